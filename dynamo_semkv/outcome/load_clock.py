"""LoadClock: is a replica's word of how long its loads took borne out by what the router saw? Pure.

    LoadClock()   .compare(by_clock, seen) -> lost just now?   .believed
    by_clock(saving, route), by_first_token(saving, route) -> share of the prefill that was spared; None: cannot tell

A connector tells how long it loaded, and nobody can look. Yet whoever loads spares the time of computing, and the
router's own time to first token, which no worker can write, shows whether that was spared. It is a coarse witness: it
has in it queues that nobody saw, decoding beside it, a prefill in pieces. So one route proves nothing: a replica's
clock is not believed any more where it was better than the first token by more than TOLERANCE on most of its last
routes. What delays an honest replica delays its cold routes too, and so is in the rate that both are measured by; what
is left is noise to both sides (tests/outcome/test_load_clock.py says how much is borne).
"""

from __future__ import annotations

from dynamo_semkv.outcome.closed import ClosedRoute
from dynamo_semkv.outcome.saving import MIN_COLD_TOKENS, Saving

TOLERANCE = 0.5
"""Of the prefill that was spared. Who says that it loaded at a quarter of the cost of computing, and computes, is off
by three quarters."""
NEEDED = 8.0
"""Routes, faded, before anything is said: with fewer an honest replica in a burst could be off on all."""
MOST = 0.75
"""Of them. A replica that is late by half of what it spared on every other route is believed still."""
_FADE = 2.0 ** (-1.0 / 16.0)
"""By half every 16 routes that were compared, not served: one that is not believed is not believed again just because
it was left alone."""


class LoadClock:
    """Of one replica."""

    def __init__(self) -> None:
        self._routes = 0.0
        self._better = 0.0

    @property
    def believed(self) -> bool:
        return self._routes < NEEDED or self._better < MOST * self._routes

    def compare(self, by_clock: float, seen: float) -> bool:
        """Shares of the prefill that were spared by one load. True: with this one it is not believed any more."""
        before = self.believed
        self._routes = self._routes * _FADE + 1.0
        self._better = self._better * _FADE + (by_clock - seen > TOLERANCE)
        return before and not self.believed


def by_clock(saving: Saving, route: ClosedRoute) -> float | None:
    """What the connector's word makes of the load; None where it gave none."""
    report = route.report
    if report is None or report.load_seconds is None:
        return None
    return _bounded(1.0 - report.load_seconds / (report.confirmed * saving.seconds_per_token))


def by_first_token(saving: Saving, route: ClosedRoute) -> float | None:
    """What the first token makes of it. None where it cannot tell: nobody saw it, or the queue, or the queue was longer
    than the load and what was wrong about it outweighs the load; or it loaded too little."""
    report, queued = route.report, route.observed.queued_tokens if route.observed is not None else None
    if report is None or saving.saved_seconds is None or queued is None:
        return None
    if report.confirmed < max(MIN_COLD_TOKENS, queued):
        return None
    return _bounded(saving.saved_seconds / (report.confirmed * saving.seconds_per_token))


def _bounded(share: float) -> float:
    return max(-1.0, min(1.0, share))
