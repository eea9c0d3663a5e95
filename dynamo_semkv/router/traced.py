"""Spans around the stages of one request, so that no stage knows of spans. Installed only when spans are exported.

    TracedHandler(service.handle, tracing)   the route's span, child of the frontend's context, parent of all others
    TracedEdge(edge, tracing)                exact overlap and load
    TracedAdvisor(advisor, tracing)          score: what is left of advising once evidence and load are known
    TracedHints(sender, tracing)             the hint over the bus

`observed.py`, which also counts and logs, calls these:

    record_stage                             donor lookup
    trace_opened, trace_observed             dispatch: between the two records of a route
    trace_outcome                            the outcome, when it is known

A stage is recorded when it is over, with the times it took; nothing is done per chunk. A fault of a span never reaches
the stage in it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from dynamo_semkv.contracts.hints import KvHintsEnvelope
from dynamo_semkv.contracts.identity import StableReplica
from dynamo_semkv.contracts.keys import PromptKey
from dynamo_semkv.contracts.route_events import RouteObserved, RouteOpened
from dynamo_semkv.outcome.closed import ClosedRoute
from dynamo_semkv.router.pipeline import Advice
from dynamo_semkv.router.runtime_errors import RequestFailed
from dynamo_semkv.router.runtime_types import CallContext, Chunk, Dispatch, Edge, Handler, Request
from dynamo_semkv.router.service import Advising, Hints
from dynamo_semkv.telemetry import names
from dynamo_semkv.telemetry.throttled import Throttled
from dynamo_semkv.telemetry.tracing import Attributes, Tracing, traceparent_of

if TYPE_CHECKING:
    from dynamo_semkv.telemetry.tracing import Span

logger = logging.getLogger(__name__)
_throttled = Throttled(logger)

T = TypeVar("T")
U = TypeVar("U")

_FAILED_ENDS = frozenset({"error", "worker_lost", "no_worker"})


@dataclass
class _Trace:
    """The trace of the request that this task serves."""

    span: Span
    known_at: int = 0
    """When the last question before scoring was answered (Unix ns)."""
    opened_at: int = 0
    dispatch: Dispatch | None = None


_current: ContextVar[_Trace | None] = ContextVar("semkv_trace", default=None)


class TracedHandler:
    """A Handler whose calls each are one route's span."""

    def __init__(self, handler: Handler, tracing: Tracing) -> None:
        self._handler = handler
        self._tracing = tracing

    async def __call__(self, request: Request, call: CallContext) -> AsyncIterator[Chunk]:
        """Passes the chunks on and ends the span when the handler is closed."""
        trace, call = self._begin(request, call)
        _current.set(trace)
        error: str | None = None
        chunks = self._handler(request, call)
        try:
            async for chunk in chunks:
                yield chunk
        except RequestFailed as failure:
            error = failure.kind.value
            raise
        finally:
            # Closed here, not by the garbage collector: closing writes the route's last record, which belongs to this
            # trace.
            close = getattr(chunks, "aclose", None)
            if close is not None:
                await close()
            _current.set(None)
            if trace is not None:
                _guarded(lambda: self._tracing.end(trace.span, error=error))

    def _begin(self, request: Request, call: CallContext) -> tuple[_Trace | None, CallContext]:
        """The call carries the route's own context from here on: it travels in the records and in the hint, so the
        connector's spans find their parent."""
        try:
            model = request.get("model")
            attributes = {
                names.REQUEST_ID: call.request_id or None,
                names.GEN_AI_MODEL: model if isinstance(model, str) else None,
            }
            span = self._tracing.start(names.ROUTE, parent=call.traceparent, attributes=attributes)
            return _Trace(span), msgspec.structs.replace(call, traceparent=traceparent_of(span))
        except Exception:  # noqa: BLE001 - a request without a trace is served all the same; logged
            _throttled.exception("no trace was begun")
            return None, call


