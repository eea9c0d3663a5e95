"""Builds a leader or a rank from `llm_args` and the environment, and closes its parts again. The only module that knows
all parts."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from dynamo_semkv.bus.publisher import BusPublisher
from dynamo_semkv.config.schema import ConnectorConfig
from dynamo_semkv.contracts.codec import parse_donor_payload
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.hints import DONOR_ACTION, DONOR_VERSION, HintDelivery
from dynamo_semkv.contracts.identity import StableReplica
from dynamo_semkv.telemetry.catalogue import ASK_SECONDS, BUILD_SECONDS
from dynamo_semkv.telemetry.target import otlp_target
from dynamo_semkv.telemetry.tracing import Tracing, start_tracing
from worker_connector.background import Background, Job
from worker_connector.donors.event_stream import EventStream, stream_address
from worker_connector.donors.kv_event_registry import listen
from worker_connector.donors.kv_event_socket import KvEventListener, event_socket_path
from worker_connector.donors.sink import ReportSink
from worker_connector.engine_api.settings import Settings, load_settings, tell_settings
from worker_connector.engine_api.world import rank_of, world_of
from worker_connector.fetch.peer_fetch import PeerFetch
from worker_connector.fetch.weights_fingerprint import weights_print
from worker_connector.leader.api_variants import restarts_failed_loads, restarts_failed_parked_loads
from worker_connector.leader.cache_reset import owns_cache
from worker_connector.leader.disk_prefetch_wait import DiskPrefetchWait, offer
from worker_connector.leader.event_publisher import EventPublisher, Identity, JobQueue
from worker_connector.leader.leader import Leader
from worker_connector.link.channel import leader_channel, rank_channel
from worker_connector.link.rank_endpoint import RankEndpoint
from worker_connector.rank.disk import DiskPlace
from worker_connector.rank.options import RankOptions
from worker_connector.rank.rank import Rank
from worker_connector.requests.attempt_trace import AttemptTracer
from worker_connector.requests.engine_namespace import CONNECTOR_VERSION
from worker_connector.requests.hint_listener import HintListener
from worker_connector.timings import Durations

_log = logging.getLogger(__name__)


class _Closeable(Protocol):
    def close(self, timeout: float = ...) -> object: ...


class InlineQueue:
    """Runs each job in the thread that submits it (tests)."""

    def submit(self, job: Job) -> bool:
        """Runs the job before it returns; always True."""
        job()
        return True


@dataclass
class LeaderParts:
    """One leader with all its parts, for `snapshot` and `close`."""

    leader: Leader
    event_publisher: EventPublisher
    queue: JobQueue
    background: Background | None
    tracing: Tracing | None = None
    faults: Counter[str] = field(default_factory=Counter)
    """Exceptions caught, by callback."""
    ask_seconds: Durations = field(default_factory=lambda: Durations(ASK_SECONDS.buckets))
    """Seconds that the engine waited for each offer."""
    build_seconds: Durations = field(default_factory=lambda: Durations(BUILD_SECONDS.buckets))
    """Seconds that the engine waited for the metadata of each batch."""
    _publisher: BusPublisher | None = None
    endpoint: RankEndpoint | None = None
    _listener: HintListener | None = None
    _ear: KvEventListener | None = None
    _stream: EventStream | None = None
    _metrics: _Closeable | None = None
    fetch: PeerFetch | None = None
    door: DiskPrefetchWait | None = None

    def snapshot(self) -> dict[str, Any]:
        """Counters and gauges, JSON-able: what metrics are made of."""
        background, publisher, tracing = self.background, self._publisher, self.tracing
        return {
            **self.leader.snapshot(),
            "connector": CONNECTOR_VERSION,
            "faults": dict(self.faults),
            "ask_seconds": self.ask_seconds.snapshot(),
            "build_seconds": self.build_seconds.snapshot(),
            "background": None
            if background is None
            else {"background_refused": background.refused, "background_failed": background.failed},
            "bus": None if publisher is None else asdict(publisher.stats()),
            "fetch": None if self.fetch is None else self.fetch.snapshot(),
            "disk_holds": None if self.door is None else self.door.snapshot(),
            "spans": None if tracing is None else dict(tracing.counts),
        }

    def close(self, timeout: float = 5.0) -> None:
        """Ends the background thread before the publisher, which takes what the last jobs publish."""
        parts: list[_Closeable | None] = [
            self.door,
            self.fetch,
            self.endpoint,
            self._metrics,
            self._listener,
            self._ear,
            self._stream,
            self.background,
            self._publisher,
            self.tracing,
        ]
        for part in parts:
            if part is not None:
                part.close(timeout)


def assemble_leader(llm_args: Any, env: Mapping[str, str]) -> LeaderParts:
    """With bus, background thread and hint listener. Raises Refused or ContractError at bring-up."""
    settings = load_settings(llm_args, env)
    tell_settings("the leader", settings)
    publisher = BusPublisher(settings.bus, f"connector-{settings.stable_routing_id}")
    background = Background(
        f"connector-{settings.stable_routing_id}",
        settings.connector.report_buffer,
        settings.connector.announce_interval_seconds,
        lambda: _beat(parts),
        due=lambda: _due(parts),
        on_due=lambda: _on_due(parts),
    )
    event_publisher = EventPublisher(
        publisher,
        background,
        settings.connector,
        time.monotonic,
        on_open=lambda identity: _listen(parts, settings, llm_args, identity),
        donor_ttl=settings.donor_ttl,
    )
    leader, endpoint = _leader(settings, llm_args, event_publisher, time.monotonic)
    listen(leader)
    owns_cache(leader)
    target = otlp_target(settings.otlp_endpoint, env)
    tracing = start_tracing(target, "semkv-connector", settings.stable_routing_id)
    event_publisher.tracer = AttemptTracer(tracing) if tracing is not None else None
    parts = LeaderParts(
        leader, event_publisher, background, background, tracing, _publisher=publisher, endpoint=endpoint
    )
    parts.fetch = _peer_fetch(settings, llm_args, leader, event_publisher)
    parts.door = _disk_door(settings, llm_args, leader)
    if parts.door is not None:
        offer(parts.door)
    publisher.start()
    background.start()
    return parts


def assemble_leader_with(
    llm_args: Any,
    settings: Settings,
    sink: ReportSink,
    *,
    clock: Callable[[], float] = time.monotonic,
    background: Background | None = None,
) -> LeaderParts:
    """Without a bus: `sink` gets what would be published. `background` takes the jobs, and is started by the caller;
    None: each job runs in the thread that submits it."""
    queue: JobQueue = background or InlineQueue()
    event_publisher = EventPublisher(sink, queue, settings.connector, clock, donor_ttl=settings.donor_ttl)
    leader, endpoint = _leader(settings, llm_args, event_publisher, clock)
    return LeaderParts(
        leader,
        event_publisher,
        queue,
        background,
        endpoint=endpoint,
        fetch=_peer_fetch(settings, llm_args, leader, event_publisher, manual=True),
        door=_disk_door(settings, llm_args, leader),
    )


def _peer_fetch(
    settings: Settings, llm_args: Any, leader: Leader, event_publisher: EventPublisher, *, manual: bool = False
) -> PeerFetch | None:
    """It listens once it is known which rank this is. `manual`: its steps are called by a test."""
    if settings.fetch_secret is None:
        return None
    try:
        weights = weights_print(llm_args)
    except OSError as error:
        _log.error(
            "semkv connector: nothing is pulled or served: the weights of %s cannot be read: %s", llm_args.model, error
        )
        return None
    config, secret = settings.connector.fetch, settings.fetch_secret
    return PeerFetch(leader, event_publisher.hints, config, secret, weights=weights, manual=manual)


def _disk_door(settings: Settings, llm_args: Any, leader: Leader) -> DiskPrefetchWait | None:
    """None under tensor parallelism: orders to the ranks' disks go out with a batch, and an engine whose request waits
    may have none."""
    config = settings.connector
    if not settings.exact or config.disk_path is None or config.disk_wait_ms <= 0 or world_of(llm_args) > 1:
        return None
    return DiskPrefetchWait(leader, config)


def _leader(
    settings: Settings, llm_args: Any, event_publisher: EventPublisher, clock: Callable[[], float]
) -> tuple[Leader, RankEndpoint | None]:
    """The leader, and an endpoint for ranks of other processes where it awaits results of such."""
    world = world_of(llm_args) if settings.exact else 1
    endpoint = RankEndpoint(world) if world > 1 else None
    leader = Leader(
        settings,
        llm_args,
        leader_channel(llm_args),
        event_publisher,
        clock,
        world=world,
        endpoint=endpoint.address if endpoint is not None else None,
    )
    if endpoint is not None:
        endpoint.start(leader)
    return leader, endpoint


def assemble_rank(llm_args: Any, env: Mapping[str, str]) -> Rank:
    """A rank as the environment configures it. Raises Refused or ContractError at bring-up."""
    settings = load_settings(llm_args, env)
    tell_settings("a rank", settings)
    return assemble_rank_with(llm_args, settings, env=env)


def assemble_rank_with(
    llm_args: Any,
    settings: Settings,
    *,
    inline: bool = False,
    restarts_failed: bool | None = None,
    env: Mapping[str, str] = MappingProxyType({}),
) -> Rank:
    """`restarts_failed` None: as configured, else as the engine's own code says; never with several ranks, which could
    not agree on it."""
    if restarts_failed is None:
        restarts_failed = settings.connector.restarts_failed_loads
    number = rank_of(llm_args, env) if settings.exact else 0
    alone = world_of(llm_args) == 1
    options = RankOptions(
        slab_bytes=settings.connector.slab_bytes if settings.exact else None,
        inline=inline,
        restarts_failed=alone and (restarts_failed_loads() if restarts_failed is None else restarts_failed),
        restarts_failed_parked=alone
        and (restarts_failed_parked_loads() if restarts_failed is None else restarts_failed),
        apart=not alone and number > 0,
        async_loads=settings.connector.async_load_min_tokens is not None,
        async_deadline_seconds=settings.connector.async_load_deadline_seconds,
        trust_layer_hooks=settings.connector.trust_layer_hooks,
        disk=_disk_place(settings, number, world_of(llm_args)),
    )
    return Rank(rank_channel(llm_args), number, options)


def _disk_place(settings: Settings, number: int, world: int) -> DiskPlace | None:
    path = settings.connector.disk_path
    if path is None or not settings.exact:
        return None
    shard = f"{number}/{world}" if world > 1 else "0/1"
    return DiskPlace(Path(path).expanduser(), settings.connector.disk_bytes, shard)


def _beat(parts: LeaderParts) -> None:
    parts.event_publisher.announce()
    parts.leader.sweep_idle()
    parts.leader.warn_of_missing_ranks()
    parts.leader.restate_if_due()


def _due(parts: LeaderParts) -> float:
    donors = parts.event_publisher.donors
    return min(parts.leader.restatement_due, math.inf if donors is None else donors.due)


def _on_due(parts: LeaderParts) -> None:
    parts.leader.restate_if_due()
    if parts.event_publisher.donors is not None:
        parts.event_publisher.donors.tell_due()


def _listen(parts: LeaderParts, settings: Settings, llm_args: Any, identity: Identity) -> None:
    listener = HintListener(
        settings.bus, identity.replica, lambda payload: receive_hint(parts, identity.replica, payload)
    )
    parts._listener = listener
    listener.start()
    if parts.fetch is not None:
        parts.fetch.open(identity.replica.dp_rank)
    parts._ear = _hear_events(parts, identity)
    parts._stream = _hear_stream(parts, llm_args, identity)
    if settings.connector.metrics_port is not None:
        parts._metrics = _serve_metrics(parts, settings.connector, identity.replica.dp_rank)


def _hear_events(parts: LeaderParts, identity: Identity) -> KvEventListener | None:
    """Receives the KV cache events of another process that drains the engine; None where that fails."""
    try:
        ear = KvEventListener(event_socket_path(*identity.replica), parts.leader.kv_events)
        ear.start()
    except OSError as error:
        _log.warning("semkv connector: KV cache events of other processes are not heard: %s", error)
        return None
    return ear


def _hear_stream(parts: LeaderParts, llm_args: Any, identity: Identity) -> EventStream | None:
    """Receives the KV cache events that the engine itself publishes; None where it publishes none."""
    try:
        address = stream_address(llm_args, identity.replica.dp_rank)
        stream = EventStream(address, parts.leader.kv_events) if address is not None else None
    except (ImportError, ValueError) as error:
        _log.warning("semkv connector: the engine's KV event stream is not heard: %s", error)
        return None
    if stream is not None:
        stream.start()
    return stream


def _serve_metrics(parts: LeaderParts, config: ConnectorConfig, dp_rank: int) -> _Closeable | None:
    """An engine runs on without its metrics: a port that is taken or beyond the last one, or a missing library, is only
    logged."""
    port = config.metrics_port
    assert port is not None
    try:
        from dynamo_semkv.telemetry.connector_metrics import MetricsServer

        server = MetricsServer([parts.snapshot], config.metrics_host, port + dp_rank if port else 0)
    except (ImportError, OSError, OverflowError, RuntimeError) as error:
        _log.warning("semkv connector: no metrics on %s port %d: %s", config.metrics_host, port, error)
        return None
    _log.info("semkv connector: metrics of rank %d: %s", dp_rank, server.url)
    return server


def receive_hint(parts: LeaderParts, replica: StableReplica, payload: bytes) -> None:
    """Into the table, and the hinted donor's blocks to the head of the scrub: the request is about to ask for them."""
    delivery = parts.event_publisher.table.receive(payload, replica)
    if delivery is None:
        return
    donor_id = _donor_of(delivery)
    if donor_id is not None:
        parts.leader.hint_received(donor_id)


def _donor_of(delivery: HintDelivery) -> str | None:
    for action in delivery.envelope.actions:
        if action.action_type == DONOR_ACTION and action.action_version == DONOR_VERSION:
            try:
                return parse_donor_payload(action).donor_id
            except ContractError:
                return None  # counted when the request that it belongs to is reported
    return None
