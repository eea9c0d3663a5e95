"""The router process: makes, wires, starts, drains and closes every part. Policy lives elsewhere.

It serves without the broker too: there is no evidence then, and Dynamo routes.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import secrets
import signal
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from dynamo_semkv.config.load import Loaded, read_salt_key
from dynamo_semkv.config.schema import Config, DashboardConfig
from dynamo_semkv.contracts.namespace import DEFAULT_SALT_KEY
from dynamo_semkv.dashboard.server import DashboardServer
from dynamo_semkv.evidence.worker import SWITCH_SECONDS
from dynamo_semkv.outcome.intake import RouteJournal
from dynamo_semkv.router.advisor import Advisor
from dynamo_semkv.router.explain_route import ExplainRoute
from dynamo_semkv.router.fallback import within
from dynamo_semkv.router.gateway_advice import GatewayAdvice
from dynamo_semkv.router.guarded_route import GuardedRoute
from dynamo_semkv.router.hint_sender import HintSender
from dynamo_semkv.router.knowledge import Knowledge
from dynamo_semkv.router.observed import ObservedJournal, ObservedLookup
from dynamo_semkv.router.reload import Reloader
from dynamo_semkv.router.route_records import RouteRecords
from dynamo_semkv.router.runtime import DynamoEdge
from dynamo_semkv.router.runtime_settings import EdgeError, EdgeSettings
from dynamo_semkv.router.runtime_types import Edge
from dynamo_semkv.router.runtime_version import installed, verdict
from dynamo_semkv.router.service import RouterIdentity, RouterService
from dynamo_semkv.router.traced import (
    TracedAdvisor,
    TracedEdge,
    TracedHandler,
    TracedHints,
    traced,
)
from dynamo_semkv.telemetry.target import otlp_target
from dynamo_semkv.telemetry.throttled import Throttled
from dynamo_semkv.telemetry.tracing import start_tracing

logger = logging.getLogger(__name__)
_throttled = Throttled(logger)

BEAT_DEADLINE = 1.0
COUNT_SECONDS = 2.0
"""How often Dynamo's own counters are read for the page."""


def run(loaded: Loaded) -> int:
    """Serves until SIGTERM or SIGINT. Exit status: 0, or 1 when there was nothing to serve in front of."""
    sys.setswitchinterval(SWITCH_SECONDS)
    main = serve(loaded)
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


def edge_settings(config: Config) -> EdgeSettings:
    """Our options as options of the edge to Dynamo."""
    dynamo, router = config.dynamo, config.dynamo.kv_router
    threshold = router.active_decode_blocks_threshold
    return EdgeSettings(
        worker_endpoint=f"{dynamo.namespace}.{dynamo.worker_component}.{dynamo.worker_endpoint}",
        router_endpoint=f"{dynamo.namespace}.{dynamo.router_component}.{dynamo.router_endpoint}",
        model_name=config.model.name,
        model_path=config.model.path,
        offer_model=dynamo.offer_model,
        kv_router={
            "router_temperature": router.router_temperature,
            "overlap_score_credit": router.overlap_score_credit,
            "host_cache_hit_weight": router.host_cache_hit_weight,
            "disk_cache_hit_weight": router.disk_cache_hit_weight,
            "router_replica_sync": router.router_replica_sync,
            "router_queue_threshold": router.router_queue_threshold,
            "router_predicted_ttl_secs": router.router_predicted_ttl_seconds,
        },
        load_thresholds={} if threshold is None else {"active_decode_blocks_threshold": threshold},
        session_affinity_ttl_s=router.session_affinity_ttl_seconds,
        wait_workers_s=dynamo.wait_for_workers_seconds or math.inf,
    )


