"""Wrappers that count around the stages, so that no stage holds a counter for others.

    MeasuredLookup(runner, metrics)            around DeadlineRunner: answers by provider
    MeasuredHistory(history, metrics, ...)     in front of History: outcomes of this router's own routes

A fault in a counter never reaches the stage behind it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from dynamo_semkv.evidence.deadline import LookupResult
from dynamo_semkv.evidence.provider import LookupQuery
from dynamo_semkv.observe.metrics import Metrics
from dynamo_semkv.outcome.closed import ClosedRoute, OrphanReport
from dynamo_semkv.outcome.history import History
from dynamo_semkv.telemetry.throttled import Throttled

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)


class Lookup(Protocol):
    """The part of evidence.deadline.DeadlineRunner that is used here."""

    async def lookup(self, query: LookupQuery) -> LookupResult:
        """Asks all providers, under the runner's own deadline."""
        ...


class MeasuredLookup:
    """A Lookup that counts the answer and the time of each provider."""

    def __init__(self, runner: Lookup, metrics: Metrics) -> None:
        self._runner = runner
        self._metrics = metrics

    async def lookup(self, query: LookupQuery) -> LookupResult:
        """Asks the runner, then counts."""
        result = await self._runner.lookup(query)
        try:
            for provider, (status, seconds) in result.by_provider.items():
                self._metrics.provider_answered(provider, status, seconds)
        except Exception:  # noqa: BLE001 - a counter may not fail the request that it counts; logged
            _throttled.exception("a metric was not counted")
        return result


class MeasuredHistory:
    """A History that counts outcomes. `router`: whose routes are counted. Every router receives all routes, so each
    counts its own, and sums over routers are right. `is_live`: False during the replay, whose routes were counted by
    the process that closed them."""

    def __init__(self, history: History, metrics: Metrics, *, router: str, is_live: Callable[[], bool]) -> None:
        self._history = history
        self._metrics = metrics
        self._router = router
        self._is_live = is_live

    def add(self, route: ClosedRoute) -> None:
        """Keeps the route; counts it if it is this router's own and closes now."""
        self._history.add(route)
        if route.opened.router == self._router and self._is_live():
            self._metrics.closed(route)

    def add_orphan(self, orphan: OrphanReport) -> None:
        """Keeps the report; every router counts it, unless it is of the replay."""
        self._history.add_orphan(orphan)
        if self._is_live():
            self._metrics.orphan(orphan)
