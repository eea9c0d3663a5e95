"""BusClock: the broker's time, as far as its messages show it. Pure but for the clock that is handed in."""

from __future__ import annotations

import math
from collections.abc import Callable

WINDOW_SECONDS = 300.0


class BusClock:
    """Messages carry the broker's time, and the clocks of two machines need not agree. A message that has just been
    stored shows how far the broker's clock is ahead of ours; one that is read back from the past shows less. So the
    greatest difference of the last one or two windows counts: a broker's clock that is set back is followed after
    that."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._since = monotonic()
        self._ahead = -math.inf
        self._ahead_before = -math.inf

    def message_arrived(self, stored_at: float) -> None:
        """A message arrived that the broker stored at this Unix time."""
        now = self._monotonic()
        if now - self._since > WINDOW_SECONDS:
            self._since, self._ahead_before, self._ahead = now, self._ahead, -math.inf
        self._ahead = max(self._ahead, stored_at - now)

    def now(self) -> float:
        """The broker's time in Unix seconds; minus infinity before any message arrived."""
        return self._monotonic() + max(self._ahead, self._ahead_before)
