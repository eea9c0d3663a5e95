"""Leader: the connector's scheduler side without an engine in it. One a leader rank, one a rank under attention DP.

The engine's callbacks, in order: `ask` (possibly under the engine's own lock, so no I/O and no waiting), `allocated`,
`batch`, `finished`. What ranks did comes in by `on_result`, maybe from another thread, so one lock is held for as long
as a callback takes; the event publisher hashes, encodes and publishes outside of it.

The callbacks may raise; their caller (`scheduler.py`) catches, counts and answers "nothing", since an exception would
end the executor. A promise that cannot be kept must be loud: `ConnectorMetadata.unloadable` carries it to the ranks.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dynamo_semkv.contracts.identity import StableReplica, new_generation
from dynamo_semkv.contracts.namespace import CacheNamespace
from dynamo_semkv.telemetry.throttled import Throttled
from worker_connector.disk.messages import DiskOrder
from worker_connector.donors.device_events import KvEvents
from worker_connector.donors.sink import ResidencySink
from worker_connector.engine_api.request_view import RequestScope, is_dummy
from worker_connector.engine_api.settings import Settings
from worker_connector.leader.api_variants import unmet_reservations
from worker_connector.leader.cache_generation import CacheGeneration, Offer
from worker_connector.leader.cache_reset import checked_revision
from worker_connector.leader.event_publisher import EventPublisher, Identity
from worker_connector.leader.publisher_numbers import numbers_of
from worker_connector.link.channel import RankChannel, RankReady, RankResult
from worker_connector.link.metadata import ConnectorMetadata, Orders, Unloadable
from worker_connector.link.rank_aggregator import RankAggregator, warn_of_missing_ranks
from worker_connector.link.wire import Endpoint
from worker_connector.memory.slab import HostSlab
from worker_connector.requests.async_loads import Grouped
from worker_connector.requests.engine_namespace import (
    RequestNamespaces,
    adapters_of,
    configured_rank,
    engine_namespace,
    served_model_name,
)
from worker_connector.restatement import Restatement

_throttled = Throttled(logging.getLogger(__name__))

NOTHING = Offer(0, False)
REMOTE_PATIENCE = 64
"""Iterations within which a rank of another process has told of a forward pass."""
IDLE_SECONDS = 30.0
"""Without any iteration for this long, an engine has no running request."""
_EARLY_EVENTS = 10_000
_OF_THE_REQUEST = frozenset({"tenant", "lora", "lora_revision", "multimodal"})


class Leader:
    """Thread-safe."""

    def __init__(
        self,
        settings: Settings,
        llm_args: Any,
        channel: RankChannel,
        event_publisher: EventPublisher,
        clock: Callable[[], float],
        *,
        world: int = 1,
        endpoint: Endpoint | None = None,
    ) -> None:
        """`world`: ranks that obey this leader; those of other processes find it at `endpoint`."""
        self._settings = settings
        self._llm_args = llm_args
        self._channel = channel
        self._event_publisher = event_publisher
        self._clock = clock
        self._lock = self.lock = threading.RLock()
        self._generation = new_generation()
        self._dp_rank = configured_rank(llm_args)
        self._aggregator = RankAggregator(world, clock)
        self._endpoint = endpoint
        self._life: CacheGeneration | None = None
        self._namespaces: RequestNamespaces | None = None
        self._weights_revision: str | None = None
        self.comparable = True
        """Under `lock`. Do equal namespaces mean equal KV, here and in another worker? Not after `reset_cache`, which
        the other one may not have heard yet, until `weights_changed` names the difference."""
        self._iteration = 0
        self._last_batch = clock()
        self._restatement = Restatement(settings.restate_seconds, clock)
        self._replica: StableReplica | None = None
        self._disk_orders: list[DiskOrder] = []
        self._early_events: deque[KvEvents] = deque(maxlen=_EARLY_EVENTS)
        """Before it is known who we are. A lost one is a gap in the ids."""
        self.counts: Counter[str] = Counter()
        """What should be rare: `not_ready`, `unknown_request`, `unasked_replay`, `tokens_differ`, `position_unknown`,
        `vanished`, `rank_differs`, `unloadable`, `damaged_blocks`, `damaged_loaded`, `pool_changed`, `result_errors`,
        `batch_errors`, `upkeep_errors`, `pages_reassigned`, `block_size_differs`, `stale_resumed`, `donor_events_lost`;
        and `restated`: routine."""
        event_publisher.attach_owner(self)
        channel.listen(self.on_result)

    def ask(self, request: Any, computed: int) -> Offer:
        """Tokens beyond `computed` that the slab will serve, and whether the request is to be parked meanwhile."""
        if is_dummy(request):
            return NOTHING
        with self._lock:
            if self._life is None:
                self.counts["not_ready"] += 1
                return NOTHING
            return self._life.ask(request, computed, all_ranks=self._aggregator.complete)

    def allocated(self, request: Any, flat: Iterable[int] = (), grouped: Grouped = None) -> None:
        """Pages are there. They are taken from the reports that follow, and here where the request is to be parked,
        since no report follows then; where the forward pass starts is read in any case."""
        if is_dummy(request):
            return
        with self._lock:
            if self._life is not None:
                self._life.allocated(request, flat, grouped)

    def batch(self, output: Any) -> ConnectorMetadata:
        """One iteration's instructions for the ranks."""
        with self._lock:
            iteration = self._iteration = self._iteration + 1
            unmet = unmet_reservations(output)
            orders = self._orders(output)
            if orders is None and not unmet and not self._disk_orders:
                return ConnectorMetadata(
                    self._channel.channel_id, self._generation, iteration, endpoint=self._endpoint, idle=True
                )
            self.counts["unloadable"] += len(unmet)
            orders = orders or Orders()
            to_disk, self._disk_orders = tuple(self._disk_orders), []
            return ConnectorMetadata(
                self._channel.channel_id,
                self._generation,
                iteration,
                tuple(orders.loads),
                tuple(orders.saves),
                (*unmet, *orders.unloadable),
                tuple(orders.async_loads),
                tuple(orders.nothing_to_load),
                tuple(orders.abandoned),
                to_disk,
                self._endpoint,
            )

    def _orders(self, output: Any) -> Orders | None:
        """None: nothing is ordered, and no attempt waits for this forward pass. A fault here may cost reuse and saves.
        Where the engine relies on an offer, its pass may not run without the load."""
        life = self._life
        try:
            self._last_batch = self._clock()
            self._see_rank(getattr(output, "attention_dp_rank", None))
        except Exception:  # noqa: BLE001 - who speaks is not what is loaded
            self.counts["batch_errors"] += 1
            _throttled.exception("semkv connector: iteration %d has no speaker", self._iteration)
        if life is None:
            return Orders()
        try:
            forwarded = self._channel.last_idle_forward
            orders = life.batch(output, self._iteration, all_ranks=self._aggregator.complete, forwarded=forwarded)
            self._end_if_contradicted(life)
            return orders
        except Exception as error:
            self.counts["batch_errors"] += 1
            if not life.break_promises():
                raise  # counted, logged and answered with nothing by the caller
            _throttled.exception("semkv connector: iteration %d could not be read", self._iteration)
            return Orders(unloadable=[Unloadable(None, f"the batch could not be read: {error}")])

    def _end_if_contradicted(self, life: CacheGeneration) -> None:
        """Materialization ends for good where the engine's reports contradict the registered pool: nothing more is
        offered or saved, what is resident is forgotten, and every announcement says why."""
        why = life.contradiction
        if why is None or self._event_publisher.problem is not None:
            return
        _throttled.error("semkv connector: materialization ends, nothing is offered or saved any more: %s", why)
        self._event_publisher.end_materialization(why)
        self._forget_blocks()

    def cancelled(self, request: Any, start: int, end: int) -> None:
        """The engine will not take the tokens [start, end) of an offer. Where the head is cut, because its own cache
        has caught up, the first report's `computed_position` says it; only a cut tail is noted."""
        with self._lock:
            if self._life is not None:
                self._life.cancelled(int(request.request_id), start, end)

    def reset(self, request: Any) -> None:
        """The engine destroyed the request's allocation, and will ask again."""
        with self._lock:
            if self._life is not None:
                self._life.reset(int(request.request_id))

    def finished(self, request: Any) -> None:
        """The request ended by itself. Cancelled ones may come here too, or never."""
        with self._lock:
            if self._life is not None:
                self._life.finished(request, forwarded=self._channel.last_idle_forward)

    def on_result(self, result: RankResult) -> None:
        """Never raises: it is called from the rank's copies, or by the thread of a rank in another process."""
        self._on_ranks(lambda: self._aggregator.take(result))

    def rank_connected(self, rank: int) -> None:
        """A rank of another process is connected. Never raises."""
        self._on_ranks(lambda: self._aggregator.connected(rank))

    def rank_lost(self, rank: int) -> None:
        """Its connection is gone: what waits for it fails, and nothing is offered until it is back. Never raises."""
        _throttled.error("semkv connector: rank %d is lost; nothing is loaded or saved until it is back", rank)
        self._on_ranks(lambda: self._aggregator.lost(rank))

    def _on_ranks(self, learn: Callable[[], Sequence[RankResult]]) -> None:
        try:
            with self._lock:
                for result in learn():
                    if isinstance(result, RankReady):
                        self._ready(result)
                    elif self._life is not None:
                        self._life.take(result)
        except Exception:  # noqa: BLE001 - a fault of the leader's books may not fail a rank's forward pass
            self.counts["result_errors"] += 1
            _throttled.exception("semkv connector: a rank's result could not be booked")

    def warn_of_missing_ranks(self) -> None:
        """From the beat."""
        with self._lock:
            missing = self._aggregator.overdue()
        if missing:
            warn_of_missing_ranks(missing, self._aggregator.world)

    def _ready(self, pool: RankReady) -> None:
        """A pool was registered. A second time means that the engine rebuilt it, and the rank its slab: a new life of
        the cache."""
        if self._life is not None:
            self.counts["pool_changed"] += 1
            _throttled.warning("semkv connector: the KV cache was registered anew; what was saved so far is gone")
            self._life.close()
            self._event_publisher.end_materialization(None)
            self._new_generation()
        self._namespaces = RequestNamespaces(
            self._base_namespace(pool, self._weights_revision),
            adapters_of(self._llm_args),
            self._settings.salt_key,
        )
        self._life = CacheGeneration(
            pool,
            self._settings,
            self._namespaces,
            self._event_publisher,
            self._verify,
            lambda: self._generation,
            self.counts,
            patience=1 if self._aggregator.world == 1 else REMOTE_PATIENCE,
        )
        if self._settings.connector.disk_path is not None:
            self._disk_orders.clear()
            self._life.attach_disk(self._to_disk, self._lock, ranks=self._aggregator.world, clock=self._clock)
        unknown = set(self._namespaces.base.unknown_fields()) - _OF_THE_REQUEST
        if unknown and self._settings.exact:
            _throttled.warning(
                "semkv connector: nothing will be materialized, unknown in the namespace: %s", sorted(unknown)
            )
        self._open()

    def _verify(self, slots: Sequence[int]) -> list[int]:
        rank = self._channel.rank
        return list(slots) if rank is None else rank.verify(slots)

    def _to_disk(self, order: DiskOrder) -> None:
        """With several ranks by the next metadata, which reaches each of them once and in order; it comes with the next
        iteration."""
        rank = self._channel.rank
        if self._aggregator.world > 1:
            self._disk_orders.append(order)
        elif rank is not None:
            rank.disk(order)

    def _see_rank(self, rank: int | None) -> None:
        """The engine's word on which data-parallel rank this is counts, as long as nothing was published under
        another."""
        if rank is not None and rank != self._dp_rank:
            if self._replica is not None:
                self.counts["rank_differs"] += 1
                return
            self._dp_rank = rank
        if self._replica is None:
            self._dp_rank = self._dp_rank or 0
            self._open()

    def _open(self) -> None:
        """Speaks to the world once it is known who speaks and in which namespace."""
        if self._life is None or self._namespaces is None or self._dp_rank is None:
            return
        self._replica = StableReplica(self._settings.stable_routing_id, self._dp_rank)
        self._event_publisher.open(
            Identity(
                replica=self._replica,
                model=served_model_name(self._llm_args, self._settings.model),
                namespace=self._namespaces.base,
                tokens_per_block=self._life.pool.tokens_per_block,
                slab_blocks=self._life.pool.slots,
            ),
            self._generation,
        )
        self._event_publisher.hear(self._dp_rank, self._life.pool.tokens_per_block, self._digest_of)
        early = list(self._early_events)
        self._early_events.clear()
        for events in early:
            self.kv_events(events)

    def cache(self) -> tuple[CacheGeneration | None, RequestNamespaces | None, HostSlab | None]:
        """Under `lock`. The slab may be of a pool that is not heard of yet."""
        return self._life, self._namespaces, None if self._channel.rank is None else self._channel.rank.slab

    @property
    def replica(self) -> StableReplica | None:
        """None until pool and rank are known."""
        return self._replica

    def reset_cache(self) -> None:
        """The engine's cache was reset for a reason that makes old KV wrong. Waits for the disk of an only rank: what
        is on it is not served after a restart either. Several are told with the next batch. OSError: the disk did not
        take it; all else is done."""
        with self._lock:
            self._forget_blocks()
        self._channel.make_resets_durable()

    def weights_changed(self, revision: str) -> None:
        """The same, and what is saved from now on is another model's: of these weights. ContractError for what is no
        name (nothing is done), or too long behind the model's (all is forgotten, the old name stays)."""
        revision = checked_revision(revision)
        try:
            with self._lock:
                self._forget_blocks()
                if self._life is not None and self._namespaces is not None:
                    self._namespaces.rebase(self._base_namespace(self._life.pool, revision))
                    self._life.running.open_digest = self._namespaces.open_digest
                    self._open()
                self._weights_revision = revision
                self.comparable = True
        finally:
            self._channel.make_resets_durable()

    def _forget_blocks(self) -> None:
        if self._life is not None:
            self._life.forget_blocks()
        self.comparable = False
        self._new_generation()

    def _base_namespace(self, pool: RankReady, revision: str | None) -> CacheNamespace:
        return engine_namespace(self._llm_args, pool, self._settings.model, revision)

    def _new_generation(self) -> None:
        self._generation = new_generation()
        if self._replica is not None:
            self._event_publisher.reset(self._generation, resident=False)

    def donor_events_lost(self) -> None:
        """Consumers have a gap in our donor events: a new generation, and everything resident again, when that is
        due."""
        with self._lock:
            self.counts["donor_events_lost"] += 1
            self._restatement.lost()
        self.restate_if_due()

    def restate_if_due(self) -> None:
        """From the beat, and when a loss is to be answered (restatement.py). Old hints stay good: donors keep their
        ids."""
        with self._lock:
            lost = self._restatement.answers_a_loss()
            if self._life is None or not (lost or self._restatement.is_routine(self._event_publisher.events_to_forget)):
                return
            if not lost:
                self.counts["restated"] += 1
            self._restatement.begun()
            self._generation = new_generation()
            self._event_publisher.reset(self._generation, resident=True)

    @property
    def restatement_due(self) -> float:
        """When a lost donor event is to be answered, in seconds of the clock; infinite: none is open."""
        return self._restatement.due_at

    def sweep_idle(self) -> None:
        """From the beat: an engine that has not iterated for long runs nothing, and tells of no cancellation."""
        with self._lock:
            if self._life is not None and self._clock() - self._last_batch >= IDLE_SECONDS:
                self._life.sweep(self._iteration, keep_offers=True)

    def kv_events(self, events: KvEvents) -> None:
        """What the engine says of its own cache: see donors/device_events.py. Any thread; never raises, never waits."""
        device = self._event_publisher.device
        if device is not None:
            device.offer(events)
        elif self._replica is None:
            self._early_events.append(events if isinstance(events, Mapping) else list(events))

    def _digest_of(self, salt: str | None, adapter: int | None) -> bytes:
        with self._lock:
            assert self._namespaces is not None
            return self._namespaces.of(RequestScope(salt, True, adapter, ()))[1]

    def attach_residency(self, sink: ResidencySink) -> None:
        """`sink` is told of what is resident now and of every change from now on, on the background thread."""
        with self._lock:
            self._event_publisher.attach_residency(sink, self._life.resident() if self._life is not None else ())

    def resident_blocks(self) -> int:
        """How many blocks the slab holds; 0 before the pool is registered. Any thread."""
        with self._lock:
            return self._life.ledger.stats().resident if self._life is not None and self._life.ledger is not None else 0

    def hint_received(self, donor_id: str) -> None:
        """On the bus thread. A request for this donor comes: check its blocks first, bring up what is on disk."""
        donor = self._event_publisher.donors.get(donor_id) if self._event_publisher.donors is not None else None
        rank = self._channel.rank
        if donor is not None and donor.tip is not None and rank is not None:
            rank.verify_soon([entry.slot for entry in donor.tip.chain() if entry.slot >= 0])
        life = self._life
        if donor is not None and donor.below is not None and life is not None and life.disk is not None:
            life.disk.hinted(donor.below)

    def snapshot(self) -> dict[str, Any]:
        """Numbers for logs, tests and an operator; nothing of any prompt."""
        with self._lock:
            life = self._life
            numbers: dict[str, Any] = {
                "dp_rank": self._dp_rank,
                "generation": self._generation,
                "materialization": self._settings.connector.materialization.value,
                "iteration": self._iteration,
                "counts": dict(self.counts),
                **numbers_of(self._event_publisher),
                "ranks": self._aggregator.describe(),
            }
            if life is not None:
                numbers |= life.numbers()
            rank = self._channel.rank
        return numbers | {"rank": dict(rank.snapshot()) if rank is not None else None}
