"""W3C trace context, version 00: `00-<32 hex trace id>-<16 hex span id>-<2 hex flags>`. Pure; OpenTelemetry is not
needed to read one.

It comes from clients, so anything that is not exactly this is no context.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

HEADER = "traceparent"
_FORM = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


class TraceContext(NamedTuple):
    """The ids of a W3C traceparent."""

    trace_id: int
    span_id: int
    flags: int

    @property
    def trace_hex(self) -> str:
        """32 hex digits."""
        return f"{self.trace_id:032x}"

    @property
    def span_hex(self) -> str:
        """16 hex digits."""
        return f"{self.span_id:016x}"


def parse(text: object) -> TraceContext | None:
    """None for what is no traceparent, and for all-zero ids."""
    found = _FORM.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        return None
    context = TraceContext(*(int(part, 16) for part in found.groups()))
    return context if context.trace_id and context.span_id else None


def form(context: TraceContext) -> str:
    """The context as a traceparent header."""
    return f"00-{context.trace_hex}-{context.span_hex}-{context.flags:02x}"


def of_call(header: str | None, metadata: Mapping[str, str]) -> str | None:
    """The context of a call: Dynamo's own, else the client's `x-dynamo-meta-traceparent`. Dynamo 1.6 hands its context
    on only with DYN_LOGGING_JSONL or OTEL_EXPORT_ENABLED set on frontend and router."""
    for candidate in (header, metadata.get(HEADER)):
        if parse(candidate) is not None:
            return candidate
    return None
