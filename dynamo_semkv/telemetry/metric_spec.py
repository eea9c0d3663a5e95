"""MetricSpec: one entry of a metric catalogue. docs/metrics.md is made of them, and exporters take names and labels from nowhere else."""

from __future__ import annotations

from typing import NamedTuple


class MetricSpec(NamedTuple):
    name: str
    kind: str
    """`counter`, `gauge` or `histogram`."""
    unit: str
    labels: tuple[str, ...]
    meaning: str
    usage: str
    buckets: tuple[float, ...] = ()
