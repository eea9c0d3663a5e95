"""One request through a scripted KvRouter: pins, the way back from a pin, failures before and after the first chunk,
who served."""

from __future__ import annotations

import copy
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest
from dynamo.common.utils.token_ids import token_ids_to_list

from dynamo_semkv.contracts.identity import ReplicaKey
from dynamo_semkv.contracts.keys import as_tokens
from dynamo_semkv.router.runtime_dispatch import (
    HANDED_OVER,
    RequestDispatch,
    pinned_request,
    take_replica,
)
from dynamo_semkv.router.runtime_errors import FailureKind, RequestFailed
from dynamo_semkv.router.runtime_types import Chunk, Request
from tests.router.iterated import iterated

PIN = ReplicaKey(2**63 + 5, 1)
OTHER = ReplicaKey(11, 0)
REQUEST: Request = {"token_ids": [1], "routing": {"cache_salt": "t", "dp_rank": 0}, "extra_args": {"semkv": "hint"}}


def served_by(replica: ReplicaKey) -> dict[str, Any]:
    worker, rank = replica
    return {
        "worker_id": {
            "prefill_worker_id": worker,
            "prefill_dp_rank": rank,
            "decode_worker_id": worker,
            "decode_dp_rank": rank,
        }
    }


def answer(replica: ReplicaKey, count: int = 3, finish: str = "length") -> list[Chunk]:
    chunks: list[Chunk] = [{"token_ids": [n], "finish_reason": None} for n in range(count)]
    chunks[0]["routing_data"] = served_by(replica)
    chunks[-1].update(
        finish_reason=finish,
        engine_data={"kv_cache_hit": {"reused_tokens": 64}},
        completion_usage={"prompt_tokens": 9},
    )
    chunks[-1].setdefault("routing_data", {})["timing"] = {"ttft_ms": 1.0}
    return chunks


class Router:
    """KvRouter as a script: one entry per call, an exception to refuse it, or what its stream does."""

    def __init__(self, *script: Exception | list[Chunk | Exception]) -> None:
        self.script = list(script)
        self.requests: list[Request] = []
        self.lost_workers: list[int] = []

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        self.requests.append(copy.deepcopy(request))
        step = self.script.pop(0)
        if isinstance(step, Exception):
            raise step
        return self.stream(step)

    @staticmethod
    async def stream(step: list[Chunk | Exception]) -> AsyncIterator[Chunk]:
        for item in step:
            if isinstance(item, Exception):
                raise item
            yield copy.deepcopy(item)

    def lost(self, worker_id: int) -> None:
        self.lost_workers.append(worker_id)

    def dispatch(self, pin: ReplicaKey | None = None, **more: Any) -> RequestDispatch:
        request = more.pop("request", REQUEST)
        return RequestDispatch(
            self.generate,
            request,
            pin,
            unpinned=more.pop("unpinned", None),
            annotate=more.pop("annotate", None),
            tokens=more.pop("tokens", None),
            losses=self,
        )


async def collect(dispatch: RequestDispatch) -> list[Chunk]:
    return [chunk async for chunk in iterated(dispatch)]


async def failure(dispatch: RequestDispatch) -> tuple[list[Chunk], RequestFailed]:
    chunks: list[Chunk] = []
    try:
        async for chunk in iterated(dispatch):
            chunks.append(chunk)
    except RequestFailed as failed:
        return chunks, failed
    pytest.fail(f"no failure after {chunks}")


def test_a_pin_is_worker_and_rank_and_the_request_is_left_alone() -> None:
    before = copy.deepcopy(REQUEST)
    pinned = pinned_request(REQUEST, PIN)
    assert pinned["routing"] == {"cache_salt": "t", "backend_instance_id": PIN.worker_id, "dp_rank": 1}
    assert before == REQUEST
    assert pinned_request({"token_ids": []}, PIN)["routing"] == {"backend_instance_id": PIN.worker_id, "dp_rank": 1}


