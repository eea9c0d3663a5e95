"""RouterState: everything that a router shows, read at one moment. Plain values; the router fills in what only it knows
(replicas).

Metrics, snapshot and readiness are functions of it, so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamo_semkv.bus.outbox import PublisherStats
from dynamo_semkv.bus.subscriber import SubscriberStats
from dynamo_semkv.observe.dynamo_counters import DynamoTokens
from dynamo_semkv.outcome.closed import ClosedRoute, ReplicaName
from dynamo_semkv.outcome.history import Bucket
from dynamo_semkv.outcome.route_tracker import TrackerStats
from dynamo_semkv.outcome.totals import Totals


@dataclass(frozen=True)
class ReplicaStatus:
    """One live replica. `None`: not known."""

    worker_id: int
    dp_rank: int
    stable_routing_id: str | None = None
    standing: str = "ok"
    """Why it may, or may not, be advised: a value of router.replicas.Standing."""
    differs_in: str | None = None
    """With `namespace_differs`: the first field in which its namespace is not the common one."""
    model: str | None = None
    generation: str | None = None
    materialization: str | None = None
    problem: str | None = None
    """Why its connector materializes nothing though it was configured to."""
    slab_blocks: int | None = None
    resident_blocks: int | None = None
    total_blocks: int | None = None
    queued_prefill_tokens: int | None = None
    active_decode_blocks: int | None = None
    active_requests: int | None = None

    @property
    def name(self) -> str:
        """The replica's name in reports and route events; its instance id where it has no stable id."""
        return str(ReplicaName(self.stable_routing_id or str(self.worker_id), self.dp_rank))


@dataclass(frozen=True)
class StreamStatus:
    """One stream of the bus: what was read of it, in records, and what was refused."""

    name: str
    caught_up: bool
    messages: int = 0
    malformed: int = 0
    unsupported_version: int = 0
    foreign_subject: int = 0
    unsupported: tuple[float, str] | None = None
    """Seconds since the last message of a version that this release cannot read, and that version."""


@dataclass(frozen=True)
class RouterState:
    """One router at one moment."""

    now: float
    """Unix seconds."""
    uptime_seconds: float
    router: str
    mode: str
    canary_percent: float
    config_hash: str
    history_size: int
    totals: Totals
    since: float | None = None
    recent: Sequence[ClosedRoute] = ()
    course: Sequence[Bucket] = ()
    open_routes: int = 0
    held_reports: int = 0
    replayed: bool = True
    """Whether the totals contain what the bus kept of routes and reports."""
    book: TrackerStats = field(default_factory=TrackerStats)
    replicas: Sequence[ReplicaStatus] = ()
    publisher: PublisherStats | None = None
    subscriber: SubscriberStats | None = None
    streams: Sequence[StreamStatus] = ()
    catalog: Mapping[str, Any] = field(default_factory=dict)
    """`DonorCatalog.snapshot()`."""
    providers: Mapping[str, Any] = field(default_factory=dict)
    """`DeadlineRunner.snapshot()`."""
    configuration: Mapping[str, Any] = field(default_factory=dict)
    """`ConfigWatch.status()`."""
    calibration: Mapping[str, Any] = field(default_factory=dict)
    """`Calibration.snapshot()`."""
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    dynamo: DynamoTokens | None = None
    """None: Dynamo's status server is off or did not answer, or nothing was routed yet."""
    spans: Mapping[str, int] = field(default_factory=dict)
    """`Tracing.counts`; empty when no spans are made."""


def stream_states(catalog: Mapping[str, Any]) -> dict[str, int]:
    """Donor event streams by state: `ok`, `quarantined`, `absent`."""
    streams = catalog.get("streams", ())
    quarantined = sum(bool(row["quarantined"]) for row in streams)
    absent = sum(bool(row["absent"]) and not row["quarantined"] for row in streams)
    return {"ok": len(streams) - quarantined - absent, "quarantined": quarantined, "absent": absent}
