"""What goes wrong on our side of a request: a closed set of reasons, each counted, none of which the client sees."""

from __future__ import annotations

import asyncio
import logging
import types
from collections import Counter
from collections.abc import Coroutine, Generator
from enum import Enum
from typing import Any, TypeVar

from dynamo_semkv.router.runtime_errors import FailureKind

logger = logging.getLogger(__name__)

T = TypeVar("T")


class FallbackReason(str, Enum):
    """Why a request went to Dynamo's own choice, or without a hint or a record, because of us. Closed: a metric label."""

    REQUEST_UNREADABLE = "request_unreadable"
    """Not of the shape that advice needs (no token ids, two cache salts, ...)."""
    EXACT_TIMEOUT = "exact_timeout"
    EXACT_ERROR = "exact_error"
    LOOKUP_TIMEOUT = "lookup_timeout"
    LOOKUP_ERROR = "lookup_error"
    ADVICE_ERROR = "advice_error"
    SCORER_ERROR = "scorer_error"
    """A scorer of `plugins.scorers` raised, or said what is no number: it counts for nothing on that replica. Or it was slow: it counts for
    nothing, and is put aside for a while."""
    HINT_ERROR = "hint_error"
    """No hint could be made, or the request's `extra_args` is no mapping and cannot carry it (it went over the bus only)."""
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
    """Counts by reason; logs the 1st, 2nd, 4th, 8th, ... of each, so that a fault that stays does not fill the log."""

    def __init__(self) -> None:
        self.counts: Counter[FallbackReason] = Counter()

    def add(self, reason: FallbackReason, detail: object = "") -> None:
        self.counts[reason] += 1
        count = self.counts[reason]
        if count & (count - 1) == 0:
            # A deadline that passed is an event, not a fault with a place in the code.
            error = detail if isinstance(detail, BaseException) and not isinstance(detail, Late) else None
            logger.warning(
                "%s (%d so far): %s", reason.value, count, repr(detail) if error else detail, exc_info=error or None
            )


class Late(Exception):
    """Something of ours, or a question to Dynamo, took longer than its deadline."""


async def within(seconds: float, coroutine: Coroutine[Any, Any, T]) -> T:
    """The result, or Late. Unlike `asyncio.wait_for` it never waits for what it cancels, so nothing that ignores its cancellation can hold
    up a request. Its own cancellation cancels the coroutine too.

    The coroutine runs in the task of whoever waits for it. A task of its own, and what tells of that one's end, would take longer than most
    of what is waited for; it gets one when it is given up and goes on all the same.
    """
    try:
        waits_for = coroutine.send(None)
    except StopIteration as ended:
        return ended.value  # type: ignore[no-any-return]
    return await _driven(seconds, coroutine, waits_for)


class _Deadline:
    """Wakes whoever waits when it has passed, by cancelling what is waited for."""

    def __init__(self) -> None:
        self._late = False
        self.waits_for: asyncio.Future[Any] | None = None

    def is_late(self) -> bool:
        return self._late

    def passed(self) -> None:
        self._late = True
        if self.waits_for is not None:
            self.waits_for.cancel()


@types.coroutine
def _driven(
    seconds: float, coroutine: Coroutine[Any, Any, T], waits_for: asyncio.Future[Any] | None
) -> Generator[Any, None, T]:
    """Does with the coroutine what a task does with its own, until the deadline. `waits_for`: what it yielded last, None for a turn of the
    loop."""
    deadline = _Deadline()
    timer = asyncio.get_running_loop().call_later(seconds, deadline.passed)
    try:
        while not deadline.is_late():
            # The cancellation of a plain future wakes who waits for it at once. Anything else may ignore it, so a gate stands before it.
            plain = waits_for is None or type(waits_for) is asyncio.Future
            deadline.waits_for = gate = waits_for if plain else _gate(waits_for)
            try:
                yield gate
            except asyncio.CancelledError as error:
                if deadline.is_late():
                    break
                if _is_cancelled():
                    _give_up(coroutine, waits_for)
                    raise
                waits_for = coroutine.throw(error)
            except BaseException as error:  # noqa: BLE001 - not caught: the coroutine is what it is for
                waits_for = coroutine.throw(error)
            else:
                waits_for = coroutine.send(None)
    except StopIteration as ended:
        return ended.value  # type: ignore[no-any-return]
    finally:
        timer.cancel()
    _give_up(coroutine, waits_for)
    raise Late(f"not within {seconds * 1000:.1f} ms")


def _gate(waits_for: Any) -> asyncio.Future[None]:
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def opened(_: object) -> None:
        if not gate.done():
            gate.set_result(None)

    waits_for._asyncio_future_blocking = False  # as a task does that was handed it
    waits_for.add_done_callback(opened)
    gate._asyncio_future_blocking = True
    return gate


def _is_cancelled() -> bool:
    """Whether this task was cancelled, and not only what it waits for. Python 3.10 cannot tell."""
    cancelling = getattr(asyncio.current_task(), "cancelling", None)
    return cancelling is None or cancelling() > 0


def _give_up(coroutine: Coroutine[Any, Any, object], waits_for: asyncio.Future[Any] | None) -> None:
    """Cancels the coroutine; what it raises then interests nobody."""
    if waits_for is not None:
        waits_for.cancel()
    try:
        waits_for = coroutine.throw(asyncio.CancelledError())
    except (StopIteration, asyncio.CancelledError):
        return
    except Exception as error:  # noqa: BLE001 - nobody waits for it any more; logged
        logger.debug("abandoned after its deadline: %r", error)
        return
    asyncio.ensure_future(_rest(coroutine, waits_for))  # noqa: RUF006 - what it waits for holds it


async def _rest(coroutine: Coroutine[Any, Any, object], waits_for: asyncio.Future[Any] | None) -> None:
    """Of what went on after its cancellation."""
    try:
        await _drained(coroutine, waits_for)
    except Exception as error:  # noqa: BLE001 - as above
        logger.debug("abandoned after its deadline: %r", error)


@types.coroutine
def _drained(
    coroutine: Coroutine[Any, Any, object], waits_for: asyncio.Future[Any] | None
) -> Generator[Any, None, None]:
    try:
        while True:
            try:
                yield waits_for
            except BaseException as error:  # noqa: BLE001 - not caught: the coroutine is what it is for
                waits_for = coroutine.throw(error)
            else:
                waits_for = coroutine.send(None)
    except StopIteration:
        return
