"""Replay: messages of several streams, each in order by itself, put back into one order by the time the broker stored
them.

    Replay(streams)   .add(stream, timestamp, item)   .caught_up(stream)   .ready() -> [(timestamp, item)]

A router that starts reads hours of route events and of reports side by side. Were one stream ahead of the other, routes
would run out of time before their reports are read, and equal prompts hours apart would look as if they were in flight
together. An item is handed out when no stream can bring an older one any more; memory is what one stream is ahead of
the slowest.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Replay(Generic[T]):
    def __init__(self, streams: Iterable[str]) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._number = itertools.count()
        self._reached: dict[str, float] = dict.fromkeys(streams, float("-inf"))

    @property
    def done(self) -> bool:
        """Every stream has caught up and everything was handed out."""
        return not self._reached and not self._heap

    def add(self, stream: str, timestamp: float, item: T) -> None:
        heapq.heappush(self._heap, (timestamp, next(self._number), item))
        if stream in self._reached:
            self._reached[stream] = max(self._reached[stream], timestamp)

    def caught_up(self, stream: str) -> None:
        self._reached.pop(stream, None)

    def ready(self) -> list[tuple[float, T]]:
        sure = min(self._reached.values(), default=float("inf"))
        items: list[tuple[float, T]] = []
        while self._heap and (self._heap[0][0] <= sure or not self._reached):
            timestamp, _, item = heapq.heappop(self._heap)
            items.append((timestamp, item))
        return items
