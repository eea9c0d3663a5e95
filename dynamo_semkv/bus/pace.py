"""Pace: how many messages of one subject were sent lately, which decides for how long the next ones are gathered.

A message that is alone is sent soon, since somebody may wait for it. Where many come, waking up for each of them costs
ten times what sending does.
"""

from __future__ import annotations

GATHER_SECONDS = 0.005
GATHER_BUSY_SECONDS = 0.05
"""A process that is killed loses what it has gathered. Half as long costs twice the processor time, here and in the
broker."""
BUSY = 40.0
HALF_LIFE_SECONDS = 1.0
"""A subject is busy while about 28 messages a second are sent (40 x ln 2), and right after a burst of 40."""
SUBJECTS_REMEMBERED = 512


class Pace:
    """The pace of one subject. `now` is in seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._lately = 0.0
        self._at = 0.0

    def sent(self, count: int, now: float) -> None:
        """`count` records were sent at `now`."""
        self._lately = self._left(now) + count
        self._at = now

    def busy(self, now: float) -> bool:
        """Whether so many records went lately that gathering for longer pays."""
        return self._left(now) >= BUSY

    def gather_seconds(self, now: float) -> float:
        """How long to wait for more records before the next send."""
        return GATHER_BUSY_SECONDS if self.busy(now) else GATHER_SECONDS

    def _left(self, now: float) -> float:
        return float(self._lately * 2.0 ** -(max(0.0, now - self._at) / HALF_LIFE_SECONDS))


class Paces:
    """One Pace for each subject. Not thread-safe."""

    def __init__(self) -> None:
        self._paces: dict[str, Pace] = {}

    def of(self, subject: str) -> Pace:
        """The subject's pace; a new subject starts with none sent."""
        if len(self._paces) >= SUBJECTS_REMEMBERED:
            self._paces.clear()  # each is found out again within a second
        return self._paces.setdefault(subject, Pace())
