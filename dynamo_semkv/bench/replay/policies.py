"""Placement policies of the replay. Each sees what it could know in a live graph; only the oracle sees what the engine
will do."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from dynamo_semkv.advice.decision import DecisionReason
from dynamo_semkv.bench.replay.replica import Served, SimulatedReplica
from dynamo_semkv.bench.replay.trace import TraceRequest
from dynamo_semkv.config.schema import Config, PlacementMode
from dynamo_semkv.contracts.announcement import ANNOUNCEMENT_VERSION, ReplicaAnnouncement
from dynamo_semkv.contracts.evidence import MatchType, SemanticTrtMatch
from dynamo_semkv.contracts.identity import ReplicaKey, new_route_id, stable_worker_id
from dynamo_semkv.contracts.keys import prompt_key
from dynamo_semkv.contracts.location import Tier, WorkerLocation
from dynamo_semkv.contracts.namespace import CacheNamespace
from dynamo_semkv.contracts.report import REPORT_VERSION, MaterializationReport, Outcome, Reason
from dynamo_semkv.contracts.route_events import RouteObserved
from dynamo_semkv.outcome.calibration import Calibration
from dynamo_semkv.outcome.closed import ClosedRoute
from dynamo_semkv.outcome.route_tracker import RouteTracker
from dynamo_semkv.router.opened_event import Attempt, opened_event
from dynamo_semkv.router.pipeline import Advice, DecisionContext, Lookup, Prompt, weigh
from dynamo_semkv.router.replicas import ReplicaDirectory
from dynamo_semkv.router.runtime_types import Exact, Overlap, RankLoad, RankOverlap, ReplicaCard

MODEL = "replay"
DYNAMO_HOST_WEIGHT = 0.75
"""Dynamo's default of `host_cache_hit_weight`."""


class Policy(Protocol):
    """Chooses a replica for each request of the trace, in order of arrival."""

    name: str

    def choose(self, request: TraceRequest, replicas: Sequence[SimulatedReplica], now: float) -> int:
        """The index of the replica. `now`: seconds since the first request."""
        ...

    def served(self, request: TraceRequest, index: int, result: Served) -> None:
        """Takes the result of a request, at the simulated time at which it is known."""


class RoundRobin:
    """Each replica in turn."""

    name = "round robin"

    def __init__(self) -> None:
        self._next = itertools.count()

    def choose(self, request: TraceRequest, replicas: Sequence[SimulatedReplica], now: float) -> int:
        """The next one."""
        return next(self._next) % len(replicas)

    def served(self, request: TraceRequest, index: int, result: Served) -> None:
        """Learns nothing."""
        return None


class DynamoKv:
    """The rule of Dynamo's KvRouter at temperature 0: least prefill tokens to wait for and to compute, where overlap
    counts by tier; ties are broken at random. `index_sees_host`: whether its index knows the host slab (it does for
    requests without a salt)."""

    name = "Dynamo kv"

    def __init__(self, *, index_sees_host: bool, seed: int = 0) -> None:
        self._index_sees_host = index_sees_host
        self._rng = random.Random(seed)

    def choose(self, request: TraceRequest, replicas: Sequence[SimulatedReplica], now: float) -> int:
        """The replica of least cost in tokens."""
        costs = []
        for index, replica in enumerate(replicas):
            device, host = replica.overlap(request.chain)
            saved = device + (DYNAMO_HOST_WEIGHT * host if self._index_sees_host else 0.0)
            cost = replica.queued_tokens(now) + max(0.0, request.tokens - saved * replica.block_tokens)
            costs.append((cost, self._rng.random(), index))
        return min(costs)[2]

    def served(self, request: TraceRequest, index: int, result: Served) -> None:
        """Learns nothing."""
        return None


