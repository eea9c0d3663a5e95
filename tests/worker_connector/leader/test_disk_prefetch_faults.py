"""No fault of the disk, of its books or of a client delays a held request beyond its deadline, or fails it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dynamo_semkv.contracts.report import Reason
from tests.worker_connector.disk_holds import LONG, below, gone_at_once, held, held_and_served, resident
from tests.worker_connector.scripted_disk import (
    PROMPT,
    SLOTS,
    chain_of,
    crowd,
    disk_of,
    flip,
    settle,
    stop,
    tier_of,
    with_disk,
)
from worker_connector.engine_api.geometry import PoolGeometry
from worker_connector.engine_api.request_view import RequestScope


async def test_a_disk_that_brings_nothing_delays_a_request_until_its_deadline(tmp_path: Path) -> None:
    engine, door = below(tmp_path, wait_ms=5.0)
    await door.before(PROMPT)
    assert door.counts == {"late": 1}
    assert engine.prefill(engine.request(PROMPT)) == 0


async def test_a_disk_that_hangs_holds_nobody_until_it_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_connector.disk.tier._ORDER_BLOCKS", 5)
    engine, door = below(tmp_path, wait_ms=5.0)
    await door.before(PROMPT)
    engine.now += 0.999
    await door.before(PROMPT)  # it may still come
    engine.now += 0.002
    for _ in range(2):
        await gone_at_once(engine, door)
        engine.now += 60.0
    assert door.counts == {"late": 2, "hanging": 2}
    assert disk_of(engine).run_pending(1) == 1
    engine.now += 0.999
    await door.before(PROMPT)  # it is at work, if slowly
    assert door.counts == {"late": 3, "hanging": 2}
    settle(engine)
    engine.now += 60.0
    crowd(engine)
    await held_and_served(engine, door)  # nothing is expected of it: it does not hang
    assert door.counts == {"late": 3, "hanging": 2, "arrived": 1}


async def test_requests_that_gave_up_are_in_nobody_s_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_connector.disk.read_queue.MOST_HELD", 1)
    _, door = below(tmp_path, wait_ms=1.0)
    for _ in range(3):
        await door.before(PROMPT)
    assert door.counts == {"late": 3}


async def test_what_is_in_the_slab_of_a_prompt_is_in_use_from_then_on(tmp_path: Path) -> None:
    """Or the blocks that come could take the slots of those that they continue."""
    engine, door = below(tmp_path)
    tier_of(engine).hinted(chain_of(engine)[3])
    settle(engine)
    found = door._find(PROMPT, RequestScope(None, True, None, ()))
    assert found is not None
    life, _, _ = engine.leader.cache()
    assert life is not None
    assert life.ledger is not None
    last = life.ledger.by_key(chain_of(engine)[3].key)
    assert last is not None
    assert last.tick > found.horizon  # what it continues cannot go before it, and is as young when it goes


async def test_nobody_waits_in_a_namespace_that_serves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, door = below(tmp_path)
    _, namespaces, _ = engine.leader.cache()
    assert namespaces is not None
    of = namespaces.of
    monkeypatch.setattr(namespaces, "of", lambda scope: (*of(scope)[:2], Reason.NAMESPACE_UNKNOWN))
    await gone_at_once(engine, door)
    assert door.counts == {}


async def test_what_has_come_at_the_deadline_serves_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker_connector.disk.tier._ORDER_BLOCKS", 2)
    engine, door = below(tmp_path, wait_ms=5.0)
    waiting = asyncio.ensure_future(door.before(PROMPT))
    await asyncio.sleep(0)
    assert disk_of(engine).run_pending(1) == 1
    await waiting
    assert (door.counts, resident(engine)) == ({"late": 1}, 2)
    assert engine.prefill(engine.request(PROMPT)) == 8


@pytest.mark.parametrize("block", [0, 4, 9])
async def test_a_damaged_file_ends_the_wait(tmp_path: Path, block: int) -> None:
    engine, door = below(tmp_path)
    chosen = chain_of(engine)[block]
    store = disk_of(engine).store
    flip(store._path(store._name(chosen.digest, chosen.key)), -40)
    waiting = await held(engine, door)
    settle(engine)
    await waiting
    assert (door.counts, store.counts["damaged"]) == ({"partly": 1}, 1)
    assert engine.prefill(engine.request(PROMPT)) == 4 * block


async def test_a_reset_ends_the_wait_and_nothing_of_before_is_served(tmp_path: Path) -> None:
    engine, door = below(tmp_path)
    waiting = await held(engine, door)
    engine.leader.reset_cache()
    await waiting
    settle(engine)
    assert door.counts == {"partly": 1}
    assert engine.prefill(engine.request(PROMPT)) == 0


async def test_a_new_pool_ends_the_wait(tmp_path: Path) -> None:
    engine, door = below(tmp_path)
    waiting = await held(engine, door)
    engine.rank.register(PoolGeometry.from_layout(engine.layout()))
    await waiting
    assert door.counts == {"partly": 1}


async def test_shutdown_ends_the_wait(tmp_path: Path) -> None:
    engine = with_disk(tmp_path, wait_ms=LONG)
    engine.serve(PROMPT)
    settle(engine)
    crowd(engine)
    door = engine.parts.door
    assert door is not None
    waiting = await held(engine, door)
    stop(engine)
    await waiting
    await gone_at_once(engine, door)
    assert door.counts == {"partly": 1}


async def test_a_request_that_is_cancelled_while_it_waits_leaves_the_blocks_to_the_next_one(tmp_path: Path) -> None:
    engine, door = below(tmp_path)
    waiting = await held(engine, door)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert door.counts == {"left": 1}
    settle(engine)
    assert resident(engine) == 10


async def _fails() -> None:
    raise RuntimeError("a fault of somebody else")


def _raises() -> Awaitable[None]:
    raise RuntimeError("a fault of somebody else")


@pytest.mark.parametrize("gone", [lambda: asyncio.sleep(0), _fails, _raises], ids=["left", "fails", "raises"])
async def test_a_client_that_leaves_ends_the_wait(tmp_path: Path, gone: Callable[[], Awaitable[Any]]) -> None:
    engine, door = below(tmp_path)
    await door.before(PROMPT, gone=gone)
    assert door.counts == {"left": 1}
    settle(engine)
    assert resident(engine) == 10


async def test_a_client_that_stays_is_waited_with(tmp_path: Path) -> None:
    engine, door = below(tmp_path)
    ended = asyncio.Event()

    async def gone() -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        ended.set()

    waiting = await held(engine, door, gone=gone)
    settle(engine)
    await waiting
    await asyncio.wait_for(ended.wait(), 10)  # nothing is left behind
    assert door.counts == {"arrived": 1}


async def test_a_fault_of_the_books_costs_the_request_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, door = below(tmp_path)

    def broken() -> int:
        raise RuntimeError("a fault of ours")

    caplog.set_level(logging.CRITICAL, "worker_connector.leader.disk_prefetch_wait")
    await gone_at_once(engine, door, on_device=broken)
    await gone_at_once(engine, door, [-1, 2])
    monkeypatch.setattr(engine.leader, "cache", broken)
    await gone_at_once(engine, door)
    assert door.counts == {"failed": 3}


async def test_more_than_so_many_are_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_connector.disk.read_queue.MOST_HELD", 1)
    engine, door = below(tmp_path)
    waiting = await held(engine, door)
    await gone_at_once(engine, door)
    assert door.counts == {"crowded": 1}
    settle(engine)
    await waiting


async def test_what_is_counted_and_how_long_is_in_the_snapshot(tmp_path: Path) -> None:
    engine, door = below(tmp_path)
    waiting = await held(engine, door)
    engine.now += 0.03
    settle(engine)
    await waiting
    shot = door.snapshot()
    assert shot["results"] == {"arrived": 1}
    assert (sum(shot["seconds"]["counts"]), round(shot["seconds"]["sum"], 6)) == (1, 0.03)
    assert engine.parts.snapshot()["disk_holds"]["results"] == {}  # the connector's own door held nobody


async def test_slots_of_blocks_that_are_in_use_stay(tmp_path: Path) -> None:
    engine, door = below(tmp_path)
    life, _, _ = engine.leader.cache()
    assert life is not None
    assert life.ledger is not None
    leased = [entry for entry in life.ledger.entries() if entry.resident]
    assert len(leased) > SLOTS - 10
    life.ledger.lease(*leased)
    await gone_at_once(engine, door)
    assert door.counts == {"partly": 1}
    assert tier_of(engine).counts["no_slot"] == 1
    assert all(entry.resident for entry in leased)
    life.ledger.release(*leased)
