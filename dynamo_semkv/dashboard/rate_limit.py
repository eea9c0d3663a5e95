"""A limit on how often something may be asked for: a bucket that fills at a steady rate."""

from __future__ import annotations

import time
from collections.abc import Callable


class RateLimit:
    """Allows `per_second` in the long run and `burst` at once. One thread."""

    def __init__(self, per_second: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._burst = float(burst)
        self._clock = clock
        self._left = self._burst
        self._at = clock()
        self.refused = 0

    def take(self) -> bool:
        """Whether one more may be answered now. False is counted."""
        now = self._clock()
        self._left = min(self._burst, self._left + max(0.0, now - self._at) * self._per_second)
        self._at = max(self._at, now)
        if self._left < 1.0:
            self.refused += 1
            return False
        self._left -= 1.0
        return True
