"""One request as a stream of Dynamo's output chunks: `{token_ids, finish_reason, completion_usage, engine_data}`.

The engine calls back on its own threads; chunks are made in the event loop. All tokens that have come by the time the
loop gets its turn go out as one chunk.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any, Protocol

from dynamo_semkv.contracts.hints import KvHintsEnvelope
from dynamo_semkv.telemetry.throttled import Throttled
from worker_connector.reference_engine.dynamo_worker.request import BadRequest, Submission
from worker_connector.reference_engine.engine.engine import Engine, EngineDeadError, RequestHandle
from worker_connector.reference_engine.engine.outcome import CANCELLED, ERROR, LENGTH, STOP, OnOutput, RequestStats

logger = logging.getLogger(__name__)
_throttled = Throttled(logger)

Chunk = dict[str, Any]


class Cancellation(Protocol):
    """The part of Dynamo's Context that is used here."""

    def is_stopped(self) -> bool:
        """Whether generation is to stop."""
        ...

    def is_killed(self) -> bool:
        """Whether the request is to end at once."""
        ...

    def async_killed_or_stopped(self) -> asyncio.Future[bool]:
        """Done once either holds."""
        ...


class Sender(Protocol):
    """The part of Dynamo's response sender that is used here."""

    def send(self, item: Chunk) -> None:
        """Passes one chunk on. RuntimeError once the consumer dropped the stream."""
        ...

    def close(self) -> None:
        """Ends the stream after its last chunk."""
        ...


class EngineGone(RuntimeError):
    """The engine was shut down, or died, under a request that nobody cancelled."""


async def chunks(
    engine: Engine, asked: Submission, context: Cancellation, hints: KvHintsEnvelope | None = None
) -> AsyncGenerator[Chunk, None]:
    """The chunks of one request. Ends after the chunk with a finish reason, or without one when the client cancelled.
    Raises EngineGone, and BadRequest for what the engine refuses. Closing it early cancels the request."""
    loop = asyncio.get_running_loop()
    outputs: asyncio.Queue[tuple[list[int], str | None, RequestStats]] = asyncio.Queue()

    def on_output(token_ids: list[int], finish_reason: str | None, stats: RequestStats) -> None:
        loop.call_soon_threadsafe(outputs.put_nowait, (token_ids, finish_reason, stats))

    handle = _submit(engine, asked, hints, on_output)
    watch = asyncio.ensure_future(_cancel_with(context, handle))
    generated = 0
    try:
        while True:
            token_ids, finish_reason, stats = await outputs.get()
            while finish_reason is None and not outputs.empty():
                more, finish_reason, stats = outputs.get_nowait()
                token_ids = token_ids + more
            if finish_reason == CANCELLED:
                if context.is_stopped() or context.is_killed():
                    return
                raise EngineGone("the engine was shut down")
            if finish_reason == ERROR and engine.fatal_error is not None:
                raise EngineGone(f"the engine died: {engine.fatal_error}")
            token_ids, ended = _end_after_minimum(token_ids, generated, asked)
            generated += len(token_ids)
            chunk: Chunk = {"token_ids": token_ids}
            if ended or finish_reason is not None:
                chunk.update(_last(STOP if ended else finish_reason, stats, generated))
                yield chunk
                return
            if token_ids:
                yield chunk
    finally:
        watch.cancel()
        handle.cancel()  # does nothing to a request that has ended


def _submit(engine: Engine, asked: Submission, hints: KvHintsEnvelope | None, on_output: OnOutput) -> RequestHandle:
    try:
        return engine.submit(
            asked.token_ids,
            max_new_tokens=asked.max_new_tokens,
            sampling=asked.sampling,
            # The engine cannot pass over an end token before min_tokens: then `chunks` ends the request.
            eos_token_ids=() if asked.min_tokens else asked.stop_token_ids,
            dp_rank=asked.dp_rank,
            cache_salt=asked.cache_salt,
            kv_hints=hints,
            on_output=on_output,
        )
    except EngineDeadError as error:
        raise EngineGone(str(error)) from error
    except ValueError as error:
        raise BadRequest(str(error)) from error


async def push(stream: AsyncGenerator[Chunk, None], sender: Sender) -> None:
    """Sends every chunk of `stream` to `sender`. What the stream raises passes through. A consumer that left ends the
    stream, and so the request, at once, and is no failure: the chunk that finds it gone may come before the client's
    cancellation does."""
    try:
        async for item in stream:
            try:
                sender.send(item)
            except RuntimeError as error:
                _throttled.info("a request ends early: %s", error)
                return
        sender.close()
    finally:
        await stream.aclose()


async def _cancel_with(context: Cancellation, handle: RequestHandle) -> None:
    await context.async_killed_or_stopped()
    handle.cancel()


def _end_after_minimum(token_ids: list[int], generated: int, asked: Submission) -> tuple[list[int], bool]:
    """(tokens that count, whether the last of them is an end token beyond the minimum)."""
    if asked.min_tokens:
        for index, token in enumerate(token_ids):
            if generated + index + 1 > asked.min_tokens and token in asked.stop_token_ids:
                return token_ids[: index + 1], True
    return token_ids, False


def _last(finish_reason: str | None, stats: RequestStats, generated: int) -> Chunk:
    if finish_reason == ERROR:
        return {"finish_reason": {"error": stats.error or "the engine failed this request"}}
    assert finish_reason in (STOP, LENGTH)
    return {
        "finish_reason": finish_reason,
        "completion_usage": {
            "prompt_tokens": stats.prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": stats.prompt_tokens + generated,
            "prompt_tokens_details": {"cached_tokens": stats.cached_tokens},
        },
        "engine_data": {"kv_cache_hit": {"prompt_tokens": stats.prompt_tokens, "reused_tokens": stats.cached_tokens}},
    }
