"""Requests that are held at the door for what is on disk of their prompts: what is worth waiting for, for how long, and that no fault of
the disk delays a request beyond its deadline or fails it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dynamo_semkv.config.schema import Materialization
from dynamo_semkv.contracts.location import Tier
from dynamo_semkv.contracts.report import Outcome
from tests.worker_connector.disk import PROMPT, SLOTS, chain_of, crowd, disk_of, flip, settle, stop, tier_of, with_disk
from tests.worker_connector.harness import MIB, settings
from tests.worker_connector.scripted import OPTIONS, ScriptedEngine, llm_args
from tests.worker_connector.test_disk_tier_rules import no_files_here
from worker_connector.assembly import assemble_leader_with
from worker_connector.disk_door import DiskDoor
from worker_connector.geometry import PoolGeometry
from worker_connector.request_view import pack_tokens

LONG = 60_000.0
"""Milliseconds: a test that waited for it would not end."""


def below(path: Path, wait_ms: float = LONG, **options: Any) -> tuple[ScriptedEngine, DiskDoor]:
    """`PROMPT` is on disk, and not in the slab any more; a door with the engine's clock."""
    engine = with_disk(path, wait_ms=wait_ms, **options)
    engine.serve(PROMPT)
    settle(engine)
    crowd(engine)
    assert [block.ordinal for block in chain_of(engine)] == list(range(10))
    door = DiskDoor(engine.leader, engine.parts.outlet._config, clock=lambda: engine.now)
    return engine, door


async def held(
    engine: ScriptedEngine, door: DiskDoor, tokens: list[int] = PROMPT, **options: Any
) -> asyncio.Task[None]:
    """The request waits at the door; nothing was read yet."""
    task = asyncio.ensure_future(door.before(tokens, **options))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not task.done()
    return task


def resident(engine: ScriptedEngine, tokens: list[int] = PROMPT) -> int:
    life, namespaces, _ = engine.leader.cache()
    assert life is not None
    assert life.ledger is not None
    assert namespaces is not None
    return len(life.ledger.match(namespaces.open_digest, pack_tokens(tokens), 100).path)


# what it is for


async def test_the_request_that_asks_is_served_from_disk(tmp_path: Path) -> None:
    engine, door = below(tmp_path)
    waiting = await held(engine, door)
    settle(engine)
    await waiting
    assert door.counts == {"arrived": 1}
    asked = engine.request(PROMPT)
    assert engine.prefill(asked) == 40  # every byte that its pass reads is checked
    engine.finish(asked)
    report = engine.report_of(asked)
    assert (report.outcome, report.confirmed, report.tier) == (Outcome.MATERIALIZED_EXACT, 40, Tier.DISK)
    engine.check_balance()


async def test_a_hint_that_came_first_is_waited_for(tmp_path: Path) -> None:
    engine, door = below(tmp_path)
    life, _, _ = engine.leader.cache()
    assert life is not None
    tier_of(engine).hinted(chain_of(engine)[-1])
    waiting = await held(engine, door)
    settle(engine)
    await waiting
    assert (door.counts, resident(engine)) == ({"arrived": 1}, 10)
    assert disk_of(engine).store.counts["read"] == 10


async def test_part_that_is_in_the_slab_is_continued(tmp_path: Path) -> None:
    engine, door = below(tmp_path)
    tier_of(engine).hinted(chain_of(engine)[3])
    settle(engine)
    assert resident(engine) == 4
    waiting = await held(engine, door)
    settle(engine)
    await waiting
    assert resident(engine) == 10
    assert disk_of(engine).store.counts["read"] == 10


async def test_requests_for_one_prompt_read_it_once(tmp_path: Path) -> None:
    engine, door = below(tmp_path)
    waiting = [await held(engine, door), await held(engine, door, PROMPT[:24] + [7] * 17)]
    settle(engine)
    await asyncio.gather(*waiting)
    assert door.counts == {"arrived": 2}
    assert disk_of(engine).store.counts["read"] == 10


async def test_the_door_touches_no_file(tmp_path: Path) -> None:
    engine, door = below(tmp_path)
    with no_files_here():
        waiting = await held(engine, door)
    settle(engine)
    await waiting


# who does not wait


