"""Chunks of a request on a real engine: contents, cancellation both ways, and an engine that goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.worker_connector.reference_engine.connectors import Recorder, recording_connector
from tests.worker_connector.reference_engine.running import prompt, start, until
from worker_connector.reference_engine import Engine
from worker_connector.reference_engine.dynamo_worker.request import BadRequest, Submission, submission
from worker_connector.reference_engine.dynamo_worker.stream import EngineGone, chunks, push


class Context:
    """Dynamo's Context as far as it is used."""

    def __init__(self) -> None:
        self._stopped: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def stop(self) -> None:
        self._stopped.set_result(True)

    def is_stopped(self) -> bool:
        return self._stopped.done()

    def is_killed(self) -> bool:
        return False

    def async_killed_or_stopped(self) -> asyncio.Future[bool]:
        return asyncio.shield(self._stopped)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with start(data_parallel_size=2) as running:
        yield running


def ask(tokens: list[int], **parts: Any) -> Submission:
    return submission(parts, tokens, token_limit=512, data_parallel_size=2)


async def collect(stream: AsyncIterator[dict[str, Any]]) -> list[dict[str, Any]]:
    return [chunk async for chunk in stream]


async def test_chunks_add_up_and_the_last_has_the_engines_own_numbers(engine: Engine) -> None:
    tokens = prompt(40)
    expected = engine.submit(tokens, max_new_tokens=6, dp_rank=1).result(60.0)
    asked = ask(tokens, stop_conditions={"max_tokens": 6}, routing={"dp_rank": 1})
    got = await collect(chunks(engine, asked, Context()))
    assert [token for chunk in got for token in chunk["token_ids"]] == expected.token_ids
    assert all("finish_reason" not in chunk for chunk in got[:-1])
    last = got[-1]
    assert last["finish_reason"] == "length"
    assert last["completion_usage"] == {
        "prompt_tokens": 40,
        "completion_tokens": 6,
        "total_tokens": 46,
        "prompt_tokens_details": {"cached_tokens": 32},
    }
    assert last["engine_data"] == {"kv_cache_hit": {"prompt_tokens": 40, "reused_tokens": 32}}


async def test_a_salt_separates(engine: Engine) -> None:
    tokens = prompt(40)
    engine.submit(tokens, max_new_tokens=1, dp_rank=0).result(60.0)
    routing = {"dp_rank": 0, "cache_salt": "t1"}
    asked = ask(tokens, stop_conditions={"max_tokens": 1}, routing=routing)
    for cached in (0, 32):  # not the unsalted one's blocks, but its own
        last = (await collect(chunks(engine, asked, Context())))[-1]
        assert last["engine_data"]["kv_cache_hit"]["reused_tokens"] == cached


async def generated(engine: Engine, tokens: list[int], count: int) -> list[int]:
    return engine.submit(tokens, max_new_tokens=count).result(60.0).token_ids


async def test_a_stop_token_ends_with_stop(engine: Engine) -> None:
    tokens = prompt(20)
    free = await generated(engine, tokens, 8)
    end = free[2]
    asked = ask(tokens, stop_conditions={"max_tokens": 8, "stop_token_ids_hidden": [end]})
    got = await collect(chunks(engine, asked, Context()))
    assert [token for chunk in got for token in chunk["token_ids"]] == free[: free.index(end) + 1]
    assert got[-1]["finish_reason"] == "stop"


async def test_min_tokens_passes_an_early_stop_token(engine: Engine) -> None:
    tokens = prompt(20)
    free = await generated(engine, tokens, 12)
    end = free[2]
    minimum = free.index(end) + 1
    asked = ask(tokens, stop_conditions={"max_tokens": 12, "min_tokens": minimum, "stop_token_ids_hidden": [end]})
    got = await collect(chunks(engine, asked, Context()))
    tokens_out = [token for chunk in got for token in chunk["token_ids"]]
    later = [index for index, token in enumerate(free) if token == end and index + 1 > minimum]
    if later:
        assert tokens_out == free[: later[0] + 1]
        assert got[-1]["finish_reason"] == "stop"
    else:
        assert tokens_out == free
        assert got[-1]["finish_reason"] == "length"
    assert got[-1]["completion_usage"]["completion_tokens"] == len(tokens_out) > minimum


async def test_a_cancelled_context_ends_the_request_without_a_last_chunk(engine: Engine) -> None:
    context = Context()
    got = []
    async for chunk in chunks(engine, ask(prompt(16), routing={"dp_rank": 0}), context):
        got.append(chunk)
        if len(got) == 1:
            context.stop()
    assert all("finish_reason" not in chunk for chunk in got)
    await asyncio.to_thread(until, lambda: engine.stats(0).running_requests == 0, "the engine let go of the request")


async def test_a_stream_that_is_closed_early_cancels(engine: Engine) -> None:
    stream = chunks(engine, ask(prompt(16), routing={"dp_rank": 1}), Context())
    await stream.__anext__()
    await stream.aclose()  # type: ignore[attr-defined]
    await asyncio.to_thread(until, lambda: engine.stats(1).running_requests == 0, "the engine let go of the request")


class Sender:
    """Dynamo's response sender, whose consumer leaves after `room` chunks."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.sent: list[dict[str, Any]] = []
        self.closed = False

    def send(self, item: dict[str, Any]) -> None:
        if len(self.sent) == self.room:
            raise RuntimeError("response stream is closed; the consumer dropped the response stream")
        self.sent.append(item)

    def close(self) -> None:
        self.closed = True


async def test_a_consumer_that_left_ends_the_request_and_is_no_failure(engine: Engine) -> None:
    sender = Sender(room=2)
    asked = ask(prompt(16), stop_conditions={"max_tokens": 400, "ignore_eos": True}, routing={"dp_rank": 1})
    await push(chunks(engine, asked, Context()), sender)
    assert len(sender.sent) == 2
    assert not sender.closed
    await asyncio.to_thread(until, lambda: engine.stats(1).running_requests == 0, "the engine let go of the request")
    assert engine.stats(1).generated_tokens < 400


async def test_a_whole_answer_is_pushed_and_closed_and_a_failure_goes_through(engine: Engine) -> None:
    sender = Sender(room=100)
    await push(chunks(engine, ask(prompt(16), stop_conditions={"max_tokens": 3}), Context()), sender)
    assert sender.sent[-1]["finish_reason"] == "length"
    assert sender.closed
    refused = Sender(room=100)
    with pytest.raises(BadRequest, match="vocabulary"):
        await push(chunks(engine, ask([99_999]), Context()), refused)
    assert not refused.closed


async def test_a_shutdown_is_not_a_cancellation(engine: Engine) -> None:
    """What still runs when the worker ends has to fail typed, so that Dynamo gives it to another one."""
    stream = chunks(engine, ask(prompt(16)), Context())
    await stream.__anext__()
    await asyncio.to_thread(engine.shutdown)
    with pytest.raises(EngineGone):
        await collect(stream)
    with pytest.raises(EngineGone):
        await collect(chunks(engine, ask(prompt(16)), Context()))


async def test_an_engine_that_dies_is_gone() -> None:
    recorder = Recorder(failures={"meta": RuntimeError("broken")})
    with start(recording_connector(recorder)) as engine:
        with pytest.raises(EngineGone, match="broken"):
            await collect(chunks(engine, ask(prompt(16), routing={"dp_rank": 0}), Context()))


async def test_what_the_engine_refuses_is_the_clients_fault(engine: Engine) -> None:
    with pytest.raises(BadRequest, match="vocabulary"):
        await collect(chunks(engine, ask([99_999]), Context()))
