"""What a prefill worker hands over, and what a decode worker makes of it: pure functions over scripted chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest

from worker_connector.reference_engine.dynamo_worker.handoff import (
    Handoff,
    context_only,
    continued,
    from_first_token,
    handed_over,
    handoff_of,
)
from worker_connector.reference_engine.dynamo_worker.request import BadRequest, Submission
from worker_connector.reference_engine.models.sampling import SamplingParams

STOPS = frozenset({9})


def asked(**changes: Any) -> Submission:
    base: dict[str, Any] = {
        "token_ids": [1, 2, 3],
        "max_new_tokens": 4,
        "sampling": SamplingParams(),
        "stop_token_ids": STOPS,
        "min_tokens": 0,
        "dp_rank": None,
        "cache_salt": None,
    }
    return Submission(**{**base, **changes})


async def script(*chunks: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    for chunk in chunks:
        yield chunk


def read(stream: AsyncIterator[dict[str, Any]]) -> list[dict[str, Any]]:
    async def all_of_it() -> list[dict[str, Any]]:
        return [chunk async for chunk in stream]

    return asyncio.run(all_of_it())


def usage(completion: int, cached: int = 2) -> dict[str, Any]:
    return {
        "prompt_tokens": 3,
        "completion_tokens": completion,
        "total_tokens": 3 + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def test_a_prefill_is_the_prompt_and_one_token_even_if_that_is_a_stop() -> None:
    only = context_only(asked(min_tokens=2))
    assert (only.max_new_tokens, only.stop_token_ids, only.min_tokens) == (1, frozenset(), 0)
    told = read(handed_over(script({"token_ids": [9]}, {"token_ids": [], "finish_reason": "length"}), 3))
    assert told[0]["disaggregated_params"] == {"first_token": 9, "prompt_tokens": 3}
    assert "disaggregated_params" not in told[1]


def test_a_failed_prefill_hands_nothing_over() -> None:
    failed = {"finish_reason": {"error": "no"}}
    assert read(handed_over(script(failed), 3)) == [failed]


@pytest.mark.parametrize(
    ("result", "names"),
    [
        ({}, "disaggregated_params"),
        ("x", "disaggregated_params"),
        ({"disaggregated_params": "dummy"}, "disaggregated_params"),
        ({"disaggregated_params": {"first_token": True, "prompt_tokens": 3}}, "first_token"),
        ({"disaggregated_params": {"first_token": -1, "prompt_tokens": 3}}, "first_token"),
        ({"disaggregated_params": {"first_token": 5, "prompt_tokens": 4}}, "prompt_tokens: got 4"),
    ],
)
def test_another_hand_over_is_refused_by_name(result: Any, names: str) -> None:
    with pytest.raises(BadRequest, match=names):
        handoff_of({"prefill_result": result}, 3)


def test_a_request_that_was_not_prefilled_is_all_of_it_done_here() -> None:
    assert handoff_of({}, 3) is None
    assert handoff_of({"prefill_result": None}, 3) is None


def test_decoding_goes_on_behind_the_first_token_and_counts_the_whole_request() -> None:
    params = {"first_token": 5, "prompt_tokens": 3}
    details = {"cached_tokens": 2}
    handoff = handoff_of({"prefill_result": {"disaggregated_params": params, "prompt_tokens_details": details}}, 3)
    assert handoff == Handoff(5, 3, 2)
    rest = continued(asked(min_tokens=3), handoff)
    assert rest is not None
    assert (rest.token_ids, rest.max_new_tokens, rest.min_tokens) == ([1, 2, 3, 5], 3, 2)
    last = {"token_ids": [7], "finish_reason": "length", "completion_usage": {"completion_tokens": 3}}
    told = read(from_first_token(script({"token_ids": [6]}, last), asked(), handoff))
    assert [token for chunk in told for token in chunk["token_ids"]] == [5, 6, 7]
    assert told[-1]["completion_usage"] == usage(4)


@pytest.mark.parametrize(
    ("changes", "first", "reason"),
    [({"max_new_tokens": 1}, 5, "length"), ({}, 9, "stop"), ({"min_tokens": 1}, 9, "stop")],
)
def test_a_first_token_that_is_the_last_needs_no_engine(changes: dict[str, Any], first: int, reason: str) -> None:
    handoff = Handoff(first, 3, 2)
    assert continued(asked(**changes), handoff) is None
    (only,) = read(from_first_token(None, asked(**changes), handoff))
    assert only == {"token_ids": [first], "finish_reason": reason, "completion_usage": usage(1)}


def test_a_stop_before_the_minimum_does_not_end_it() -> None:
    assert continued(asked(min_tokens=2), Handoff(9, 3, 0)) is not None