async def test_the_pin_holds() -> None:
    router = Router(answer(PIN))
    dispatch = router.dispatch(PIN, annotate={"route_id": "r"})
    chunks = await collect(dispatch)

    assert router.requests == [pinned_request(REQUEST, PIN)]
    assert (dispatch.replica, dispatch.pinned, dispatch.fallback) == (PIN, True, None)
    assert (dispatch.chunks, dispatch.finish_reason) == (3, "length")
    assert dispatch.engine_data == {"kv_cache_hit": {"reused_tokens": 64}}
    assert (dispatch.usage, dispatch.timing) == ({"prompt_tokens": 9}, {"ttft_ms": 1.0})
    told = {"worker_id": str(PIN.worker_id), "dp_rank": 1, "route_id": "r"}
    assert [chunk.get("engine_data", {}).get("semkv") for chunk in chunks] == [told, None, told]
    assert chunks[-1]["engine_data"]["kv_cache_hit"] == {"reused_tokens": 64}
    # The frontend would log an ERROR for a worker id that is not the router's own.
    assert "routing_data" not in chunks[0]
    assert chunks[-1]["routing_data"] == {"timing": {"ttft_ms": 1.0}}


async def test_token_ids_travel_packed_with_a_pin_and_without() -> None:
    ids = [7, 0, 2**31 - 1]
    router = Router(Exception("something new"), answer(OTHER))
    await collect(router.dispatch(PIN, request={**REQUEST, "token_ids": ids}, tokens=as_tokens(ids)))
    packed = struct.pack("<3i", *ids)
    # Given up, the pin leaves the request that was not meant for it.
    assert [request["token_ids"] for request in router.requests] == [packed, packed]
    assert token_ids_to_list(packed) == ids


@pytest.mark.parametrize("ids", [[], [1, 2**31]])
async def test_what_does_not_fit_the_packed_form_travels_as_it_is(ids: list[int]) -> None:
    router = Router(answer(OTHER))
    await collect(router.dispatch(request={**REQUEST, "token_ids": ids}, tokens=as_tokens(ids)))
    assert router.requests[0]["token_ids"] == ids


async def test_one_chunk_is_first_and_last() -> None:
    dispatch = Router(answer(OTHER, count=1)).dispatch()
    (chunk,) = await collect(dispatch)
    assert dispatch.replica == OTHER
    assert chunk["engine_data"]["semkv"]["worker_id"] == "11"
    assert chunk["routing_data"] == {"timing": {"ttft_ms": 1.0}}
    assert dispatch.engine_data == {"kv_cache_hit": {"reused_tokens": 64}}


async def test_an_empty_stream_is_an_empty_answer() -> None:
    dispatch = Router([]).dispatch(PIN)
    assert await collect(dispatch) == []
    assert dispatch.replica is None


@pytest.mark.parametrize(
    ("refusal", "reason", "suspect"),
    [
        (
            Exception("InvalidRequest: nvext.backend_instance_id=7 does not identify a known worker"),
            "invalid_pin",
            False,
        ),
        (Exception("Pinned worker 7 dp_rank 9 is not eligible: outside [0, 2)"), "invalid_pin", False),
        (Exception("CapacityExhausted: pinned worker 7 is overloaded"), "invalid_pin", False),
        (Exception("no endpoints available to route work"), "no_worker", True),
        (Exception("Unavailable: TCP connection to 127.0.0.1:1 failed"), "worker_lost", True),
        (Exception("something new"), "unknown", False),
    ],
)
async def test_a_refused_pin_goes_to_dynamos_choice(refusal: Exception, reason: str, suspect: bool) -> None:
    router = Router(refusal, answer(OTHER))
    plain = {**REQUEST, "extra_args": {}}
    dispatch = router.dispatch(PIN, unpinned=plain)
    assert len(await collect(dispatch)) == 3
    assert router.requests == [pinned_request(REQUEST, PIN), plain], "the hint for the pinned replica went elsewhere"
    assert (dispatch.replica, dispatch.pinned, dispatch.fallback) == (OTHER, False, reason)
    assert router.lost_workers == ([PIN.worker_id] if suspect else [])


async def test_a_pinned_worker_that_dies_before_its_first_chunk_costs_the_pin_only() -> None:
    router = Router([ValueError("Unavailable: Stream ended before generation completed")], answer(OTHER))
    dispatch = router.dispatch(PIN)
    assert len(await collect(dispatch)) == 3
    assert (dispatch.fallback, dispatch.replica) == ("worker_lost", OTHER)


async def test_the_way_back_is_taken_once() -> None:
    router = Router(
        Exception("no endpoints available to route work"), Exception("no endpoints available to route work")
    )
    chunks, failed = await failure(router.dispatch(PIN))
    assert chunks == []
    assert failed.kind is FailureKind.NO_WORKER
    assert len(router.requests) == 2


