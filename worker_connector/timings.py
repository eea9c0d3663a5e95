"""Timestamps of one attempt, and histograms of durations: plain numbers, for spans and metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass
class Timings:
    """When each step of one attempt happened, in Unix nanoseconds; 0: it did not happen."""

    asked: int = 0
    answered: int = 0
    sent: int = 0
    """When the loads were sent to the ranks."""
    copied: int = 0
    closed: int = 0

    def as_now(self) -> Timings:
        """A copy."""
        return Timings(self.asked, self.answered, self.sent, self.copied, self.closed)


_SORTED_AT = 1024


class _Counted(NamedTuple):
    """Replaced as a whole, so that a reader on another thread counts every duration once."""

    counts: tuple[int, ...]
    sum: float
    unsorted: list[float]


class Durations:
    """A histogram of seconds. `add` is called on one thread, or under its owner's lock; it only appends the number,
    since finding a bucket between two forward passes costs more than all else that it does. `snapshot`: any thread."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counted = _Counted((0,) * (len(self._bounds) + 1), 0.0, [])

    def add(self, seconds: float) -> None:
        """Notes one duration."""
        unsorted = self._counted.unsorted
        unsorted.append(seconds)
        if len(unsorted) >= _SORTED_AT:
            self._counted = _Counted(*self._sorted(self._counted), [])

    def _sorted(self, counted: _Counted) -> tuple[tuple[int, ...], float]:
        counts, unsorted = list(counted.counts), counted.unsorted.copy()
        for seconds in unsorted:
            counts[bisect_left(self._bounds, seconds)] += 1
        return tuple(counts), counted.sum + sum(unsorted)

    def snapshot(self) -> dict[str, Any]:
        """`counts`: per bucket, not cumulative; the last one is what exceeds all bounds."""
        counts, total = self._sorted(self._counted)
        return {"bounds": list(self._bounds), "counts": list(counts), "sum": total}
