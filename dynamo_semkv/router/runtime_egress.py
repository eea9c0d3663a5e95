"""How an endpoint of ours answers: push egress, typed failures, cancellation. Imports `dynamo` for its exceptions only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from dynamo.llm.exceptions import Cancelled, Disconnected, HttpError, InvalidArgument

from dynamo_semkv.router.runtime_errors import FailureKind, RequestFailed
from dynamo_semkv.router.runtime_types import CallContext, Chunk, Handler, Request
from dynamo_semkv.telemetry.traceparent import of_call

OVERLOADED_STATUS = 529
"""The status Dynamo's own frontend gives when its router refuses a request for lack of capacity."""


class Inflight:
    """How many calls are being answered; what a graceful stop waits for."""

    def __init__(self) -> None:
        self.count = 0


def dynamo_error(failure: RequestFailed) -> Exception:
    """What to raise so that the frontend does the right thing.

    `Disconnected` is the one that makes it continue the request elsewhere and leaves this router in rotation; `EngineShutdown` and
    `StreamIncomplete` take the router out for five seconds, and an untyped ValueError is taken for the client's fault.
    """
    text = str(failure)
    if failure.kind in (FailureKind.WORKER_LOST, FailureKind.NO_WORKER):
        return Disconnected(text)
    if failure.kind in (FailureKind.INVALID_REQUEST, FailureKind.INVALID_PIN):
        return InvalidArgument(text)
    if failure.kind is FailureKind.OVERLOADED:
        return HttpError(OVERLOADED_STATUS, text)
    if failure.kind is FailureKind.CANCELLED:
        return Cancelled(text)
    return HttpError(500, text)


def adapter(inflight: Inflight, handler: Handler) -> Callable[..., AsyncIterator[Chunk]]:
    """A Dynamo handler. Its parameter `response_sender` is what makes Dynamo use push egress, which costs one crossing into
    Python per request and not one per chunk; without a sender (in-process and health-check calls) Dynamo pulls instead.
    """

    def serve(request: Request, context: Any = None, response_sender: Any = None) -> AsyncIterator[Chunk]:
        if response_sender is None:
            return _pull(inflight, handler, request, context)
        return _push(inflight, handler, request, context, response_sender)

    return serve


async def _pull(inflight: Inflight, handler: Handler, request: Request, context: Any) -> AsyncIterator[Chunk]:
    inflight.count += 1
    try:
        async for chunk in handler(request, _call(context)):
            yield chunk
    except RequestFailed as failure:
        raise dynamo_error(failure) from None
    finally:
        inflight.count -= 1


async def _push(
    inflight: Inflight, handler: Handler, request: Request, context: Any, response_sender: Any
) -> AsyncIterator[Chunk]:
    # Dynamo does not interrupt a push handler: a client that leaves during a long prefill would be noticed with the first chunk only.
    stopped = asyncio.ensure_future(context.async_killed_or_stopped())
    pump = asyncio.ensure_future(_pump(handler, request, _call(context), response_sender.send))
    inflight.count += 1
    try:
        await asyncio.wait((pump, stopped), return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            # Nobody listens any more, so nothing that ended this early is a failure.
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)
            return
        pump.result()
    except RequestFailed as failure:
        raise dynamo_error(failure) from None
    finally:
        stopped.cancel()
        pump.cancel()
        inflight.count -= 1
    # Only on success: an exception that leaves this generator ends the stream typed, close_with_error would flatten it to text.
    response_sender.close()
    return
    yield {}  # type: ignore[unreachable]  # makes this an async generator, which is what Dynamo drives; it never yields


async def _pump(handler: Handler, request: Request, call: CallContext, send: Callable[[Chunk], None]) -> None:
    async for chunk in handler(request, call):
        send(chunk)


def _call(context: Any) -> CallContext:
    if context is None:
        return CallContext(request_id="", metadata={}, traceparent=None, is_stopped=lambda: False)
    headers, metadata = context.trace_headers() or {}, dict(context.metadata.items())
    return CallContext(
        request_id=context.id(),
        metadata=metadata,
        traceparent=of_call(headers.get("traceparent"), metadata),
        is_stopped=context.is_stopped,
    )
