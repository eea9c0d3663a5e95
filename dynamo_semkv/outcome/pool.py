"""Pool: what all workers observed of one kind of claim, where no worker counts for more than a few routes.

    Pool()   .add(worker, lesson, now, cap, new_cell=...)   .drop(worker, cell, now, cap)
             .around(worker, cell, now) -> (total, trials)

A worker is all its ranks together. It counts with at most `cap` trials, at its own mean, so that one that is busy, or
lies, moves the start values of others by no more than that. Its own cells see all that it observed itself. `now` is in
half-lives. Every operation is O(1).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dynamo_semkv.outcome.lessons import Lesson


@dataclass
class Sums:
    """Faded sums of trials, as of `at`."""

    total: float = 0.0
    trials: float = 0.0
    at: float = 0.0

    def faded(self, now: float, half_life: float = 1.0) -> tuple[float, float]:
        """(total, trials) as of `now`."""
        weight = float(2.0 ** (-(now - self.at) / half_life))
        return self.total * weight, self.trials * weight

    def add(self, lesson: Lesson, now: float, half_life: float = 1.0) -> None:
        """Adds one lesson at `now`."""
        self.move(lesson.share * lesson.weight, lesson.weight, now, half_life)

    def move(self, by_total: float, by_trials: float, now: float, half_life: float = 1.0) -> None:
        """Fades the sums to `now` and changes them by the given amounts, which may be negative."""
        total, trials = self.faded(now, half_life)
        self.total, self.trials, self.at = total + by_total, trials + by_trials, now


@dataclass
class _Worker:
    observed: Sums = field(default_factory=Sums)
    counted: Sums = field(default_factory=Sums)
    """The part of `observed` that is in the sums of the pool."""
    cells: int = 0


class Pool:
    """The trials of all workers for one kind of claim."""

    def __init__(self) -> None:
        self._counted = Sums()
        self._workers: dict[str, _Worker] = {}

    def __len__(self) -> int:
        """How many workers observed something."""
        return len(self._workers)

    def add(self, worker: str, lesson: Lesson, now: float, cap: float, *, new_cell: bool) -> None:
        """Adds a worker's lesson. `new_cell`: it is the first lesson of a cell, which will be dropped some day."""
        of = self._workers.setdefault(worker, _Worker())
        of.cells += new_cell
        of.observed.add(lesson, now)
        self._count(of, now, cap)

    def drop(self, worker: str, cell: Sums, now: float, cap: float) -> None:
        """Forgets a cell; a worker without any cell leaves the pool."""
        of = self._workers[worker]
        of.cells -= 1
        total, trials = cell.faded(now)
        if of.cells == 0:
            del self._workers[worker]
            of.observed = Sums(at=now)
        else:
            of.observed.move(-total, -trials, now)
        self._count(of, now, cap)

    def around(self, worker: str, cell: Sums | None, now: float) -> tuple[float, float]:
        """(total, trials) of all that counts for a cell of `worker`: other workers as they are counted, and its own
        other cells."""
        total, trials = self._counted.faded(now)
        of = self._workers.get(worker)
        if of is not None:
            for sums, sign in ((of.counted, -1.0), (of.observed, 1.0), (cell, -1.0)):
                if sums is not None:
                    part, weight = sums.faded(now)
                    total, trials = total + sign * part, trials + sign * weight
        return total, max(0.0, trials)

    def _count(self, of: _Worker, now: float, cap: float) -> None:
        """Replaces the worker's old part of the sums by the new one."""
        total, trials = of.observed.faded(now)
        part = min(1.0, cap / trials) if trials > 0.0 else 0.0
        before, before_trials = of.counted.faded(now)
        of.counted = Sums(total * part, trials * part, now)
        self._counted.move(of.counted.total - before, of.counted.trials - before_trials, now)
        if not self._workers:
            self._counted = Sums(at=now)  # rounding errors of the subtractions end here
