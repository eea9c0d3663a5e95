"""Spans of one attempt, made when it is reported, on the background thread: the engine's threads only note times.

    AttemptTracer(tracing).begin(closed, hints, carrier) -> AttemptTrace
        .traceparent   .reported(report, began_ns, sent)

The engine carries no trace context to a connector (dynamo.trtllm hands it to the engine's own tracer only), so it comes
with the hint. Without a hint the attempt begins a trace of its own: its report carries that context, and the router,
which joins the report to its route, links to it. No parent is ever guessed.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from dynamo_semkv.contracts.report import MaterializationReport, Outcome
from dynamo_semkv.telemetry import names
from dynamo_semkv.telemetry.names import Carrier
from dynamo_semkv.telemetry.throttled import Throttled
from dynamo_semkv.telemetry.tracing import Tracing, traceparent_of
from worker_connector.requests.attempt import ClosedAttempt
from worker_connector.requests.hints import ParsedHints

if TYPE_CHECKING:
    from dynamo_semkv.telemetry.tracing import Span

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)

_CHILD = (Carrier.REQUEST, Carrier.HINT)
_FAILED = (Outcome.LOAD_FAILED,)


class AttemptTracer:
    """Begins the span of an attempt that a traced request asks for."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    def begin(self, closed: ClosedAttempt, hints: ParsedHints | None, carrier: str) -> AttemptTrace | None:
        """None when there is nothing to tell, or when it cannot be told: a report never depends on a span."""
        context = hints.traceparent if hints is not None else None
        if context is None:
            carrier = Carrier.NONE
        try:
            span = self._tracing.start(
                names.MATERIALIZE,
                parent=context if carrier in _CHILD else None,
                links=[context if carrier == Carrier.EQUAL_PROMPT else None],
                start_ns=closed.timings.asked or None,
                attributes={names.CONTEXT_CARRIER: carrier},
            )
            return AttemptTrace(self._tracing, span, closed)
        except Exception:  # noqa: BLE001 - the report goes out without a span; logged
            _throttled.exception("semkv connector: no span was begun")
            return None


class AttemptTrace:
    """The span of one attempt, which ends when its report was handed over."""

    def __init__(self, tracing: Tracing, span: Span, closed: ClosedAttempt) -> None:
        self._tracing = tracing
        self._span = span
        self._closed = closed
        self.traceparent = traceparent_of(span)

    def reported(self, report: MaterializationReport, began: int, sent: bool) -> None:
        """The report was handed over at `began` (Unix ns), and the bus took it or not."""
        try:
            self._tell(report, began, sent)
        except Exception:  # noqa: BLE001 - the report is out; logged
            _throttled.exception("semkv connector: spans of a report were not made")

    def _tell(self, report: MaterializationReport, began: int, sent: bool) -> None:
        tracing, span, timings = self._tracing, self._span, self._closed.timings
        if timings.asked and timings.answered:
            offer = {names.LOCAL_TOKENS: report.local_tokens, names.OFFERED_TOKENS: report.offered}
            tracing.record(names.OFFER, span, timings.asked, timings.answered, offer)
        if timings.sent:
            load = {names.COPIED_TOKENS: report.copied, names.LOAD_SECONDS: report.load_seconds}
            landed = bool(timings.copied) and report.outcome not in _FAILED
            tracing.record(
                names.LOAD,
                span,
                timings.sent,
                timings.copied or timings.closed,
                load,
                error=None if landed else report.reason.value,
            )
        now = time.time_ns()
        tracing.record(names.REPORT, span, began, now, {names.REPORT_SENT: sent})
        failed = report.reason.value if report.outcome in _FAILED else None
        tracing.end(span, _of(report), error=failed, end_ns=now)


def _of(report: MaterializationReport) -> dict[str, Any]:
    return {
        names.ROUTE_ID: report.route_id,
        names.DONOR_ID: report.donor_id,
        names.REPLICA: f"{report.stable_routing_id}/{report.dp_rank}",
        names.ENGINE_REQUEST: report.request_id,
        names.EPOCH: report.epoch,
        names.INPUT_TOKENS: report.prompt_tokens,
        names.LOCAL_TOKENS: report.local_tokens,
        names.OFFERED_TOKENS: report.offered,
        names.HONOURED_TOKENS: report.honoured,
        names.COPIED_TOKENS: report.copied,
        names.CONFIRMED_TOKENS: report.confirmed,
        names.OUTCOME_RESULT: report.outcome.value,
        names.OUTCOME_REASON: report.reason.value,
        names.TIER: report.tier.value if report.tier is not None else None,
    }
