"""Tape: a schedule as bytes. Every decision takes one; when they are used up, each is the plainest one, so a schedule
ends by itself, and a shorter tape of smaller bytes is a simpler schedule. That is what lets Hypothesis draw, shrink and
print a schedule as one value."""

from __future__ import annotations

from collections import Counter


class Tape:
    """Also the dice of the engine's rarer behaviours."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._at = 0
        self.happened: Counter[str] = Counter()
        """What hit, by name."""

    @property
    def is_used_up(self) -> bool:
        return self._at >= len(self.data)

    def _next(self) -> int:
        byte = self.data[self._at] if self._at < len(self.data) else 0
        self._at += 1
        return byte

    def below(self, what: str, bound: int) -> int:
        """One of 0 .. bound-1, of which 0 is the plainest; bound is at most 256. `what` is for whoever reads the
        call."""
        return self._next() % bound

    def hits(self, what: str, rate: float) -> bool:
        """Does something happen that happens this often? Draws nothing where it never does."""
        if rate <= 0 or self._next() < 256 * (1 - rate):
            return False
        self.happened[what] += 1
        return True
