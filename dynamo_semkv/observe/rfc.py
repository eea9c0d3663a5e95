"""The RFC's list of metrics (semantic KV cache reuse, Observability) beside what is exported; rendered into
docs/metrics.md.

Each entry is a series of its own, or a part of one: found, placed, declined and materialized never share a number.
"""

from __future__ import annotations

from typing import NamedTuple


class Asked(NamedTuple):
    """One metric that the RFC asks for, and the series that answers it."""

    what: str
    """In the RFC's words."""
    series: str
    """PromQL selector, or the name of a recording rule."""
    note: str = ""


ASKED: tuple[Asked, ...] = (
    Asked("semantic lookup total", 'semkv_lookup_total{result!="skipped"}'),
    Asked("discovery-only hit total", "semkv_discovery_only_total"),
    Asked("exact-equivalent materialized total", 'semkv_outcome_total{outcome="materialized_exact"}'),
    Asked("experimental semantic materialized total", 'semkv_outcome_total{outcome="materialized_experimental"}'),
    Asked("backend-declined total", 'semkv_outcome_total{outcome="declined"}'),
    Asked("stale donor total", 'semkv_outcome_total{outcome="stale_donor"}'),
    Asked("namespace mismatch total", 'semkv_outcome_total{outcome="namespace_mismatch"}'),
    Asked("provider timeout total", 'semkv_provider_lookup_total{result="timeout"}'),
    Asked("load failure total", 'semkv_outcome_total{outcome="load_failed"}'),
    Asked(
        "embedding latency if embedding runs in-process",
        "semkv_provider_lookup_seconds",
        "of the providers that embed: `embedding` and `semblend`, both off by default",
    ),
    Asked("connector metadata build latency", "semkv_connector_build_metadata_seconds", "in the engine, once a batch"),
    Asked("load latency by memory level", "semkv_load_seconds"),
    Asked(
        "materialized token count",
        "semkv_materialized_tokens_total",
        "and without a hint: `semkv_unhinted_tokens_total`",
    ),
    Asked(
        "TTFT delta for accepted materializations",
        "semkv_ttft_saved_seconds",
        "against the replica's own cold rate, as the same request is never run twice; "
        "`job:semkv_ttft_delta_seconds:median5m` is recorded beside it: median cold less median loaded",
    ),
)


def table() -> str:
    """The list as a Markdown table."""
    rows = [f"| {asked.what} | `{asked.series}`{f'; {asked.note}' if asked.note else ''} |" for asked in ASKED]
    return "\n".join(["| the RFC asks for | it is |", "|---|---|", *rows])