class TracedEdge:
    """An Edge whose `exact` is a span. Everything else passes through."""

    def __init__(self, edge: Edge, tracing: Tracing) -> None:
        self._edge = edge
        self._tracing = tracing
        # Called per request or per beat, but no stage of a trace.
        self.live_replicas = edge.live_replicas
        self.loads = edge.loads
        self.best_choice = edge.best_choice

    async def exact(
        self, token_ids: Sequence[int], cache_namespace: str | None = None, lora_name: str | None = None
    ) -> Any:
        """Records a span, also of a question that failed or was given up."""
        began = time.time_ns()
        error: str | None = "unfinished"  # also of a question that was given up at its deadline
        try:
            found = await self._edge.exact(token_ids, cache_namespace, lora_name)
            error = None
            return found
        except Exception as caught:
            error = type(caught).__name__
            raise
        finally:
            record_stage(self._tracing, names.EXACT, began, error=error)

    def dispatch(self, request: Request, pin: Any, **options: Any) -> Dispatch:
        """Keeps the dispatch for its span, which `trace_observed` records."""
        dispatch = self._edge.dispatch(request, pin, **options)
        trace = _current.get()
        if trace is not None:
            trace.dispatch = dispatch
        return dispatch


class TracedAdvisor:
    """An Advisor whose scoring is a span."""

    def __init__(self, advisor: Advising, tracing: Tracing) -> None:
        self._advisor = advisor
        self._tracing = tracing

    async def advise(self, request: Request, request_id: str) -> Advice | None:
        """Records a span where a sheet was made; it begins when the last question was answered."""
        advice = await self._advisor.advise(request, request_id)
        trace = _current.get()
        if trace is not None and advice is not None and advice.sheet is not None:
            scored = advice
            _guarded(lambda: record_stage(self._tracing, names.SCORE, trace.known_at, _scored(scored)))
        return advice


class TracedHints:
    """Hints whose sending is a span."""

    def __init__(self, hints: Hints, tracing: Tracing) -> None:
        self._hints = hints
        self._tracing = tracing

    def send(
        self, replica: StableReplica, prompt_key: PromptKey, envelope: KvHintsEnvelope, traceparent: str | None = None
    ) -> bool:
        """Records a span with the replica and whether the bus took the hint."""
        began = time.time_ns()
        sent = False
        try:
            sent = self._hints.send(replica, prompt_key, envelope, traceparent)
            return sent
        finally:
            attributes = {names.REPLICA: _name(*replica), names.HINT_SENT: sent}
            record_stage(self._tracing, names.HINT, began, attributes)


def trace_opened(event: RouteOpened) -> None:
    """Puts the decision on the route's span; the dispatch begins now."""
    trace = _current.get()
    if trace is not None:
        trace.opened_at = time.time_ns()
        _guarded(lambda: trace.span.set_attributes(_present(_opened(event))))


def trace_observed(event: RouteObserved, tracing: Tracing) -> None:
    """Records the dispatch, which ended now, as a span. None where somebody else dispatches (gateway_advice.py)."""
    trace = _current.get()
    if trace is not None and trace.opened_at and trace.dispatch is not None:
        dispatch = trace.dispatch
        _guarded(lambda: _record_dispatch(tracing, trace, dispatch, event))


def _record_dispatch(tracing: Tracing, trace: _Trace, dispatch: Dispatch, event: RouteObserved) -> None:
    span = tracing.start(names.DISPATCH, parent=trace.span, start_ns=trace.opened_at)
    if dispatch.fallback is not None:
        span.add_event(names.PIN_GIVEN_UP, {names.PIN_FALLBACK: dispatch.fallback}, timestamp=trace.opened_at)
    if event.ttft_seconds is not None:
        span.add_event(names.FIRST_CHUNK, timestamp=_started(trace.span) + int(event.ttft_seconds * 1e9))
    attributes = {
        names.END: event.end,
        names.REPLICA: _name(event.served_stable_routing_id, event.served_dp_rank),
        names.WORKER_ID: event.served_worker_id,
        names.PINNED: dispatch.pinned,
    }
    tracing.end(span, attributes, error=event.end if event.end in _FAILED_ENDS else None)
    counted = {
        names.GEN_AI_OUTPUT_TOKENS: event.output_tokens,
        names.GEN_AI_CACHE_READ_TOKENS: event.engine_cached_tokens,
    }
    trace.span.set_attributes(_present(counted))


def trace_outcome(route: ClosedRoute, tracing: Tracing) -> None:
    """Records what became of a route as a span of its trace; none where the route has no trace."""
    if route.opened.traceparent is not None:
        _guarded(lambda: _record_outcome(route, tracing))


