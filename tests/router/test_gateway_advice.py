"""GatewayAdvice: what is no request is said to be none, and what is one gets an answer."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from dynamo_semkv.router import gateway_advice
from dynamo_semkv.router.fallback import FallbackReason
from dynamo_semkv.router.gateway_advice import LARGE, LARGE_AT_ONCE, MAX_TOKENS, GatewayAdvice
from dynamo_semkv.router.runtime_errors import FailureKind, RequestFailed
from tests.router.fakes import FakeRouter, a_call, a_request, donor_on_a1


def gateway_of(fake: FakeRouter, **more: Any) -> GatewayAdvice:
    return GatewayAdvice(
        fake.service,
        fake.advisor,
        fake.edge,
        fake.loaded,
        model="m",
        **more,
    )


@pytest.mark.parametrize("request_", [[1], None, "x", 5])
async def test_what_is_no_mapping_is_an_invalid_request_that_names_the_field(request_: Any) -> None:
    with pytest.raises(RequestFailed, match=r"^request: got .* allowed: a PreprocessedRequest") as caught:
        _ = [chunk async for chunk in gateway_of(FakeRouter()).handle(request_, a_call())]
    assert caught.value.kind is FailureKind.INVALID_REQUEST


@pytest.mark.parametrize("changes", [{"extra_args": "text"}, {"extra_args": [1]}, {"routing": [1]}, {"routing": "x"}])
async def test_fields_of_another_shape_cost_no_advice(changes: dict[str, Any]) -> None:
    fake = FakeRouter(lookup=donor_on_a1())
    (answer,) = [chunk async for chunk in gateway_of(fake).handle(a_request(**changes), a_call())]
    assert answer["decision"] == "placed"
    assert answer["route_id"] in str(answer["hint"])
    assert answer["dynamo"] == {"worker_id": "22", "dp_rank": 1}
    fake.journal.check()


async def test_a_fault_of_ours_is_no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("bug")

    monkeypatch.setattr("dynamo_semkv.router.service.new_route_id", fails)
    fake = FakeRouter(lookup=donor_on_a1())
    answer = await gateway_of(fake).answer_body({"token_ids": list(range(1, 1025))})
    assert (answer["decision"], answer["hint"]) == ("no_advice", None)
    assert fake.fallbacks.counts == {FallbackReason.ADVICE_ERROR: 1}


@pytest.mark.parametrize("bad", [True, -1, 2**31, 2**70, "1", None, 1.0, [1]])
@pytest.mark.parametrize("at", [0, LARGE + 10])
async def test_every_token_is_checked(bad: Any, at: int) -> None:
    tokens: list[Any] = [1] * (LARGE + 20)
    tokens[at] = bad
    answer = await gateway_of(FakeRouter()).answer_body({"token_ids": tokens})
    assert answer == {"error": "token_ids: got 'another value', allowed: integers from 0 to 2147483647 only"}


@pytest.mark.parametrize(
    ("context_length", "limit"), [(None, MAX_TOKENS), (64, 64), (2**30, MAX_TOKENS), (0, MAX_TOKENS)]
)
async def test_a_prompt_is_at_most_what_the_model_takes(context_length: int | None, limit: int) -> None:
    gateway = gateway_of(FakeRouter(), context_length=context_length)
    answer = await gateway.answer_body({"token_ids": [1] * (limit + 1)})
    assert answer["error"] == f"token_ids: got {limit + 1}, allowed: a list of 1 to {limit} token ids"
    for tokens in ([1] * (limit + 1), bytes(4 * (limit + 1))):
        with pytest.raises(RequestFailed, match=f"token_ids: got {limit + 1}") as caught:
            _ = [chunk async for chunk in gateway.handle({"token_ids": tokens}, a_call())]
        assert caught.value.kind is FailureKind.INVALID_REQUEST


async def test_a_large_prompt_is_read_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    read_in: list[bool] = []
    whole = gateway_advice._are_ids

    def noted(tokens: list[Any]) -> bool:
        read_in.append(threading.current_thread() is threading.main_thread())
        return whole(tokens)

    monkeypatch.setattr(gateway_advice, "_are_ids", noted)
    gateway = gateway_of(FakeRouter())
    for count in (LARGE, LARGE + 1):
        assert "decision" in await gateway.answer_body({"token_ids": [1] * count})
    assert read_in == [True, False]


async def test_large_prompts_too_many_at_once_are_told_so_and_small_ones_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived, go_on = asyncio.Semaphore(0), asyncio.Event()
    fake = FakeRouter()
    gateway = gateway_of(fake)
    whole = fake.advisor.advise

    async def held_up(request: Any, request_id: str) -> Any:
        if len(request["token_ids"]) > LARGE:
            arrived.release()
            await go_on.wait()
        return await whole(request, request_id)

    monkeypatch.setattr(fake.advisor, "advise", held_up)
    large = {"token_ids": [1] * (LARGE + 1)}
    held = []
    for _ in range(LARGE_AT_ONCE):
        held.append(asyncio.ensure_future(gateway.answer_body(large)))
        await asyncio.wait_for(arrived.acquire(), 30)
    assert await gateway.answer_body(large) == {"error": "busy"}
    with pytest.raises(RequestFailed, match="busy") as caught:
        _ = [chunk async for chunk in gateway.handle(a_request(LARGE + 1), a_call())]
    assert caught.value.kind is FailureKind.OVERLOADED
    assert "decision" in await gateway.answer_body({"token_ids": [1] * 64})
    go_on.set()
    assert all("decision" in answer for answer in await asyncio.gather(*held))
    assert "decision" in await gateway.answer_body(large), "the slots are free again"


async def test_dynamos_own_choice_is_asked_within_the_request_s_constraints() -> None:
    fake = FakeRouter(lookup=donor_on_a1())
    asked = {"routing_constraints": {"required_taints": ["b", "a"]}}
    (answer,) = [chunk async for chunk in gateway_of(fake).handle(a_request(routing=asked), a_call())]
    assert ("best_choice", ["a", "b"]) in fake.edge.asked
    assert (answer["decision"], answer["replica"]) == ("donor_unreachable", None)


@pytest.mark.parametrize(("allowed", "shown"), [([11], None), ([22, 33], {"worker_id": "22", "dp_rank": 1})])
async def test_a_choice_of_dynamos_outside_the_allowed_workers_is_not_shown(
    allowed: list[int], shown: dict[str, Any] | None
) -> None:
    fake = FakeRouter()
    request = a_request(routing={"allowed_worker_ids": allowed})
    (answer,) = [chunk async for chunk in gateway_of(fake).handle(request, a_call())]
    assert answer["dynamo"] == shown
