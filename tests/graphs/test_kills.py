"""kill -9 in the middle of traffic: no request is lost, and afterwards catalog and outcomes are complete again.

The tests share one graph and leave it whole.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from graphs.local.graph import LocalGraph
from tests.graphs import soak
from tests.graphs.conftest import ROUTE_SECONDS
from tests.graphs.traffic import Traffic, ask, get, routes, send, snapshot, wait_until

pytestmark = [pytest.mark.graph, pytest.mark.slow]


def closed_everywhere(graph: LocalGraph, request_id: str | None) -> list[dict[str, Any]]:
    """The attempts of a request once every router has closed the same ones with the same outcome."""
    seen: dict[str, list[dict[str, Any]]] = {}

    def agree() -> bool:
        seen.update({router: routes(graph, router, request_id) for router in graph.router_names})
        keys = [sorted((r["route_id"], r["outcome"], r["reason"]) for r in found) for found in seen.values()]
        return bool(keys[0]) and all(key == keys[0] for key in keys)

    wait_until(f"every router to have closed {request_id} alike", agree, 6 * ROUTE_SECONDS, lambda: repr(seen))
    return seen[graph.router_names[0]]


def served_and_confirmed(graph: LocalGraph, seed: int) -> dict[str, Any]:
    """A fresh prompt end to end: served, reported, closed the same on every router. Its last attempt."""
    answer = send(graph, ask(seed))
    assert answer.ok, answer
    found = closed_everywhere(graph, answer.request_id)
    assert found[-1]["outcome"] not in ("unconfirmed", "orphan_report"), found
    return found[-1]


def test_a_killed_worker_loses_no_request_and_its_donors_go(graph: LocalGraph) -> None:
    traffic = Traffic(graph, first_seed=0)
    traffic.wait_for(8)
    graph.kill("worker-0")
    traffic.wait_for(8)
    graph.start("worker-0")
    graph.wait_ready()
    traffic.wait_for(8)
    answers = traffic.finish()
    for _, answer in answers:
        assert closed_everywhere(graph, answer.request_id)
    served_and_confirmed(graph, 901)
    # Discovery lists a killed worker until its lease ends, so the graph counted as ready before the new one had come.
    seen: dict[str, set[str]] = {}

    def whole() -> bool:
        seen.update({n: {r["name"] for r in snapshot(graph, n)["replicas"] if r["live"]} for n in graph.router_names})
        return all(names == {f"worker-{w}/{r}" for w in (0, 1) for r in (0, 1)} for names in seen.values())

    wait_until("every router to know every replica", whole, 6 * ROUTE_SECONDS, lambda: repr(seen))


def test_a_killed_router_loses_no_request_and_comes_back_complete(graph: LocalGraph) -> None:
    clients = 4
    traffic = Traffic(graph, clients, first_seed=1000)
    traffic.wait_for(8)
    graph.kill("router-0")
    killed_at = time.monotonic()
    traffic.wait_for(8)
    graph.start("router-0")
    graph.wait_ready()
    traffic.wait_for(8)
    ids = [answer.request_id for _, answer in traffic.finish()]
    # No request is lost, but a record may be: of a request that was answered in the moment between its record and the
    # bus.
    soak.wait_closed_alike(graph, ids, 6 * ROUTE_SECONDS, traffic.sent_before(killed_at))
    lacking = [request_id for request_id in ids if not routes(graph, "router-1", request_id)]
    assert len(lacking) <= clients
    served_and_confirmed(graph, 902)
    donors = wait_until(
        "the same donors on both routers",
        lambda: len({snapshot(graph, r)["catalog"]["donors"] for r in graph.router_names}) == 1,
    )
    assert donors


def test_a_killed_broker_delays_no_request_and_no_outcome_is_lost(graph: LocalGraph) -> None:
    traffic = Traffic(graph, first_seed=2000)
    traffic.wait_for(8)
    graph.kill("nats")
    traffic.wait_for(8)  # no longer than that: what ended at its start waits ROUTE_SECONDS for its report
    graph.restart("nats")
    traffic.wait_for(8)
    answers = traffic.finish()
    lost = 0
    for _, answer in answers:
        found = closed_everywhere(graph, answer.request_id)
        lost += found[-1]["outcome"] == "unconfirmed"
    served_and_confirmed(graph, 903)
    assert lost == 0, f"{lost} of {len(answers)} routes have no report"


def test_what_a_quiet_engine_cached_during_an_outage_is_known_afterwards(graph: LocalGraph) -> None:
    """Dynamo asks for KV events that it missed only when a later one comes, so a quiet rank has to send one."""

    def batches() -> list[int]:
        ranks = [get(f"{graph.status_url(worker)}/engine/semkv").get("ranks", []) for worker in graph.worker_names]
        return [rank["event_batches"] for worker in ranks for rank in worker]

    graph.kill("nats")
    assert send(graph, ask(3001)).ok
    graph.restart("nats")
    before = batches()
    # Clients of NATS are back within some seconds, each in its own time; so the first heartbeat may still be lost.
    wait_until("three heartbeats of each rank", lambda: all(b - a >= 3 for a, b in zip(before, batches(), strict=True)))
    last = closed_everywhere(graph, send(graph, ask(3001)).request_id)[-1]["opened"]
    assert last["exact_device_tokens"] + last["exact_host_tokens"] > 0


def test_the_soak_runs_a_round_and_would_see_what_it_looks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "PARTS", ("worker-1",))
    assert soak.run(5.0, seed=1, rounds=1, model_dir=tmp_path / "models")["killed"] == {"worker-1": 1}


def test_the_soak_tells_a_difference_a_double_and_a_hole(graph: LocalGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"route_id": "a", "outcome": "declined", "reason": "none"}
    answers: dict[str, list[dict[str, str]]] = {}
    monkeypatch.setattr(soak, "routes", lambda graph, router, request_id: answers[router])
    for rows, wrong in (
        ({"router-0": [row], "router-1": [row]}, False),
        ({"router-0": [row], "router-1": []}, True),
        ({"router-0": [row, row], "router-1": [row, row]}, True),
        ({"router-0": [row], "router-1": [{**row, "outcome": "no_donor"}]}, True),
    ):
        answers.update(rows)
        assert (soak.closed_alike(graph, ["r"]) is not None) is wrong