async def serve(loaded: Loaded) -> int:
    """Serves in the running event loop until SIGTERM or SIGINT; the exit status is that of `run`."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    # Until there is something to serve, a SIGHUP must not end the process and has nothing to do: the file is read again
    # by then.
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, lambda: None)
    serves, objection = verdict(installed())
    if objection is not None:
        logger.log(logging.WARNING if serves else logging.ERROR, "%s", objection)
    if not serves:
        return 1
    router = f"{loaded.config.dynamo.router_component}-{secrets.token_hex(4)}"
    logger.info("router %s runs %s", router, loaded.told)
    target = otlp_target(loaded.config.observe.otlp_endpoint, os.environ)
    knowledge = Knowledge(loaded, router, start_tracing(target, "semkv-router", router))
    page = _page(loaded.config.dashboard, knowledge)
    await knowledge.start()
    try:
        await _open(page, loaded.config.dashboard)
        connecting = DynamoEdge.connect(edge_settings(loaded.config), knowledge.collector.metrics_text)
        edge = await _unless(stop, connecting)
        if edge is not None and page is None:
            explain = GuardedRoute(
                ExplainRoute(knowledge.history).answer, loaded.config.security, os.environ, "explain"
            )
            edge.expose_route("semkv/explain", explain.answer)
        return 0 if edge is None else await _serve(loaded, router, knowledge, edge, stop)
    except EdgeError as error:
        logger.error("nothing to serve: %s", error)
        return 1
    finally:
        if page is not None:
            await page.close()
        await knowledge.close()


@dataclass(frozen=True)
class _Serving:
    """What answers requests, once Dynamo is there."""

    advisor: Advisor
    service: RouterService
    gateway: GatewayAdvice

    def reload(self, loaded: Loaded) -> None:
        """For requests from now on."""
        self.advisor.reload(loaded.config)
        self.service.reload(loaded)
        self.gateway.reload(loaded)


def _serving(loaded: Loaded, router: str, knowledge: Knowledge, edge: DynamoEdge) -> _Serving:
    config, tracing = loaded.config, knowledge.tracing
    stages: Edge = traced(edge, TracedEdge, tracing)
    advisor = Advisor(
        edge=stages,
        directory=knowledge.directory,
        lookup=ObservedLookup(knowledge.lookup, knowledge.metrics, tracing),
        config=config,
        fallbacks=knowledge.fallbacks,
        salt_key=read_salt_key(config.security.salt_key_file, DEFAULT_SALT_KEY),
        credit=knowledge.calibration,
        scorers=knowledge.scorers,
    )
    advising = traced(advisor, TracedAdvisor, tracing)
    journal = RouteJournal(knowledge.publisher, knowledge.intake, router)
    service = RouterService(
        stages,
        advising,
        traced(HintSender(knowledge.publisher), TracedHints, tracing),
        RouteRecords(
            ObservedJournal(journal, knowledge.metrics, tracing),
            knowledge.directory,
            knowledge.attempts,
            knowledge.fallbacks,
            router=router,
            kv_router=config.dynamo.kv_router,  # as Dynamo's router was made with: changes need a restart
        ),
        knowledge.directory,
        knowledge.fallbacks,
        loaded,
        RouterIdentity(router, edge.instance_id, edge.role),
    )
    model, context_length = config.model.name or edge.card.model, edge.card.context_length
    gateway = GatewayAdvice(
        service, advising, stages, loaded, model=model, context_length=context_length, tracing=tracing
    )
    return _Serving(advisor, service, gateway)


async def _serve(loaded: Loaded, router: str, knowledge: Knowledge, edge: DynamoEdge, stop: asyncio.Event) -> int:
    config = loaded.config
    knowledge.directory.serve_as(config.model.name or edge.card.model, edge.role)
    serving = _serving(loaded, router, knowledge, edge)
    advise = GuardedRoute(serving.gateway.answer_body, config.security, os.environ)
    edge.expose_route("semkv/advise", advise.answer)
    serving.advisor.refresh()
    if not await knowledge.replayed():
        logger.warning("bus %s is not read yet: serving without evidence until it is", config.bus.url)

    def take_over(changed: Loaded) -> None:
        serving.reload(changed)
        knowledge.reload(changed)

    reloader = Reloader(knowledge.watch, take_over)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloader.request)
    handler = traced(serving.service.handle, TracedHandler, knowledge.tracing)
    answering = asyncio.ensure_future(edge.serve(handler, {"advise": serving.gateway.endpoint}))
    stopping = asyncio.ensure_future(stop.wait())
    beside = [
        stopping,
        asyncio.ensure_future(_freeze_what_was_replayed(knowledge)),
        asyncio.ensure_future(reloader.run(config.dynamo.poll_seconds)),
        asyncio.ensure_future(_beat(config.dynamo.poll_seconds, serving.advisor, knowledge, edge)),
        asyncio.ensure_future(_count(knowledge)),
    ]
    logger.info("placement %s, %d replicas", config.placement.mode.value, len(knowledge.directory.live()))
    try:
        await asyncio.wait((answering, stopping), return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            logger.info("stopping: %d requests in flight", edge.inflight)
            await edge.shutdown(config.dynamo.drain_seconds)
        await answering
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
    return 0


def _page(config: DashboardConfig, knowledge: Knowledge) -> DashboardServer | None:
    """None where the page is off. ContractError for a page that others could read without a token."""
    if not config.enabled:
        return None
    state = knowledge.collector
    return DashboardServer(
        config, state.snapshot, knowledge.history, metrics=state.metrics_text, readiness=state.readiness
    )


async def _open(page: DashboardServer | None, config: DashboardConfig) -> None:
    """The page is for operators: a port that is taken (by another router of this machine, say) keeps no request from
    being served."""
    if page is None:
        return
    try:
        logger.info("dashboard: %s", await page.start())
    except OSError as error:
        logger.warning("no dashboard on %s port %d: %s", config.host, config.port, error)


async def _freeze_what_was_replayed(knowledge: Knowledge) -> None:
    """Donors live long and are in no cycle, and there may be 100,000 of them: a full collection that visits all of them
    stops every request for some 78 ms. Once they are frozen, no collection visits them; an evicted donor is still freed
    at once, by its reference count."""
    while not await knowledge.replayed():
        pass  # it waits by itself
    gc.collect()
    gc.freeze()


async def _beat(seconds: float, advisor: Advisor, knowledge: Knowledge, edge: DynamoEdge) -> None:
    while True:
        await asyncio.sleep(seconds)
        try:
            advisor.refresh()
            knowledge.tidy()
            knowledge.take_loads(await within(BEAT_DEADLINE, edge.loads()))
        except Exception:  # noqa: BLE001 - a beat that fails may not end all later ones; counted and logged
            _throttled.exception("a beat failed")


async def _count(knowledge: Knowledge) -> None:
    """Runs beside the beat: the status server may be slow to answer, and the beat may not wait for it."""
    while True:
        await asyncio.sleep(COUNT_SECONDS)
        await knowledge.count_dynamo()


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
