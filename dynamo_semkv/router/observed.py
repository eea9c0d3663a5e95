"""What is counted, logged and traced around the stages, so that no stage counts for others.

A fault of these never reaches the stage. The log has one line at DEBUG when a route opens and one when its stream ends:
what `explain` shows. No text, no tokens, no tenant.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from dynamo_semkv.contracts.route_events import RouteObserved, RouteOpened
from dynamo_semkv.evidence.deadline import LookupResult
from dynamo_semkv.evidence.provider import LookupQuery
from dynamo_semkv.observe.metrics import Metrics
from dynamo_semkv.outcome.closed import ClosedRoute, OrphanReport
from dynamo_semkv.outcome.history import History
from dynamo_semkv.router.advisor import LookupRunner
from dynamo_semkv.router.route_records import Journal
from dynamo_semkv.router.traced import record_stage, trace_observed, trace_opened, trace_outcome
from dynamo_semkv.telemetry import names
from dynamo_semkv.telemetry.throttled import Throttled
from dynamo_semkv.telemetry.tracing import Tracing

logger = logging.getLogger(__name__)
_throttled = Throttled(logger)


class ObservedLookup:
    """A LookupRunner that counts the answer and the time of each provider. `tracing` None: no spans are made."""

    def __init__(self, runner: LookupRunner, metrics: Metrics, tracing: Tracing | None = None) -> None:
        self._runner = runner
        self._metrics = metrics
        self._tracing = tracing

    async def lookup(self, query: LookupQuery) -> LookupResult:
        """Asks the runner, then counts. The span has the status and the number of matches; it is `unfinished` where
        nobody waited for the answer."""
        began, attributes, error = time.time_ns(), dict[str, Any](), "unfinished"
        try:
            result = await self._runner.lookup(query)
            status = result.status.value
            attributes = {names.LOOKUP_RESULT: status, names.LOOKUP_MATCHES: len(result.matches)}
            error = status if status in ("timeout", "error") else ""
        except Exception as caught:
            error = type(caught).__name__
            raise
        finally:
            if self._tracing is not None:
                record_stage(self._tracing, names.LOOKUP, began, attributes, error=error or None)
        try:
            for provider, (answer, seconds) in result.by_provider.items():
                self._metrics.provider_answered(provider, answer, seconds)
        except Exception:  # noqa: BLE001 - a counter may not fail the request that it counts; logged
            _throttled.exception("a metric was not counted")
        return result


class ObservedJournal:
    """A Journal around the one that writes to the bus. What it adds never fails the record. `tracing` None: no spans
    are made."""

    def __init__(self, journal: Journal, metrics: Metrics, tracing: Tracing | None = None) -> None:
        self._journal = journal
        self._metrics = metrics
        self._tracing = tracing

    def opened(self, event: RouteOpened) -> None:
        """Writes the record; counts the decision and its lookup. The dispatch's span begins here."""
        self._journal.opened(event)
        try:
            self._metrics.opened(event)
        except Exception:  # noqa: BLE001 - a counter may not fail the request that it counts; logged
            _throttled.exception("a metric was not counted")
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "route opened: %s in mode %s, lookup %s, replica %s/%s; tokens: %d input, %d evidence, %d placed, %d "
                "hinted",
                event.decision_reason,
                event.mode,
                event.lookup,
                event.stable_routing_id,
                event.dp_rank,
                event.input_tokens,
                event.evidence_tokens,
                event.placed_tokens,
                event.hinted_tokens,
            )
        if self._tracing is not None:
            trace_opened(event)

    def observed(self, event: RouteObserved) -> None:
        """Writes the record; the dispatch's span ends here. The outcome is counted when the route closes."""
        self._journal.observed(event)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "route ended: %s, served by %s/%s, first chunk after %s s, %d output tokens, %s of the engine's own "
                "cache",
                event.end,
                event.served_stable_routing_id,
                event.served_dp_rank,
                event.ttft_seconds,
                event.output_tokens,
                event.engine_cached_tokens,
            )
        if self._tracing is not None:
            trace_observed(event, self._tracing)


class ObservedHistory:
    """The history of closed routes: keeps each, then counts it and ends its trace.

    Every router receives all routes, so each counts its own (`router`), and sums over routers are right. `is_live`:
    False during the replay, whose routes were counted by the process that closed them. Reports without a route belong
    to no router: each counts them.
    """

    def __init__(
        self,
        history: History,
        metrics: Metrics,
        tracing: Tracing | None = None,
        *,
        router: str,
        is_live: Callable[[], bool],
    ) -> None:
        self._history = history
        self._metrics = metrics
        self._tracing = tracing
        self._router = router
        self._is_live = is_live

    def add(self, route: ClosedRoute) -> None:
        """Keeps the route; counts and traces it if it is this router's own and closes now."""
        self._history.add(route)
        if route.opened.router == self._router and self._is_live():
            self._metrics.closed(route)
            if self._tracing is not None:
                trace_outcome(route, self._tracing)

    def add_orphan(self, orphan: OrphanReport) -> None:
        """Keeps the report; counts it unless it is of the replay."""
        self._history.add_orphan(orphan)
        if self._is_live():
            self._metrics.orphan(orphan)
