"""A router in one process: the real advisor, service, lookup and record around a simulated Dynamo that answers at once.
No bus, no engine.

The cost of Dynamo's own answers is not in it (its index and its bookings are Rust, asked over a binding; `graph.py`
measures them), and neither is the token stream.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo_semkv.bench.alike import FAMILY, alike, asked, unknown
from dynamo_semkv.bus.publishing import DiscardingPublisher
from dynamo_semkv.config.load import Loaded, build, config_hash
from dynamo_semkv.config.schema import Config
from dynamo_semkv.contracts.announcement import ANNOUNCEMENT_VERSION, ReplicaAnnouncement
from dynamo_semkv.contracts.codec import encode_route_event
from dynamo_semkv.contracts.identity import ReplicaKey, stable_worker_id
from dynamo_semkv.contracts.keys import TokenArray
from dynamo_semkv.contracts.namespace import CacheNamespace
from dynamo_semkv.contracts.route_events import RouteEvent
from dynamo_semkv.evidence.catalog import DonorCatalog
from dynamo_semkv.evidence.deadline import DeadlineRunner
from dynamo_semkv.evidence.fingerprint import FingerprintProvider
from dynamo_semkv.evidence.limits import CatalogLimits
from dynamo_semkv.outcome.calibration import Calibration
from dynamo_semkv.router.advisor import Advisor
from dynamo_semkv.router.attempts import Attempts
from dynamo_semkv.router.fallback import Fallbacks
from dynamo_semkv.router.hint_sender import HintSender
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
    Request,
)
from dynamo_semkv.router.service import RouterIdentity, RouterService
from dynamo_semkv.testing import EventTape

MODEL = "bench"
BLOCK = 32
_OF_A_REQUEST = ("tenant", "lora", "lora_revision", "multimodal", "tokens_per_block")


def announced_namespace() -> CacheNamespace:
    """The namespace as an engine announces it: every field is known except those of a request."""
    known: dict[str, Any] = {name: "bench" for name in CacheNamespace.__struct_fields__ if name not in _OF_A_REQUEST}
    return CacheNamespace(**known, tokens_per_block=BLOCK)


@dataclass
class SimulatedDispatch:
    """A Dispatch of one chunk, and the end."""

    replica: ReplicaKey | None
    pinned: bool
    fallback: str | None = None
    chunks: int = 1
    finish_reason: str | None = "length"
    engine_data: Mapping[str, Any] | None = None
    usage: Mapping[str, Any] | None = None
    timing: Mapping[str, Any] | None = None

    async def first(self) -> Chunk | None:
        """The only chunk."""
        return {"token_ids": [1], "finish_reason": "length"}

    async def next(self) -> Chunk | None:
        """None: there are no more."""
        return None

    async def close(self) -> None:
        """Holds nothing."""
        return None


@dataclass
class SimulatedEdge:
    """The Edge that the router asks: nothing on any device, a queue on every other replica."""

    live: Mapping[ReplicaKey, ReplicaCard]

    def live_replicas(self) -> Mapping[ReplicaKey, ReplicaCard]:
        """Always the same."""
        return self.live

    async def loads(self) -> Mapping[ReplicaKey, RankLoad]:
        """64 queued tokens on every other replica."""
        return {key: RankLoad(64 * (at % 2), 2 * (at % 2), at % 2) for at, key in enumerate(self.live)}

    async def exact(
        self, token_ids: Sequence[int], cache_namespace: str | None = None, lora_name: str | None = None
    ) -> tuple[Overlap, Mapping[ReplicaKey, RankLoad]]:
        """No overlap anywhere, and `loads`."""
        ranks = {key: RankOverlap(0, 0, 0) for key in self.live}
        return Overlap(BLOCK, len(token_ids) // BLOCK, ranks), await self.loads()

    async def best_choice(
        self,
        token_ids: Sequence[int],
        cache_namespace: str | None = None,
        lora_name: str | None = None,
        required_taints: Collection[str] = (),
    ) -> Choice:
        """The first replica."""
        return Choice(next(iter(self.live)), 0)

    def dispatch(
        self,
        request: Request,
        pin: ReplicaKey | None,
        *,
        unpinned: Request | None = None,
        annotate: Mapping[str, Any] | None = None,
        tokens: TokenArray | None = None,
    ) -> SimulatedDispatch:
        """To the pin, else to the first replica; sends nothing."""
        return SimulatedDispatch(pin or next(iter(self.live)), pin is not None)


class Record:
    """A Journal that encodes route events as for the bus, and counts them."""

    def __init__(self) -> None:
        self.opens = 0
        self.ends = 0
        self.placed = 0

    def opened(self, event: RouteEvent) -> None:
        """Encodes and counts; `placed` where the decision placed it."""
        encode_route_event(event)
        self.opens += 1
        self.placed += getattr(event, "decision_reason", "") == "placed"

    def observed(self, event: RouteEvent) -> None:
        """Encodes and counts."""
        encode_route_event(event)
        self.ends += 1


class Scene:
    """The parts of one router, wired: `donors` documents spread over `replicas` ranks (two per worker), and requests of
    which every second one has donors (alike.py)."""

    def __init__(self, *, donors: int, tokens: int, replicas: int) -> None:
        # Long deadlines, so that a slow moment of a busy machine does not lead into another code path.
        patient = {"deadline_ms": 1_000.0, "exact_deadline_ms": 1_000.0}
        self.config: Config = build({"placement": {"mode": "enforce"}, "evidence": patient})
        self.tokens, self.donors = tokens, donors
        self.namespace = announced_namespace()
        self.narrowed = self.namespace.for_request(tenant="")
        self.directory = ReplicaDirectory()
        self.edge = SimulatedEdge(self._join(replicas))
        provider = FingerprintProvider(self.config.evidence.fingerprint)
        self.catalog = DonorCatalog([provider], clock=time.monotonic, limits=CatalogLimits(max_donors=max(1, donors)))
        self.lookup = DeadlineRunner([provider], 1.0, self.config.evidence.max_matches)
        self.calibration = Calibration(self.config.scoring)
        self.record = Record()
        self.fallbacks = Fallbacks()
        self.hints = HintSender(DiscardingPublisher())
        self.advisor = Advisor(
            edge=self.edge,
            directory=self.directory,
            lookup=self.lookup,
            config=self.config,
            fallbacks=self.fallbacks,
            credit=self.calibration,
        )
        kv_router = self.config.dynamo.kv_router
        self.records = RouteRecords(
            self.record, self.directory, Attempts(), self.fallbacks, router="bench", kv_router=kv_router
        )
        self.service = RouterService(
            self.edge,
            self.advisor,
            self.hints,
            self.records,
            self.directory,
            self.fallbacks,
            Loaded(self.config, config_hash(self.config), "bench"),
            RouterIdentity("bench"),
        )
        self.advisor.refresh()
        self._register()

    def close(self) -> None:
        """Ends the lookup threads."""
        self.lookup.close()

    def request(self, number: int) -> dict[str, Any]:
        """The request as Dynamo hands it over, token ids as a list. Even numbers begin as FAMILY donors do, odd ones
        share nothing with any."""
        if number % 2 == 0 and self.donors:
            own = asked(number * 7_919 % max(1, self.donors // FAMILY), number, self.tokens, from_the_start=True)
        else:
            own = unknown(number, self.tokens)
        return {
            "model": MODEL,
            "token_ids": own.tolist(),
            "stop_conditions": {"max_tokens": 1},
            "sampling_options": {},
            "routing": None,
            "extra_args": None,
            "annotations": [],
        }

    def call(self, number: int) -> CallContext:
        """The call of request `number`; its client never leaves."""
        return CallContext(request_id=f"bench-{number}", metadata={}, traceparent=None, is_stopped=lambda: False)

    async def handle(self, number: int, request: Request) -> None:
        """Serves one request through the service, to its last chunk."""
        async for _ in self.service.handle(request, self.call(number)):
            pass

    def _join(self, replicas: int) -> dict[ReplicaKey, ReplicaCard]:
        cards: dict[ReplicaKey, ReplicaCard] = {}
        for number in range(replicas):
            worker, rank = divmod(number, 2)
            stable = f"bench-{worker}"
            cards[ReplicaKey(stable_worker_id(stable), rank)] = ReplicaCard(
                MODEL, "", BLOCK, 2, 0, stable, 65_536, None, None, None, None, None
            )
            self.directory.announce(
                ReplicaAnnouncement(
                    version=ANNOUNCEMENT_VERSION,
                    stable_routing_id=stable,
                    dp_rank=rank,
                    generation="g1",
                    model=MODEL,
                    namespace=self.namespace,
                    materialization="exact",
                )
            )
        return cards

    def _register(self) -> None:
        replicas = list(self.edge.live)
        tapes = [EventTape(worker_id=key.worker_id, dp_rank=key.dp_rank) for key in replicas]
        for tape in tapes:
            self.catalog.apply(tape.reset())
        for number in range(self.donors):
            tape = tapes[number % len(tapes)]
            donor = f"{number:032x}"
            self.catalog.apply(tape.register(donor, alike(number, self.tokens), self.narrowed))
            tape.events.clear()
