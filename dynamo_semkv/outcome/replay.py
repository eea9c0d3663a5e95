"""Replay: merges the stored messages of several streams, each in order by itself, by the time the broker stored them.

    Replay(streams)   .add(stream, timestamp, item)   .caught_up(stream)   .ready() -> [(timestamp, item)]

A router that starts reads hours of route events and of reports side by side. If one stream ran ahead of the other,
routes would run out of time before their reports are read, and equal prompts hours apart would look as if they were in
flight together. An item is handed out when no stream can bring an older one any more; memory holds what one stream is
ahead of the slowest.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Replay(Generic[T]):
    """Merges until every stream has caught up; then it is `done` and not needed any more."""

    def __init__(self, streams: Iterable[str]) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._number = itertools.count()
        self._reached: dict[str, float] = dict.fromkeys(streams, float("-inf"))

    @property
    def done(self) -> bool:
        """Every stream has caught up and everything was handed out."""
        return not self._reached and not self._heap

    def add(self, stream: str, timestamp: float, item: T) -> None:
        """Takes one message; `timestamp`: Unix seconds at which the broker stored it."""
        heapq.heappush(self._heap, (timestamp, next(self._number), item))
        if stream in self._reached:
            self._reached[stream] = max(self._reached[stream], timestamp)

    def caught_up(self, stream: str) -> None:
        """The stream has delivered all that was stored: nothing waits for it any more."""
        self._reached.pop(stream, None)

    def ready(self) -> list[tuple[float, T]]:
        """Removes and returns the items that no stream can precede any more, in order of time."""
        sure = min(self._reached.values(), default=float("inf"))
        items: list[tuple[float, T]] = []
        while self._heap and (self._heap[0][0] <= sure or not self._reached):
            timestamp, _, item = heapq.heappop(self._heap)
            items.append((timestamp, item))
        return items
