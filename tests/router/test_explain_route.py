"""A route is explained at Dynamo's status server too, for routers without a page; whoever asks shows the token, or is
on this machine."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from dynamo_semkv.config.schema import SecurityConfig
from dynamo_semkv.observe.snapshot import explain, explain_request
from dynamo_semkv.outcome.closed import ClosedRoute
from dynamo_semkv.outcome.history import History
from dynamo_semkv.router.explain_route import MOST, ExplainRoute
from dynamo_semkv.router.guarded_route import GuardedRoute
from tests.observe.fake_state import NOW, fake_route


@pytest.fixture
def routes() -> list[ClosedRoute]:
    rng = random.Random(5)
    return [fake_route(number, NOW, rng) for number in range(1, 6)]


@pytest.fixture
def asked(routes: list[ClosedRoute]) -> ExplainRoute:
    history = History(100)
    for route in routes:
        history.add(route)
    return ExplainRoute(history)


async def test_route_request_and_the_last_ones_are_explained_as_the_page_does(
    asked: ExplainRoute, routes: list[ClosedRoute]
) -> None:
    first = routes[0]
    expected = {"routes": [explain(first)]}
    assert await asked.answer({"route_id": first.route_id}) == expected
    by_request = {"routes": explain_request(asked._history, first.route_id)}
    assert [route["route_id"] for route in by_request["routes"]] == [first.route_id]
    assert await asked.answer({"request_id": first.route_id}) == by_request
    assert first.opened.request_id is not None
    assert await asked.answer({"request_id": f"chatcmpl-{first.opened.request_id}"}) == by_request
    last = await asked.answer({"last": 2})
    assert [route["route_id"] for route in last["routes"]] == [routes[-1].route_id, routes[-2].route_id]
    assert json.loads(json.dumps(last, allow_nan=False)) == last


async def test_what_is_not_known_is_an_empty_list(asked: ExplainRoute) -> None:
    assert await asked.answer({"route_id": "0" * 32}) == {"routes": []}
    assert await asked.answer({"request_id": "nobody's"}) == {"routes": []}


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        "x",
        {},
        {"route_id": "short"},
        {"route_id": 5},
        {"request_id": None},
        {"last": 0},
        {"last": MOST + 1},
        {"last": True},
        {"last": "3"},
        {"prompt": "x"},
        {"route_id": "0" * 32, "last": 1},
    ],
    ids=str,
)
async def test_a_question_that_is_none_is_answered_with_what_is_allowed(asked: ExplainRoute, body: Any) -> None:
    said = await asked.answer(body)
    assert set(said) == {"error"}
    assert "allowed" in said["error"]


async def test_beyond_this_machine_it_wants_the_token(asked: ExplainRoute) -> None:
    elsewhere = GuardedRoute(asked.answer, SecurityConfig(), {"DYN_SYSTEM_HOST": "0.0.0.0"}, "explain")
    assert "security.advise_token_file" in (await elsewhere.answer({"last": 1}))["error"]
    here = GuardedRoute(asked.answer, SecurityConfig(), {"DYN_SYSTEM_HOST": "127.0.0.1"}, "explain")
    assert len((await here.answer({"last": 1}))["routes"]) == 1
