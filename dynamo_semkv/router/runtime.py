"""The edge to Dynamo: with runtime_egress.py the only module of `dynamo_semkv` that imports `dynamo`.

It registers the public model in front of workers that registered with no public endpoint, as
`dynamo.thunderagent_router` does, and hands each request to a handler that knows nothing of Dynamo. Contracts:
runtime_types.py.

It does not know why a replica was chosen, what a hint says or what was reused.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from dynamo.common.utils.token_ids import token_ids_to_list
from dynamo.llm import (
    FpmEventSubscriber,
    KvRouter,
    KvRouterConfig,
    LoadThresholdConfig,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    RouterConfig,
    RouterMode,
    RoutingConstraints,
    WorkerType,
    register_model,
)
from dynamo.runtime import DistributedRuntime

from dynamo_semkv.contracts.identity import ReplicaKey
from dynamo_semkv.contracts.keys import TokenArray
from dynamo_semkv.router.runtime_cards import CardError, CardTable, card_of, none_to_place, role_before
from dynamo_semkv.router.runtime_dispatch import RequestDispatch
from dynamo_semkv.router.runtime_egress import Inflight, adapter
from dynamo_semkv.router.runtime_errors import FailureKind, RequestFailed
from dynamo_semkv.router.runtime_settings import EdgeError, EdgeSettings
from dynamo_semkv.router.runtime_types import (
    Choice,
    Handler,
    Overlap,
    RankLoad,
    RankOverlap,
    ReplicaCard,
    Request,
    RouteCallback,
    WorkerRole,
)

logger = logging.getLogger(__name__)

RESPONSE_BUFFER = 16
"""Chunks Dynamo may hold between its router and us. Not 0: an unbuffered stream of 1.6.1 drops the worker's stream at
the first terminal chunk, which cuts the other choices of an n > 1 request, books every request as cancelled, makes
workers log an ERROR when their end of stream comes after it, and turns typed failures into text. The price: a worker
learns of a cancellation with its next chunk, so during a long prefill only at its end. 1, 16 and 100 measured alike."""

LATE_ARRIVALS_S = 1.0
"""How long after leaving discovery a frontend may still send us a request."""

LIVE_ROUTE = "semkv/live"
"""`/engine/semkv/live` of the status server answers as soon as the runtime is there, for startup and liveness probes.
Dynamo's own `/live` says the same as `/health`, so it fails for as long as the workers load their model."""


def runtime_from_env(loop: asyncio.AbstractEventLoop) -> DistributedRuntime:
    """A DistributedRuntime as Dynamo's own components make it: DYN_DISCOVERY_BACKEND, DYN_REQUEST_PLANE,
    DYN_EVENT_PLANE."""
    return DistributedRuntime(
        loop, os.environ.get("DYN_DISCOVERY_BACKEND", "etcd"), os.environ.get("DYN_REQUEST_PLANE", "tcp")
    )


