"""The router process: every part made, wired, started, drained and closed. Policy lives elsewhere.

A broker that is away does not keep it from serving: there is no evidence then, and Dynamo routes. Any number of these processes may serve
one component name; each is complete from the bus and from Dynamo's discovery.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import time
from collections.abc import Coroutine
from typing import Any

from dynamo_semkv.bus.publisher import BusPublisher
from dynamo_semkv.bus.subscriber import BusSubscriber
from dynamo_semkv.config.load import Loaded, read_salt_key
from dynamo_semkv.config.schema import Config
from dynamo_semkv.contracts import subjects
from dynamo_semkv.contracts.namespace import DEFAULT_SALT_KEY
from dynamo_semkv.evidence.catalog import DonorCatalog
from dynamo_semkv.evidence.deadline import DeadlineRunner
from dynamo_semkv.evidence.fingerprint import FingerprintProvider
from dynamo_semkv.outcome.book import BookLimits, OutcomeBook
from dynamo_semkv.outcome.history import History
from dynamo_semkv.outcome.intake import Intake, RouteJournal
from dynamo_semkv.router.advisor import Advisor
from dynamo_semkv.router.fallback import Fallbacks
from dynamo_semkv.router.hint_sender import HintSender
from dynamo_semkv.router.replicas import ReplicaDirectory
from dynamo_semkv.router.runtime import DynamoEdge, EdgeError, EdgeSettings
from dynamo_semkv.router.service import RouterService

logger = logging.getLogger(__name__)

REPLAY_SECONDS = 2.0
"""How long the start waits for donors and announcements to be read back before the first request; the broker may be away."""
CLOSE_SECONDS = 2.0
SWEEP = 1_000
"""Donors of ended streams that leave the index a beat: about a millisecond."""


def run(loaded: Loaded) -> int:
    """Serves until SIGTERM or SIGINT. Exit status: 0, or 1 when there was nothing to serve in front of."""
    main = serve(loaded)
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


def edge_settings(config: Config) -> EdgeSettings:
    """Our options -> those of the edge to Dynamo."""
    dynamo, router = config.dynamo, config.dynamo.kv_router
    threshold = router.active_decode_blocks_threshold
    return EdgeSettings(
        worker_endpoint=f"{dynamo.namespace}.{dynamo.worker_component}.{dynamo.worker_endpoint}",
        router_endpoint=f"{dynamo.namespace}.{dynamo.router_component}.{dynamo.router_endpoint}",
        model_name=config.model.name,
        model_path=config.model.path,
        kv_router={
            "router_temperature": router.router_temperature,
            "overlap_score_credit": router.overlap_score_credit,
            "host_cache_hit_weight": router.host_cache_hit_weight,
            "disk_cache_hit_weight": router.disk_cache_hit_weight,
            "router_replica_sync": router.router_replica_sync,
            "router_queue_threshold": router.router_queue_threshold,
        },
        load_thresholds={} if threshold is None else {"active_decode_blocks_threshold": threshold},
        session_affinity_ttl_s=router.session_affinity_ttl_seconds,
        wait_workers_s=dynamo.wait_for_workers_seconds or math.inf,
    )


class State:
    """What a router knows, all of it from the bus and from discovery: donors, replicas, outcomes."""

    def __init__(self, loaded: Loaded) -> None:
        config = loaded.config
        evidence = config.evidence
        providers = []
        if evidence.fingerprint.enabled:
            providers.append(FingerprintProvider(evidence.fingerprint))
        self.catalog = DonorCatalog(
            providers,
            clock=time.monotonic,
            max_donors=evidence.fingerprint.max_donors,
            max_donors_per_namespace=evidence.fingerprint.max_donors_per_namespace,
        )
        self.lookup = DeadlineRunner(
            providers,
            evidence.deadline_ms / 1000,
            evidence.max_matches,
            min_overlap_tokens=evidence.min_overlap_tokens,
        )
        self.directory = ReplicaDirectory(self.catalog.purge_replica, self.catalog.readmit_replica)
        self.history = History(config.outcome.history_size)
        self.book = OutcomeBook(
            config.outcome.report_ttl_seconds,
            self.history.add,
            self.history.add_orphan,
            limits=BookLimits(open_routes=config.outcome.max_open_routes),
        )
        name = f"semkv-router-{os.getpid()}"
        self.publisher = BusPublisher(config.bus, name)
        self.subscriber = BusSubscriber(config.bus, name)
        self.intake = Intake(
            self.subscriber,
            self.book,
            apply_donor_event=self.catalog.apply,
            announce=self.directory.announce,
        )

    async def start(self) -> None:
        self.publisher.start()
        await self.intake.start()
        await self.subscriber.start()

    async def replayed(self) -> bool:
        """Waits, but not for long, until what the bus kept of donors and announcements has been read."""
        until = time.monotonic() + REPLAY_SECONDS
        streams = (subjects.DONOR_STREAM, subjects.ANNOUNCEMENT_STREAM)
        while not all(self.subscriber.caught_up(stream) for stream in streams):
            if time.monotonic() > until:
                return False
            await asyncio.sleep(0.02)
        return True

    async def close(self) -> None:
        await self.intake.close()
        await self.subscriber.close()
        self.lookup.close(CLOSE_SECONDS)
        await asyncio.to_thread(self.publisher.close, CLOSE_SECONDS)


async def serve(loaded: Loaded) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    state = State(loaded)
    await state.start()
    try:
        logger.info("configuration %s: %s", loaded.hash, loaded.source)
        edge = await _unless(stop, DynamoEdge.connect(edge_settings(loaded.config)))
        if edge is None:
            return 0
        return await _serve(loaded, state, edge, stop)
    except EdgeError as error:
        logger.error("nothing to serve: %s", error)
        return 1
    finally:
        await state.close()


async def _serve(loaded: Loaded, state: State, edge: DynamoEdge, stop: asyncio.Event) -> int:
    config = loaded.config
    router = f"{config.dynamo.router_component}-{edge.instance_id:x}"
    state.directory.serve_as(config.model.name or edge.card.model)
    fallbacks = Fallbacks()
    advisor = Advisor(
        edge=edge,
        directory=state.directory,
        lookup=state.lookup,
        config=config,
        fallbacks=fallbacks,
        salt_key=read_salt_key(config.security.salt_key_file, DEFAULT_SALT_KEY),
    )
    service = RouterService(
        edge=edge,
        directory=state.directory,
        advisor=advisor,
        journal=RouteJournal(state.publisher, state.intake, router),
        hints=HintSender(state.publisher),
        fallbacks=fallbacks,
        config=config,
        config_hash=loaded.hash,
        router=router,
    )
    advisor.refresh()
    if not await state.replayed():
        logger.warning("bus %s is not read yet: serving without evidence until it is", config.bus.url)
    beat = asyncio.ensure_future(_beat(config.dynamo.poll_seconds, advisor, state))
    serving = asyncio.ensure_future(edge.serve(service.handle))
    stopping = asyncio.ensure_future(stop.wait())
    logger.info(
        "router %s: placement %s, %d replicas", router, config.placement.mode.value, len(state.directory.live())
    )
    try:
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            logger.info("stopping: %d requests in flight", edge.inflight)
            await edge.shutdown(config.dynamo.drain_seconds)
        await serving
    finally:
        for task in (beat, stopping):
            task.cancel()
        await asyncio.gather(beat, stopping, return_exceptions=True)
    return 0


async def _beat(seconds: float, advisor: Advisor, state: State) -> None:
    """What has to happen without requests too: a dead worker's donors go, and what is over is swept."""
    failures = 0
    while True:
        await asyncio.sleep(seconds)
        try:
            advisor.refresh()
            state.catalog.forget_absent()
            state.catalog.sweep(SWEEP)
        except Exception:  # a beat that fails may not end all later ones; counted and logged
            failures += 1
            if failures & (failures - 1) == 0:
                logger.exception("beat failed (%d so far)", failures)


async def _unless(stop: asyncio.Event, coroutine: Coroutine[Any, Any, DynamoEdge]) -> DynamoEdge | None:
    """The result, or None when the process was told to stop first."""
    work, stopping = asyncio.ensure_future(coroutine), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((work, stopping), return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        work.cancel()
        stopping.cancel()
        await asyncio.gather(work, stopping, return_exceptions=True)
