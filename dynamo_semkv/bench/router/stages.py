"""The cost of each stage of the router, and of all of them together: wall time, and processor time, which a busy
machine changes little."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynamo_semkv.bench.router.scene import BLOCK, MODEL, Scene
from dynamo_semkv.config.schema import PlacementMode
from dynamo_semkv.contracts.keys import BlockChain
from dynamo_semkv.evidence.provider import LookupQuery
from dynamo_semkv.router.facts import request_facts
from dynamo_semkv.router.ingress import strip_client_hints
from dynamo_semkv.router.pipeline import DecisionContext, Lookup, Prompt, narrow, weigh
from dynamo_semkv.router.runtime_types import Exact
from dynamo_semkv.router.service import RouterService

GOAL_P50_MS, GOAL_P99_MS = 1.0, 3.0


@dataclass(frozen=True)
class Cost:
    """The cost of one stage, in milliseconds per request."""

    stage: str
    wall_p50: float
    wall_p99: float
    own_p50: float
    """Processor time: of all threads for a stage that uses several, else of this one."""
    own_p99: float


@dataclass(frozen=True)
class Decision:
    """The cost of a decision at one number of replicas."""

    replicas: int
    weigh: Cost
    whole: Cost


class _Clock:
    """Times one stage, call by call."""

    def __init__(self, stage: str, own: Callable[[], float] = time.thread_time) -> None:
        self._stage = stage
        self._own = own
        self._rows: list[tuple[float, float]] = []
        self._began = (0.0, 0.0)

    def __enter__(self) -> None:
        self._began = (time.perf_counter(), self._own())

    def __exit__(self, *_: object) -> None:
        own, wall = self._own(), time.perf_counter()
        self._rows.append((wall - self._began[0], own - self._began[1]))

    @property
    def cost(self) -> Cost:
        wall, own = (np.array(column) * 1e3 for column in zip(*self._rows, strict=True))
        quantiles = (float(np.quantile(values, q)) for values in (wall, own) for q in (0.5, 0.99))
        return Cost(self._stage, *quantiles)


def stages(scene: Scene, requests: int) -> list[Cost]:
    """The cost stage by stage, and of `whole`: everything from the arrival of a request to its first chunk, without
    Dynamo's own answers."""
    return asyncio.run(_stages(scene, requests))


def decisions(replicas: Sequence[int], *, donors: int, tokens: int, requests: int) -> list[Decision]:
    """The stages for growing numbers of replicas: `weigh` is the one that grows with them."""
    found = []
    for count in replicas:
        scene = Scene(donors=donors, tokens=tokens, replicas=count)
        try:
            costs = {cost.stage: cost for cost in stages(scene, requests)}
        finally:
            scene.close()
        found.append(Decision(count, costs["weigh"], costs["whole"]))
    return found


async def _stages(scene: Scene, requests: int) -> list[Cost]:
    made = [scene.request(number) for number in range(requests)]
    warm = max(2, requests // 10)
    for number in range(warm):
        await scene.handle(number, made[number])
    # As in the router after its start: a garbage collection never visits donors.
    gc.collect()
    gc.freeze()
    try:
        whole = _Clock("whole", time.process_time)
        for number, request in enumerate(made):
            with whole:
                await scene.handle(number, request)
        return [*await _each(scene, made), whole.cost]
    finally:
        gc.unfreeze()


async def _each(scene: Scene, made: Sequence[dict[str, Any]]) -> list[Cost]:
    clocks = {
        name: _Clock(name, time.process_time if name == "lookup" else time.thread_time)
        for name in ("read", "exact", "lookup", "weigh", "hint and record")
    }
    view = scene.directory.view_of(MODEL)
    context = DecisionContext(scene.directory, scene.config, scene.calibration)
    for number, raw in enumerate(made):
        with clocks["read"]:
            request, _ = strip_client_hints(raw)
            facts = request_facts(request)
            prompt = narrow(facts, view, b"key")
        with clocks["exact"]:
            exact = Exact(*await scene.edge.exact(facts.token_ids))
        with clocks["lookup"]:
            result = await scene.lookup.lookup(_query(prompt))
        with clocks["weigh"]:
            advice = weigh(
                prompt,
                exact,
                Lookup(result.status.value, True, result.matches, result.seconds),
                context=context,
                view=view,
                mode=PlacementMode.ENFORCE,
                seed_material=number.to_bytes(8, "little"),
            )
        service: RouterService = scene.service
        with clocks["hint and record"]:
            prepared = service.prepare(request, scene.call(number), advice, "0" * 16)
        scene.records.advised(prepared.route_id)
    return [clock.cost for clock in clocks.values()]


def _query(prompt: Prompt) -> LookupQuery:
    return LookupQuery(
        tokens=prompt.tokens,
        namespace=prompt.namespace,
        digest=prompt.digest,
        chain=BlockChain(prompt.digest, prompt.tokens, BLOCK),
    )