class DynamoEdge:
    """`Edge` over a Dynamo runtime. Made by `connect`; `serve` runs until `shutdown`."""

    def __init__(self, runtime: DistributedRuntime, settings: EdgeSettings) -> None:
        self._runtime = runtime
        self.expose_route(LIVE_ROUTE, _live)
        self._settings = settings
        self._workers = runtime.endpoint(settings.worker_endpoint)
        self._public = runtime.endpoint(settings.router_endpoint)
        self._cards = CardTable()
        self._cards_read = -1.0
        self._live: Mapping[ReplicaKey, ReplicaCard] = {}
        self._suspects: dict[int, float] = {}
        self._served: list[Any] = []
        self._calls = Inflight()

    @classmethod
    async def connect(cls, settings: EdgeSettings, exposition: Callable[[], str] | None = None) -> DynamoEdge:
        """Connect, wait for a worker with a usable card, build KvRouter. EdgeError after `wait_workers_s`.

        `exposition`: see `expose_metrics`; served from before the wait, so that a router without workers is seen.
        """
        edge = cls(runtime_from_env(asyncio.get_running_loop()), settings)
        if exposition is not None:
            edge.expose_metrics(exposition)
        await edge._connect()
        return edge

    async def _connect(self) -> None:
        settings = self._settings
        deadline = time.monotonic() + settings.wait_workers_s
        self._client = await self._workers.client()
        self._subscriber = FpmEventSubscriber(self._workers)
        self._subscriber.start_tracking()
        # KvRouter reads the cards once, when it is built, to learn how the engine hashes blocks; so a card must be
        # there first.
        waited = False
        while not (live := self._read_cards()) or none_to_place(live.values()):
            if live and not waited:
                waited = True
                logger.warning(
                    "workers of %s compute no prompts so far; waiting for some that do (dynamo.worker_component says "
                    "where)",
                    settings.worker_endpoint,
                )
            if time.monotonic() > deadline:
                if live:
                    break  # their roles are the fault, and the error below names them
                raise EdgeError(
                    f"no worker with a usable model card at {settings.worker_endpoint} in {settings.wait_workers_s} s"
                )
            await asyncio.sleep(0.01)
        sizes = {card.block_size for card in self._live.values()}
        if len(sizes) != 1:
            raise EdgeError(f"workers of {settings.worker_endpoint} have different KV block sizes: {sorted(sizes)}")
        self._cards.require_block_size(next(iter(sizes)))
        self.role = self._role()
        self._kv = KvRouter(
            endpoint=self._workers,
            block_size=self.card.block_size,
            kv_router_config=KvRouterConfig(**{"router_replica_sync": True, **settings.kv_router}),
            session_affinity_ttl_secs=settings.session_affinity_ttl_s,
            load_threshold_config=LoadThresholdConfig(**settings.load_thresholds) if settings.load_thresholds else None,
        )

    def _role(self) -> WorkerRole:
        """The frontend must not find the cards of prefill workers under the name that we offer: it would then dispatch
        to them and to us alike."""
        try:
            role = role_before(self._live.values())
        except CardError as error:
            raise EdgeError(f"workers of {self._settings.worker_endpoint}: {error}") from error
        self.card = card_of(self._live.values(), role)
        named = self._settings.model_name
        if role is WorkerRole.PREFILL and self._settings.offer_model and named in (None, self.card.model):
            raise EdgeError(
                f"model.name: {named!r}, expected the name that the decode workers offer; the prefill workers of "
                f"{self._settings.worker_endpoint} need another one (--served-model-name), theirs is "
                f"{self.card.model!r}"
            )
        return role

    @property
    def instance_id(self) -> int:
        """Our own instance id: what the frontend's `nvext.worker_id` shows for a request that came this way."""
        return int(self._public.connection_id())

    @property
    def inflight(self) -> int:
        """How many calls are being answered."""
        return self._calls.count

    # --- what Dynamo knows -------------------------------------------------------------------------------------------

    def live_replicas(self) -> Mapping[ReplicaKey, ReplicaCard]:
        """Replicas that may be pinned: in discovery, with a usable card, not lost moments ago. At most `cards_s`
        old."""
        if time.monotonic() - self._cards_read > self._settings.cards_s:
            self._read_cards()
        if not self._suspects:
            return self._live
        now = time.monotonic()
        self._suspects = {worker: until for worker, until in self._suspects.items() if until > now}
        return {key: card for key, card in self._live.items() if key.worker_id not in self._suspects}

    def _read_cards(self) -> Mapping[ReplicaKey, ReplicaCard]:
        self._cards_read = time.monotonic()
        instances = set(self._client.instance_ids())
        cards = {
            worker: text for worker, text in self._subscriber.get_model_cards().items() if int(worker) in instances
        }
        self._live = self._cards.update(cards)
        return self._live

    def lost(self, worker_id: int) -> None:
        """Leave a worker out of `live_replicas` for `suspect_s`: discovery reports its death only when its lease
        ends."""
        self._suspects[worker_id] = time.monotonic() + self._settings.suspect_s

    async def loads(self) -> Mapping[ReplicaKey, RankLoad]:
        """The load per replica, without a further prompt. Asked about a prompt, Dynamo adds the same numbers to every
        replica (its tokens less the device overlap, its blocks), and hashes the prompt once more for that; asked about
        none it returns the present load."""
        return _loads(await self._kv.get_potential_loads([]))

    async def exact(
        self, token_ids: Sequence[int], cache_namespace: str | None = None, lora_name: str | None = None
    ) -> tuple[Overlap, Mapping[ReplicaKey, RankLoad]]:
        """Exact overlap per replica and tier, and loads, at once: Dynamo works on a question from the moment it is
        asked, so there is one wait instead of two."""
        scores = self._kv.get_overlap_scores(
            _ids(token_ids), lora_name=lora_name, include_shared=False, cache_namespace=cache_namespace
        )
        loads = asyncio.ensure_future(self._kv.get_potential_loads([]))
        try:
            return _overlap(await scores), _loads(await loads)
        finally:
            # Without the first answer the second is not needed, and neither is its exception.
            if not loads.cancel() and not loads.cancelled():
                loads.exception()

    async def best_choice(
        self,
        token_ids: Sequence[int],
        cache_namespace: str | None = None,
        lora_name: str | None = None,
        required_taints: Collection[str] = (),
    ) -> Choice:
        """Dynamo's own choice, without a booking. RequestFailed(NO_WORKER) when there is none."""
        try:
            worker, rank, blocks = await self._kv.best_worker(
                _ids(token_ids),
                lora_name=lora_name,
                cache_namespace=cache_namespace,
                routing_constraints=RoutingConstraints(set(required_taints)) if required_taints else None,
            )
        except Exception as error:
            raise RequestFailed(FailureKind.NO_WORKER, str(error)) from error
        return Choice(ReplicaKey(worker, rank), blocks)

    def dispatch(
        self,
        request: Request,
        pin: ReplicaKey | None,
        *,
        unpinned: Request | None = None,
        annotate: Mapping[str, Any] | None = None,
        tokens: TokenArray | None = None,
    ) -> RequestDispatch:
        """Send the request through KvRouter, to `pin` or where Dynamo likes; iterate the result for the chunks.

        `unpinned` is what is sent when the pin is given up (without the hint that was meant for the pinned replica);
        default: the request. `annotate` goes to the client with the replica that served, in `engine_data.semkv`.
        `tokens`: the request's token ids, where the caller has them as an array, which Dynamo reads sooner than a list.
        """
        return RequestDispatch(
            self._generate,
            request,
            pin,
            unpinned=unpinned,
            annotate=annotate,
            tokens=tokens,
            losses=self,
        )

    async def _generate(self, request: Request) -> Any:
        return await self._kv.generate_from_request(request, response_buffer_size=RESPONSE_BUFFER)

    # --- what we offer -----------------------------------------------------------------------------------------------

    def expose_metrics(self, exposition: Callable[[], str]) -> None:
        """Append Prometheus exposition text to the status server's /metrics."""
        self._public.metrics.register_prometheus_expfmt_callback(exposition)

    def expose_route(self, name: str, callback: RouteCallback) -> None:
        """Serves the JSON route /engine/<name> of the status server (DYN_SYSTEM_PORT). Dynamo authenticates nobody: the
        callback must."""
        self._runtime.register_engine_route(name, callback)

    async def serve(self, generate: Handler, others: Mapping[str, Handler] | None = None) -> None:
        """Serve `generate` as the public model, and `others` as further endpoints of our component, until `shutdown`.

        The endpoint is served before the model is announced, so that no client finds a model without an instance.
        """
        namespace, component, _ = self._settings.router_endpoint.split(".")
        self._served.append(self._public)
        tasks = [
            asyncio.ensure_future(self._public.serve_endpoint(adapter(self._calls, generate), graceful_shutdown=True))
        ]
        for name, handler in (others or {}).items():
            endpoint = self._runtime.endpoint(f"{namespace}.{component}.{name}")
            self._served.append(endpoint)
            tasks.append(
                asyncio.ensure_future(endpoint.serve_endpoint(adapter(self._calls, handler), graceful_shutdown=True))
            )
        # Kubernetes' discovery lists ready pods only, so readiness may not wait for our instance to be listed.
        self._runtime.set_health_status(True)
        client = await self._public.client()
        while self.instance_id not in client.instance_ids():
            for task in tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.005)
        if self._settings.offer_model:
            await self._announce()
        else:
            logger.info(
                "no model is offered (dynamo.offer_model): %s gives advice only", self._settings.router_endpoint
            )
        await asyncio.gather(*tasks)

    async def _announce(self) -> None:
        settings, card = self._settings, self.card
        config = ModelRuntimeConfig()
        config.tool_call_parser = settings.tool_call_parser or card.tool_call_parser
        config.reasoning_parser = settings.reasoning_parser or card.reasoning_parser
        config.context_length = card.context_length
        self.model_name = settings.model_name or card.model
        prefill = self.role is WorkerRole.PREFILL
        await register_model(
            ModelInput.Tokens,
            # A prefill tier offers clients nothing: the decode workers' card does, and the frontend sends each prompt
            # here first.
            ModelType.Prefill if prefill else ModelType.Chat | ModelType.Completions,
            self._public,
            settings.model_path or card.source_path,
            self.model_name,
            worker_type=WorkerType.Prefill if prefill else WorkerType.Aggregated,
            needs=[[WorkerType.Decode]] if prefill else None,
            kv_cache_block_size=card.block_size,
            # The routers behind our name are equal and hold no KV, whatever mode the frontend uses for other models.
            router_config=RouterConfig(RouterMode.RoundRobin),
            runtime_config=config,
            ignore_weights=True,
        )
        does, endpoint = "prefilled" if prefill else "served", settings.router_endpoint
        logger.info("model %s is %s by %s (instance %d)", self.model_name, does, endpoint, self.instance_id)

    async def shutdown(self, grace_s: float = 5.0) -> None:
        """Leave discovery, let requests in flight end for `grace_s`, stop.

        For the first part of the grace requests still arrive: the frontends learn of our leaving a little later than we
        leave.
        """
        self._runtime.set_health_status(False)
        for endpoint in self._served:
            await endpoint.unregister_endpoint_instance()
        deadline = time.monotonic() + grace_s
        await asyncio.sleep(min(LATE_ARRIVALS_S, grace_s))
        while self._calls.count and time.monotonic() < deadline:  # noqa: ASYNC110 - once a process, and bounded
            await asyncio.sleep(0.02)
        self._subscriber.shutdown()
        self._runtime.shutdown()


