"""Deadlines that hold even against what ignores them, and counted reasons."""

from __future__ import annotations

import asyncio
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_semkv.router.attempts import Attempts
from dynamo_semkv.router.fallback import FallbackReason, Fallbacks, Late, pin_reason, within
from dynamo_semkv.router.runtime_errors import FailureKind


async def _value(value: int) -> int:
    return value


async def test_what_is_in_time_is_returned_and_what_it_raises_is_raised() -> None:
    assert await within(5.0, _value(3)) == 3

    async def fail() -> int:
        raise RuntimeError("theirs")

    with pytest.raises(RuntimeError, match="theirs"):
        await within(5.0, fail())


async def test_production_stack_1016_what_ignores_its_cancellation_is_left_behind() -> None:
    released = asyncio.Event()
    ignored = asyncio.Event()

    async def stubborn() -> int:
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                ignored.set()
        raise RuntimeError("too late to matter")

    try:
        with pytest.raises(Late):
            await within(0.001, stubborn())
        await asyncio.wait_for(ignored.wait(), 5.0)
    finally:
        released.set()  # or the loop could not close
    # Its late exception is taken: nothing is reported as never retrieved when the loop ends.
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_cancelling_the_waiter_cancels_the_work() -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    waiter = asyncio.ensure_future(within(60.0, work()))
    await started.wait()
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    await asyncio.wait_for(cancelled.wait(), 5.0)


async def test_what_waits_for_a_task_that_ignores_its_cancellation_is_left_behind() -> None:
    released = asyncio.Event()

    async def stubborn() -> None:
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                continue

    task = asyncio.ensure_future(stubborn())

    async def waits() -> None:
        await task

    try:
        with pytest.raises(Late):
            await within(0.001, waits())
    finally:
        released.set()
        await task


async def test_turns_of_the_loop_have_a_deadline_too() -> None:
    turns, ended = 0, asyncio.Event()

    async def busy() -> None:
        nonlocal turns
        try:
            while True:
                turns += 1
                await asyncio.sleep(0)
        finally:
            ended.set()

    with pytest.raises(Late):
        await within(0.001, busy())
    assert turns > 0
    await asyncio.wait_for(ended.wait(), 5.0)


async def test_a_future_that_somebody_else_cancelled_cancels_nobody() -> None:
    given: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def with_another_way() -> str:
        try:
            await given
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            return "another way"
        return "given"

    asyncio.get_running_loop().call_soon(given.cancel)
    assert await within(60.0, with_another_way()) == "another way"


async def test_waits_of_every_kind_give_what_they_give() -> None:
    async def one(value: int) -> int:
        await asyncio.sleep(0)
        return value

    async def fails() -> None:
        await asyncio.sleep(0)
        raise RuntimeError("theirs")

    async def many() -> list[int]:
        found = list(await asyncio.gather(one(1), one(2)))
        found.append(await asyncio.ensure_future(one(3)))
        found.append(await within(5.0, one(4)))
        try:
            await asyncio.ensure_future(fails())
        except RuntimeError:
            found.append(5)
        async with asyncio.Lock():
            found.append(await asyncio.wait_for(one(6), 5.0))
        return found

    assert await within(60.0, many()) == [1, 2, 3, 4, 5, 6]


def test_counts_all_and_logs_powers_of_two(caplog: pytest.LogCaptureFixture) -> None:
    fallbacks = Fallbacks()
    with caplog.at_level(logging.WARNING):
        for _ in range(9):
            fallbacks.add(FallbackReason.LOOKUP_ERROR, ValueError("x"))
        fallbacks.add(FallbackReason.EXACT_TIMEOUT, "late")
    assert fallbacks.counts == {FallbackReason.LOOKUP_ERROR: 9, FallbackReason.EXACT_TIMEOUT: 1}
    assert len([r for r in caplog.records if "lookup_error" in r.getMessage()]) == 4


@pytest.mark.parametrize("kind", [*FailureKind, "a kind of a newer edge"])
def test_every_reason_to_give_up_a_pin_has_a_label(kind: str) -> None:
    assert pin_reason(kind).value.startswith("pin_")


def test_dynamo_13191_attempts_of_one_request_are_told_apart() -> None:
    attempts = Attempts()
    assert [attempts.next("a"), attempts.next("b"), attempts.next("a"), attempts.next("a")] == [0, 0, 1, 2]
    assert [attempts.next(""), attempts.next("")] == [0, 0]


def test_dynamo_13191_a_first_attempt_at_another_router_counts() -> None:
    attempts = Attempts()
    attempts.opened_elsewhere("a", None, 0)
    assert attempts.next("a") == 1
    # The echo of its own events, and late ones, change nothing.
    attempts.opened_elsewhere("a", None, 1)
    attempts.opened_elsewhere("a", None, 0)
    attempts.opened_elsewhere(None, None, 3)
    assert attempts.next("a") == 2


def test_requests_of_two_tenants_with_one_id_are_no_attempts_of_each_other() -> None:
    """A client chooses the id, by `x-dynamo-request-id`."""
    attempts = Attempts()
    assert [attempts.next("a", "t1"), attempts.next("a", "t2"), attempts.next("a", ""), attempts.next("a", "t1")] == [
        0,
        0,
        0,
        1,
    ]
    attempts.opened_elsewhere("a", "t2", 4)
    assert [attempts.next("a", "t2"), attempts.next("a", "")] == [5, 1]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text("abcdef", max_size=2), max_size=200))
def test_attempts_stay_bounded(ids: list[str]) -> None:
    attempts = Attempts(limit=4)
    for n, request_id in enumerate(ids):
        attempts.next(request_id)
        attempts.opened_elsewhere(f"{request_id}-elsewhere", None, n)
    assert len(attempts) <= 4
