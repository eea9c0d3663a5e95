"""The reference engine as a Dynamo worker: one process, all data-parallel ranks, no public endpoint.

It imports Dynamo; the engine does not. The recipe is that of Dynamo's own workers: a model card without a public
endpoint, one KV event publisher a rank, push egress, and the engine's own cached-token count in the last chunk.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq
from dynamo.common.utils.prometheus import register_engine_metrics_callback
from dynamo.common.utils.token_ids import token_ids_to_list
from dynamo.llm import (
    KvEventPublisher,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerMetricsPublisher,
    WorkerType,
    register_model,
)
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument
from dynamo.runtime import DistributedRuntime

from dynamo_semkv.contracts.hints import KvHintsEnvelope
from dynamo_semkv.telemetry import logs
from dynamo_semkv.telemetry.connector_metrics import registry
from dynamo_semkv.telemetry.throttled import Throttled
from worker_connector.fetch.router_hint import publish_router_hint
from worker_connector.reference_engine.dynamo_worker.disk import DiskAhead
from worker_connector.reference_engine.dynamo_worker.fetch import FetchAhead, endpoints_of, peer_fetches
from worker_connector.reference_engine.dynamo_worker.handoff import (
    Role,
    context_only,
    continued,
    from_first_token,
    handed_over,
    handoff_of,
)
from worker_connector.reference_engine.dynamo_worker.kv_events import DeviceEvents, HostResidency, heartbeat
from worker_connector.reference_engine.dynamo_worker.request import (
    BadRequest,
    Submission,
    merged_hints,
    route_of,
    submission,
)
from worker_connector.reference_engine.dynamo_worker.stream import EngineGone, chunks, push
from worker_connector.reference_engine.engine.config import ConnectorSpec, EngineConfig
from worker_connector.reference_engine.engine.engine import Engine

logger = logging.getLogger(__name__)
_throttled = Throttled(logger)

_HINT_ROLES = {Role.AGGREGATED: "aggregated", Role.PREFILL: "prefill", Role.DECODE: "decode"}

BEAT_SECONDS = 0.02
"""How often KV events and load are read from the engine while it has something to do, and for QUIET_SECONDS after."""
QUIET_SECONDS = 1.0
IDLE_BEAT_SECONDS = 0.2
"""The same for an idle engine until a request comes; a load that did not change is published no more often."""
HEARTBEAT_SECONDS = 5.0
"""A rank that has sent no KV event for so long sends one that changes nothing."""
SUBSCRIBE_MILLISECONDS = 20_000
SEND_BUFFER = 100_000
FAIL_SECONDS = 5.0
"""How long requests that outlived the drain may take to fail."""


@dataclass(frozen=True)
class WorkerSettings:
    """What one worker process is started with."""

    engine: EngineConfig
    model_dir: Path
    endpoint: str = "dynamo.backend.generate"
    role: Role = Role.AGGREGATED
    served_name: str | None = None
    """The name on the model card; None: the model's own."""
    connector: ConnectorSpec | None = None
    native_hints: bool = False
    """Hand hints to the engine on the request, as NVIDIA/TensorRT-LLM#18153 proposes. Off: as TensorRT-LLM is today."""
    offer_model: bool = False
    """Offer the model to clients, for graphs without a router in front."""
    drain_seconds: float = 20.0


class RankRelay:
    """One rank's loopback ZMQ socket, whose events Dynamo's publisher relays."""

    def __init__(self, endpoint: Any, rank: int, block_size: int) -> None:
        self.rank = rank
        self.sequence = 0
        """Batches of events sent."""
        self.sent_at = time.monotonic()
        """When the last event went out."""
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB)
        self._socket.set_hwm(SEND_BUFFER)
        port: int = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._publisher = KvEventPublisher(
            endpoint=endpoint,
            kv_block_size=block_size,
            dp_rank=rank,
            enable_local_indexer=True,
            zmq_endpoint=f"tcp://127.0.0.1:{port}",
            zmq_topic="",
        )

    def wait_subscribed(self) -> None:
        """Waits for Dynamo's subscription: a PUB socket drops what it sends before. RuntimeError after 20 s."""
        if not self._socket.poll(SUBSCRIBE_MILLISECONDS):
            raise RuntimeError(f"rank {self.rank}: Dynamo did not subscribe to its KV events in 20 s")
        self._socket.recv()

    def send(self, events: Sequence[Mapping[str, Any]]) -> None:
        """On the event loop's thread only: a ZMQ socket belongs to one thread."""
        payload = msgspec.msgpack.encode([time.time(), events, self.rank])
        self._socket.send_multipart([b"", self.sequence.to_bytes(8, "big"), payload])
        self.sequence += 1
        self.sent_at = time.monotonic()

    def close(self) -> None:
        """Drops what the socket has not sent yet."""
        self._socket.close(linger=0)


