"""A clock that moves when told. Pass the object where a `Callable[[], float]` is wanted."""

from __future__ import annotations


class ManualClock:
    def __init__(self, now: float = 1_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Negative: the clock was set back, as wall clocks are."""
        self.now += seconds
