"""Generates docs/metrics.md from the catalogue: `python -m dynamo_semkv.observe.reference > docs/metrics.md`.

    markdown() -> str

Label values are read from the enumerations that the counters themselves use, so the document cannot name one that is
never exported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from enum import Enum

from dynamo_semkv.advice.decision import DecisionReason
from dynamo_semkv.config.schema import Materialization, PlacementMode
from dynamo_semkv.contracts.evidence import MatchType
from dynamo_semkv.contracts.location import Tier
from dynamo_semkv.contracts.report import Outcome, Reason
from dynamo_semkv.evidence.deadline import LookupStatus
from dynamo_semkv.evidence.stream import Verdict
from dynamo_semkv.observe import catalogue as c
from dynamo_semkv.observe import dynamo_counters, rfc
from dynamo_semkv.observe.catalogue import CATALOGUE
from dynamo_semkv.outcome.closed import CrossCheck, OrphanReason, TtftClass
from dynamo_semkv.outcome.route_tracker import TrackerStats
from dynamo_semkv.telemetry import catalogue as t
from dynamo_semkv.telemetry import label_sets
from dynamo_semkv.telemetry.metric_spec import SPANS, MetricSpec

SECTIONS: dict[str, tuple[MetricSpec, ...]] = {
    "Funnel": (c.INPUT, c.EVIDENCE, c.PLACED, c.HINTED, c.MATERIALIZED, c.BEYOND_DYNAMO, c.UNHINTED),
    "Decisions": (
        c.LOOKUPS,
        c.LOOKUP_SECONDS,
        c.PROVIDER_LOOKUPS,
        c.PROVIDER_SECONDS,
        c.PLACEMENTS,
        c.DISCOVERY_ONLY,
        c.EXPECTED_SHARE,
        c.EXPECTED_SAVING,
        c.FALLBACKS,
    ),
    "Outcomes": (
        c.OUTCOMES,
        c.CROSS_CHECKS,
        c.TTFT,
        c.TTFT_SAVED,
        c.LOAD_SECONDS,
        c.OPEN_ROUTES,
        c.HELD_REPORTS,
        c.BOOK_EVENTS,
    ),
    "Router and replicas": (
        c.READY,
        c.CONFIG,
        c.RELOAD_REFUSED,
        SPANS,
        c.REPLICAS,
        c.REPLICA_PREFILL,
        c.REPLICA_RATE,
        c.REPLICA_DECODE,
        c.REPLICA_SLAB,
    ),
    "Donor catalog": (c.CATALOG_DONORS, c.CATALOG_STREAMS, c.CATALOG_EVENTS),
    "Bus": (
        c.BUS_CONNECTED,
        c.BUS_BUFFERED,
        c.BUS_DROPPED,
        c.BUS_RECONNECTS,
        c.STREAM_CAUGHT_UP,
        c.STREAM_MESSAGES,
        c.STREAM_REFUSED,
    ),
    "Connector: reuse": (
        t.TOKENS,
        t.OUTCOMES,
        t.ATTEMPTS,
        t.OPEN_ATTEMPTS,
        t.TRACKED,
        t.RANKS,
        t.RANKS_AGREE,
        t.PARKED,
        t.LEASES,
        t.ASK_SECONDS,
        t.BUILD_SECONDS,
        t.LOAD_SECONDS,
        t.HINTS,
        t.REPORTS,
    ),
    "Connector: host memory": (
        t.SLAB_BLOCKS,
        t.LEASED_BLOCKS,
        t.SEALED,
        t.CHECKS,
        t.EVICTED,
        t.EVICTED_TWINS,
        t.REFUSED_BLOCKS,
        t.COLLISIONS,
        t.SAVES,
        t.OPEN_SAVES,
        t.SAVE_SECONDS,
        t.COPIED_BLOCKS,
        t.DISK_BLOCKS,
        t.DISK_CHANGES,
        t.DISK_FILES,
        t.DISK_HOLDS,
        t.DISK_HOLD_SECONDS,
        t.DEVICE_BLOCKS,
        t.DEVICE_EVENTS,
        t.DEVICE_STANDING,
        t.DONORS,
        t.DONOR_CHANGES,
    ),
    "Connector: blocks of other workers": (
        t.FETCHED_TOKENS,
        t.PULLS,
        t.FETCH_BLOCKS,
        t.FETCH_SERVING,
        t.FETCH_SECONDS,
    ),
    "Connector: itself": (
        t.INFO,
        t.FAULTS,
        t.ANOMALIES_TOTAL,
        t.ANNOUNCEMENTS,
        t.BUS_CONNECTED,
        t.BUS_BUFFERED,
        t.BUS_DROPPED,
        t.BUS_RECONNECTS,
        t.CONNECTOR_SPANS,
    ),
}
EVERYTHING: tuple[MetricSpec, ...] = (*CATALOGUE, *t.CATALOGUE)

_INTRO = """\
# Metrics

