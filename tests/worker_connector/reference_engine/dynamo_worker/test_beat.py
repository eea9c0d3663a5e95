"""How often a Dynamo worker reads its engine: at once when it is asked for something, seldom when idle, and no longer
than it runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("dynamo.llm")

from worker_connector.reference_engine.dynamo_worker import worker as dynamo_worker
from worker_connector.reference_engine.dynamo_worker.worker import DynamoWorker


class Engine:
    """One rank, whose events of a reset come with its next iteration, as the real one's do."""

    def __init__(self) -> None:
        self.polls = 0
        self.active = 0
        self._comes_with: int | None = None

    def reset_prefix_cache(self) -> None:
        self._comes_with = self.polls + 3

    def poll_kv_events(self, rank: int) -> list[dict[str, Any]]:
        self.polls += 1
        return [{"event_id": 1}] if self.polls == self._comes_with else []

    def stats(self, rank: int) -> SimpleNamespace:
        return SimpleNamespace(active_blocks=self.active)


class Beaten:
    """A worker without its runtime, and what it told Dynamo."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.loads: list[int] = []
        self.events: list[dict[str, Any]] = []
        self.worker: Any = object.__new__(DynamoWorker)
        self.worker.__dict__.update(
            engine=self.engine,
            _device=[SimpleNamespace(apply=self.events.extend)],
            _hand_in=[None],
            _metrics=SimpleNamespace(
                publish=lambda dp_rank, active_decode_blocks: self.loads.append(active_decode_blocks)
            ),
            _relays=[SimpleNamespace(sent_at=time.monotonic() + 3600)],
            _in_flight=0,
            _asked=asyncio.Event(),
            _told={},
        )  # fmt: skip
        self.task = asyncio.ensure_future(self.worker._beat())

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true"
            await asyncio.sleep(0.001)

    async def idle(self) -> None:
        """Until it waits for somebody to ask."""
        await self.until(lambda: bool(self.worker._asked._waiters))


@pytest.fixture
async def beaten(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(dynamo_worker, "QUIET_SECONDS", 0.1)
    monkeypatch.setattr(dynamo_worker, "IDLE_BEAT_SECONDS", 3600.0)
    made = Beaten()
    await made.idle()
    yield made
    made.task.cancel()
    await asyncio.wait((made.task,), timeout=10)


async def test_an_idle_engine_is_left_alone_until_it_is_asked(beaten: Beaten) -> None:
    polls = beaten.engine.polls
    await asyncio.sleep(0.05)
    assert beaten.engine.polls == polls
    beaten.engine.active = 7
    beaten.worker._in_flight = 1
    beaten.worker._asked.set()
    await beaten.until(lambda: beaten.loads[-1] == 7)
    beaten.engine.active = beaten.worker._in_flight = 0
    await beaten.until(lambda: beaten.loads[-1] == 0)


async def test_what_a_reset_removed_is_read_with_the_iteration_that_follows(
    beaten: Beaten, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine does it after the call has returned, so one look at once is not enough."""
    monkeypatch.setattr(dynamo_worker, "QUIET_SECONDS", 60.0)  # a machine that stalls is not what is tested
    await beaten.worker._reset()
    await beaten.until(lambda: bool(beaten.events))


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
async def test_the_beat_ends_when_it_is_cancelled(beaten: Beaten, turns: int) -> None:
    """Also in the turns of the loop in which a request came: it would go on to read an engine that is gone."""
    beaten.worker._asked.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    beaten.task.cancel()
    await beaten.until(beaten.task.done)
    assert beaten.task.cancelled()


async def test_an_unchanged_load_is_told_again(beaten: Beaten, monkeypatch: pytest.MonkeyPatch) -> None:
    """To routers that came later."""
    monkeypatch.setattr(dynamo_worker, "IDLE_BEAT_SECONDS", 0.01)
    beaten.loads.clear()
    beaten.worker._asked.set()
    await beaten.until(lambda: beaten.loads[:3] == [0, 0, 0])
