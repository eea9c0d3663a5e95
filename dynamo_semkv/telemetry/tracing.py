"""Tracing: spans to a collector, off the request's path.

    tracing = start_tracing(target, "semkv-router", "semkv-1a2b")
        None when off, or when OpenTelemetry is not installed
    span = tracing.start(names.ROUTE, parent=traceparent)             ended by its owner
    tracing.record(names.LOOKUP, span, start_ns, end_ns, {...})       a stage that is over
    tracing.close(2.0)

Ended spans wait in a bounded queue (`OTEL_BSP_*`); one thread sends them. A collector that is away costs the spans,
counted, and nothing else. OpenTelemetry's process-wide provider is left alone: the engine process may have its own.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dynamo_semkv import __version__
from dynamo_semkv.config.extras import remedy
from dynamo_semkv.telemetry import names
from dynamo_semkv.telemetry.target import Target, shown
from dynamo_semkv.telemetry.throttled import Throttled
from dynamo_semkv.telemetry.traceparent import TraceContext, form, parse

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.trace import Span as Span  # others take the type from here

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)

Attributes = Mapping[str, Any]
EXTRA = remedy("telemetry")
_EXPORTER_LOG = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


class Tracing:
    """Thread-safe. Made by `start_tracing`, or around any exporter (tests)."""

    def __init__(
        self, exporter: SpanExporter, service: str, instance: str, *, sample_ratio: float | None = None
    ) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

        self.counts: Counter[str] = Counter()
        """Spans: `ended`, `exported`, `failed`. What is in none of the last two waits, or was dropped because the queue
        was full."""
        resource = Resource.create({names.SERVICE_VERSION: __version__, names.SERVICE_INSTANCE: instance})
        if str(resource.attributes.get(names.SERVICE_NAME, "")).startswith("unknown_service"):
            # The operator said nothing in OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES.
            resource = resource.merge(Resource({names.SERVICE_NAME: service}))
        sampler = ParentBasedTraceIdRatio(sample_ratio) if sample_ratio is not None else None
        self._provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_counting(exporter, self.counts)))
        self._tracer = self._provider.get_tracer(names.SCOPE, __version__)

    def start(
        self,
        name: str,
        *,
        parent: str | Span | None = None,
        start_ns: int | None = None,
        attributes: Attributes | None = None,
        links: Iterable[str | None] = (),
    ) -> Span:
        """`parent`: a traceparent or a span of ours; None, or what is no traceparent, begins a trace. `start_ns`: Unix
        nanoseconds."""
        from opentelemetry.trace import Link

        remote = [_span_context(parse(text)) for text in links if parse(text) is not None]
        return self._tracer.start_span(
            name,
            context=_context_of(parent),
            attributes=_known(attributes or {}),
            links=[Link(context) for context in remote],
            start_time=start_ns,
        )

    def record(
        self,
        name: str,
        parent: Span,
        start_ns: int,
        end_ns: int,
        attributes: Attributes | None = None,
        *,
        error: str | None = None,
    ) -> None:
        """A stage that is over. `error`: its class, from a closed set."""
        span = self.start(name, parent=parent, start_ns=start_ns, attributes=attributes)
        self.end(span, error=error, end_ns=max(start_ns, end_ns))

    def end(
        self, span: Span, attributes: Attributes | None = None, *, error: str | None = None, end_ns: int | None = None
    ) -> None:
        """Ends a span, with attributes, and as failed where there is an `error`. `end_ns` in Unix nanoseconds; None:
        now."""
        from opentelemetry.trace import Status, StatusCode

        if span.is_recording():
            span.set_attributes(_known(attributes or {}))
            if error is not None:
                span.set_attribute(names.ERROR_TYPE, error)
                span.set_status(Status(StatusCode.ERROR))
            self.counts["ended"] += 1
        span.end(end_ns)

    def close(self, timeout: float = 2.0) -> None:
        """Sends what waits, for as long as the time allows: a collector that is away does not hold up the end of the
        process."""
        ending = threading.Thread(target=self._provider.shutdown, name="semkv-tracing-close", daemon=True)
        ending.start()
        ending.join(timeout)


def start_tracing(target: Target, service: str, instance: str) -> Tracing | None:
    """Sends spans to the target from now on; None where there is none, or where what that takes is not installed."""
    if target.warning is not None:
        _log.warning("tracing: %s", target.warning)
    if target.url is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        tracing = Tracing(OTLPSpanExporter(endpoint=target.url), service, instance, sample_ratio=target.sample_ratio)
    except ImportError as error:
        _log.warning("tracing: no spans are exported to %s: %s (%s)", shown(target.url), error, EXTRA)
        return None
    except Exception:  # noqa: BLE001 - a setting that OpenTelemetry refuses may not keep a router or an engine from starting; logged
        _log.exception("tracing: no spans are exported to %s", shown(target.url))
        return None
    logging.getLogger(_EXPORTER_LOG).addFilter(_said_by_us)
    _log.info("tracing: spans go to %s", shown(target.url))
    return tracing


def traceparent_of(span: Span) -> str:
    """The span as a traceparent header."""
    context = span.get_span_context()
    return form(TraceContext(context.trace_id, context.span_id, int(context.trace_flags) & 1))


def _known(attributes: Attributes) -> dict[str, Any]:
    return {key: value for key, value in attributes.items() if value is not None}


def _span_context(context: TraceContext | None) -> Any:
    from opentelemetry.trace import SpanContext, TraceFlags

    assert context is not None
    return SpanContext(context.trace_id, context.span_id, is_remote=True, trace_flags=TraceFlags(context.flags & 1))


def _context_of(parent: str | Span | None) -> Any:
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, set_span_in_context

    nothing = Context()  # never the ambient one: whatever else runs in this process is no parent of ours
    if parent is None:
        return nothing
    if isinstance(parent, str):
        remote = parse(parent)
        return nothing if remote is None else set_span_in_context(NonRecordingSpan(_span_context(remote)), nothing)
    return set_span_in_context(parent, nothing)


_sending = threading.local()


def _said_by_us(record: logging.LogRecord) -> bool:
    """The exporter logs every retry of every batch; ours are counted, and told at the 1st, 2nd, 4th, ... failure."""
    return not getattr(_sending, "ours", False)


def _counting(exporter: SpanExporter, counts: Counter[str]) -> SpanExporter:
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Counting(SpanExporter):
        """Runs on the processor's thread."""

        failures = 0

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            _sending.ours = True
            try:
                result = exporter.export(spans)
                why = "the collector did not take them"
            except Exception as error:  # noqa: BLE001 - the next batch may get through; counted and logged below
                result, why = SpanExportResult.FAILURE, repr(error)
            finally:
                _sending.ours = False
            if result is SpanExportResult.SUCCESS:
                counts["exported"] += len(spans)
                return result
            counts["failed"] += len(spans)
            self.failures += 1
            _throttled.warning("tracing: %d spans are lost: %s", len(spans), why)
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

    return Counting()
