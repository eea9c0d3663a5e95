"""A graph in which nothing goes wrong: what reaches the worker, who served, what listens, and that no process logs an
error."""

from __future__ import annotations

import json
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.router.conftest import OpenGraph
from tests.router.graph.build import Answer, TestGraph, chat_body, http_json
from tests.router.graph.processes import LOOPBACK, Process, listening_sockets, wait_until

pytestmark = pytest.mark.graph


@dataclass
class Healthy:
    graph: TestGraph
    workers: list[Process]
    routers: list[Process]


@pytest.fixture(scope="module")
def healthy(open_graph: OpenGraph) -> Iterator[Healthy]:
    """Two workers of two ranks, two routers behind one name, one frontend."""
    with open_graph() as graph:
        workers = [graph.worker(f"w{n}") for n in range(2)]
        routers = [graph.router(f"r{n}") for n in range(2)]
        graph.frontend(routers=2)
        yield Healthy(graph, workers, routers)


def only_new(records: list[dict[str, Any]], seen: int, count: int = 1) -> list[dict[str, Any]]:
    assert len(records) == seen + count
    return records[seen:]


def test_every_field_reaches_the_worker(healthy: Healthy) -> None:
    graph = healthy.graph
    seen, routed = len(graph.records("workers", "request")), len(graph.records("routers", "request"))
    status, answer = http_json(
        graph.frontend_port,
        "/v1/chat/completions",
        chat_body(
            max_tokens=2,
            temperature=0.5,
            top_p=0.9,
            seed=3,
            frequency_penalty=0.25,
            stop=["w9"],
            nvext={
                "annotations": ["note"],
                "cache_salt": "tenant",
                "agent_hints": {"osl": 40, "priority": 7},
                "extra_fields": ["engine_data"],
            },
            top_k=5,
            ignore_eos=True,
        ),
        {"x-dynamo-meta-team": "blue", "x-dynamo-session-id": "session"},
    )
    assert status == 200, answer
    (received,) = only_new(graph.records("workers", "request"), seen)
    (router,) = only_new(graph.records("routers", "request"), routed)
    sent, got = router["request"], received["request"]
    assert router["metadata"] == {"team": "blue"}
    # Spot checks that the frontend sent what the client asked for; then: what the router got is what the worker got.
    assert sent["token_ids"] == list(range(100))
    assert sent["sampling_options"]["seed"] == 3
    assert sent["stop_conditions"]["ignore_eos"] is True
    assert sent["annotations"] == ["note"]
    assert sent["agent_context"]["session_id"] == "session"
    assert sent["routing"]["cache_salt"] == "tenant"
    assert {key: got.get(key) for key in sent if key not in ("routing", "extra_args")} == {
        key: value for key, value in sent.items() if key not in ("routing", "extra_args")
    }
    assert got["routing"] == {**sent["routing"], "dp_rank": got["routing"]["dp_rank"]}
    assert got["routing"]["dp_rank"] in (0, 1)
    assert got["extra_args"].pop("semkv")["route"].startswith("r"), "what the router adds travels in extra_args"
    assert got["extra_args"] == sent["extra_args"]
    assert set(got) == set(sent), "nothing is added beside them"


