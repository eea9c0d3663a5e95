"""Hand-written fakes of what the service stands on: the edge, its dispatch, the lookup, journal and hints. No Dynamo,
no bus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamo_semkv.config.load import Loaded, build, config_hash
from dynamo_semkv.contracts.announcement import ANNOUNCEMENT_VERSION, ReplicaAnnouncement
from dynamo_semkv.contracts.evidence import MatchType, SemanticTrtMatch
from dynamo_semkv.contracts.hints import KvHintsEnvelope
from dynamo_semkv.contracts.identity import ReplicaKey, StableReplica, stable_worker_id
from dynamo_semkv.contracts.keys import PromptKey, TokenArray
from dynamo_semkv.contracts.location import Tier, WorkerLocation
from dynamo_semkv.contracts.namespace import CacheNamespace
from dynamo_semkv.contracts.route_events import RouteObserved, RouteOpened
from dynamo_semkv.evidence.deadline import LookupResult, LookupStatus
from dynamo_semkv.evidence.provider import LookupQuery
from dynamo_semkv.router.advisor import Advisor
from dynamo_semkv.router.attempts import Attempts
from dynamo_semkv.router.fallback import Fallbacks
from dynamo_semkv.router.replicas import ReplicaDirectory
from dynamo_semkv.router.route_records import RouteRecords
from dynamo_semkv.router.runtime_types import (
    CallContext,
    Choice,
    Chunk,
    Overlap,
    RankLoad,
    RankOverlap,
    ReplicaCard,
    WorkerRole,
)
from dynamo_semkv.router.service import RouterIdentity, RouterService
from dynamo_semkv.scoring.credit import Credit

BLOCK = 32
NAMESPACE = CacheNamespace(
    model="m@1",
    engine="reference/1",
    tokenizer="t",
    prompt_format="f",
    backend_mode="reference",
    tokens_per_block=BLOCK,
    kv_dtype="float32",
    kv_layout="l",
    attention_window="full",
    attention_shape="gqa",
    parallelism="tp1",
    ptuning="",
    speculative="",
    multimodal_policy="",
    connector="c/1",
    provider_generation="p1",
)
"""As an engine announces it: nothing unknown but what a request brings."""
A0, A1, B0, B1 = ReplicaKey(11, 0), ReplicaKey(11, 1), ReplicaKey(22, 0), ReplicaKey(22, 1)
STABLE = {11: "w-a", 22: "w-b"}
Gate = Callable[[str], Awaitable[None]]


def card(stable: str | None, *, block_size: int = BLOCK) -> ReplicaCard:
    return ReplicaCard(
        model="hidden",
        source_path="",
        block_size=block_size,
        data_parallel_size=2,
        data_parallel_start_rank=0,
        stable_routing_id=stable,
        total_kv_blocks=4096,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        context_length=None,
        tool_call_parser=None,
        reasoning_parser=None,
    )


def announcement(
    stable: str, rank: int, *, generation: str = "g1", model: str = "m", namespace: CacheNamespace = NAMESPACE
) -> ReplicaAnnouncement:
    return ReplicaAnnouncement(
        version=ANNOUNCEMENT_VERSION,
        stable_routing_id=stable,
        dp_rank=rank,
        generation=generation,
        model=model,
        namespace=namespace,
        materialization="exact",
    )


def match(
    replica: tuple[str, int],
    tokens: int,
    *,
    donor: str = "d" * 32,
    kind: MatchType = MatchType.EXACT_EQUIVALENT,
    generation: str = "g1",
    tier: Tier = Tier.HOST_PINNED,
) -> SemanticTrtMatch:
    stable, rank = replica
    return SemanticTrtMatch(
        donor_id=donor,
        reusable_token_count=tokens,
        exact_prefix_tokens=tokens if kind is MatchType.EXACT_EQUIVALENT else 0,
        match_type=kind,
        location=WorkerLocation(worker_id=stable_worker_id(stable), dp_rank=rank, tier=tier),
        provider="fingerprint",
        provider_generation=generation,
        overlap=0.5,
        confidence=0.9,
        quality_signals={"evidence": 12.5},
    )


async def no_gate(stage: str) -> None:
    return None


def chunks(count: int, *, cached: int = 0, prompt: int = 0) -> list[Chunk]:
    """A complete answer of `count` tokens."""
    made: list[Chunk] = [{"token_ids": [i]} for i in range(count)]
    made[-1]["finish_reason"] = "length"
    made[-1]["engine_data"] = {"kv_cache_hit": {"prompt_tokens": prompt, "reused_tokens": cached}}
    made[-1]["completion_usage"] = {"completion_tokens": count}
    return made


class FakeDispatch:
    """Follows `script`: chunks are sent, exceptions raised. A refused pin is one that `edge.refuse` names."""

    def __init__(
        self, edge: FakeEdge, request: dict[str, Any], pin: ReplicaKey | None, unpinned: dict[str, Any]
    ) -> None:
        self._edge = edge
        self.request, self.pin = request, pin
        self._unpinned = unpinned
        self.sent: dict[str, Any] | None = None
        self.replica: ReplicaKey | None = None
        self.pinned = False
        self.fallback: str | None = None
        self.chunks = 0
        self.finish_reason: str | None = None
        self.engine_data: Mapping[str, Any] | None = None
        self.usage: Mapping[str, Any] | None = None
        self.timing: Mapping[str, Any] | None = None
        self.annotate: Mapping[str, Any] | None = None
        self.tokens: TokenArray | None = None
        self.closed = False
        self.stream: Any = None

    async def first(self) -> Chunk | None:
        self.stream = self.__aiter__()
        chunk = await anext(self.stream, None)
        self.chunks = 0 if chunk is None else 1
        return chunk

    async def next(self) -> Chunk | None:
        chunk = await anext(self.stream, None)
        self.chunks += chunk is not None
        return chunk

    async def close(self) -> None:
        if self.stream is not None:
            await self.stream.aclose()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        edge = self._edge
        try:
            self.sent = self.request
            if self.pin is not None and edge.refuse is not None:
                self.fallback, self.sent = edge.refuse, self._unpinned
            await edge.gate("first_chunk")
            self.pinned = self.pin is not None and self.fallback is None
            for step in edge.script:
                if isinstance(step, BaseException):
                    raise step
                self.replica = self.pin if self.pinned and self.pin is not None else edge.dynamos_choice
                self.finish_reason = step.get("finish_reason")
                self.engine_data = step.get("engine_data")
                self.usage = step.get("completion_usage")
                yield step
                await edge.gate("next_chunk")
        finally:
            self.closed = True


@dataclass
class FakeEdge:
    live: Mapping[ReplicaKey, ReplicaCard] = field(
        default_factory=lambda: {A0: card("w-a"), A1: card("w-a"), B0: card("w-b"), B1: card("w-b")}
    )
    ranks: dict[ReplicaKey, RankOverlap] = field(default_factory=dict)
    queued: dict[ReplicaKey, int] = field(default_factory=dict)
    script: list[Any] = field(default_factory=lambda: chunks(3))
    refuse: str | None = None
    dynamos_choice: ReplicaKey = B1
    gate: Gate = no_gate
    fail: dict[str, Exception] = field(default_factory=dict)
    dispatched: list[FakeDispatch] = field(default_factory=list)
    asked: list[tuple[Any, ...]] = field(default_factory=list)

    def live_replicas(self) -> Mapping[ReplicaKey, ReplicaCard]:
        if "live_replicas" in self.fail:
            raise self.fail["live_replicas"]
        return self.live

    async def overlap(
        self, token_ids: Sequence[int], cache_namespace: str | None = None, lora_name: str | None = None
    ) -> Overlap:
        self.asked.append(("overlap", len(token_ids), cache_namespace, lora_name))
        await self.gate("overlap")
        if "overlap" in self.fail:
            raise self.fail["overlap"]
        return Overlap(
            BLOCK, len(token_ids) // BLOCK, {key: self.ranks.get(key, RankOverlap(0, 0, 0)) for key in self.live}
        )

    async def loads(self) -> Mapping[ReplicaKey, RankLoad]:
        await self.gate("loads")
        if "loads" in self.fail:
            raise self.fail["loads"]
        return {key: RankLoad(self.queued.get(key, 0), 0, 0) for key in self.live}

    async def exact(
        self, token_ids: Sequence[int], cache_namespace: str | None = None, lora_name: str | None = None
    ) -> tuple[Overlap, Mapping[ReplicaKey, RankLoad]]:
        return await self.overlap(token_ids, cache_namespace, lora_name), await self.loads()

    async def best_choice(
        self,
        token_ids: Sequence[int],
        cache_namespace: str | None = None,
        lora_name: str | None = None,
        required_taints: Collection[str] = (),
    ) -> Choice:
        self.asked.append(("best_choice", sorted(required_taints)))
        return Choice(self.dynamos_choice, 0)

    def dispatch(
        self,
        request: dict[str, Any],
        pin: ReplicaKey | None,
        *,
        unpinned: dict[str, Any] | None = None,
        annotate: Mapping[str, Any] | None = None,
        tokens: TokenArray | None = None,
    ) -> FakeDispatch:
        dispatch = FakeDispatch(self, request, pin, request if unpinned is None else unpinned)
        dispatch.annotate, dispatch.tokens = annotate, tokens
        self.dispatched.append(dispatch)
        return dispatch


@dataclass
class Found:
    """What a lookup finds."""

    matches: Sequence[SemanticTrtMatch] = ()
    status: str = "hit"
    seconds: float = 0.001


@dataclass
class FakeLookup:
    found: Found | Exception = field(default_factory=lambda: Found(status="miss"))
    gate: Gate = no_gate
    queries: list[LookupQuery] = field(default_factory=list)

    async def lookup(self, query: LookupQuery) -> LookupResult:
        self.queries.append(query)
        await self.gate("lookup")
        if isinstance(self.found, Exception):
            raise self.found
        return LookupResult(LookupStatus(self.found.status), tuple(self.found.matches), self.found.seconds)


@dataclass
class FakeJournal:
    opens: list[RouteOpened] = field(default_factory=list)
    ends: list[RouteObserved] = field(default_factory=list)
    fail: Exception | None = None

    def opened(self, event: RouteOpened) -> None:
        if self.fail is not None:
            raise self.fail
        self.opens.append(event)

    def observed(self, event: RouteObserved) -> None:
        if self.fail is not None:
            raise self.fail
        self.ends.append(event)

    def check(self) -> None:
        """Each opened route ended exactly once, and nothing else did."""
        assert sorted(e.route_id for e in self.opens) == sorted(e.route_id for e in self.ends)
        assert len({e.route_id for e in self.opens}) == len(self.opens)


@dataclass
class FakeHints:
    sent: list[tuple[StableReplica, PromptKey, KvHintsEnvelope]] = field(default_factory=list)
    takes: bool | Exception = True

    def send(
        self, replica: StableReplica, prompt_key: PromptKey, envelope: KvHintsEnvelope, traceparent: str | None = None
    ) -> bool:
        if isinstance(self.takes, Exception):
            raise self.takes
        self.sent.append((replica, prompt_key, envelope))
        return self.takes


class FakeRouter:
    """A service on fakes. `settings` is a tree as in the YAML file."""

    def __init__(
        self,
        settings: Mapping[str, Any] | None = None,
        *,
        edge: FakeEdge | None = None,
        lookup: Any = None,
        announce: bool = True,
        router: str = "r1",
        credit: Credit | None = None,
        role: WorkerRole = WorkerRole.UNKNOWN,
        instance_id: int | None = None,
    ) -> None:
        # Deadlines so long that a busy machine is not taken for a slow provider; tests of the deadlines set their own.
        patient = {"deadline_ms": 1000, "exact_deadline_ms": 1000}
        self.config = build({"placement": {"mode": "enforce"}, "evidence": patient, **(settings or {})})
        self.edge = edge or FakeEdge()
        self.lookup = lookup if lookup is not None else FakeLookup()
        self.journal, self.hints, self.fallbacks = FakeJournal(), FakeHints(), Fallbacks()
        self.directory = ReplicaDirectory()
        if role is not WorkerRole.UNKNOWN:
            self.directory.serve_as("m", role)
        if announce:
            for stable in ("w-a", "w-b"):
                for rank in (0, 1):
                    self.directory.announce(announcement(stable, rank))
        self.advisor = Advisor(
            edge=self.edge,
            directory=self.directory,
            lookup=self.lookup,
            config=self.config,
            fallbacks=self.fallbacks,
            credit=credit,
        )
        self.records = RouteRecords(
            self.journal,
            self.directory,
            Attempts(),
            self.fallbacks,
            router=router,
            kv_router=self.config.dynamo.kv_router,
        )
        self.loaded = Loaded(self.config, config_hash(self.config), "test")
        self.identity = RouterIdentity(router, instance_id, role)
        self.service = RouterService(
            self.edge,
            self.advisor,
            self.hints,
            self.records,
            self.directory,
            self.fallbacks,
            self.loaded,
            self.identity,
        )

    async def run(self, request: dict[str, Any] | None = None, *, request_id: str = "req-1") -> list[Chunk]:
        return [chunk async for chunk in self.service.handle(request or a_request(), a_call(request_id))]

    @property
    def opened(self) -> RouteOpened:
        (event,) = self.journal.opens
        return event

    @property
    def ended(self) -> RouteObserved:
        (event,) = self.journal.ends
        return event

    @property
    def dispatch(self) -> FakeDispatch:
        (dispatch,) = self.edge.dispatched
        return dispatch


def a_request(tokens: int = 1024, **changes: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "token_ids": list(range(1, tokens + 1)),
        "stop_conditions": {"max_tokens": 3},
        "sampling_options": {},
        "routing": None,
        "extra_args": None,
        "annotations": [],
        **changes,
    }


def a_call(request_id: str = "req-1", *, stopped: bool = False) -> CallContext:
    return CallContext(request_id=request_id, metadata={}, traceparent="00-t-s-01", is_stopped=lambda: stopped)


async def never(stage: str) -> None:
    await asyncio.Event().wait()


def donor_on_a1(tokens: int = 960, **changes: Any) -> FakeLookup:
    return FakeLookup(Found([match(("w-a", 1), tokens, **changes)]))
