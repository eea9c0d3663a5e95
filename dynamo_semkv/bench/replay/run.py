"""Replays one trace under one policy and computes the figures."""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dynamo_semkv.bench.replay.hindsight import improve
from dynamo_semkv.bench.replay.policies import DynamoKv, Greedy, Planned, Policy, RoundRobin, Semkv
from dynamo_semkv.bench.replay.replica import Blocks, Served, SimulatedReplica
from dynamo_semkv.bench.replay.trace import TraceRequest
from dynamo_semkv.config.schema import Config

ENGINES = ("materializes", "declines", "half", "slow", "lies")
"""What the engines do. `half`: replicas with an even number materialize, the others decline everything. `slow`: all
materialize, and loading costs SLOW_COST. `lies`: replicas with an odd number report that they loaded, and compute."""
HINDSIGHT_STEPS = 60
"""How many changes the search for the oracle's plan tries."""
SLOW_COST = 1.5
"""As a share of the prefill time: a token from the host comes later than one that is computed."""


@dataclass(frozen=True)
class Fleet:
    """The replicas of a replay, all equal."""

    replicas: int = 8
    block_tokens: int = 512
    device_blocks: int = 600
    """Blocks of each replica's device cache."""
    host_blocks: int = 6_000
    rate: float = 20_000.0
    """Prefill tokens a second of one replica."""
    host_cost: float = 0.25
    """Cost of a token that is loaded from the host, as a share of its prefill time."""

    def make(self) -> list[SimulatedReplica]:
        """New replicas with empty caches."""
        return [
            SimulatedReplica(
                self.block_tokens, self.rate, self.host_cost, Blocks(self.device_blocks), Blocks(self.host_blocks)
            )
            for _ in range(self.replicas)
        ]


@dataclass(frozen=True)
class Figures:
    """The figures of one policy on one trace. Times in seconds."""

    policy: str
    requests: int
    confirmed_share: float
    """Tokens that were loaded from the host and confirmed, as a share of all prompt tokens."""
    device_share: float
    mean_prefill_tokens: float
    mean_ttft: float
    p50_ttft: float
    p99_ttft: float
    late_mean_ttft: float
    """The mean over the second half of the trace, after everything that can be learned was learned."""
    regret: float
    """How far the mean TTFT is above the oracle's in the same trace and on the same engines, as a share of the
    oracle's."""
    load_spread: float
    """Standard deviation over mean of the prefill tokens that the replicas computed."""
    placed: int
    placed_late: int
    """Those in the last tenth of the trace."""


def materializing(engine: str, replicas: int) -> list[bool]:
    """For each replica whether it really loads what it has in host memory."""
    return [engine in ("materializes", "slow") or (engine in ("half", "lies") and n % 2 == 0) for n in range(replicas)]


def lying(engine: str, replicas: int) -> list[bool]:
    """For each replica whether it reports loads that it did not make."""
    return [engine == "lies" and n % 2 == 1 for n in range(replicas)]


def replay(
    trace: Sequence[TraceRequest],
    policy: Policy,
    fleet: Fleet,
    materializes: Sequence[bool],
    lies: Sequence[bool] = (),
) -> tuple[list[Served], list[SimulatedReplica]]:
    """Requests arrive as the trace says; the policy learns the result of a request when it is served, not before."""
    replicas = fleet.make()
    results: list[Served] = []
    pending: list[tuple[float, int, TraceRequest, int, Served]] = []
    for request in trace:
        while pending and pending[0][0] <= request.at:
            _, _, done, index, served = heapq.heappop(pending)
            policy.served(done, index, served)
        for replica in replicas:
            replica.settle(request.at)
        index = policy.choose(request, replicas, request.at)
        served = replicas[index].serve(
            request.chain, request.tokens, request.at, materializes=materializes[index], lies=bool(lies) and lies[index]
        )
        results.append(served)
        heapq.heappush(pending, (served.end, request.number, request, index, served))
    while pending:
        _, _, done, index, served = heapq.heappop(pending)
        policy.served(done, index, served)
    return results, replicas


def compare(
    trace: Sequence[TraceRequest],
    fleet: Fleet,
    config: Config,
    *,
    engine: str = "materializes",
    index_sees_host: bool = True,
    hindsight_steps: int = HINDSIGHT_STEPS,
) -> list[Figures]:
    """Round robin, Dynamo, ours and the oracle on the same trace and engines; the oracle last. It knows the trace, and
    none beats it."""
    able, lies = materializing(engine, fleet.replicas), lying(engine, fleet.replicas)
    fleet = replace(fleet, host_cost=SLOW_COST) if engine == "slow" else fleet

    def run(policy: Policy) -> _Run:
        recorded = _Recorded(policy)
        results, replicas = replay(trace, recorded, fleet, able, lies)
        return _Run(policy, results, replicas, recorded.plan)

    semkv = Semkv(fleet.replicas, config, DynamoKv(index_sees_host=index_sees_host), index_sees_host=index_sees_host)
    runs = [run(RoundRobin()), run(DynamoKv(index_sees_host=index_sees_host)), run(semkv)]
    begun = min([*runs, run(Greedy(materializes=able))], key=lambda found: found.mean_ttft)
    plan = improve(trace, begun.plan, lambda tried: run(Planned(tried)).mean_ttft, fleet.replicas, hindsight_steps)
    runs.append(run(Planned(plan)))
    best = runs[-1].mean_ttft
    return [_figures(trace, found.policy, found.results, found.replicas, best) for found in runs]


class _Recorded:
    """A policy that also records where it sent each request."""

    def __init__(self, policy: Policy) -> None:
        self.name = policy.name
        self.plan: list[int] = []
        self._policy = policy

    def choose(self, request: TraceRequest, replicas: Sequence[SimulatedReplica], now: float) -> int:
        self.plan.append(self._policy.choose(request, replicas, now))
        return self.plan[-1]

    def served(self, request: TraceRequest, index: int, result: Served) -> None:
        self._policy.served(request, index, result)


@dataclass(frozen=True)
class _Run:
    policy: Policy
    results: Sequence[Served]
    replicas: Sequence[SimulatedReplica]
    plan: Sequence[int]

    @property
    def mean_ttft(self) -> float:
        return statistics.fmean(served.ttft for served in self.results)


def _figures(
    trace: Sequence[TraceRequest],
    policy: Policy,
    results: Sequence[Served],
    replicas: Sequence[SimulatedReplica],
    best: float,
) -> Figures:
    tokens = sum(request.tokens for request in trace)
    ttft = np.array([served.ttft for served in results])
    loads = [replica.computed_tokens for replica in replicas]
    placed = policy.placed if isinstance(policy, Semkv) else []
    return Figures(
        policy=policy.name,
        requests=len(trace),
        confirmed_share=sum(served.confirmed for served in results) / tokens,
        device_share=sum(served.device_tokens for served in results) / tokens,
        mean_prefill_tokens=sum(served.computed for served in results) / len(results),
        mean_ttft=float(ttft.mean()),
        p50_ttft=float(np.quantile(ttft, 0.5)),
        p99_ttft=float(np.quantile(ttft, 0.99)),
        late_mean_ttft=float(ttft[len(ttft) // 2 :].mean()),
        regret=float(ttft.mean()) / best - 1.0,
        load_spread=statistics.pstdev(loads) / statistics.fmean(loads),
        placed=len(placed),
        placed_late=sum(number >= trace[-len(trace) // 10].number for number in placed),
    )
