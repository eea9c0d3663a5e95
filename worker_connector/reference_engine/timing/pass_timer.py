"""Waits for as long as a forward pass would take on the GPU of a profile, without using the processor."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from worker_connector.reference_engine.models.model import Segment
from worker_connector.reference_engine.timing.bus import Bus
from worker_connector.reference_engine.timing.cost_model import CostModel, Rows


class PassTimer:
    """The clock of one rank.

    The fixed part of a pass stands for the host's work that nothing hides. So what the host really does between two
    passes is taken for it, and comes on top only where it is more; what the host does during a pass is hidden by it.
    """

    def __init__(
        self,
        cost: CostModel,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.cost = cost
        self.bus = Bus(cost, clock)
        self._clock = clock
        self._sleep = sleep
        self._host_since = 0.0
        self._began = 0.0
        self._ended = 0.0

    def iterate(self, *, goes_on: bool) -> None:
        """The host begins an iteration. `goes_on`: there was a pass in the one before, and work was left, so the host
        has been busy since that pass ended; else it waited for something to do."""
        self._host_since = self._ended if goes_on else self._clock()

    def begin(self) -> None:
        """The pass is launched now."""
        now = self._clock()
        self._began = now - min(now - self._host_since, self.cost.host_seconds)

    def finish(self, segments: Sequence[Segment], loaded: float) -> None:
        """Return when the pass has ended: not before its work is done, nor before what it reads has arrived at
        `loaded` (a time of `Bus.copy`; 0.0: nothing is on its way). Loads come in layer by layer while layers before
        are computed, so the longer of the two counts and not their sum."""
        work = self.cost.pass_seconds(Rows(segment.start, len(segment.tokens)) for segment in segments)
        self._ended = max(self._began + work, loaded)
        self._sleep(max(0.0, self._ended - self._clock()))