async def test_the_workers_verdict_on_the_request_stands() -> None:
    router = Router([ValueError("InvalidRequest: prompt too long")])
    chunks, failed = await failure(router.dispatch(PIN))
    assert chunks == []
    assert (failed.kind, str(failed)) == (FailureKind.INVALID_REQUEST, "prompt too long")
    assert len(router.requests) == 1


async def test_nothing_is_repeated_once_a_chunk_was_sent() -> None:
    router = Router([*answer(PIN)[:2], ValueError("Unavailable: Stream ended before generation completed")])
    dispatch = router.dispatch(PIN)
    chunks, failed = await failure(dispatch)
    assert len(chunks) == 2
    assert failed.kind is FailureKind.WORKER_LOST
    assert len(router.requests) == 1
    assert router.lost_workers == [PIN.worker_id]
    assert dispatch.finish_reason is None


async def test_a_failure_after_a_complete_answer_is_not_the_clients() -> None:
    router = Router([*answer(OTHER), ValueError("Unavailable: engine shutting down")])
    dispatch = router.dispatch()
    assert len(await collect(dispatch)) == 3
    assert router.lost_workers == []


async def test_an_answer_of_two_choices_is_complete_with_the_second() -> None:
    first, second = answer(OTHER), answer(OTHER)
    lost = ValueError("Unavailable: engine shutting down")
    request = {**REQUEST, "sampling_options": {"n": 2}}
    _, failed = await failure(Router([*first, lost]).dispatch(request=request))
    assert failed.kind is FailureKind.WORKER_LOST
    assert len(await collect(Router([*first, *second, lost]).dispatch(request=request))) == 6


async def test_a_cancelled_finish_is_no_complete_answer() -> None:
    lost = ValueError("Unavailable: engine shutting down")
    _, failed = await failure(Router([*answer(OTHER, finish="cancelled"), lost]).dispatch())
    assert failed.kind is FailureKind.WORKER_LOST


@pytest.mark.parametrize(
    "chunk",
    [
        {},
        {"routing_data": None},
        {"routing_data": {"worker_id": "text"}},
        {"routing_data": {"worker_id": {"decode_worker_id": 7}}},
        {"routing_data": {"worker_id": {"decode_worker_id": "7", "decode_dp_rank": 1}}},
        {"routing_data": {"worker_id": {"decode_worker_id": 7, "prefill_dp_rank": 1}}},
    ],
)
def test_half_an_attribution_names_no_replica(chunk: Chunk) -> None:
    assert take_replica(chunk) is None
    assert not isinstance(chunk.get("routing_data"), dict) or "worker_id" not in chunk["routing_data"]


def test_prefill_is_named_where_there_is_no_decode() -> None:
    chunk: Chunk = {"routing_data": {"worker_id": {"prefill_worker_id": 3, "prefill_dp_rank": 0}}}
    assert take_replica(chunk) == ReplicaKey(3, 0)


async def test_engine_data_that_is_no_object_is_left_as_the_worker_sent_it() -> None:
    chunks = answer(OTHER)
    chunks[-1]["engine_data"] = [1, 2]
    dispatch = Router(chunks).dispatch()
    assert (await collect(dispatch))[-1]["engine_data"] == [1, 2]
    assert dispatch.engine_data is None


@pytest.mark.parametrize("ends_with", [None, "length"])
async def test_a_prefill_that_handed_its_kv_over_is_complete_and_passes_as_it_is(ends_with: str | None) -> None:
    params = {"opaque": "the engine's"}
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}
    only: Chunk = {"token_ids": [1], "disaggregated_params": params, "completion_usage": usage}
    only["routing_data"] = served_by(OTHER)
    more: list[Chunk] = [{"token_ids": [], "finish_reason": ends_with}] if ends_with else []
    router = Router([only, *more])
    dispatch = router.dispatch()
    seen = [chunk async for chunk in iterated(dispatch)]
    assert seen[0]["disaggregated_params"] == params
    assert (dispatch.finish_reason, dispatch.usage, dispatch.replica) == (ends_with or HANDED_OVER, usage, OTHER)


async def test_what_fails_behind_the_hand_over_changes_nothing_for_the_client() -> None:
    router = Router([{"token_ids": [1], "disaggregated_params": "x"}, Exception("Unavailable: stream ended")])
    assert len([chunk async for chunk in iterated(router.dispatch())]) == 1
