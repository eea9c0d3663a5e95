"""What goes wrong on the router's side of a request: a closed set of reasons, each counted, none of which the client
sees."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine
from enum import Enum
from typing import Any, TypeVar

from dynamo_semkv.router.runtime_errors import FailureKind
from dynamo_semkv.telemetry.throttled import Throttled

logger = logging.getLogger(__name__)
_throttled = Throttled(logger)

T = TypeVar("T")


class FallbackReason(str, Enum):
    """Why, because of a fault of ours, a request went to Dynamo's own choice, or without a hint or a record. Closed: a
    metric label."""

    REQUEST_UNREADABLE = "request_unreadable"
    """Not of the shape that advice needs (no token ids, two cache salts, ...)."""
    EXACT_TIMEOUT = "exact_timeout"
    EXACT_ERROR = "exact_error"
    LOOKUP_TIMEOUT = "lookup_timeout"
    LOOKUP_ERROR = "lookup_error"
    ADVICE_ERROR = "advice_error"
    SCORER_ERROR = "scorer_error"
    """A scorer of `plugins.scorers` raised, or returned something that is no number: it counts for nothing on that
    replica. Or it was slow: it counts for nothing, and is not asked for a while."""
    HINT_ERROR = "hint_error"
    """No hint could be made, or the request's `extra_args` is no mapping and cannot carry it (it went over the bus
    only)."""
    HINT_NOT_SENT = "hint_not_sent"
    """The bus did not take the out-of-band hint; the one in the request is still there."""
    JOURNAL_ERROR = "journal_error"
    PIN_WORKER_LOST = "pin_worker_lost"
    PIN_OVERLOADED = "pin_overloaded"
    PIN_INVALID = "pin_invalid"
    PIN_ERROR = "pin_error"


_PIN_REASONS = {
    FailureKind.WORKER_LOST: FallbackReason.PIN_WORKER_LOST,
    FailureKind.NO_WORKER: FallbackReason.PIN_WORKER_LOST,
    FailureKind.OVERLOADED: FallbackReason.PIN_OVERLOADED,
    FailureKind.INVALID_PIN: FallbackReason.PIN_INVALID,
}


def pin_reason(kind: str) -> FallbackReason:
    """`Dispatch.fallback` (the value of a FailureKind) -> why a pin was given up before the first chunk."""
    try:
        return _PIN_REASONS.get(FailureKind(kind), FallbackReason.PIN_ERROR)
    except ValueError:
        return FallbackReason.PIN_ERROR


class Fallbacks:
    """Counts faults by reason, and logs each reason with a throttle of its own."""

    def __init__(self) -> None:
        self.counts: Counter[FallbackReason] = Counter()

    def add(self, reason: FallbackReason, detail: object = "") -> None:
        """Counts one fault. `detail`: an exception, logged with its traceback unless it is `Late`, or text."""
        self.counts[reason] += 1
        # A deadline that passed is an event, not a fault with a place in the code.
        error = detail if isinstance(detail, BaseException) and not isinstance(detail, Late) else None
        shown = repr(detail) if error else detail
        _throttled.warning("%s: %s", reason.value, shown, key=reason.value, exc_info=error)


class Late(Exception):
    """Work of ours, or a question to Dynamo, took longer than its deadline."""


async def within(seconds: float, coroutine: Coroutine[Any, Any, T]) -> T:
    """The result, or Late. Unlike `asyncio.wait_for` it never waits for what it cancels, so nothing that ignores its
    cancellation can hold up a request. When the caller is cancelled, the task is cancelled too."""
    task = asyncio.ensure_future(coroutine)
    try:
        done, _ = await asyncio.wait((task,), timeout=seconds)
    finally:
        if not task.done():
            task.cancel()
            task.add_done_callback(_forget)
    if not done:
        raise Late(f"not within {seconds * 1000:.1f} ms")
    return task.result()


def _forget(task: asyncio.Future[Any]) -> None:
    """Takes the outcome of an abandoned task, so that asyncio does not log an exception that nobody is waiting for."""
    if not task.cancelled() and task.exception() is not None:
        logger.debug("abandoned after its deadline: %r", task.exception())