def _record_outcome(route: ClosedRoute, tracing: Tracing) -> None:
    now = time.time_ns()
    ended = int((route.observed.observed_at if route.observed is not None else route.opened.opened_at) * 1e9)
    report, opened = route.report, route.opened.traceparent
    span = tracing.start(
        names.OUTCOME,
        parent=opened,
        start_ns=min(ended, now),
        # A connector that makes no spans returns the context that it was sent.
        links=[text for text in (report.traceparent if report is not None else None,) if text != opened],
    )
    tracing.end(span, _closed(route), end_ns=now)


def traced(part: T, around: Callable[[T, Tracing], U], tracing: Tracing | None) -> T | U:
    """`part` in its wrapper, or as it is when no spans are made: tracing that is off costs nothing."""
    return part if tracing is None else around(part, tracing)


def record_stage(
    tracing: Tracing, name: str, began: int, attributes: Attributes | None = None, *, error: str | None = None
) -> None:
    """Records one stage of this task's request, which ends now."""
    trace = _current.get()
    if trace is None:
        return
    trace.known_at = time.time_ns()
    _guarded(lambda: tracing.record(name, trace.span, began, trace.known_at, attributes, error=error))


def _started(span: Span) -> int:
    """Unix nanoseconds; 0 for a span that is not recorded."""
    return int(getattr(span, "start_time", 0) or 0)


def _scored(advice: Advice) -> dict[str, Any]:
    decision, sheet = advice.decision, advice.sheet
    assert sheet is not None
    return {
        names.MODE: decision.mode.value,
        names.DECISION: decision.reason.value,
        names.CANDIDATES: sum(row.filtered_by is None for row in sheet.rows),
        names.UNREACHABLE: advice.unresolved,
        names.EVIDENCE_TOKENS: decision.evidence_tokens,
        names.PLACED_TOKENS: decision.placed_tokens,
    }


def _opened(event: RouteOpened) -> dict[str, Any]:
    return {
        names.ROUTE_ID: event.route_id,
        names.ATTEMPT: event.attempt,
        names.ROUTER: event.router,
        names.CONFIG_HASH: event.config_hash,
        names.MODE: event.mode,
        names.DECISION: event.decision_reason,
        names.SHADOW_CHOICE: event.shadow_choice,
        names.LOOKUP_RESULT: event.lookup,
        names.REPLICA: _name(event.stable_routing_id, event.dp_rank),
        names.DONOR_ID: event.donor_id,
        names.PROVIDER: event.provider,
        names.MATCH_TYPE: event.match_type.value if event.match_type is not None else None,
        names.OVERLAP: event.overlap.value,
        names.TIER: event.tier.value if event.tier is not None else None,
        names.INPUT_TOKENS: event.input_tokens,
        names.EXACT_DEVICE_TOKENS: event.exact_device_tokens,
        names.EXACT_HOST_TOKENS: event.exact_host_tokens,
        names.EVIDENCE_TOKENS: event.evidence_tokens,
        names.PLACED_TOKENS: event.placed_tokens,
        names.HINTED_TOKENS: event.hinted_tokens,
        names.GEN_AI_INPUT_TOKENS: event.input_tokens,
    }


def _closed(route: ClosedRoute) -> dict[str, Any]:
    report = route.report
    attributes: dict[str, Any] = {
        names.ROUTE_ID: route.route_id,
        names.OUTCOME_RESULT: route.outcome.value,
        names.OUTCOME_REASON: route.reason.value,
        names.CROSS_CHECK: route.cross_check.value,
    }
    if report is not None:
        attributes |= {
            names.REPLICA: _name(report.stable_routing_id, report.dp_rank),
            names.OFFERED_TOKENS: report.offered,
            names.CONFIRMED_TOKENS: report.confirmed,
            names.LOAD_SECONDS: report.load_seconds,
        }
    return attributes


def _name(stable: str | None, rank: int | None) -> str | None:
    return f"{stable}/{rank}" if stable is not None and rank is not None else None


def _present(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}


def _guarded(record: Callable[[], object]) -> None:
    try:
        record()
    except Exception:  # noqa: BLE001 - a span may not fail the request that it describes; logged
        _throttled.exception("a span was not made")
