"""EventPublisher: everything that a leader tells the world. The leader calls it under its lock and it only appends; the
background thread does the hashing, the sketches, the encoding and the publishing.

What happens to resident blocks (stored, departed, become a donor) goes through one ordered list that is never dropped,
so a donor cannot outlive its blocks because two messages overtook each other. Reports are bounded by the background's
capacity.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dynamo_semkv.config.schema import ConnectorConfig, Materialization
from dynamo_semkv.contracts.announcement import ANNOUNCEMENT_VERSION, KvEvents, ReplicaAnnouncement
from dynamo_semkv.contracts.codec import MSGPACK, encode_announcement, encode_report
from dynamo_semkv.contracts.identity import Generation, StableReplica
from dynamo_semkv.contracts.keys import BlockKey, prompt_key
from dynamo_semkv.contracts.namespace import CacheNamespace
from dynamo_semkv.contracts.report import MaterializationReport, Outcome, Reason
from dynamo_semkv.contracts.subjects import DONOR_EVENTS, announcements, reports
from dynamo_semkv.telemetry.label_sets import TOKEN_STEPS
from dynamo_semkv.telemetry.logs import about
from dynamo_semkv.telemetry.names import Carrier
from dynamo_semkv.telemetry.throttled import Throttled
from worker_connector.background import Job
from worker_connector.disk.index import DiskBlock, DiskIndex
from worker_connector.donors.device_blocks import DigestOf
from worker_connector.donors.device_events import DeviceEvents
from worker_connector.donors.donor import Tiers
from worker_connector.donors.donor_stream import DonorStream
from worker_connector.donors.registry import DonorRegistry
from worker_connector.donors.sink import ReportSink, ResidencySink
from worker_connector.engine_api.request_view import unpack_tokens
from worker_connector.leader.cache_changes import (
    AttachResidency,
    Change,
    ComputedDonor,
    Departed,
    DiskGone,
    DonorsOnDisk,
    Reset,
    ResidentDonor,
    Stored,
)
from worker_connector.ledger.block import BlockEntry
from worker_connector.ledger.ledger import Ledger
from worker_connector.requests.attempt import ClosedAttempt
from worker_connector.requests.attempt_trace import AttemptTracer
from worker_connector.requests.engine_namespace import CONNECTOR_VERSION
from worker_connector.requests.hints import HintReader, HintTable, ParsedHints
from worker_connector.requests.load_decision import Decline, HintFacts, explain
from worker_connector.requests.report import build_report

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)


class JobQueue(Protocol):
    """The background thread."""

    def submit(self, job: Job) -> bool:
        """Runs the job later, in order. False: the queue is full, and the job never runs."""


class Owner(Protocol):
    """The leader, as the event_publisher needs it. Called on the background and bus threads."""

    def resident_blocks(self) -> int:
        """How many blocks the slab holds."""

    def donor_events_lost(self) -> None:
        """Consumers of our donor events have a gap: the owner decides on a new generation."""


@dataclass(frozen=True)
class Identity:
    """Known once the pool is registered and the rank's number is known."""

    replica: StableReplica
    model: str
    namespace: CacheNamespace
    tokens_per_block: int
    slab_blocks: int


_SERVED_ENOUGH = 8
"""Prompts that became donors, by which one event at least must have been drained."""
_DONORS_AT_ONCE = 8
"""Donors of an earlier life that one job makes: a sketch takes a millisecond or more, and reports wait behind it."""


