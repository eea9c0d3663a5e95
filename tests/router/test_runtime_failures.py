"""One request going wrong: what the client is told, what the worker is told, and that the next request is served."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.router.conftest import OpenGraph
from tests.router.graph.build import TestGraph, chat_body, http_json
from tests.router.graph.processes import LOOPBACK, WAIT_SECONDS, Process, wait_until

pytestmark = pytest.mark.graph


@dataclass
class RunningGraph:
    graph: TestGraph
    workers: list[Process]
    router: Process

    def tell(self, worker: int, route: str, **body: Any) -> None:
        """One of the test worker's engine routes."""
        assert http_json(self.graph.status_port(self.workers[worker]), f"/engine/{route}", body)[0] == 200

    def last(self) -> dict[str, Any]:
        return self.graph.dispatches()[-1]


@pytest.fixture(scope="module")
def up(open_graph: OpenGraph) -> Iterator[RunningGraph]:
    with open_graph() as graph:
        workers = [graph.worker(f"w{n}", "--delay-s", "0.02") for n in range(2)]
        router = graph.router("r0", "--load-thresholds", '{"active_decode_blocks_threshold": 0.5}')
        graph.frontend(routers=1)
        yield RunningGraph(graph, workers, router)


def leave_early(up: RunningGraph, stream: bool, annotations: list[str], received: int) -> None:
    """Send a request and close the connection once a worker has sent `received` chunks of it."""
    seen = len(up.graph.records("workers", "request"))
    body = chat_body(start=5, max_tokens=500, stream=stream, nvext={"annotations": annotations})
    connection = http.client.HTTPConnection(LOOPBACK, up.graph.frontend_port, timeout=WAIT_SECONDS)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    wait_until("the request at a worker", lambda: len(up.graph.records("workers", "request")) > seen)
    if received:
        response = connection.getresponse()
        for _ in range(received):
            assert response.readline()
    connection.close()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_router_and_worker(up: RunningGraph, stream: bool) -> None:
    graph = up.graph
    ended, stopped = len(graph.records("routers", "dispatch")), len(graph.records("workers", "stopped"))
    leave_early(up, stream, [], received=2 if stream else 0)
    wait_until("the router's end of it", lambda: len(graph.records("routers", "dispatch")) > ended)
    wait_until("the worker's end of it", lambda: len(graph.records("workers", "stopped")) > stopped)
    assert (up.last()["outcome"], up.last()["stopped"]) == ("closed", True)
    assert up.last()["chunks"] < 500
    assert graph.records("workers", "stopped")[-1]["sent"] < 500
    wait_until("nothing in flight", lambda: graph.query(up.router, [1])["inflight"] == 0)


def test_a_client_that_leaves_during_a_long_prefill_is_noticed_before_its_end(up: RunningGraph) -> None:
    graph = up.graph
    ended, stopped = len(graph.records("routers", "dispatch")), len(graph.records("workers", "stopped"))
    leave_early(up, True, ["hold:8"], received=0)
    wait_until("the router's end of it", lambda: len(graph.records("routers", "dispatch")) > ended)
    assert len(graph.records("workers", "stopped")) == stopped, "the router waited for the worker's first chunk"
    assert (up.last()["outcome"], up.last()["chunks"]) == ("closed", 0)
    # Dynamo tells the worker with its first chunk; what it holds for the request is given back then.
    wait_until("the worker's end of it", lambda: len(graph.records("workers", "stopped")) > stopped)
    assert graph.records("workers", "stopped")[-1]["sent"] < 10
    wait_until("no load booked", lambda: all(load[2] == 0 for load in graph.query(up.router, [1])["loads"].values()))


@pytest.mark.parametrize("after", [0, 2])
def test_what_a_worker_says_of_a_bad_request_reaches_the_client(up: RunningGraph, after: int) -> None:
    for worker in range(2):
        up.tell(worker, "fail", after=after, kind="invalid")
    seen = len(up.graph.records("workers", "request"))
    status, body = up.graph.chat(max_tokens=4)
    assert (status, body["message"]) == (400, "scripted failure")
    assert up.last()["outcome"] == "invalid_request"
    assert len(up.graph.records("workers", "request")) == seen + 1, "a bad request was tried twice"
    up.tell(0, "fail", after=10**6, kind="invalid")
    up.tell(1, "fail", after=10**6, kind="invalid")
    assert up.graph.chat()[0] == 200


def test_a_pin_to_a_full_worker_goes_elsewhere_and_a_full_pool_is_529(up: RunningGraph) -> None:
    graph = up.graph
    full = graph.worker_id("w0")

    def publish(*blocks: int) -> None:
        """Load of both workers, rank by rank. Told before each try: Dynamo's router overwrites a rank's load with its
        own count when it sends the rank a request, and a worker's publisher keeps only the latest value."""
        for rank in (0, 1):
            for worker, active in enumerate(blocks):
                up.tell(worker, "load", rank=rank, active_decode_blocks=active)
            time.sleep(0.03)

    def pin_refused() -> bool:
        publish(4000, 0)
        status, _ = graph.chat(nvext={"annotations": [f"pin:{full}:0"]})
        assert status == 200
        return bool(up.last()["fallback"])

    def answered(status: int, *blocks: int) -> bool:
        publish(*blocks)
        return graph.chat()[0] == status

    wait_until("the pin to be refused", pin_refused, interval_s=0.05)
    assert up.last()["fallback"] in ("invalid_pin", "overloaded")
    assert up.last()["replica"][0] == graph.worker_id("w1")
    wait_until("the pool to be full", lambda: answered(529, 4000, 4000), interval_s=0.05)
    assert up.last()["outcome"] == "overloaded"
    wait_until("room again", lambda: answered(200, 0, 0), interval_s=0.05)


def test_a_worker_that_shuts_down_in_the_middle_is_continued_elsewhere(up: RunningGraph) -> None:
    graph = up.graph
    up.tell(0, "fail", after=2, kind="shutdown")
    pin = f"pin:{graph.worker_id('w0')}:1"
    answer = graph.stream(max_tokens=8, nvext={"annotations": [pin], "extra_fields": ["engine_data"]})
    assert answer.error is None
    assert answer.tokens == list(range(100, 108)), "the stream was not continued where it was cut"
    first, second = graph.dispatches()[-2:]
    assert first["id"] == second["id"], "a migrated request keeps the frontend's id"
    assert (first["outcome"], first["chunks"], first["pinned"]) == ("worker_lost", 2, True)
    # The pin is still on the request. Dynamo leaves the worker out for some seconds, so mostly it is given up; the
    # worker lives, so it may hold.
    assert (second["outcome"], second["fallback"]) == ("done", None if second["pinned"] else "no_worker")
    live = graph.query(up.router, [1])["live"]
    assert {key.split("/")[0] for key in live} == {graph.worker_id("w1")}, "a lost worker can still be pinned to"
    told = [event["engine_data"]["semkv"]["worker_id"] for event in answer.nvext]
    assert [told[0], told[-1]] == [first["replica"][0], second["replica"][0]]