class Greedy:
    """Least time to first token for this request, knowing what the engine will really do; ties are broken at random, as
    Dynamo's. It does not plan for requests to come, so it is where the oracle's search begins and no oracle itself."""

    name = "greedy"

    def __init__(self, *, materializes: Sequence[bool], seed: int = 0) -> None:
        """`materializes[n]`: replica n really loads what it has in host memory."""
        self._materializes = materializes
        self._rng = random.Random(seed)

    def choose(self, request: TraceRequest, replicas: Sequence[SimulatedReplica], now: float) -> int:
        """The replica with the earliest first token."""
        times = []
        for index, replica in enumerate(replicas):
            able = self._materializes[index]
            served = replica.would_take(request.chain, request.tokens, now, materializes=able)
            times.append((served.ttft, self._rng.random(), index))
        return min(times)[2]

    def served(self, request: TraceRequest, index: int, result: Served) -> None:
        """Learns nothing."""
        return None


class Planned:
    """The oracle: a replica for each request, fixed in advance with the whole trace known (`hindsight.py`)."""

    name = "oracle"

    def __init__(self, plan: Sequence[int]) -> None:
        self._plan = plan
        self._next = itertools.count()

    def choose(self, request: TraceRequest, replicas: Sequence[SimulatedReplica], now: float) -> int:
        """The plan's next entry."""
        return self._plan[next(self._next)]

    def served(self, request: TraceRequest, index: int, result: Served) -> None:
        """Learns nothing."""
        return None


