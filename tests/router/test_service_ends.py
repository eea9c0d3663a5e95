"""How a stream ends: whatever the end, an opened route is recorded once, and nothing stays open."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from dynamo_semkv.router.runtime_errors import ClientGone, FailureKind, RequestFailed
from tests.router.fakes import (
    FakeEdge,
    FakeRouter,
    a_call,
    a_request,
    chunks,
    donor_on_a1,
    never,
)

LOST = RequestFailed(FailureKind.WORKER_LOST, "gone")


@pytest.mark.parametrize(
    ("failure", "before", "after"),
    [
        (LOST, "worker_lost", "worker_lost"),
        (RequestFailed(FailureKind.NO_WORKER, "none"), "no_worker", "worker_lost"),
        (RequestFailed(FailureKind.CANCELLED, "stop"), "cancelled", "cancelled"),
        (RequestFailed(FailureKind.INVALID_REQUEST, "bad"), "error", "error"),
        (RequestFailed(FailureKind.OVERLOADED, "full"), "error", "error"),
        (ValueError("a bug of the edge"), "error", "error"),
    ],
    ids=str,
)
@pytest.mark.parametrize("sent", [0, 2])
async def test_a_failing_stream_is_recorded_once_and_its_failure_is_passed_on(
    failure: Exception, before: str, after: str, sent: int
) -> None:
    """`before`: how it ends before its first chunk, `after`: behind one."""
    end = after if sent else before
    fake = FakeRouter(edge=FakeEdge(script=[*chunks(3)[:sent], failure]), lookup=donor_on_a1())
    got: list[Any] = []

    async def consume() -> None:
        async for chunk in fake.service.handle(a_request(), a_call()):
            got.append(chunk)

    with pytest.raises(type(failure), match=str(failure)):
        await consume()
    assert len(got) == sent
    fake.journal.check()
    assert fake.ended.end == end
    assert (fake.ended.ttft_seconds is None) == (sent == 0)
    assert fake.ended.output_tokens == sent


@pytest.mark.parametrize(
    ("last", "stopped", "end"),
    [
        ({"finish_reason": "stop"}, False, "complete"),
        ({"finish_reason": "cancelled"}, False, "cancelled"),
        ({"finish_reason": "error"}, False, "error"),
        ({}, True, "cancelled"),
        ({}, False, "error"),
    ],
)
async def test_a_stream_that_just_ends_is_complete_only_with_a_finish_reason(
    last: dict[str, Any], stopped: bool, end: str
) -> None:
    fake = FakeRouter(edge=FakeEdge(script=[{"token_ids": [1]}, {"token_ids": [2], **last}]))
    _ = [chunk async for chunk in fake.service.handle(a_request(), a_call(stopped=stopped))]
    assert fake.ended.end == end


async def test_a_refusal_that_comes_as_a_chunk_is_no_first_token() -> None:
    """dynamo.trtllm tells of a refused request in a chunk with an error and no tokens, not with an exception."""
    fake = FakeRouter(edge=FakeEdge(script=[{"finish_reason": "error", "token_ids": []}]), lookup=donor_on_a1())
    assert [chunk async for chunk in fake.service.handle(a_request(), a_call())]
    assert (fake.ended.end, fake.ended.ttft_seconds, fake.ended.output_tokens) == ("error", None, 0)
    assert fake.ended.served_stable_routing_id == "w-a"


async def test_a_pinned_worker_that_was_lost_may_have_run_what_then_no_worker_takes() -> None:
    edge = FakeEdge(script=[RequestFailed(FailureKind.NO_WORKER, "none")], refuse="worker_lost")
    fake = FakeRouter(edge=edge, lookup=donor_on_a1())
    with pytest.raises(RequestFailed):
        await fake.run()
    assert fake.ended.end == "worker_lost"


async def test_dynamo_12315_a_client_that_leaves_mid_stream_ends_its_route_once() -> None:
    fake = FakeRouter(lookup=donor_on_a1())
    stream = fake.service.handle(a_request(), a_call())
    assert await stream.__anext__()
    await stream.aclose()
    fake.journal.check()
    assert fake.ended.end == "cancelled"
    assert fake.ended.served_stable_routing_id == "w-a"
    assert fake.records.open_routes == 0
    assert fake.dispatch.closed


@pytest.mark.parametrize("stage", ["overlap", "loads", "lookup", "first_chunk", "next_chunk"])
async def test_dynamo_12315_cancelled_at_each_await_nothing_stays_open(stage: str) -> None:
    entered = asyncio.Event()

    async def gate(at: str) -> None:
        if at == stage:
            entered.set()
            await never(at)

    lookup = donor_on_a1()
    lookup.gate = gate
    fake = FakeRouter(edge=FakeEdge(gate=gate), lookup=lookup)
    task = asyncio.ensure_future(fake.run())
    await asyncio.wait_for(entered.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    fake.journal.check()
    assert fake.records.open_routes == 0
    assert all(d.closed for d in fake.edge.dispatched)
    if stage in ("first_chunk", "next_chunk"):
        assert fake.ended.end == "cancelled"
    else:
        assert fake.journal.opens == []


async def test_dynamo_12315_cancelled_after_any_number_of_steps_nothing_stays_open() -> None:
    async def gate(at: str) -> None:
        await asyncio.sleep(0)

    ends = set()
    for steps in range(60):
        lookup = donor_on_a1()
        lookup.gate = gate
        fake = FakeRouter(
            {"evidence": {"deadline_ms": 1000, "exact_deadline_ms": 1000}}, edge=FakeEdge(gate=gate), lookup=lookup
        )
        task = asyncio.ensure_future(fake.run())
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        fake.journal.check()
        assert fake.records.open_routes == 0
        ends.add(fake.ended.end if fake.journal.ends else "not opened")
    assert ends == {"not opened", "cancelled", "complete"}


async def test_dynamo_13191_a_migrated_request_is_another_attempt_with_a_route_of_its_own() -> None:
    edge = FakeEdge(script=[*chunks(3)[:2], LOST])
    fake = FakeRouter(edge=edge, lookup=donor_on_a1())
    with pytest.raises(RequestFailed):
        await fake.run()
    edge.script = chunks(3)
    await fake.run(a_request(1026))
    await fake.run(request_id="another")
    first, second, other = fake.journal.opens
    assert (first.attempt, second.attempt, other.attempt) == (0, 1, 0)
    assert first.request_id == second.request_id
    assert first.route_id != second.route_id
    assert [e.end for e in fake.journal.ends] == ["worker_lost", "complete", "complete"]
    fake.journal.check()


async def test_chunks_are_sent_where_the_call_says_and_none_is_yielded() -> None:
    fake, sent = FakeRouter(edge=FakeEdge(script=chunks(4))), []
    call = msgspec.structs.replace(a_call(), send=sent.append)
    assert [chunk async for chunk in fake.service.handle(a_request(), call)] == []
    assert [chunk["token_ids"] for chunk in sent] == [[0], [1], [2], [3]]
    assert (fake.ended.end, fake.dispatch.chunks, fake.dispatch.closed) == ("complete", 4, True)


@pytest.mark.parametrize("before", [0, 1, 3])
async def test_a_chunk_that_cannot_be_sent_ends_the_route_as_left_by_its_client(before: int) -> None:
    fake, sent = FakeRouter(edge=FakeEdge(script=chunks(4))), []

    def send(chunk: Any) -> None:
        if len(sent) == before:
            raise RuntimeError("nobody listens")
        sent.append(chunk)

    call = msgspec.structs.replace(a_call(), send=send)
    with pytest.raises(ClientGone, match="nobody listens"):
        _ = [chunk async for chunk in fake.service.handle(a_request(), call)]
    fake.journal.check()
    assert (fake.ended.end, fake.dispatch.closed, fake.records.open_routes) == ("cancelled", True, 0)
    assert fake.ended.output_tokens == before + 1
