"""A graph whose workers are gone, and one whose clients are: a clean answer, and nothing that stays booked."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.router.conftest import OpenGraph
from tests.router.graph.build import TestGraph, chat_body
from tests.router.graph.processes import LOOPBACK, WAIT_SECONDS, Process, wait_until

pytestmark = pytest.mark.graph

STREAMS = 240
THREADS = 6


@dataclass
class Small:
    graph: TestGraph
    router: Process
    worker: Process


@pytest.fixture(scope="module")
def small(open_graph: OpenGraph) -> Iterator[Small]:
    """One worker of two ranks that sends a token every 20 ms, one router, one frontend."""
    with open_graph() as graph:
        worker = graph.worker("w0", "--delay-s", "0.02")
        router = graph.router("r0")
        graph.frontend(routers=1)
        yield Small(graph, router, worker)


def leave_after_the_first_token(port: int, start: int) -> bool:
    """Whether a token came before the client hung up."""
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=WAIT_SECONDS)
    try:
        body = json.dumps(chat_body(start=start, max_tokens=400, stream=True))
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status == 200 and bool(response.fp.readline())
    finally:
        connection.close()


def booked(small: Small) -> dict[str, Any]:
    """Requests that Dynamo's bookings or our own count still hold."""
    answer = small.graph.query(small.router, [1, 2, 3])
    active = {rank: load[2] for rank, load in answer["loads"].items() if load[2]}
    return {**active, **({"inflight": answer["inflight"]} if answer["inflight"] else {})}


def test_hundreds_of_clients_that_leave_leave_nothing_booked(small: Small) -> None:
    came: list[bool] = []

    def run(number: int) -> None:
        for at in range(STREAMS // THREADS):
            came.append(leave_after_the_first_token(small.graph.frontend_port, number * 300 + at))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert len(came) == STREAMS
    assert all(came)
    wait_until("nothing is booked", lambda: not booked(small))
    wait_until("the worker's end of each", lambda: len(small.graph.records("workers", "end")) == STREAMS)
    assert len({record["context"] for record in small.graph.records("workers", "end")}) == STREAMS
    status, _ = small.graph.chat()
    assert status == 200


def test_zero_workers_is_a_clean_error_and_a_worker_that_comes_is_used(small: Small) -> None:
    """Last: it ends the worker."""
    graph = small.graph
    small.worker.kill()
    status, body = graph.chat()
    assert 500 <= status < 600, body
    said = body["error"] if isinstance(body.get("error"), dict) else body
    assert isinstance(said["message"], str)
    assert said["message"]
    assert "Traceback" not in json.dumps(body)
    streamed = graph.stream()
    assert streamed.tokens == []
    assert streamed.error is not None
    assert small.router.running
    wait_until("nothing is booked", lambda: not booked(small))
    graph.worker("w1")
    wait_until("the new worker serves", lambda: graph.chat()[0] == 200, interval_s=0.2)
