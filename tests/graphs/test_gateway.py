"""A gateway that dispatches by itself: it asks for advice, sends to Dynamo's frontend in direct mode, and the outcome
is joined."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graphs.local.graph import LocalGraph
from graphs.local.settings import LOW_GATE, GraphSettings
from tests.graphs.traffic import PATIENT, forget_device, get, post, wait_until

pytestmark = [pytest.mark.graph, pytest.mark.slow]

BLOCK = 32
PROMPT = [7 + (n * n) % 400 for n in range(8 * BLOCK + 5)]


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[LocalGraph]:
    settings = GraphSettings(
        model="tiny",
        threads=1,
        direct=True,
        blocks_per_rank=160,
        overrides={**LOW_GATE, **PATIENT, "outcome": {"report_ttl_seconds": 30.0}},
    )
    with LocalGraph(settings, run_dir=tmp_path_factory.mktemp("gateway"), model_dir=model_dir) as started:
        yield started


def advise(graph: LocalGraph, tokens: list[int], **more: Any) -> dict[str, Any]:
    return post(f"{graph.status_url('router-0')}/engine/semkv/advise", {"token_ids": tokens, **more})


def advise_on_donor(graph: LocalGraph, tokens: list[int]) -> dict[str, Any]:
    """Advice, once the donor is known."""

    def advised() -> dict[str, Any] | None:
        answer = advise(graph, tokens)
        return answer if answer["replica"] is not None else None

    return dict(wait_until("the donor is known", advised))


def dispatch(graph: LocalGraph, tokens: list[int], where: dict[str, Any]) -> dict[str, Any]:
    """As a gateway does: to the frontend, with worker and rank in the headers."""
    body = {"model": graph.settings.served_model, "prompt": tokens, "max_tokens": 4, "temperature": 0.0}
    headers = {"x-dynamo-worker-instance-id": where["worker_id"], "x-dynamo-dp-rank": str(where["dp_rank"])}
    return post(f"{graph.frontend_url}/v1/completions", body, **headers)


def route(graph: LocalGraph, route_id: str) -> dict[str, Any]:
    return dict(wait_until(f"route {route_id}", lambda: get(f"{graph.page_url()}/api/routes/{route_id}")))


def test_what_it_was_advised_and_dispatched_by_itself_is_joined_with_the_workers_report(graph: LocalGraph) -> None:
    cold = advise(graph, PROMPT)
    assert (cold["replica"], cold["hint"], cold["decision"]) == (None, None, "no_evidence")
    first = dispatch(graph, PROMPT, cold["dynamo"])
    unplaced = route(graph, cold["route_id"])  # nobody told who served it: the report of this prompt is its own
    assert (unplaced["outcome"], unplaced["reason"], unplaced["joined_by"]) == (
        "no_donor",
        "not_resident",
        "prompt_key",
    )
    forget_device(graph)
    warm = advise_on_donor(graph, PROMPT)
    assert warm["replica"]["worker_id"] == cold["dynamo"]["worker_id"]
    assert warm["replica"]["dp_rank"] == cold["dynamo"]["dp_rank"]
    assert warm["hint"]["actions"][0]["action_type"] == "semkv.donor"
    again = dispatch(graph, PROMPT, warm["replica"])
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    closed = route(graph, warm["route_id"])
    assert (closed["outcome"], closed["joined_by"]) == ("materialized_exact", "route_id")
    assert closed["report"]["confirmed"] == 8 * BLOCK
    assert closed["observed"]["end"] == "advised"
    assert closed["served_by"] == f"{warm['replica']['stable_routing_id']}/{warm['replica']['dp_rank']}"


def test_another_tenant_is_advised_nothing(graph: LocalGraph) -> None:
    answer = advise(graph, PROMPT, cache_salt="tenant-x")
    assert (answer["replica"], answer["evidence_tokens"]) == (None, 0)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ([], "body"),
        ({}, "token_ids"),
        ({"token_ids": "1 2 3"}, "token_ids"),
        ({"token_ids": [1, -2]}, "token_ids"),
        ({"token_ids": [1, True]}, "token_ids"),
        ({"token_ids": [1], "prompt": "x"}, "prompt"),
        ({"token_ids": [1], "cache_salt": 5}, "cache_salt"),
    ],
)
def test_what_is_no_question_is_told_which_field(graph: LocalGraph, body: Any, says: str) -> None:
    answer = post(f"{graph.status_url('router-0')}/engine/semkv/advise", body)
    assert set(answer) == {"error"}
    assert says in answer["error"]


def test_no_model_of_the_router_is_listed_and_nothing_went_wrong(graph: LocalGraph) -> None:
    listed = get(f"{graph.frontend_url}/v1/models")["data"]
    assert [model["id"] for model in listed] == [graph.settings.served_model]
    assert [line for line in graph.trouble() if "router-0" in line] == []