class Semkv:
    """Dynamo's choice, unless our score sheet and gate place the request: the real pipeline, route tracker and
    calibration.

    Evidence is perfect here (a provider that knows each replica's blocks): what is measured is placement, not search.
    """

    name = "semkv"

    def __init__(self, replicas: int, config: Config, otherwise: DynamoKv, *, index_sees_host: bool) -> None:
        self._otherwise = otherwise
        self._index_sees_host = index_sees_host
        self._directory = ReplicaDirectory()
        self._names = [f"worker-{n}" for n in range(replicas)]
        self._keys = [ReplicaKey(stable_worker_id(name), 0) for name in self._names]
        self._namespace = CacheNamespace(**_known_namespace()).for_request(
            tenant="", lora="", lora_revision="", multimodal=()
        )
        self.calibration = Calibration(config.scoring)
        self._context = DecisionContext(self._directory, config, self.calibration)
        self._tracker = RouteTracker(30.0, self._closed, settle_seconds=0.0)
        self._open: dict[int, tuple[str, Advice]] = {}
        self.placed: list[int] = []
        """Numbers of the requests that were placed."""
        self._join()

    def choose(self, request: TraceRequest, replicas: Sequence[SimulatedReplica], now: float) -> int:
        """Our placement, else Dynamo's choice; opens a route."""
        prompt = self._prompt(request)
        exact, matches = self._known(request, replicas, now)
        advice = weigh(
            prompt,
            exact,
            Lookup("hit" if matches else "miss", True, matches),
            context=self._context,
            view=self._directory.view_of(MODEL),
            mode=PlacementMode.ENFORCE,
            seed_material=request.number.to_bytes(8, "little"),
        )
        self._opened(request, advice, now)
        if advice.decision.reason is not DecisionReason.PLACED or advice.decision.placed is None:
            return self._otherwise.choose(request, replicas, now)
        self.placed.append(request.number)
        return self._keys.index(advice.decision.placed)

    def served(self, request: TraceRequest, index: int, result: Served) -> None:
        """Closes the route with the report of the simulated connector."""
        route_id, advice = self._open.pop(request.number)
        name = self._names[index]
        hinted = advice.decision.hinted_tokens and advice.decision.placed == self._keys[index]
        outcome, reason = Outcome.NO_DONOR, Reason.NONE
        if result.confirmed:
            outcome, reason = Outcome.MATERIALIZED_EXACT, Reason.OK
        elif hinted:
            outcome, reason = Outcome.DECLINED, Reason.NOT_HONOURED
        at = result.end
        self._tracker.observed(
            RouteObserved(
                route_id=route_id,
                observed_at=at,
                end="complete",
                served_stable_routing_id=name,
                served_dp_rank=0,
                ttft_seconds=result.ttft,
                queued_tokens=advice.queued.get(self._keys[index]),
            ),
            at,
        )
        report = MaterializationReport(
            version=REPORT_VERSION,
            report_id=route_id,
            stable_routing_id=name,
            dp_rank=0,
            generation="g",
            prompt_key=advice.prompt.key,
            namespace=advice.prompt.digest.hex(),
            route_id=route_id,
            prompt_tokens=request.tokens,
            local_tokens=result.device_tokens,
            offered=result.confirmed,
            honoured=result.confirmed,
            copied=result.confirmed,
            confirmed=result.confirmed,
            outcome=outcome,
            reason=reason,
            tier=Tier.HOST_PINNED if result.confirmed else None,
            load_seconds=result.load_seconds if result.confirmed else None,
        )
        self._tracker.report(report, at)

    def _closed(self, route: ClosedRoute) -> None:
        self.calibration.add(replace(route, saving=self.calibration.saving_of(route)))

    def _join(self) -> None:
        card = ReplicaCard(MODEL, "", 16, 1, 0, None, None, None, None, None, None, None)
        cards = {
            key: card.__class__(**{**card.__dict__, "stable_routing_id": name})
            for key, name in zip(self._keys, self._names, strict=True)
        }
        self._directory.update_live(cards)
        for name in self._names:
            self._directory.announce(
                ReplicaAnnouncement(
                    version=ANNOUNCEMENT_VERSION,
                    stable_routing_id=name,
                    dp_rank=0,
                    generation="g",
                    model=MODEL,
                    namespace=CacheNamespace(**_known_namespace()),
                    materialization="exact",
                )
            )

    def _prompt(self, request: TraceRequest) -> Prompt:
        digest = self._namespace.digest()
        tokens = np.zeros(request.tokens, dtype=np.uint32)
        head = np.array(request.chain[: request.tokens], dtype=np.int64).astype(np.uint32)
        tokens[: len(head)] = head
        return Prompt(tokens, self._namespace, digest, prompt_key(digest, tokens[:64]))

    def _known(
        self, request: TraceRequest, replicas: Sequence[SimulatedReplica], now: float
    ) -> tuple[Exact, list[SemanticTrtMatch]]:
        size = replicas[0].block_tokens
        ranks, loads, matches = {}, {}, []
        for key, name, replica in zip(self._keys, self._names, replicas, strict=True):
            device, host = replica.overlap(request.chain)
            ranks[key] = RankOverlap(device, host if self._index_sees_host else 0, 0)
            loads[key] = RankLoad(replica.queued_tokens(now), 0, 0)
            prefix = min((device + host) * size, request.tokens)
            if host and not self._index_sees_host:
                matches.append(
                    SemanticTrtMatch(
                        donor_id=f"{name}-{request.number}",
                        reusable_token_count=prefix,
                        exact_prefix_tokens=prefix,
                        match_type=MatchType.EXACT_EQUIVALENT,
                        location=WorkerLocation(worker_id=key.worker_id, dp_rank=0, tier=Tier.HOST_PINNED),
                        provider="replay",
                        provider_generation="g",
                        overlap=prefix / request.tokens,
                        confidence=1.0,
                    )
                )
        return Exact(Overlap(size, len(request.chain), ranks), loads), matches

    def _opened(self, request: TraceRequest, advice: Advice, now: float) -> None:
        route_id = new_route_id()
        attempt = Attempt(route_id, str(request.number), "replay", 0, MODEL, now, "", None)
        event = opened_event(advice, attempt, self._directory)
        self._tracker.opened(event, now)
        self._open[request.number] = (route_id, advice)


def _known_namespace() -> dict[str, Any]:
    """Every field that an engine knows; those of a request are left out."""
    of_a_request = {"tenant", "lora", "lora_revision", "multimodal", "tokens_per_block"}
    known: dict[str, Any] = {name: "replay" for name in CacheNamespace.__struct_fields__ if name not in of_a_request}
    return known | {"tokens_per_block": 16}