class EventPublisher:
    """Publishes what the leader's cache and attempts become: donor events, reports, residency."""

    def __init__(
        self,
        sink: ReportSink,
        queue: JobQueue,
        config: ConnectorConfig,
        clock: Callable[[], float],
        on_open: Callable[[Identity], None] | None = None,
        donor_ttl: float | None = None,
    ) -> None:
        """`on_open`: called on the background thread, once, when it is known which replica this is. `donor_ttl`: of
        DonorStream."""
        self._donor_ttl = donor_ttl
        self._sink = sink
        self._on_open = on_open
        self._queue = queue
        self._config = config
        self.hints = HintReader(fetches=config.fetch.enabled)
        self._clock = clock
        self.table = HintTable(config.hint_ttl_seconds, config.max_hints, clock)
        self.donors: DonorRegistry | None = None
        """None until `open`."""
        self._owner: Owner | None = None
        self._identity: Identity | None = None
        self._generation = Generation("")
        self._residency: ResidencySink | None = None
        self._changes: deque[Change] = deque()
        self._disk: DiskIndex | None = None
        self._ledger: Ledger | None = None
        self._early: list[tuple[CacheNamespace, DiskBlock]] = []
        self.device: DeviceEvents | None = None
        """None until the leader is open."""
        self._flush_queued = False
        self.problem: str | None = None
        """Why nothing is materialized though the configuration asks for it."""
        self.counts: Counter[str] = Counter()
        """`reports`, `reports_refused` (by the bus), `reports_dropped` (background full), `announcements`,
        `residency_errors`, `donors_not_restored` (background full)."""
        self.outcomes: Counter[tuple[Outcome, Reason]] = Counter()
        self.tokens: Counter[str] = Counter()
        """`offered`, `honoured`, `copied`, `confirmed`: sums over the reports."""
        self.tracer: AttemptTracer | None = None
        """Makes spans of reported attempts, where spans go somewhere."""

    # from the leader, under its lock

    def attach_owner(self, owner: Owner) -> None:
        """Names the leader, before anything is published."""
        self._owner = owner

    def open(self, identity: Identity, generation: Generation) -> None:
        """First, and again when the engine registered another pool: the replica stays the same, its namespace may
        not."""
        self._identity = identity
        self._generation = generation
        if self.donors is None:
            self.donors = DonorRegistry(
                DonorStream(self._sink, identity.replica, self._donor_ttl),
                generation,
                identity.tokens_per_block,
                self._config.min_donor_tokens,
                self._config.max_donors,
                self._clock,
                Tiers(
                    on_disk=lambda key: None if self._disk is None else self._disk.get(key),
                    in_slab=lambda key: None if self._ledger is None else self._ledger.by_key(key),
                    on_device=lambda key: None if self.device is None else self.device.block(key),
                ),
            )
            self._sink.on_loss = self._lost
            self._queue.submit(self.donors.open)
            if self._on_open is not None:
                on_open = self._on_open
                self._queue.submit(lambda: on_open(identity))
        self._queue.submit(self.announce)
        early, self._early = self._early, []
        self.donors_on_disk(early)

    def end_materialization(self, problem: str | None) -> None:
        """From the next announcement on, nothing is materialized here, for this reason; None: as configured again."""
        self.problem = problem

    def submit(self, job: Job) -> bool:
        """On the background thread; False: it has too much to do."""
        return self._queue.submit(job)

    def hear(self, rank: int, tokens_per_block: int, digest_of: DigestOf) -> None:
        """From now on the engine's events say what the device holds."""
        self.device = DeviceEvents(rank, tokens_per_block, digest_of, lambda: self.donors, self._queue.submit)

    def on_device(self, key: BlockKey) -> bool:
        """Does the device hold this block, as far as the engine's events say? Any thread may ask."""
        return self.device is not None and self.device.holds(key)

    def below(self, disk: DiskIndex, ledger: Ledger) -> None:
        """There is a tier below the slab: where a donor's blocks are is looked up here."""
        self._disk, self._ledger = disk, ledger

    def attempt_closed(self, closed: ClosedAttempt) -> None:
        """Publishes the report of an attempt; counts it as dropped where the queue is full."""
        if not self._queue.submit(lambda: self._report(closed)):
            self.counts["reports_dropped"] += 1

    def stored(self, entries: Sequence[BlockEntry], *, salted: bool) -> None:
        """Consecutive blocks of one chain became resident."""
        if entries:
            self._changed(Stored(tuple(entries), salted))

    def departed(self, entries: Sequence[BlockEntry]) -> None:
        """Resident blocks are gone, deepest first."""
        if entries:
            self._changed(Departed(tuple(entries)))

    def disk_gone(self, blocks: Sequence[DiskBlock]) -> None:
        """Blocks are not on every rank's disk any more, deepest first."""
        if blocks:
            self._changed(DiskGone(tuple(blocks)))

    def donors_on_disk(self, ends: Sequence[tuple[CacheNamespace, DiskBlock]]) -> None:
        """An earlier life left these chains; the last ones are the most recently used. They become donors a few at a
        time."""
        ends = ends[-self._config.max_donors :]
        if self._identity is None:
            self._early = list(ends)
            return
        if not ends:
            return
        self._changed(DonorsOnDisk(tuple(ends[:_DONORS_AT_ONCE])))
        if (rest := ends[_DONORS_AT_ONCE:]) and not self._queue.submit(lambda: self.donors_on_disk(rest)):
            self.counts["donors_not_restored"] += len(rest)

    def donor_resident(self, namespace: CacheNamespace, tip: BlockEntry) -> None:
        """A prompt's blocks are resident up to `tip`."""
        self._changed(ResidentDonor(namespace, tip))

    def donor_computed(self, namespace: CacheNamespace, digest: bytes, tokens: bytes) -> None:
        """A prompt was computed on an engine whose own cache makes it a donor."""
        self._changed(ComputedDonor(namespace, digest, tokens))

    def reset(self, generation: Generation, *, resident: bool) -> None:
        """`resident`: the blocks are still there, only what was said about them was lost."""
        self._generation = generation
        self._changed(Reset(generation, resident))

    def attach_residency(self, sink: ResidencySink, resident: Sequence[tuple[BlockEntry, bool]]) -> None:
        """From now on `sink` is told; first of what is resident already (with whether it is salted), parents before
        children."""
        self._changed(AttachResidency(sink, tuple(resident)))

    def _changed(self, change: Change) -> None:
        self._changes.append(change)
        if not self._flush_queued:
            self._flush_queued = True
            if not self._queue.submit(self._flush):
                self._flush_queued = False  # the next change tries again; none is lost

    def _lost(self, subject: str) -> None:
        """The bus dropped persistent messages. Lost reports are made good by their routes' time to live, lost donor
        events by us."""
        if subject.startswith(DONOR_EVENTS) and self._owner is not None:
            self._owner.donor_events_lost()

    @property
    def events_to_forget(self) -> int | None:
        """Donor events since the last reset that a new one would make needless; None: a restatement is under way."""
        return self.donors.events_beyond_donors if self.donors is not None else 0

    # on the background thread

    def _flush(self) -> None:
        self._flush_queued = (
            False  # first: a change that is appended from here on either is seen below or queues another flush
        )
        while self._changes:
            self._apply(self._changes.popleft())

    def _apply(self, change: Change) -> None:
        donors = self.donors
        if isinstance(change, Stored):
            if donors is not None:
                donors.stored(change.entries)
            self._tell_stored(change.entries, change.salted)
        elif isinstance(change, DiskGone):
            if donors is not None:
                donors.disk_gone(change.blocks)
        elif isinstance(change, DonorsOnDisk):
            for namespace, end in change.ends:
                self._restore(namespace, end)
        elif isinstance(change, Departed):
            if donors is not None:
                donors.departed(change.entries)
            keys = [entry.key for entry in change.entries]
            self._tell(lambda sink: sink.removed(keys))
        elif isinstance(change, ResidentDonor):
            if donors is not None:
                donors.register_resident(change.namespace, change.tip)
        elif isinstance(change, ComputedDonor):
            donor_id = None
            if donors is not None:
                donor_id = donors.register_computed(change.namespace, change.digest, change.tokens)
            if donor_id is not None and self.device is not None:
                self.device.registered(donor_id, change.namespace, change.digest, change.tokens)
        elif isinstance(change, AttachResidency):
            self._residency = change.sink
            for entry, salted in change.resident:
                self._tell_stored((entry,), salted)
        else:
            if donors is not None:
                donors.reset(change.generation, resident=change.resident)
            if not change.resident:
                self._tell(lambda sink: sink.cleared())
                if self.device is not None:
                    self.device.forget()
            self.announce()

    def _restore(self, namespace: CacheNamespace, end: DiskBlock) -> None:
        """Only what this engine could load: of the same model, layout and settings, whatever the request."""
        identity = self._identity
        assert self.donors is not None
        assert identity is not None
        own = identity.namespace.for_request(
            tenant=namespace.tenant,
            lora=namespace.lora,
            lora_revision=namespace.lora_revision,
            multimodal=namespace.multimodal,
        )
        if own == namespace:
            self.donors.register_on_disk(namespace, end)

    def _tell_stored(self, entries: Sequence[BlockEntry], salted: bool) -> None:
        first = entries[0]
        parent = first.parent.key if first.parent is not None and first.parent.ordinal >= 0 else None
        blocks = [(entry.key, entry.tokens) for entry in entries]
        self._tell(lambda sink: sink.stored(parent, blocks, salted=salted))

    def _tell(self, call: Callable[[ResidencySink], None]) -> None:
        if self._residency is None:
            return
        try:
            call(self._residency)
        except Exception:  # noqa: BLE001 - somebody else's code: its fault may not cost us donors and reports
            self.counts["residency_errors"] += 1
            _throttled.exception("semkv connector: the residency sink failed")

    def announce(self) -> None:
        """At start, at every beat, and when the generation changed."""
        identity = self._identity
        if identity is None:
            return
        announcement = ReplicaAnnouncement(
            version=ANNOUNCEMENT_VERSION,
            stable_routing_id=identity.replica.stable_routing_id,
            dp_rank=identity.replica.dp_rank,
            generation=self._generation,
            model=identity.model,
            namespace=identity.namespace,
            materialization=(self._config.materialization if self.problem is None else Materialization.OFF).value,
            problem=self.problem,
            request_local_kv=False,
            slab_blocks=identity.slab_blocks,
            resident_blocks=self._owner.resident_blocks() if self._owner is not None else 0,
            connector_version=CONNECTOR_VERSION,
            kv_events=self._kv_events(),
        )
        self.counts["announcements"] += 1
        self._sink.publish(announcements(identity.replica), encode_announcement(announcement), content_type=MSGPACK)

    def _kv_events(self) -> KvEvents:
        if self.device is not None and self.device.heard:
            return KvEvents.HEARD
        served = self.donors.served if self.donors is not None else 0
        return KvEvents.SILENT if served >= _SERVED_ENOUGH else KvEvents.WAITING

    def _report(self, closed: ClosedAttempt) -> None:
        identity = self._identity
        if identity is None:
            return
        key = prompt_key(closed.digest, unpack_tokens(closed.tokens))
        hints, ours, expired = closed.hints, closed.key.epoch == 0, False
        carrier = Carrier.REQUEST
        if hints is None:
            found = self.table.take(key, closed.timings.asked)
            if found is not None:
                delivery, ours = found
                carrier = Carrier.HINT if ours else Carrier.EQUAL_PROMPT
                hints = self.hints.parse(delivery.envelope, delivery.traceparent)
            else:
                expired = self.table.missed(key)
        trace = self.tracer.begin(closed, hints, carrier) if self.tracer is not None else None
        ending = closed.ending
        if isinstance(ending, Decline):
            ending = self._explain(closed, ending, hints, expired)
        report = build_report(
            replica=identity.replica,
            closed=closed,
            prompt_key=key,
            ending=ending,
            hints=hints,
            route_is_ours=ours,
            traceparent=trace.traceparent if trace is not None else None,
        )
        self.outcomes[(ending.outcome, ending.reason)] += 1
        self.counts["reports"] += 1
        for step in TOKEN_STEPS:
            self.tokens[step] += getattr(report, step)
        began = time.time_ns()
        sent = self._sink.publish(
            reports(identity.replica), encode_report(report), content_type=MSGPACK, message_id=report.report_id
        )
        if not sent:
            self.counts["reports_refused"] += 1
        if trace is not None:
            trace.reported(report, began, sent)
        # What failed is said with its route: lines of the engine's threads know the engine's number of the request
        # only.
        level = logging.WARNING if report.outcome is Outcome.LOAD_FAILED else logging.DEBUG
        if _log.isEnabledFor(level):
            with about(route_id=report.route_id, traceparent=report.traceparent):
                _say(level, report)

    def _explain(self, closed: ClosedAttempt, decline: Decline, hints: ParsedHints | None, expired: bool) -> Decline:
        hint = hints.donor if hints is not None else None
        donor = self.donors.get(hint.donor_id) if hint is not None and self.donors is not None else None
        facts = HintFacts(
            digest_hex=closed.digest.hex(),
            namespace=closed.namespace,
            generation=closed.generation,
            donor_known=donor is not None,
            donor_namespace=donor.namespace if donor is not None else None,
        )
        return explain(decline, closed.question, hint, facts, hint_expired=expired)


def _say(level: int, report: MaterializationReport) -> None:
    say = _log.debug if level == logging.DEBUG else _throttled.warning
    say(
        "attempt %d of the engine's request %d: %s (%s); tokens: %d prompt, %d local, %d offered, %d confirmed",
        report.epoch,
        report.request_id,
        report.outcome.value,
        report.reason.value,
        report.prompt_tokens,
        report.local_tokens,
        report.offered,
        report.confirmed,
    )
