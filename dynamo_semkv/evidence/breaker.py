"""Circuit breaker: a provider that keeps failing is put aside for a while and then tried again with one lookup."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum


class BreakerState(str, Enum):
    """CLOSED: calls go through. OPEN: none do. HALF_OPEN: one trial call does, and its result decides."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    """One lookup is on trial; all others are still skipped."""


class Breaker:
    """Opens after `threshold` failures in a row; each failed trial doubles the pause up to `longest`. One thread."""

    def __init__(
        self, clock: Callable[[], float], *, threshold: int = 5, pause: float = 1.0, longest: float = 60.0
    ) -> None:
        self._clock = clock
        self._threshold = threshold
        self._first_pause = self._pause = pause
        self._longest = longest
        self._failures = 0
        self._open_until = 0.0
        self.state = BreakerState.CLOSED
        self.opened = 0

    def allow(self) -> bool:
        """True if this lookup may go through; a trial must be followed by `success` or `failure`."""
        if self.state is BreakerState.OPEN and self._clock() >= self._open_until:
            self.state = BreakerState.HALF_OPEN
            return True
        return self.state is BreakerState.CLOSED

    def abandon(self) -> None:
        """The lookup on trial was cancelled, which shows nothing: the next lookup is the trial."""
        if self.state is BreakerState.HALF_OPEN:
            self.state = BreakerState.OPEN

    def success(self) -> None:
        """The call came back in time with a sound answer: the breaker closes."""
        self._failures = 0
        self._pause = self._first_pause
        self.state = BreakerState.CLOSED

    def failure(self) -> None:
        """The call failed or was late: the breaker opens, at once after a trial, otherwise after several failures in a
        row."""
        self._failures += 1
        if self.state is BreakerState.HALF_OPEN:
            self._pause = min(2 * self._pause, self._longest)
        elif self.state is BreakerState.OPEN or self._failures < self._threshold:
            return
        self.state = BreakerState.OPEN
        self.opened += 1
        self._open_until = self._clock() + self._pause