Made from `dynamo_semkv/observe/catalogue.py` and `dynamo_semkv/telemetry/catalogue.py` by
`python -m dynamo_semkv.observe.reference > docs/metrics.md`; a test keeps the two equal.

Every router exports these at `/metrics` of its page and on Dynamo's status server, but for `semkv_connector_*`, which are the engine
process's own (see [connector](connector.md#metrics)). Each router counts its own routes, so counters add up over routers; gauges of the
catalog and of replicas describe the same things on every router, so take the maximum. Counters start at zero with the process: look at
rates. The steps of the funnel share one denominator, the prompt tokens of closed routes, and no step exceeds the one before it. Only
`semkv_materialized_tokens_total` and `semkv_unhinted_tokens_total` are reuse: the backend confirmed it.

Label values come from closed sets; a value outside its set is `other` (`unknown` where it comes from an engine of another version). No
label holds a request, route, donor, tenant, salt or prompt. Series of a replica end with the replica.
"""

_RFC_INTRO = """\
RFC semantic KV cache reuse, Observability: "distinct counters and latency histograms", never one "semantic hit".
"""

_DYNAMO = f"""\
Dynamo 1.6.1 counts by itself what its KvRouter knew and what workers said, in every router, on Dynamo's status server
(`DYN_SYSTEM_PORT`), one sample each for model, phase and router. Page, `status` and dashboard show them beside our funnel. They know
cached prefixes and nothing of donors.

