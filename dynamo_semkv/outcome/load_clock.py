"""LoadClock: whether a replica's reported load times agree with what the router saw. Pure.

    LoadClock()   .compare(by_clock, seen) -> lost just now?   .believed
    by_clock(saving, route), by_first_token(saving, route) -> share of the prefill that was spared; None: cannot tell

A connector reports how long it loaded, and nobody can check that directly. Yet a load saves computing time, and the
router's own time to first token, which no worker can write, shows whether it did. That time is a coarse measure: it
includes queues that nobody saw, decoding beside it, a prefill in pieces. So one route proves nothing: a replica's clock
is not believed any more where it was better than the first token by more than TOLERANCE on most of its last routes.
What delays an honest replica delays its cold routes too, and so is in the rate that both are measured by; what is left
is noise to both sides (tests/outcome/test_load_clock.py says how much is tolerated).
"""

from __future__ import annotations

from dynamo_semkv.outcome.closed import ClosedRoute
from dynamo_semkv.outcome.saving import MIN_COLD_TOKENS, Saving

TOLERANCE = 0.5
"""As a share of the prefill that was saved. A replica that reports loads at a quarter of the cost of computing, and
computes, is off by three quarters."""
NEEDED = 8.0
"""Routes, faded, before a clock is judged: with fewer an honest replica in a burst could be off on all."""
MOST = 0.75
"""The share of those routes on which a clock must be off. A replica that is late by half of what it saved on every
other route is still believed."""
_FADE = 2.0 ** (-1.0 / 16.0)
"""Weights halve every 16 routes that were compared, not served: a clock that lost its credit does not regain it just
because nothing was placed there."""


class LoadClock:
    """The comparison for one replica."""

    def __init__(self) -> None:
        self._routes = 0.0
        self._better = 0.0

    @property
    def believed(self) -> bool:
        """Whether the replica's load times count; True until enough routes speak against them."""
        return self._routes < NEEDED or self._better < MOST * self._routes

    def compare(self, by_clock: float, seen: float) -> bool:
        """Takes the two measures of one load, as shares of the prefill that was saved. True: with this load the clock
        lost its credit."""
        before = self.believed
        self._routes = self._routes * _FADE + 1.0
        self._better = self._better * _FADE + (by_clock - seen > TOLERANCE)
        return before and not self.believed


def by_clock(saving: Saving, route: ClosedRoute) -> float | None:
    """The share of the prefill saved, by the connector's reported time; None where it reported none."""
    report = route.report
    if report is None or report.load_seconds is None:
        return None
    return _bounded(1.0 - report.load_seconds / (report.confirmed * saving.seconds_per_token))


def by_first_token(saving: Saving, route: ClosedRoute) -> float | None:
    """The share saved, by the time to first token. None where that cannot tell: nobody saw it, or the queue; or the
    queue was longer than the load, so an error in it outweighs the load; or too little was loaded."""
    report, queued = route.report, route.observed.queued_tokens if route.observed is not None else None
    if report is None or saving.saved_seconds is None or queued is None:
        return None
    if report.confirmed < max(MIN_COLD_TOKENS, queued):
        return None
    return _bounded(saving.saved_seconds / (report.confirmed * saving.seconds_per_token))


def _bounded(share: float) -> float:
    return max(-1.0, min(1.0, share))
