"""A Tracing whose spans stay in this process, read as they would be on the wire."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from dynamo_semkv.telemetry.tracing import Tracing
from tests.telemetry.collector import Seen, decoded


class Kept(SpanExporter):
    def __init__(self) -> None:
        self.raw: list[bytes] = []
        self.tracing = Tracing(self, "semkv-test", "test-1")

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        self.raw.append(encode_spans(spans).SerializeToString())
        return SpanExportResult.SUCCESS

    def all(self) -> list[Seen]:
        self.tracing._provider.force_flush()
        return [span for body in self.raw for span in decoded(body)]

    def by_name(self) -> dict[str, Seen]:
        """Of one request: each name once."""
        spans = self.all()
        found = {span.name: span for span in spans}
        assert len(found) == len(spans), [span.name for span in spans]
        return found

    def text(self) -> str:
        """All that would go over the wire; what is to be found nowhere is searched here."""
        self.tracing._provider.force_flush()
        return b"".join(self.raw).decode("latin-1")


@contextmanager
def kept() -> Iterator[Kept]:
    memory = Kept()
    yield memory
    memory.tracing.close()
