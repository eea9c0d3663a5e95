"""LandingLoads: loads in front of a forward pass whose copies are on their way. The leader is told of each when it has
landed, and how long it took: by the clock of the stream that copies, so on a GPU too, where the host is long done by
then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from worker_connector.link.channel import LoadDone
from worker_connector.link.metadata import LoadOrder
from worker_connector.memory.copy_stream import Mark


class _Batch(NamedTuple):
    """The loads of one forward pass."""

    iteration: int
    orders: Sequence[LoadOrder]
    began: Mark
    ended: Mark


class LandingLoads:
    """Of one rank. Called on the engine's thread."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._batches: deque[_Batch] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, iteration: int, orders: Sequence[LoadOrder], began: Mark, ended: Mark) -> None:
        """The copies of `orders` lie between these two marks of one stream."""
        self._batches.append(_Batch(iteration, orders, began, ended))

    def landed(self) -> list[LoadDone]:
        """What to tell the leader, each load once, in order. A pass waits for all of its loads together, and by layer
        they are copied together: each has the share of that time that its blocks are of all blocks."""
        done: list[LoadDone] = []
        while self._batches and self._batches[0].ended.done():
            iteration, orders, began, ended = self._batches.popleft()
            blocks = sum(len(order.moves) for order in orders)
            for order in orders:
                seconds = ended.seconds_since(began) * len(order.moves) / max(blocks, 1)
                done.append(LoadDone(self._number, iteration, order.key, True, seconds))
        return done
