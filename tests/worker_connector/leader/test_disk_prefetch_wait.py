"""Requests that are held at the door for what is on disk of their prompts: what is worth waiting for, for how long, and
that no fault of the disk delays a request beyond its deadline or fails it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from dynamo_semkv.config.schema import Materialization
from dynamo_semkv.contracts.location import Tier
from dynamo_semkv.contracts.report import Outcome
from tests.worker_connector.disk.test_tier_rules import no_files_here
from tests.worker_connector.disk_holds import LONG, below, gone_at_once, held, resident
from tests.worker_connector.harness import MIB, settings
from tests.worker_connector.scripted import OPTIONS, ScriptedEngine, llm_args
from tests.worker_connector.scripted_disk import PROMPT, chain_of, crowd, disk_of, settle, stop, tier_of, with_disk
from worker_connector.assembly import assemble_leader_with
from worker_connector.connector import disk_door
from worker_connector.leader.disk_prefetch_wait import DiskPrefetchWait, offer

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
    strict = DiskPrefetchWait(engine.leader, settings(MIB, disk_path=str(tmp_path), min_offer_tokens=12).connector)
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
    door = DiskPrefetchWait(engine.leader, engine.parts.event_publisher._config)
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


def test_the_door_of_a_rank_is_found_in_its_process(tmp_path: Path) -> None:
    rank = 77  # nobody else's here
    args = llm_args(4, enable_attention_dp=True)
    engine = with_disk(tmp_path / "a", args=args, dp_rank=rank)
    door = engine.parts.door
    assert door is not None
    offer(door)
    assert disk_door(rank) is None
    engine.serve(PROMPT)  # with the first batch the engine says which rank it is
    settle(engine)
    assert disk_door(rank) is door
    assert disk_door(rank + 1) is None
    other = with_disk(tmp_path / "b", args=args, dp_rank=rank)
    assert other.parts.door is not None
    offer(other.parts.door)
    other.serve(PROMPT)
    assert disk_door(rank) is None  # which one?
    stop(other)
    assert disk_door(rank) is door
    stop(engine)
    assert disk_door(rank) is None