class OnLoop:
    """An EventOut that hands events over to the loop's thread, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop, relay: RankRelay) -> None:
        self._loop = loop
        self._relay = relay

    def send(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Callable from any thread."""
        self._loop.call_soon_threadsafe(self._relay.send, list(events))


class DynamoWorker:
    """Serves the engine to Dynamo: its model card, KV events, load and streams. Made in the running event loop."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._fatal: BaseException | None = None
        self.engine = Engine(settings.engine, settings.connector, on_fatal=self._engine_died)
        config = settings.engine
        self._token_limit = min(self.engine.max_seq_len, config.num_blocks * config.tokens_per_block)
        self._metrics = WorkerMetricsPublisher()
        self._relays: list[RankRelay] = []
        self._device: list[DeviceEvents] = []
        self._hand_in: list[Callable[[list[dict[str, Any]]], None] | None] = []
        self._host: list[HostResidency] = []
        self._disk = DiskAhead(self.engine)
        self._ahead: FetchAhead | None = None
        self._in_flight = 0
        self._idle = asyncio.Event()
        """Set whenever the last running request has ended."""
        self._asked = asyncio.Event()
        """Set by whatever gives the engine something to do; ends an idle beat."""
        self._told: dict[int, tuple[int, float]] = {}
        """Active blocks of a rank as last published, and when."""

    def _engine_died(self, rank: int, error: BaseException) -> None:
        logger.error("rank %d ended the engine: %r", rank, error)
        self._fatal = error
        self._loop.call_soon_threadsafe(self._stop.set)

    async def run(self, runtime: DistributedRuntime) -> int:
        """Serves until SIGTERM, SIGINT or the engine's end; returns the exit status, 1 if the engine died."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop.set)
        endpoint = runtime.endpoint(self._settings.endpoint)
        await self._register(endpoint)
        await self._publish(endpoint)
        runtime.register_engine_route("semkv", self._status)
        runtime.register_engine_route("reset_prefix_cache", self._reset)
        serving = asyncio.ensure_future(endpoint.serve_endpoint(self.generate, graceful_shutdown=True))
        beat = asyncio.ensure_future(self._beat())
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((serving, beat, stopping), return_when=asyncio.FIRST_COMPLETED)
            if beat.done():
                beat.result()
            await self._drain(endpoint)
        finally:
            for task in (beat, stopping):
                task.cancel()
            await self._end_engine()
            for relay in self._relays:
                relay.close()
        runtime.shutdown()
        await serving
        return 0 if self._fatal is None else 1

    async def _drain(self, endpoint: Any) -> None:
        """Leaves discovery first, so that no request is sent here any more, then lets running requests end."""
        await endpoint.unregister_endpoint_instance()
        if self._fatal is None:
            logger.info("stopping: %d requests in flight", self._in_flight)
            await self._until_idle(self._settings.drain_seconds)

    async def _end_engine(self) -> None:
        """Before the runtime ends: requests that still run fail as on a lost worker, and Dynamo migrates them."""
        await asyncio.to_thread(self.engine.shutdown)
        await self._until_idle(FAIL_SECONDS)

    async def _until_idle(self, timeout: float) -> None:
        if self._in_flight:
            idle = asyncio.ensure_future(self._idle.wait())
            await asyncio.wait((idle,), timeout=timeout)
            idle.cancel()

    async def _register(self, endpoint: Any) -> None:
        config = self._settings.engine
        card = ModelRuntimeConfig()
        card.data_parallel_size = config.data_parallel_size
        card.data_parallel_start_rank = 0
        card.total_kv_blocks = config.num_blocks
        card.max_num_seqs = config.max_batch_size
        card.max_num_batched_tokens = config.max_num_tokens
        card.context_length = self._token_limit
        card.enable_local_indexer = True
        await self._offer_blocks(card)
        role = self._settings.role
        worker_type, needs = {
            Role.AGGREGATED: (WorkerType.Aggregated, None),
            Role.PREFILL: (WorkerType.Prefill, [[WorkerType.Decode]]),
            Role.DECODE: (WorkerType.Decode, [[WorkerType.Prefill]]),
        }[role]
        # Behind our router there is no public endpoint: clients reach this engine through the router only. Of
        # disaggregated workers, those that decode offer the model.
        if role is Role.PREFILL:
            model_type = ModelType.Prefill
        elif role is Role.DECODE or self._settings.offer_model:
            model_type = ModelType.Chat | ModelType.Completions
        else:
            model_type = ModelType.Empty
        await register_model(
            ModelInput.Tokens,
            model_type,
            endpoint,
            str(self._settings.model_dir),
            self._settings.served_name or self.engine.model.name,
            worker_type=worker_type,
            needs=needs,
            kv_cache_block_size=config.tokens_per_block,
            runtime_config=card,
        )

    async def _offer_blocks(self, card: ModelRuntimeConfig) -> None:
        """Where `connector.fetch` is on, the card tells Dynamo's router where this worker's blocks can be pulled."""
        ranks = range(self._settings.engine.data_parallel_size)
        fetches = peer_fetches([self.engine.connector_scheduler(rank) for rank in ranks])
        endpoints = await endpoints_of(fetches) if fetches else {}
        if endpoints:
            publish_router_hint(card, endpoints, _HINT_ROLES[self._settings.role])
            self._ahead = FetchAhead(fetches, fetches[0].wait_seconds, counted=self._settings.native_hints)

    async def _publish(self, endpoint: Any) -> None:
        """Starts to publish KV events and load, before the first request can come."""
        size = self._settings.engine.tokens_per_block
        await self._metrics.create_endpoint(endpoint)
        for rank in range(self._settings.engine.data_parallel_size):
            relay = RankRelay(endpoint, rank, size)
            await asyncio.to_thread(relay.wait_subscribed)
            self._relays.append(relay)
            self._device.append(DeviceEvents(relay, size))
            scheduler = self.engine.connector_scheduler(rank)
            self._hand_in.append(getattr(scheduler, "kv_events", None))
            attach = getattr(scheduler, "attach_residency", None)
            if attach is not None:
                self._host.append(HostResidency(OnLoop(self._loop, relay), size))
                attach(self._host[-1])
        self._expose_metrics(endpoint)

    def _expose_metrics(self, endpoint: Any) -> None:
        """Puts the connectors' metrics at /metrics of the status server, as Dynamo's workers do for their engine."""
        schedulers = (self.engine.connector_scheduler(rank) for rank in range(self._settings.engine.data_parallel_size))
        sources = [read for scheduler in schedulers if (read := getattr(scheduler, "snapshot", None)) is not None]
        namespace, component, name = self._settings.endpoint.split(".")
        register_engine_metrics_callback(
            endpoint,
            registry(sources),
            namespace_name=namespace,
            component_name=component,
            endpoint_name=name,
            model_name=self.engine.model.name,
        )

    async def _status(self, _body: Any = None) -> dict[str, Any]:
        """GET /engine/semkv of the status server: what the engine, the connector and the event relays count."""
        ranks: list[dict[str, Any]] = []
        for rank in range(self._settings.engine.data_parallel_size):
            snapshot = getattr(self.engine.connector_scheduler(rank), "snapshot", None)
            ranks.append(
                {
                    "engine": asdict(self.engine.stats(rank)),
                    "connector": snapshot() if snapshot is not None else None,
                    "events": {
                        tier: {"announced": source[rank].announced, "skipped": dict(source[rank].skipped)}
                        for tier, source in (("device", self._device), ("host", self._host))
                        if source
                    },
                    "event_batches": self._relays[rank].sequence if self._relays else 0,
                }
            )
        waited = self._ahead.waited if self._ahead is not None else None
        return {"ranks": ranks, "in_flight": self._in_flight, "fetch_waits": waited}

    async def _reset(self, _body: Any = None) -> dict[str, Any]:
        """POST /engine/reset_prefix_cache: drop device blocks that no request holds; the host slab keeps its copies."""
        self.engine.reset_prefix_cache()
        self._asked.set()
        return {}

    async def _beat(self) -> None:
        busy_until = 0.0
        while True:
            asked = self._asked.is_set()
            self._asked.clear()
            news = [self._tell(rank) for rank in range(len(self._device))]
            now = time.monotonic()
            if asked or self._in_flight or any(news):
                busy_until = now + QUIET_SECONDS
            if now < busy_until:
                await asyncio.sleep(BEAT_SECONDS)
                continue
            # Not wait_for: up to Python 3.11 it loses a cancellation if the event is set in the same turn of the loop.
            waiting = asyncio.ensure_future(self._asked.wait())
            try:
                await asyncio.wait((waiting,), timeout=IDLE_BEAT_SECONDS)
            finally:
                waiting.cancel()

    def _tell(self, rank: int) -> bool:
        """Hands one rank's KV events and load to Dynamo, the events to its connector too. True if anything was new."""
        events = self.engine.poll_kv_events(rank)
        self._device[rank].apply(events)
        if events and (hand_in := self._hand_in[rank]) is not None:
            hand_in(events)
        active, now = self.engine.stats(rank).active_blocks, time.monotonic()
        before, told_at = self._told.get(rank, (None, 0.0))
        if active != before or now - told_at > IDLE_BEAT_SECONDS:
            self._metrics.publish(dp_rank=rank, active_decode_blocks=active)
            self._told[rank] = active, now
        if now - self._relays[rank].sent_at > HEARTBEAT_SECONDS:
            self._relays[rank].send(heartbeat(self._settings.engine.tokens_per_block))
        return bool(events) or active != before

    def generate(
        self, request: Mapping[str, Any], context: Any = None, response_sender: Any = None
    ) -> AsyncIterator[dict[str, Any]]:
        """With a parameter `response_sender` Dynamo lets us push: one call into Python a request, not one a chunk."""
        if response_sender is None:
            return self._stream(request, context)
        return self._push(request, context, response_sender)

    async def _push(self, request: Mapping[str, Any], context: Any, sender: Any) -> AsyncIterator[dict[str, Any]]:
        await push(self._stream(request, context), sender)
        nothing: tuple[dict[str, Any], ...] = ()
        for item in nothing:  # makes this an async generator, which is what Dynamo drives; it never yields
            yield item

    async def _stream(self, request: Mapping[str, Any], context: Any) -> AsyncGenerator[dict[str, Any], None]:
        self._in_flight += 1
        self._idle.clear()
        self._asked.set()
        headers = context.trace_headers() or {} if context is not None else {}
        logs.bind(
            fresh=True,
            request_id=context.id() if context is not None else None,
            traceparent=headers.get("traceparent"),
            route_id=route_of(request),
        )
        try:
            asked = submission(
                request,
                token_ids_to_list(request.get("token_ids") or []),
                token_limit=self._token_limit,
                data_parallel_size=self._settings.engine.data_parallel_size,
            )
            hints = self._hints(request)
            # This machine's disk first: what it has need not be pulled.
            await self._disk.before(asked, context.async_killed_or_stopped if context is not None else None)
            if self._ahead is not None:
                await self._ahead.before(asked, hints)
            prefill = self._disk.prefill(asked)
            async for item in self._run(request, asked, context, hints if self._settings.native_hints else None):
                if prefill is not None:
                    prefill.saw(item)
                yield item
        except BadRequest as error:
            raise InvalidArgument(str(error)) from None
        except EngineGone as error:
            # By this type the router knows to give the request to another worker.
            raise EngineShutdown(str(error)) from error
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    def _run(
        self, request: Mapping[str, Any], asked: Submission, context: Any, hints: KvHintsEnvelope | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The engine's chunks, as this worker's role makes them."""
        if self._settings.role is Role.PREFILL:
            return handed_over(
                chunks(self.engine, context_only(asked), context, hints), prompt_tokens=len(asked.token_ids)
            )
        handoff = handoff_of(request, len(asked.token_ids)) if self._settings.role is Role.DECODE else None
        if handoff is None:
            return chunks(self.engine, asked, context, hints)
        rest = continued(asked, handoff)
        return from_first_token(chunks(self.engine, rest, context, hints) if rest is not None else None, asked, handoff)

    def _hints(self, request: Mapping[str, Any]) -> KvHintsEnvelope | None:
        if not self._settings.native_hints and self._ahead is None:
            return None
        hints, refused = merged_hints(request)
        for why in refused:
            _throttled.warning("hints refused: %s", why)
        return hints


def runtime_from_env(loop: asyncio.AbstractEventLoop) -> DistributedRuntime:
    """The runtime as Dynamo's own components make it: DYN_DISCOVERY_BACKEND, DYN_REQUEST_PLANE, DYN_EVENT_PLANE."""
    return DistributedRuntime(
        loop, os.environ.get("DYN_DISCOVERY_BACKEND", "etcd"), os.environ.get("DYN_REQUEST_PLANE", "tcp")
    )


async def serve(settings: WorkerSettings) -> int:
    """Runs one worker in this event loop until it ends; returns the exit status."""
    worker = DynamoWorker(settings)
    return await worker.run(runtime_from_env(asyncio.get_running_loop()))