def served(graph: TestGraph, seen: int) -> tuple[str, int]:
    """Worker id and rank that really got the request."""
    (received,) = only_new(graph.records("workers", "request"), seen)
    return graph.worker_id(received["worker"]), received["request"]["routing"]["dp_rank"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_client_is_told_who_served(healthy: Healthy, stream: bool) -> None:
    graph = healthy.graph
    routers = {record["id"] for record in graph.records("routers", "ready")}
    seen = len(graph.records("workers", "request"))
    nvext = {"extra_fields": ["worker_id", "timing", "engine_data"]}
    if stream:
        answer: Answer = graph.stream(nvext=nvext)
        first, last = answer.nvext[0], answer.nvext[-1]
    else:
        status, body = graph.chat(nvext=nvext)
        assert status == 200
        first = last = body["nvext"]
    worker, rank = served(graph, seen)
    for told in (first, last):
        assert (told["engine_data"]["semkv"]["worker_id"], told["engine_data"]["semkv"]["dp_rank"]) == (worker, rank)
    # The frontend's own field names the instance it dispatched to. It must not carry a rank: no such replica exists.
    assert str(last["worker_id"]["decode_worker_id"]) in routers
    assert set(last["worker_id"]) == {"decode_worker_id", "prefill_worker_id"}
    assert last["engine_data"]["kv_cache_hit"] == {"prompt_tokens": 100, "reused_tokens": 0}
    assert last["timing"]["kv_hit_rate"] == 0.0, "measured by the inner router, handed through"


def test_pins_hold_and_impossible_pins_go_to_dynamos_choice(healthy: Healthy) -> None:
    graph = healthy.graph
    worker = graph.worker_id("w1")
    pins = {
        f"pin:{worker}:0": None,
        f"pin:{worker}:1": None,
        f"pin:{worker}:7": "invalid_pin",
        "pin:77:0": "invalid_pin",
    }
    for pin, fallback in pins.items():
        seen = len(graph.records("workers", "request"))
        status, _ = graph.chat(nvext={"annotations": [pin]})
        assert status == 200
        dispatch = graph.dispatches()[-1]
        assert (dispatch["pinned"], dispatch["fallback"]) == (fallback is None, fallback)
        replica = served(graph, seen)
        assert dispatch["replica"] == [replica[0], str(replica[1])]
        if fallback is None:
            assert pin == f"pin:{replica[0]}:{replica[1]}"


def test_both_choices_of_an_n2_request_end(healthy: Healthy) -> None:
    status, body = healthy.graph.chat(max_tokens=4, n=2)
    assert status == 200
    choices = [(choice["message"]["content"].split(), choice["finish_reason"]) for choice in body["choices"]]
    assert choices == [([f"w{n}" for n in range(100, 104)], "length")] * 2


def test_what_the_edge_knows_of_the_workers(healthy: Healthy) -> None:
    graph = healthy.graph
    replicas = {f"{graph.worker_id(name)}/{rank}": name for name in ("w0", "w1") for rank in (0, 1)}

    def whole() -> Any:
        """On a busy machine a connection may have failed just now, and that worker is not pinned to for some seconds;
        and what was booked for a request is given back a little after its end."""
        status = graph.query(healthy.routers[0], list(range(100)))
        return status if set(status["live"]) == set(replicas) and not any(map(any, status["loads"].values())) else None

    status = wait_until("both workers to be live and idle", whole)
    assert set(status["overlap"]) == set(status["loads"]) == set(replicas)
    for key, name in replicas.items():
        assert status["live"][key] == [f"stable-{name}", 32, 4096, {"semkv_probe": {"worker": name}}, [], "aggregated"]
    assert status["prompt_blocks"] == 3
    assert f"{status['choice'][0]}/{status['choice'][1]}" in replicas
    exposition = urllib.request.urlopen(
        f"http://{LOOPBACK}:{graph.status_port(healthy.routers[0])}/metrics", timeout=10
    )
    assert "semkv_test_inflight 0" in exposition.read().decode()


def test_a_further_endpoint_of_the_component_answers_without_a_worker(healthy: Healthy) -> None:
    graph = healthy.graph
    seen = len(graph.records("workers", "request"))
    request = json.dumps({"token_ids": list(range(64))})
    caller = graph.graph.python("caller", "-m", "tests.router.graph.call", "test.semkv.advise", request)
    (answer,) = json.loads("[" + caller.wait_log(r'\{"worker_id.*\}').group(0) + "]")
    assert f"{answer['worker_id']}/{answer['dp_rank']}" in graph.query(healthy.routers[0], [1])["live"]
    assert answer["id"]
    assert len(graph.records("workers", "request")) == seen
    wait_until("the caller to end", lambda: not caller.running)


def test_the_hidden_model_is_offered_once_under_its_name(healthy: Healthy) -> None:
    _, models = http_json(healthy.graph.frontend_port, "/v1/models")
    assert [model["id"] for model in models["data"]] == ["m"]


def test_nothing_listens_beyond_loopback(healthy: Healthy) -> None:
    sockets = listening_sockets([process.pid for process in healthy.graph.graph.processes if process.running])
    assert all(sockets.values()), f"a process without a listening socket: {sockets}"
    assert {address.rsplit(":", 1)[0] for found in sockets.values() for address in found} == {LOOPBACK}


def test_traffic_spreads_over_the_routers_and_no_process_logs_an_error(healthy: Healthy) -> None:
    graph = healthy.graph
    routed = len(graph.records("routers", "dispatch"))
    for number in range(30):
        assert graph.chat(start=number, max_tokens=1 + number % 4)[0] == 200
        assert graph.stream(start=number, max_tokens=5).tokens == list(range(100, 105))
    wait_until("every request's end", lambda: len(graph.records("routers", "dispatch")) == routed + 60)
    spread = Counter(record["router"] for record in graph.records("routers", "dispatch")[routed:])
    assert min(spread.values()) >= 20, spread
    assert {record["outcome"] for record in graph.records("routers", "dispatch")} == {"done"}
    # An error that a request leaves behind is logged within milliseconds of its end.
    time.sleep(0.3)
    assert graph.graph.error_lines() == []
