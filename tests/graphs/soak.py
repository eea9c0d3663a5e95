"""A graph under traffic and random kills, for as long as one likes: `make soak MINUTES=30`.

Every round kills one part (or none), starts it again, lets traffic go on, among it a client that hangs up on every
stream, stops it, and checks: no request was lost or answered differently, every route is closed once and alike on every
router, no route is open, no lease, attempt or save is left on any rank, and what the processes hold in memory does not
grow from round to round. Parts come in an order of chance, each once before any comes again. It prints the seed; the
same seed kills the same parts in the same order.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from graphs.local.graph import LocalGraph
from graphs.local.settings import LOW_GATE, GraphSettings
from tests.graphs.traffic import Leaving, Traffic, get, routes, snapshot, wait_until

PARTS = ("nothing", "worker-0", "worker-1", "router-0", "router-1", "nats")
ROUTE_SECONDS = 30.0
ABANDONED_SECONDS = 300.0
"""How long a route of a router that died stays open: its stream may go on for long, for all that the others know."""
GROWTH = 1.5
"""Times the resident memory of a process after its third round."""


def open_work(graph: LocalGraph) -> dict[str, int]:
    """What is still held on the ranks when nothing runs: must go back to nothing."""
    left: Counter[str] = Counter()
    for worker in graph.worker_names:
        ranks = get(f"{graph.status_url(worker)}/engine/semkv").get("ranks", [])
        left["ranks that do not answer"] += graph.settings.data_parallel_size - len(ranks)
        for rank in ranks:
            connector = rank["connector"]
            for name in ("leases", "attempts", "open_saves", "finishing", "tracked"):
                left[name] += int(connector[name])
    return {name: count for name, count in left.items() if count}


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def closed_alike(
    graph: LocalGraph, request_ids: Sequence[str | None], may_lack: Collection[str | None] = ()
) -> str | None:
    """None when every router knows each request by the same closed attempts; else what differs. `may_lack`: requests of
    a time in which a router was killed. What it had not handed to the bus yet died with it, so that nobody may know of
    such a request."""
    for request_id in request_ids:
        seen = {
            router: sorted((r["route_id"], r["outcome"], r["reason"]) for r in routes(graph, router, request_id))
            for router in graph.router_names
        }
        first = next(iter(seen.values()))
        if any(found != first for found in seen.values()) or not (first or request_id in may_lack):
            return f"{request_id}: {seen}"
        if len({route_id for route_id, _, _ in first}) != len(first):
            return f"{request_id}: a route is closed twice: {first}"
    return None


def wait_closed_alike(
    graph: LocalGraph, request_ids: Sequence[str | None], seconds: float, may_lack: Collection[str | None] = ()
) -> None:
    wait_until(
        "every route closed alike",
        lambda: closed_alike(graph, request_ids, may_lack) is None,
        seconds,
        lambda: str(closed_alike(graph, request_ids, may_lack)),
    )


def open_routes(graph: LocalGraph) -> dict[str, int]:
    """Routes that a router still waits for: those of clients that left close too."""
    found = {router: snapshot(graph, router).get("open_routes", -1) for router in graph.router_names}
    return {router: count for router, count in found.items() if count != 0}


class Soak:
    def __init__(self, graph: LocalGraph, seed: int) -> None:
        self._graph = graph
        self._rng = random.Random(seed)
        self._deck: list[str] = []
        self._router_died = -ABANDONED_SECONDS
        self._memory: dict[tuple[str, int], list[int]] = {}
        self.rounds = 0
        self.answers = 0
        self.left = 0
        self.killed: Counter[str] = Counter()

    def round(self) -> None:
        """Raises AssertionError."""
        graph, part = self._graph, self._next_part()
        print(f"round {self.rounds}: kill {part}", flush=True)
        traffic = Traffic(graph, threads=3, max_tokens=24, first_seed=self.rounds * 1_000)
        leaving = Leaving(graph, first_seed=10_000_000 + self.rounds * 10_000)
        traffic.wait_for(self._rng.randrange(1, 8))
        killed_at = -math.inf
        if part != "nothing":
            graph.kill(part)
            killed_at = time.monotonic() if part.startswith("router") else killed_at
            traffic.wait_for(self._rng.randrange(0, 4))
            if part == "nats":
                graph.restart("nats")
            else:
                graph.start(part)
            graph.wait_ready()
        traffic.wait_for(self._rng.randrange(4, 12))
        self.left += leaving.finish()
        answers = traffic.finish()
        ids = [answer.request_id for _, answer in answers if answer.request_id is not None]
        assert len(ids) == len(answers) == len(set(ids))
        wait_closed_alike(graph, ids, 6 * ROUTE_SECONDS, traffic.sent_before(killed_at))
        if part.startswith("router"):
            self._router_died = time.monotonic()
        if time.monotonic() - self._router_died > ABANDONED_SECONDS:
            self.none_open(6 * ROUTE_SECONDS)
        wait_until("nothing is held", lambda: not open_work(graph), 120.0, lambda: str(open_work(graph)))
        self._weigh()
        self.rounds += 1
        self.answers += len(answers)
        self.killed[part] += 1

    def none_open(self, seconds: float = ABANDONED_SECONDS + 2 * ROUTE_SECONDS) -> None:
        """Every route closes, those of clients that left and, in their time, those of routers that died too."""
        graph = self._graph
        wait_until("no route is open", lambda: not open_routes(graph), seconds, lambda: str(open_routes(graph)))

    def _next_part(self) -> str:
        """Each once, in an order of chance, before any comes again: a short run meets as many of them as it has
        rounds."""
        if not self._deck:
            self._deck = list(PARTS)
            self._rng.shuffle(self._deck)
        return self._deck.pop()

    def _weigh(self) -> None:
        for name, process in self._graph.processes.items():
            series = self._memory.setdefault((name, process.pid), [])
            series.append(resident_bytes(process.pid))
            if len(series) > 3:
                assert series[-1] < GROWTH * series[2], f"{name} grows: {series}"


def run(minutes: float, seed: int, *, rounds: int | None = None, model_dir: Path | None = None) -> dict[str, Any]:
    settings = GraphSettings(
        model="tiny",
        threads=1,
        routers=2,
        blocks_per_rank=160,
        overrides={
            **LOW_GATE,
            "outcome": {"report_ttl_seconds": ROUTE_SECONDS},
            "connector": {"announce_interval_seconds": 1.0},
        },
    )
    end = time.monotonic() + minutes * 60
    with tempfile.TemporaryDirectory() as folder, LocalGraph(settings, Path(folder), model_dir) as graph:
        soak = Soak(graph, seed)
        while time.monotonic() < end and (rounds is None or soak.rounds < rounds):
            soak.round()
        soak.none_open()
    killed = dict(soak.killed)
    return {"seed": seed, "rounds": soak.rounds, "answers": soak.answers, "left": soak.left, "killed": killed}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.graphs.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=None)
    arguments = parser.parse_args(argv)
    seed = random.randrange(2**31) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    try:
        print(run(arguments.minutes, seed))
    except AssertionError as error:
        print(f"FAILED with seed {seed}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
