"""What Dynamo itself does with taints and roles, over real processes: what our filters and refusals rest on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.router.conftest import OpenGraph
from tests.router.graph.build import TestGraph, http_json
from tests.router.graph.processes import Process, wait_until

pytestmark = pytest.mark.graph


@dataclass
class Tainted:
    graph: TestGraph
    router: Process
    plain: str
    """Worker without taints."""
    fast: str
    """Worker with `capacity/fast`."""


@pytest.fixture(scope="module")
def tainted(open_graph: OpenGraph) -> Iterator[Tainted]:
    with open_graph() as graph:
        workers = {name: graph.worker(name, "--ranks", "1") for name in ("plain", "fast")}
        router = graph.router("r0")
        graph.frontend(routers=1)
        made = Tainted(graph, router, graph.worker_id("plain"), graph.worker_id("fast"))
        # The router is up with the first card; the other one may come later.
        wait_until("both cards", lambda: live(made).keys() == {made.plain, made.fast})
        status = graph.status_port(workers["fast"])
        assert http_json(status, "/engine/update/model_taints", {"taints": ["capacity/fast"]})[0] == 200
        wait_until("the taint on the card that the router reads", lambda: live(made)[made.fast] == ["capacity/fast"])
        yield made


def live(made: Tainted) -> dict[str, list[str]]:
    found = made.graph.query(made.router, [1, 2, 3])["live"]
    return {key.split("/")[0]: card[4] for key, card in found.items()}


def ask(made: Tainted, pin: str | None, constraints: dict[str, Any], start: int) -> dict[str, Any]:
    """What the router's dispatch told of one request."""
    seen = len(made.graph.records("routers", "dispatch"))
    nvext: dict[str, Any] = {"routing_constraints": constraints}
    if pin is not None:
        nvext["annotations"] = [f"pin:{pin}:0"]
    status, answer = made.graph.chat(start=start, max_tokens=2, nvext=nvext)
    (told,) = wait_until("its record", lambda: made.graph.records("routers", "dispatch")[seen:])
    return {"status": status, "answer": answer, **told}


def test_a_taint_that_changes_while_the_worker_runs_is_on_the_router_s_card(tainted: Tainted) -> None:
    assert live(tainted) == {tainted.plain: [], tainted.fast: ["capacity/fast"]}
    roles = {card[5] for card in tainted.graph.query(tainted.router, [1])["live"].values()}
    assert roles == {"aggregated"}


def test_dynamo_holds_to_required_taints_without_a_pin(tainted: Tainted) -> None:
    for start in (0, 200, 400, 600):
        told = ask(tainted, None, {"required_taints": ["capacity/fast"]}, start)
        assert (told["status"], told["replica"]) == (200, [tainted.fast, "0"])


def test_a_pin_within_the_constraints_holds(tainted: Tainted) -> None:
    told = ask(tainted, tainted.fast, {"required_taints": ["capacity/fast"]}, 800)
    assert (told["status"], told["replica"], told["pinned"], told["fallback"]) == (200, [tainted.fast, "0"], True, None)


def test_a_pin_outside_the_constraints_serves_nobody_there(tainted: Tainted) -> None:
    told = ask(tainted, tainted.plain, {"required_taints": ["capacity/fast"]}, 1000)
    assert (told["status"], told["replica"], told["pinned"]) == (200, [tainted.fast, "0"], False)
    assert told["fallback"] is not None
