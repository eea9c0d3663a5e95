"""A clock that moves only when it is told to. Pass the object where a `Callable[[], float]` is wanted."""

from __future__ import annotations


class ManualClock:
    """Seconds that only `advance` changes; the start is arbitrary."""

    def __init__(self, now: float = 1_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """The time in seconds."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Moves the clock; a negative number sets it back, as wall clocks are."""
        self.now += seconds
