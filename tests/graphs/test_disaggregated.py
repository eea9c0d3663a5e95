"""Prefill and decode apart: our router in front of the prefill workers, Dynamo's frontend and the decode worker as they
are."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dynamo_semkv.bench.client import Answer
from graphs.local.graph import LocalGraph
from graphs.local.settings import LOW_GATE, GraphSettings
from tests.graphs.traffic import (
    PATIENT,
    WAIT_SECONDS,
    ask,
    forget_device,
    get,
    post,
    routes,
    send,
    snapshot,
    wait_until,
)

pytestmark = [pytest.mark.graph, pytest.mark.slow]


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[LocalGraph]:
    settings = GraphSettings(
        model="tiny",
        threads=1,
        workers=2,
        decode_workers=2,
        routers=2,
        data_parallel_size=1,
        blocks_per_rank=160,
        overrides={**LOW_GATE, **PATIENT, "outcome": {"report_ttl_seconds": 10.0}},
    )
    with LocalGraph(settings, run_dir=tmp_path_factory.mktemp("disaggregated"), model_dir=model_dir) as started:
        yield started


def closed(graph: LocalGraph, answer: Answer) -> dict[str, Any]:
    found: list[dict[str, Any]] = wait_until(
        f"the route of {answer.request_id}", lambda: routes(graph, "router-0", answer.request_id)
    )
    assert len(found) == 1, found
    return found[0]


def engine(graph: LocalGraph, part: str) -> dict[str, Any]:
    (rank,) = get(f"{graph.status_url(part)}/engine/semkv")["ranks"]
    return dict(rank)


def test_a_prompt_goes_to_the_prefill_worker_that_holds_it_and_the_answer_comes_from_decode(graph: LocalGraph) -> None:
    first = send(graph, ask(1, 12))
    assert (first.ok, first.finish_reason, first.prompt_tokens) == (True, "length", first.prompt_tokens)
    cold = closed(graph, first)
    assert (cold["decision"], cold["outcome"], cold["observed"]["end"]) == ("no_evidence", "no_donor", "complete")
    assert cold["served_by"].split("/")[0] in graph.worker_names
    holder = cold["served_by"]
    forget_device(graph)

    def placed() -> dict[str, Any] | None:
        answer = send(graph, ask(1, 12))
        assert answer.text == first.text
        route = closed(graph, answer)
        if route["decision"] == "placed":
            assert answer.cached_tokens == route["tokens"]["materialized"]
            return route
        forget_device(graph)  # the donor, or that the device lost it, was not known yet
        return None

    warm = wait_until("a placement on the donor", placed)
    assert (warm["outcome"], warm["placed_on"], warm["served_by"]) == ("materialized_exact", holder, holder)
    assert warm["joined_by"] in ("route_id", "prompt_key")  # the latter where the hint came after the request
    assert warm["tokens"]["materialized"] == warm["tokens"]["input"] // 32 * 32
    assert warm["observed"]["output_tokens"] == 1, "the route ends with the hand-over; decoding is none of its business"


def test_the_router_sees_prefill_workers_only_and_clients_one_model(graph: LocalGraph) -> None:
    send(graph, ask(2, 4))
    assert {row["stable_routing_id"] for row in snapshot(graph)["replicas"]} == set(graph.worker_names)
    assert {row["standing"] for row in snapshot(graph)["replicas"]} == {"ok"}
    listed = get(f"{graph.frontend_url}/v1/models")["data"]
    assert [model["id"] for model in listed] == [graph.settings.served_model]
    assert engine(graph, "decode-0")["connector"] is None


def instance(graph: LocalGraph, component: str) -> int:
    health = get(f"{graph.frontend_url}/health")
    found = [it for it in health["instances"] if (it["component"], it["endpoint"]) == (component, "generate")]
    return int(found[0]["instance_id"])


def test_a_client_that_names_its_decode_worker_is_prefilled_with_advice_and_decoded_there(graph: LocalGraph) -> None:
    body = {
        "model": graph.settings.served_model,
        "messages": list(ask(3).messages),
        "max_tokens": 4,
        "nvext": {"decode_worker_id": instance(graph, "backend"), "extra_fields": ["worker_id"]},
    }
    answer = post(f"{graph.frontend_url}/v1/chat/completions", body)
    assert answer["nvext"]["worker_id"]["decode_worker_id"] == body["nvext"]["decode_worker_id"]
    # `chatcmpl-<the id that the router saw>`
    route = wait_until("its route", lambda: routes(graph, "router-0", answer["id"].removeprefix("chatcmpl-")))[0]
    assert route["decision"] != "client_pinned"


def streams_under_a_kill(graph: LocalGraph, expected: dict[int, str]) -> list[list[dict[str, Any]]]:
    """The routes of each stream, one an attempt; decode-1 is killed under whichever of them it has, and comes back."""
    with ThreadPoolExecutor(len(expected)) as pool:
        waiting = {seed: pool.submit(send, graph, ask(seed, 200)) for seed in expected}
        wait_until("a stream on decode-1", lambda: engine(graph, "decode-1")["engine"]["active_blocks"] > 0)
        graph.kill("decode-1")
        answers = {seed: future.result(WAIT_SECONDS) for seed, future in waiting.items()}
    graph.restart("decode-1")
    wait_until("decode-1 again", lambda: get(f"{graph.status_url('decode-1')}/engine/semkv"))
    assert {seed: (it.ok, it.text) for seed, it in answers.items()} == {s: (True, text) for s, text in expected.items()}
    return [
        wait_until("its routes", lambda request_id=answer.request_id: routes(graph, "router-0", request_id))
        for answer in answers.values()
    ]


def test_a_decode_worker_that_dies_has_its_streams_prefilled_again_and_ended_elsewhere(graph: LocalGraph) -> None:
    expected = {seed: send(graph, ask(seed, 200)).text for seed in range(20, 24)}
    for _ in range(3):  # a stream may have ended between being seen and the kill
        found = streams_under_a_kill(graph, expected)
        for attempts in found:
            assert len({route["route_id"] for route in attempts}) == len(attempts)
            # One router never gives a number twice. Two may, where the second attempt comes before they heard of the
            # first (requests/attempts.py).
            numbers = {(route["opened"]["router"], route["attempt"]) for route in attempts}
            assert len(numbers) == len(attempts)
            assert {0} <= {number for _, number in numbers} <= set(range(len(attempts)))
        if max(map(len, found)) > 1:
            break
    else:
        raise AssertionError("no stream was on the worker that was killed")
    graph.wait_ready()


def test_one_of_two_routers_that_dies_costs_nobody_an_answer(graph: LocalGraph) -> None:
    expected = [send(graph, ask(seed, 4)).text for seed in range(10, 14)]
    graph.kill("router-1")
    again = [send(graph, ask(seed, 4)) for seed in range(10, 14)]
    graph.restart("router-1")
    assert [(answer.ok, answer.text) for answer in again] == [(True, text) for text in expected]
    graph.wait_ready()


def test_without_any_router_dynamo_refuses_as_for_a_missing_prefill_tier_and_serves_again_when_one_is_back(
    graph: LocalGraph,
) -> None:
    expected = send(graph, ask(4, 8)).text
    for router in graph.router_names:
        graph.kill(router)
    refused = send(graph, ask(4, 8))
    assert not refused.ok
    for router in graph.router_names:
        graph.restart(router)
    back = wait_until("an answer", lambda: (it := send(graph, ask(4, 8))).ok and it)
    assert back.text == expected
    graph.wait_ready()


def test_a_prefill_worker_that_dies_costs_nobody_an_answer(graph: LocalGraph) -> None:
    expected = {seed: send(graph, ask(seed, 4)).text for seed in (5, 6)}
    graph.kill("worker-1")
    for seed in (5, 6, 5, 6):
        answer = send(graph, ask(seed, 4))
        assert (answer.ok, answer.text) == (True, expected[seed])
