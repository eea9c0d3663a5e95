"""What a router knows: donors, replicas, outcomes. All of it comes from the bus and from Dynamo's discovery, so any
number of routers know the same and a restarted one knows it again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dynamo_semkv.bus.publisher import BusPublisher
from dynamo_semkv.bus.subscriber import BusSubscriber
from dynamo_semkv.config.load import Loaded
from dynamo_semkv.config.schema import Config
from dynamo_semkv.config.watch import ConfigWatch
from dynamo_semkv.contracts import subjects
from dynamo_semkv.contracts.identity import ReplicaKey
from dynamo_semkv.evidence.catalog import DonorCatalog
from dynamo_semkv.evidence.deadline import DeadlineRunner
from dynamo_semkv.evidence.limits import CatalogLimits
from dynamo_semkv.evidence.provider import DonorListener
from dynamo_semkv.observe import dynamo_counters
from dynamo_semkv.observe.dynamo_counters import DynamoTokens
from dynamo_semkv.observe.metrics import Metrics
from dynamo_semkv.observe.state import ReplicaStatus
from dynamo_semkv.observe.state_collector import BusParts, Readings, RouteParts, StateCollector
from dynamo_semkv.outcome.calibration import Calibration
from dynamo_semkv.outcome.closed import ClosedRoute
from dynamo_semkv.outcome.history import History
from dynamo_semkv.outcome.intake import Intake
from dynamo_semkv.outcome.route_tracker import RouteTracker, TrackerLimits
from dynamo_semkv.router.attempts import Attempts
from dynamo_semkv.router.fallback import FallbackReason, Fallbacks
from dynamo_semkv.router.observed import ObservedHistory
from dynamo_semkv.router.plugins import plugged_scorers
from dynamo_semkv.router.providers import providers
from dynamo_semkv.router.replicas import ReplicaDirectory
from dynamo_semkv.router.runtime_types import RankLoad
from dynamo_semkv.telemetry.tracing import Tracing

REPLAY_SECONDS = 2.0
"""How long the start waits for donors and announcements to be read back before the first request; not for ever, since
the broker may be away."""
CLOSE_SECONDS = 2.0
SWEEP = 1_000
"""How many donors of ended streams leave the index on one beat: about a millisecond."""


class Knowledge:
    """Owns the parts that hold a router's state and the bus connections that feed them. `start` and `close` in the
    event loop that serves. `router`: the name under which this process writes route events."""

    def __init__(self, loaded: Loaded, router: str, tracing: Tracing | None = None) -> None:
        config = loaded.config
        self.tracing = tracing
        self.watch = ConfigWatch(loaded)
        found = providers(config)
        self.catalog = _catalog(config, [provider for provider in found if isinstance(provider, DonorListener)])
        self.lookup = DeadlineRunner(
            found,
            config.evidence.deadline_ms / 1000,
            config.evidence.max_matches,
            min_overlap_tokens=config.evidence.min_overlap_tokens,
        )
        self.directory = ReplicaDirectory(
            self.catalog.purge_replica, self.catalog.readmit_replica, self.catalog.set_ranks
        )
        self._loads: Mapping[ReplicaKey, RankLoad] = {}
        self._dynamo: DynamoTokens | None = None
        self._status_url = dynamo_counters.status_url(os.environ)
        self.fallbacks = Fallbacks()
        self.scorers = plugged_scorers(config, lambda error: self.fallbacks.add(FallbackReason.SCORER_ERROR, error))
        self.metrics = Metrics()
        self.history = History(config.outcome.history_size)
        self._closed_routes = ObservedHistory(
            self.history, self.metrics, tracing, router=router, is_live=lambda: self.intake.live
        )
        self.calibration = Calibration(config.scoring)
        self.tracker = RouteTracker(
            config.outcome.report_ttl_seconds,
            self._closed,
            self._closed_routes.add_orphan,
            limits=TrackerLimits(open_routes=config.outcome.max_open_routes),
        )
        name = f"semkv-router-{os.getpid()}"
        self.publisher, self.subscriber = BusPublisher(config.bus, name), BusSubscriber(config.bus, name)
        self.attempts = Attempts()
        self.intake = Intake(
            self.subscriber,
            self.tracker,
            apply_donor_event=self.catalog.apply,
            announce=self.directory.announce,
            route_opened=lambda event: self.attempts.opened_elsewhere(event.request_id, event.tenant, event.attempt),
        )
        self.collector = StateCollector(
            router,
            loaded,
            RouteParts(self.history, self.tracker, self.intake),
            BusParts(self.publisher, self.subscriber),
            self._readings(),
            self.metrics,
        )

    def _readings(self) -> Readings:
        tracing = self.tracing
        return Readings(
            catalog=self.catalog.snapshot,
            providers=self.lookup.snapshot,
            replicas=self.statuses,
            fallbacks=lambda: {reason.value: count for reason, count in self.fallbacks.counts.items()},
            calibration=self.calibration.snapshot,
            configuration=self.watch.status,
            dynamo=lambda: self._dynamo,
            spans=lambda: dict(tracing.counts) if tracing is not None else {},
        )

    def _closed(self, route: ClosedRoute) -> None:
        valued = replace(route, saving=self.calibration.saving_of(route))
        self._closed_routes.add(valued)
        self.calibration.add(valued)

    async def start(self) -> None:
        """Starts the publisher's thread and the reading of the bus; does not wait for the replay."""
        self.publisher.start()
        await self.intake.start()
        await self.subscriber.start()

    async def replayed(self) -> bool:
        """Waits, at most REPLAY_SECONDS, until all stored donor events and announcements were read. False: not yet."""
        until = time.monotonic() + REPLAY_SECONDS
        streams = (subjects.DONOR_STREAM, subjects.ANNOUNCEMENT_STREAM)
        while not all(self.subscriber.caught_up(stream) for stream in streams):
            if time.monotonic() > until:
                return False
            await asyncio.sleep(0.02)
        return True

    def reload(self, loaded: Loaded) -> None:
        """Takes over what may change while running: limits of the lookup, scoring, and what the page shows."""
        evidence = loaded.config.evidence
        self.lookup.set_limits(evidence.deadline_ms / 1000, evidence.max_matches, evidence.min_overlap_tokens)
        self.calibration.reload(loaded.config.scoring)
        self.collector.reload(loaded)

    def tidy(self) -> None:
        """Does what must happen without requests too: donors of dead and of silent workers end and leave the index, and
        an id that two workers carry is noticed."""
        self.directory.tidy(time.monotonic())
        self.catalog.forget_absent()
        self.catalog.expire(self.intake.clock.now(), SWEEP)
        self.catalog.sweep(SWEEP)

    def take_loads(self, loads: Mapping[ReplicaKey, RankLoad]) -> None:
        """The loads that `statuses` shows until the next beat; decisions ask Dynamo."""
        self._loads = loads

    async def count_dynamo(self) -> None:
        """Reads Dynamo's own counters again; the last values stay when it does not answer."""
        if self._status_url is not None:
            self._dynamo = await asyncio.to_thread(dynamo_counters.read, self._status_url) or self._dynamo

    def statuses(self) -> list[ReplicaStatus]:
        """The live replicas as the page, metrics and readiness show them."""
        shown = self.directory.shown()
        found = []
        for replica, card in sorted(self.directory.live().items()):
            announced, load = self.directory.announcement_of(replica), self._loads.get(replica)
            standing, differs_in = shown[replica]
            found.append(
                ReplicaStatus(
                    worker_id=replica.worker_id,
                    dp_rank=replica.dp_rank,
                    stable_routing_id=card.stable_routing_id,
                    standing=standing.value,
                    differs_in=differs_in,
                    model=announced.model if announced is not None else None,
                    generation=announced.generation if announced is not None else None,
                    materialization=announced.materialization if announced is not None else None,
                    problem=announced.problem if announced is not None else None,
                    slab_blocks=announced.slab_blocks if announced is not None else None,
                    resident_blocks=announced.resident_blocks if announced is not None else None,
                    total_blocks=card.total_kv_blocks,
                    queued_prefill_tokens=load.prefill_tokens if load is not None else None,
                    active_decode_blocks=load.decode_blocks if load is not None else None,
                    active_requests=load.active_requests if load is not None else None,
                )
            )
        return found

    async def close(self) -> None:
        """Stops reading, then the providers, the publisher and the exporter; each of these three gets CLOSE_SECONDS."""
        await self.intake.close()
        await self.subscriber.close()
        self.lookup.close(CLOSE_SECONDS)
        await asyncio.to_thread(self.publisher.close, CLOSE_SECONDS)
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close, CLOSE_SECONDS)


def _catalog(config: Config, listeners: Sequence[DonorListener]) -> DonorCatalog:
    fingerprint = config.evidence.fingerprint
    limits = CatalogLimits(
        max_donors=fingerprint.max_donors,
        max_donors_per_namespace=fingerprint.max_donors_per_namespace,
        max_age_seconds=config.evidence.max_donor_age,
    )
    return DonorCatalog(listeners, clock=time.monotonic, limits=limits)