async def gone_at_once(engine: ScriptedEngine, door: DiskDoor, tokens: list[int] = PROMPT, **options: Any) -> None:
    """The door does not hold it: nothing works on the disk meanwhile, and the deadline is far away."""
    await asyncio.wait_for(door.before(tokens, **options), 10)


async def test_nobody_waits_where_nothing_is_on_disk(tmp_path: Path) -> None:
    engine, door = below(tmp_path)
    await gone_at_once(engine, door, [9] * 41)
    await gone_at_once(engine, door, [9])
    await gone_at_once(engine, door, [])
    tier_of(engine).hinted(chain_of(engine)[-1])
    settle(engine)
    await gone_at_once(engine, door)  # all of it is in the slab
    assert door.counts == {}


async def test_nobody_waits_for_what_the_engine_holds_itself(tmp_path: Path) -> None:
    engine, door = below(tmp_path)
    await gone_at_once(engine, door, on_device=lambda: 40)
    assert door.counts == {"on_device": 1}
    assert tier_of(engine).in_flight == 0
    waiting = await held(engine, door, on_device=lambda: 36)  # it lacks a block
    settle(engine)
    await waiting
    assert door.counts == {"on_device": 1, "arrived": 1}


async def test_nobody_waits_for_less_than_would_be_offered(tmp_path: Path) -> None:
    engine, _ = below(tmp_path)
    strict = DiskDoor(engine.leader, settings(MIB, disk_path=str(tmp_path), min_offer_tokens=12).connector)
    await gone_at_once(engine, strict, on_device=lambda: 32)
    assert strict.counts == {"too_little": 1}


async def test_nobody_waits_for_blocks_that_take_longer_than_computing(tmp_path: Path) -> None:
    engine, door = below(tmp_path)
    tier_of(engine).times.add(0.0, 1.0, 2)  # half a second a block, five for the prompt
    door.prefilled(10.0, 64)  # in a queue
    door.prefilled(6.4, 64)  # a tenth of a second a token: four seconds for its 40 tokens
    door.prefilled(0.001, 10)  # too short to say anything
    door.prefilled(0.0, 100)
    await gone_at_once(engine, door)
    assert door.counts == {"slower": 1}
    for _ in range(32):
        door.prefilled(12.9, 64)  # more than eight seconds now: the faster ones are too long ago
    waiting = await held(engine, door)
    settle(engine)
    await waiting
    assert door.counts == {"slower": 1, "arrived": 1}


async def test_what_the_engine_holds_is_no_gain(tmp_path: Path) -> None:
    """The chain has to be read from its start, and only what the engine lacks is spared."""
    engine, door = below(tmp_path)
    tier_of(engine).times.add(0.0, 1.0, 1)  # ten seconds for ten blocks
    door.prefilled(64.0, 64)  # a second a token
    await gone_at_once(engine, door, on_device=lambda: 32)
    assert door.counts == {"slower": 1}
    waiting = await held(engine, door, on_device=lambda: 28)
    settle(engine)
    await waiting


@pytest.mark.parametrize("scope", [{"salt": "b"}, {"salt": "a"}, {"adapter": 1}, {"adapter": 7}])
async def test_nobody_waits_for_blocks_of_another_namespace(tmp_path: Path, scope: dict[str, Any]) -> None:
    engine, door = below(tmp_path)
    await gone_at_once(engine, door, **scope)
    assert door.counts == {}
    assert tier_of(engine).in_flight == 0


async def test_a_tenant_waits_for_its_own_blocks(tmp_path: Path) -> None:
    engine = with_disk(tmp_path, wait_ms=LONG)
    engine.serve(PROMPT, cache_salt="a")
    settle(engine)
    crowd(engine)
    door = DiskDoor(engine.leader, engine.parts.outlet._config)
    await gone_at_once(engine, door)
    await gone_at_once(engine, door, salt="b")
    waiting = await held(engine, door, salt="a")
    settle(engine)
    await waiting
    assert door.counts == {"arrived": 1}
    assert engine.ask(engine.request(PROMPT, cache_salt="b")) == 0
    assert engine.prefill(engine.request(PROMPT, cache_salt="a")) == 40


