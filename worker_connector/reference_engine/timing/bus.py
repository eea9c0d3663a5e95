"""The link between device and host memory of one rank: copies follow each other on it."""

from __future__ import annotations

import time
from collections.abc import Callable

from worker_connector.reference_engine.timing.cost_model import CostModel


class Bus:
    """Hands out times, in seconds of `clock`; nothing is copied here. It belongs to its rank's thread."""

    def __init__(self, cost: CostModel, clock: Callable[[], float] = time.monotonic) -> None:
        self._cost = cost
        self._clock = clock
        #: When the last copy that was asked for ends.
        self.free_at = 0.0

    def copy(self, tokens: int) -> float:
        """Put the KV of so many tokens on the bus, behind what is there; returns when it has arrived."""
        self.free_at = max(self._clock(), self.free_at) + self._cost.copy_seconds(tokens)
        return self.free_at

    def has_arrived(self, due: float) -> bool:
        """Whether a copy that `copy` gave this time has ended."""
        return self._clock() >= due