async def _live(body: dict[str, Any]) -> dict[str, Any]:
    return {"status": "live"}


def _overlap(scores: Mapping[str, Any]) -> Overlap:
    """Rows without any blocks are left out: most replicas hold nothing of most prompts, and each row costs every
    request."""
    return Overlap(
        block_size=scores["block_size"],
        prompt_blocks=scores["num_blocks"],
        ranks={
            ReplicaKey(row["worker_id"], row["dp_rank"]): RankOverlap(
                row["device_blocks"], row["host_pinned_extension_blocks"], row["disk_extension_blocks"]
            )
            for row in scores["workers"]
            if row["device_blocks"] or row["host_pinned_extension_blocks"] or row["disk_extension_blocks"]
        },
    )


def _loads(rows: Iterable[Mapping[str, int]]) -> dict[ReplicaKey, RankLoad]:
    # The constructor of a NamedTuple is a Python function, and every request makes two tuples for each replica.
    made = tuple.__new__
    return {
        made(ReplicaKey, (row["worker_id"], row["dp_rank"])): made(
            RankLoad, (row["potential_prefill_tokens"], row["potential_decode_blocks"], row["active_requests"])
        )
        for row in rows
    }


def token_ids_list(request: Request) -> list[int]:
    """The prompt's token ids as a list, whichever form the request plane used. KvRouter's queries read packed bytes as
    tokens."""
    return token_ids_to_list(request.get("token_ids") or [])


def _ids(token_ids: Sequence[int]) -> list[int]:
    if isinstance(token_ids, bytes | bytearray | memoryview):
        raise TypeError(
            "token_ids: packed bytes, expected ints (Dynamo would read each byte as a token); see token_ids_list"
        )
    return token_ids if isinstance(token_ids, list) else list(token_ids)
