"""MetricSpec: one entry of a metric catalogue. docs/metrics.md is made of them, and exporters take names and labels
from nowhere else."""

from __future__ import annotations

from typing import NamedTuple


class MetricSpec(NamedTuple):
    """What one metric is: the code that exposes it and docs/metrics.md read it here."""

    name: str
    kind: str
    """`counter`, `gauge` or `histogram`."""
    unit: str
    labels: tuple[str, ...]
    meaning: str
    usage: str
    buckets: tuple[float, ...] = ()


SPANS = MetricSpec(
    "semkv_spans_total",
    "counter",
    "spans",
    ("state",),
    "Spans made by this router, exported, or lost because the collector did not take them. No series when no spans are "
    "made.",
    "`failed` rising: the collector is away, or the endpoint is wrong. `ended` far above the other two for long: the "
    "queue is full, raise OTEL_BSP_MAX_QUEUE_SIZE or sample.",
)
