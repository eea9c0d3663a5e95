"""Disconnects: who left is cancelled once and told apart from who was cancelled otherwise; nothing is looked at when
nobody is watched."""

from __future__ import annotations

import asyncio

import pytest

from dynamo_semkv.router import disconnects as module
from dynamo_semkv.router.disconnects import Disconnects
from tests.bus.waiting import until


class Context:
    def __init__(self) -> None:
        self.stopped = self.killed = False
        self.looks = 0

    def is_stopped(self) -> bool:
        self.looks += 1
        return self.stopped

    def is_killed(self) -> bool:
        return self.killed


class Call:
    """A task that waits for ever, watched."""

    def __init__(self, disconnects: Disconnects) -> None:
        self.context = Context()
        self.cancellations = 0
        self.task = asyncio.ensure_future(self._wait())
        disconnects.watch(self.task, self.context)

    async def _wait(self) -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancellations += 1
                if self.cancellations > 1:
                    raise

    async def end(self) -> None:
        while not self.task.done():
            self.task.cancel()
            await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.001)


@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_only_who_left_is_cancelled_and_only_once(how: str) -> None:
    disconnects = Disconnects()
    one, other = Call(disconnects), Call(disconnects)
    setattr(one.context, how, True)
    seen = other.context.looks
    await until("several looks after it", lambda: one.cancellations and other.context.looks >= seen + 5)
    assert (one.cancellations, other.cancellations) == (1, 0)
    assert disconnects.was_cancelled(one.task)
    assert not disconnects.was_cancelled(other.task)
    disconnects.forget(one.task)
    assert not disconnects.was_cancelled(one.task)
    disconnects.forget(other.task)
    await one.end()
    await other.end()


async def test_who_is_forgotten_is_not_cancelled_and_the_looking_ends() -> None:
    disconnects = Disconnects()
    call = Call(disconnects)
    disconnects.forget(call.task)
    disconnects.forget(call.task)
    call.context.stopped = True
    await until("the looking ended", lambda: disconnects._timer is None)
    assert (call.cancellations, call.context.looks) == (0, 0)
    again = Call(disconnects)
    await until("looked at again", lambda: again.context.looks >= 3)
    disconnects.forget(again.task)
    await call.end()
    await again.end()


async def test_of_very_many_calls_each_is_looked_at_less_often() -> None:
    disconnects = Disconnects()
    tasks = [asyncio.ensure_future(asyncio.sleep(0)) for _ in range(3)]
    disconnects._calls = {task: Context() for task in tasks}
    disconnects._calls |= {asyncio.ensure_future(asyncio.sleep(0)): Context() for _ in range(2_000)}
    now = asyncio.get_running_loop().time()
    disconnects._start_timer()
    assert disconnects._timer is not None
    assert disconnects._timer.when() - now >= 2_003 * module.LOOK_SECONDS_A_CALL
    disconnects._timer.cancel()
    await asyncio.gather(*disconnects._calls)
