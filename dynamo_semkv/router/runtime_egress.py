"""How our endpoints answer: push egress, typed failures, cancellation. Imports `dynamo` for its exceptions only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from dynamo.llm.exceptions import Cancelled, Disconnected, HttpError, InvalidArgument

from dynamo_semkv.router.disconnects import Disconnects, gone
from dynamo_semkv.router.runtime_errors import ClientGone, FailureKind, RequestFailed
from dynamo_semkv.router.runtime_types import CallContext, Chunk, Handler, Request
from dynamo_semkv.telemetry.throttled import Throttled
from dynamo_semkv.telemetry.traceparent import of_call

logger = logging.getLogger(__name__)
_throttled = Throttled(logger)

OVERLOADED_STATUS = 529
"""The status Dynamo's own frontend gives when its router refuses a request for lack of capacity."""


class Inflight:
    """The calls that are being answered: their number, which a graceful stop waits for, and whose clients left."""

    def __init__(self) -> None:
        self.count = 0
        self.disconnects = Disconnects()


def dynamo_error(failure: RequestFailed) -> Exception:
    """The exception to raise so that the frontend does the right thing.

    `Disconnected` is the one that makes it continue the request elsewhere and leaves this router in rotation;
    `EngineShutdown` and `StreamIncomplete` take the router out for five seconds, and an untyped ValueError is taken for
    the client's fault.
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
    """A Dynamo handler. Its parameter `response_sender` is what makes Dynamo use push egress, which costs one crossing
    into Python per request and not one per chunk; without a sender (in-process and health-check calls) Dynamo pulls
    instead.
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
    # Dynamo drives this generator by one call of `__anext__`, so all of it runs in one task.
    task, disconnects = asyncio.current_task(), inflight.disconnects
    assert task is not None
    chunks = handler(request, _call(context, response_sender.send))
    inflight.count += 1
    disconnects.watch(task, context)
    try:
        # Most handlers yield their chunks; one that sends them itself yields none.
        async for chunk in chunks:
            try:
                response_sender.send(chunk)
            except RuntimeError as error:
                raise ClientGone(str(error)) from error
    except ClientGone as error:
        # A failed send may come before Dynamo's own notice that the client left.
        _throttled.info("a request ends early: %s", error)
        return
    except (Exception, asyncio.CancelledError) as error:
        # Asks the context too: a worker that was stopped may report it before the next look.
        if disconnects.was_cancelled(task) or gone(context):
            return  # nobody waits for the answer any more, so an early end is no failure
        if isinstance(error, RequestFailed):
            raise dynamo_error(error) from None
        raise
    finally:
        disconnects.forget(task)
        inflight.count -= 1
        # The handler is closed here, not by the garbage collector, also when a chunk could not be sent.
        close = getattr(chunks, "aclose", None)
        if close is not None:
            await close()
    # Only on success: an exception that leaves this generator ends the stream with a type, close_with_error would
    # reduce it to text.
    response_sender.close()
    return
    yield {}  # type: ignore[unreachable]  # makes this an async generator, which is what Dynamo drives; it never yields


def _call(context: Any, send: Callable[[Chunk], None] | None = None) -> CallContext:
    if context is None:
        return CallContext(request_id="", metadata={}, traceparent=None, is_stopped=lambda: False, send=send)
    headers, metadata = context.trace_headers() or {}, dict(context.metadata.items())
    return CallContext(
        request_id=context.id(),
        metadata=metadata,
        traceparent=of_call(headers.get("traceparent"), metadata),
        is_stopped=context.is_stopped,
        send=send,
    )