@pytest.mark.parametrize(
    "options",
    [{"disk_wait_ms": 0.0}, {"disk_path": None}, {"materialization": Materialization.OFF}],
    ids=["off", "no disk", "no slab"],
)
def test_where_nobody_is_held_there_is_no_door(tmp_path: Path, options: dict[str, Any]) -> None:
    it = settings(MIB, **({"disk_path": str(tmp_path)} | OPTIONS | options))
    engine = ScriptedEngine(it)
    assert engine.parts.door is None
    assert engine.parts.snapshot()["disk_holds"] is None
    stop(engine)


def test_under_tensor_parallelism_there_is_no_door(tmp_path: Path) -> None:
    """Orders to the ranks' disks go out with a batch; an engine whose only request is held would have none."""
    it = settings(MIB, disk_path=str(tmp_path), **OPTIONS)
    engine = ScriptedEngine(it)
    parts = assemble_leader_with(llm_args(4, tensor_parallel_size=2), it, engine.sink)
    assert engine.parts.door is not None
    assert parts.door is None
    parts.close()
    stop(engine)


# faults of ours


async def test_a_disk_that_brings_nothing_delays_a_request_until_its_deadline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, door = below(tmp_path, wait_ms=5.0)
    await door.before(PROMPT)
    assert door.counts == {"late": 1}
    assert engine.prefill(engine.request(PROMPT)) == 0
    assert "answered nothing while a request waited" in caplog.text
    await gone_at_once(engine, door)  # and it is left alone for a second
    engine.now += 0.999
    await gone_at_once(engine, door)
    assert door.counts == {"late": 1, "resting": 2}
    engine.now += 0.001
    await door.before(PROMPT)  # still nothing: for two
    engine.now += 1.999
    await gone_at_once(engine, door)
    assert door.counts == {"late": 2, "resting": 3}
    engine.now += 0.001
    settle(engine)  # what was asked for came at last, and serves whoever comes now
    assert resident(engine) == 10


async def test_rest_has_an_end_however_long_the_disk_is_away(tmp_path: Path) -> None:
    engine, door = below(tmp_path, wait_ms=1.0)
    for _ in range(12):
        await door.before(PROMPT)
        engine.now += 60.0
    assert door.counts == {"late": 12}


async def test_requests_that_wait_together_let_it_rest_once(tmp_path: Path) -> None:
    engine, door = below(tmp_path, wait_ms=5.0)
    await asyncio.gather(*(door.before(PROMPT) for _ in range(4)))
    engine.now += 1.0
    waiting = await asyncio.gather(door.before(PROMPT))
    assert waiting == [None]
    assert door.counts == {"late": 5}


async def test_a_disk_that_is_only_slow_is_not_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_connector.disk_tier._ORDER_BLOCKS", 2)
    engine, door = below(tmp_path, wait_ms=200.0)
    waiting = await held(engine, door)
    assert disk_of(engine).run_pending(1) == 1
    await waiting
    assert (door.counts, resident(engine)) == ({"late": 1}, 2)
    asked = engine.request(PROMPT)
    assert engine.prefill(asked) == 8  # what came in time serves it
    engine.finish(asked)
    settle(engine)
    assert not door._rest


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
    assert not door._rest


async def _fails() -> None:
    raise RuntimeError("a fault of somebody else")


def _raises() -> Awaitable[None]:
    raise RuntimeError("a fault of somebody else")


@pytest.mark.parametrize("gone", [lambda: asyncio.sleep(0), _fails, _raises], ids=["left", "fails", "raises"])
async def test_a_client_that_leaves_ends_the_wait(tmp_path: Path, gone: Callable[[], Awaitable[Any]]) -> None:
    engine, door = below(tmp_path)
    await door.before(PROMPT, gone=gone)
    assert door.counts == {"left": 1}
    assert not door._rest
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

    caplog.set_level(logging.CRITICAL, "worker_connector.disk_door")
    await gone_at_once(engine, door, on_device=broken)
    await gone_at_once(engine, door, [-1, 2])
    monkeypatch.setattr(engine.leader, "cache", broken)
    await gone_at_once(engine, door)
    assert door.counts == {"failed": 3}


async def test_more_than_so_many_are_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_connector.disk_wishes.MOST_HELD", 1)
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
    life.ledger.lease(leased)
    await gone_at_once(engine, door)
    assert door.counts == {"partly": 1}
    assert tier_of(engine).counts["no_slot"] == 1
    assert all(entry.resident for entry in leased)
    life.ledger.release(leased)
