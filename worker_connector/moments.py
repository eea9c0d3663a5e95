"""When things happened to one attempt, and how long things take: plain numbers, for spans and metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class Moments:
    """Unix nanoseconds; 0: it did not happen."""

    asked: int = 0
    answered: int = 0
    sent: int = 0
    """To the ranks."""
    copied: int = 0
    closed: int = 0


class Durations:
    """A histogram of seconds. Not thread-safe: what it counts is counted under its owner's lock or on one thread."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def snapshot(self) -> dict[str, Any]:
        """`counts`: per bucket, not cumulative; the last one is what exceeds all bounds."""
        return {"bounds": list(self._bounds), "counts": list(self._counts), "sum": self._sum}