| series | tokens of |
|---|---|
{"".join(f"| `{name}` | {meaning} |{chr(10)}" for name, meaning in dynamo_counters.MEANINGS.items())}"""


def markdown() -> str:
    """The whole document, ending with a line break."""
    parts = [_INTRO]
    for title, specs in SECTIONS.items():
        parts.append(f"## {title}\n")
        parts.extend(_entry(spec) for spec in specs)
    parts += ["## What the RFC asks for\n", _RFC_INTRO, f"{rfc.table()}\n", "## Dynamo's own\n", _DYNAMO]
    return "\n".join(parts)


def label_values(spec: MetricSpec, label: str) -> str:
    """The values of one label; a description where the set is not ours to close."""
    return _VALUES[spec.name, label]


def _entry(spec: MetricSpec) -> str:
    facts = [spec.kind, *([spec.unit] if spec.unit else [])]
    lines = [f"### `{spec.name}`\n", f"{', '.join(facts)}. {spec.meaning}\n"]
    lines += [f"- `{label}`: {label_values(spec, label)}" for label in spec.labels]
    if spec.buckets:
        lines.append(f"- buckets: {', '.join(f'{bound:g}' for bound in spec.buckets)}")
    lines.append(f"- when it moves: {spec.usage}\n")
    return "\n".join(lines)


def _names(values: Iterable[Enum | str]) -> str:
    return ", ".join(f"`{value.value if isinstance(value, Enum) else value}`" for value in values)


_WORKER = "Dynamo's instance id, in decimal"
_RANK = "data-parallel rank"
_STREAM_NAMES = ("donors", "announcements", "routes", "reports")
_VALUES: dict[tuple[str, str], str] = {
    (c.LOOKUPS.name, "result"): _names(LookupStatus),
    (c.PROVIDER_LOOKUPS.name, "provider"): "name of the evidence provider",
    (c.PROVIDER_LOOKUPS.name, "result"): _names(LookupStatus),
    (c.PROVIDER_SECONDS.name, "provider"): "name of the evidence provider",
    (c.PLACEMENTS.name, "mode"): _names(PlacementMode),
    (c.PLACEMENTS.name, "result"): _names(DecisionReason),
    (c.EXPECTED_SHARE.name, "match_type"): _names(MatchType),
    (c.EXPECTED_SAVING.name, "tier"): _names(tier for tier in Tier if tier is not Tier.DEVICE),
    (c.FALLBACKS.name, "reason"): _names(c.FALLBACK_REASONS),
    (c.OUTCOMES.name, "outcome"): _names(Outcome),
    (c.OUTCOMES.name, "reason"): f"{_names(Reason)}; of `orphan_report`: {_names(OrphanReason)}",
    (c.CROSS_CHECKS.name, "result"): _names(CrossCheck),
    (c.TTFT.name, "class"): _names(TtftClass),
    (c.LOAD_SECONDS.name, "tier"): _names(Tier),
    (c.TTFT_SAVED.name, "tier"): _names(Tier),
    (c.BOOK_EVENTS.name, "event"): _names(TrackerStats.__dataclass_fields__),
    (c.CONFIG.name, "mode"): _names(PlacementMode),
    (c.CONFIG.name, "config_hash"): "16 hex digits over every value that is in force",
    (SPANS.name, "state"): _names(label_sets.SPAN_STATES),
    (c.REPLICAS.name, "standing"): _names(c.STANDINGS),
    (c.CATALOG_STREAMS.name, "state"): _names(("ok", "quarantined", "absent")),
    (c.CATALOG_EVENTS.name, "verdict"): _names((*Verdict, *c.CATALOG_NOTES)),
    (c.BUS_CONNECTED.name, "side"): _names(("publish", "subscribe")),
    (c.BUS_RECONNECTS.name, "side"): _names(("publish", "subscribe")),
    (c.STREAM_CAUGHT_UP.name, "stream"): _names(_STREAM_NAMES),
    (c.STREAM_MESSAGES.name, "stream"): _names(_STREAM_NAMES),
    (c.STREAM_REFUSED.name, "stream"): _names(_STREAM_NAMES),
    (c.STREAM_REFUSED.name, "kind"): _names(("malformed", "unsupported_version", "foreign_subject")),
    **{(spec.name, "worker_id"): _WORKER for spec in EVERYTHING if "worker_id" in spec.labels},
    **{(spec.name, "dp_rank"): _RANK for spec in EVERYTHING if "dp_rank" in spec.labels},
    (t.TOKENS.name, "step"): _names(label_sets.TOKEN_STEPS),
    (t.OUTCOMES.name, "outcome"): _names(Outcome),
    (t.OUTCOMES.name, "reason"): _names(Reason),
    (t.ATTEMPTS.name, "event"): _names(label_sets.ATTEMPT_EVENTS),
    (t.HINTS.name, "event"): _names(label_sets.HINT_EVENTS),
    (t.PULLS.name, "result"): _names(label_sets.PULL_RESULTS),
    (t.FETCH_BLOCKS.name, "direction"): _names(label_sets.FETCH_BLOCKS),
    (t.FETCH_SERVING.name, "event"): _names(label_sets.SERVING_EVENTS),
    (t.REPORTS.name, "result"): _names(label_sets.REPORT_RESULTS),
    (t.SLAB_BLOCKS.name, "state"): _names(label_sets.BLOCK_STATES),
    (t.CHECKS.name, "result"): _names(label_sets.CHECK_RESULTS),
    (t.SAVES.name, "event"): _names(label_sets.SAVE_EVENTS),
    (t.COPIED_BLOCKS.name, "direction"): _names(label_sets.COPY_EVENTS),
    (t.DONOR_CHANGES.name, "event"): _names(label_sets.DONOR_EVENTS),
    (t.DISK_CHANGES.name, "event"): _names(label_sets.DISK_EVENTS),
    (t.DISK_FILES.name, "event"): _names(label_sets.FILE_EVENTS),
    (t.DISK_HOLDS.name, "result"): _names(label_sets.HOLD_RESULTS),
    (t.DEVICE_EVENTS.name, "event"): _names(label_sets.KV_EVENTS),
    (t.RANKS.name, "state"): _names(label_sets.RANK_STATES),
    (t.INFO.name, "generation"): "of the cache, as reports and donor events name it",
    (t.INFO.name, "materialization"): _names(Materialization),
    (t.INFO.name, "connector"): "version of the connector",
    (t.FAULTS.name, "callback"): _names(label_sets.CALLBACKS),
    (t.ANOMALIES_TOTAL.name, "kind"): _names(label_sets.ANOMALIES),
    (t.CONNECTOR_SPANS.name, "state"): _names(label_sets.SPAN_STATES),
}


if __name__ == "__main__":
    sys.stdout.write(markdown())
