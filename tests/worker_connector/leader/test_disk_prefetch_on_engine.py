"""Requests held at the door of a real engine: the very request that asks is served from disk, and its logits are those
of a warm one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from dynamo_semkv.contracts.location import Tier
from dynamo_semkv.contracts.report import Outcome
from tests.worker_connector.disk.test_disk_on_engine import settle
from tests.worker_connector.harness import MIB, Bench, ended, engine, prompt, run, settings, wait_for
from worker_connector.leader.disk_prefetch_wait import DiskPrefetchWait
from worker_connector.reference_engine.dynamo_worker.disk import DiskAhead
from worker_connector.reference_engine.dynamo_worker.request import Submission
from worker_connector.reference_engine.engine.engine import Engine
from worker_connector.reference_engine.models.sampling import SamplingParams

torch.set_num_threads(1)
WITH_LOGITS = SamplingParams(return_generation_logits=True)
TOKENS = prompt(200, 1)
"""Six blocks, and some."""


def bench_on(path: Path, wait_ms: float = 60_000.0, **options: Any) -> Bench:
    return Bench(settings(4 * MIB, disk_path=str(path), disk_bytes=64 * MIB, disk_wait_ms=wait_ms), **options)


def asked(tokens: list[int] = TOKENS, rank: int | None = None, salt: str | None = None) -> Submission:
    return Submission(tokens, 8, SamplingParams(), frozenset(), 0, rank, salt)


def door_of(bench: Bench, rank: int = 0) -> DiskPrefetchWait:
    door = bench.schedulers[rank].disk_door
    assert door is not None
    return door


def left_on_disk(path: Path, salt: str | None = None, **config: Any) -> Any:
    """An engine that has ended left the KV of `TOKENS`; its answer when it was warm."""
    bench = bench_on(path)
    with engine(bench, **config) as running:
        run(running, TOKENS, cache_salt=salt)
        _, warm = run(running, TOKENS, cache_salt=salt, sampling=WITH_LOGITS)
        settle(bench)
    assert warm.stats.device_reused_tokens == 192
    return warm


@contextmanager
def next_engine(path: Path, **config: Any) -> Iterator[tuple[Bench, Engine]]:
    bench = bench_on(path)
    with engine(bench, **config) as running:
        settle(bench)  # the directory is looked through
        yield bench, running
        ended(bench)
    bench.check_balance()


async def hold(bench: Bench, running: Engine, what: Submission) -> None:
    """The door, while the disk works."""
    waiting = asyncio.ensure_future(DiskAhead(running).before(what))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await asyncio.to_thread(settle, bench)
    await asyncio.wait_for(waiting, 60)


@pytest.mark.parametrize("manager", ["v1", "v2"])
def test_first_request_after_a_restart_is_served_from_disk_bit_for_bit(tmp_path: Path, manager: str) -> None:
    warm = left_on_disk(tmp_path, kv_cache_manager=manager)
    with next_engine(tmp_path, kv_cache_manager=manager) as (bench, running):
        asyncio.run(hold(bench, running, asked()))
        request_id, served = run(running, TOKENS, sampling=WITH_LOGITS)
        ended(bench)
    assert door_of(bench).counts == {"arrived": 1}
    assert served.token_ids == warm.token_ids
    assert (served.stats.connector_served_tokens, served.stats.device_reused_tokens) == (192, 0)
    for ours, theirs in zip(served.stats.generation_logits, warm.stats.generation_logits, strict=True):
        assert torch.equal(ours, theirs)
    report = bench.report_of(request_id)
    assert (report.outcome, report.confirmed, report.tier) == (Outcome.MATERIALIZED_EXACT, 192, Tier.DISK)


def test_with_threads_as_in_production(tmp_path: Path) -> None:
    warm = left_on_disk(tmp_path)
    bench = bench_on(tmp_path, inline=False)
    with engine(bench) as running:
        wait_for(lambda: bench.schedulers[0].snapshot()["disk"]["blocks"] == 6)
        asyncio.run(asyncio.wait_for(DiskAhead(running).before(asked()), 60))
        request_id, served = run(running, TOKENS, sampling=WITH_LOGITS)
        wait_for(lambda: bool(bench.sink.reports))
    assert served.token_ids == warm.token_ids
    assert served.stats.connector_served_tokens == 192
    assert (bench.report_of(request_id).confirmed, bench.report_of(request_id).tier) == (192, Tier.DISK)


def test_what_the_engine_holds_is_not_read(tmp_path: Path) -> None:
    bench = bench_on(tmp_path)
    with engine(bench) as running:
        run(running, TOKENS)
        settle(bench)
        ledger = bench.leader._life.ledger  # type: ignore[union-attr]
        assert ledger is not None
        for entry in list(ledger.entries()):
            if entry.ordinal == 0:
                ledger.remove(entry)  # as if others had taken the slots
        assert running.cached_tokens(0, TOKENS) == 192
        assert running.cached_tokens(0, TOKENS[:160]) == 128
        assert running.cached_tokens(0, TOKENS, "somebody else's") == 0
        asyncio.run(asyncio.wait_for(DiskAhead(running).before(asked()), 60))
        assert door_of(bench).counts == {"on_device": 1}
        running.reset_prefix_cache()
        wait_for(lambda: running.cached_tokens(0, TOKENS) == 0)
        asyncio.run(hold(bench, running, asked()))
        assert door_of(bench).counts == {"on_device": 1, "arrived": 1}
        _, served = run(running, TOKENS)
        assert served.stats.connector_served_tokens == 192
        settle(bench)
    bench.check_balance()


def test_a_tenant_s_blocks_are_brought_up_for_that_tenant_only(tmp_path: Path) -> None:
    left_on_disk(tmp_path, "tenant a")
    with next_engine(tmp_path) as (bench, running):
        for other in (None, "tenant b"):
            asyncio.run(hold(bench, running, asked(salt=other)))
            _, cold = run(running, TOKENS, cache_salt=other)
            assert cold.stats.cached_tokens == 0
        assert door_of(bench).counts == {}
        asyncio.run(hold(bench, running, asked(salt="tenant a")))
        _, served = run(running, TOKENS, cache_salt="tenant a")
        assert served.stats.connector_served_tokens == 192


def test_of_several_ranks_the_request_must_name_its_own(tmp_path: Path) -> None:
    bench = bench_on(tmp_path)
    with engine(bench, data_parallel_size=2) as running:
        run(running, TOKENS, dp_rank=1)
        settle(bench)
        running.reset_prefix_cache()
        wait_for(lambda: running.cached_tokens(1, TOKENS) == 0)
        ledger = bench.schedulers[1].leader._life.ledger  # type: ignore[union-attr]
        assert ledger is not None
        for entry in list(ledger.entries()):
            if entry.ordinal == 0:
                ledger.remove(entry)
        for rank in (None, 0):
            asyncio.run(hold(bench, running, asked(rank=rank)))
        assert [door_of(bench, rank).counts for rank in (0, 1)] == [{}, {}]
        asyncio.run(hold(bench, running, asked(rank=1)))
        assert door_of(bench, 1).counts == {"arrived": 1}
        settle(bench)


def test_an_engine_without_a_connector_or_a_disk_has_no_door() -> None:
    for bench in (None, Bench(settings())):
        with engine(bench) as running:
            ahead = DiskAhead(running)
            asyncio.run(ahead.before(asked()))
            assert ahead.prefill(asked()) is None


def test_prefills_are_measured_from_the_engine_s_own_chunks(tmp_path: Path) -> None:
    bench = bench_on(tmp_path)
    now = [100.0]
    with engine(bench) as running:
        ahead = DiskAhead(running, lambda: now[0])
        watched = ahead.prefill(asked())
        assert watched is not None
        now[0] += 2.0
        watched.saw({"token_ids": [1]})
        now[0] += 5.0
        watched.saw({"token_ids": [2]})
        assert list(door_of(bench)._prefills) == []
        watched.saw({"engine_data": {"kv_cache_hit": {"prompt_tokens": 300, "reused_tokens": 200}}})
        assert list(door_of(bench)._prefills) == [0.02]
        watched = ahead.prefill(asked())
        assert watched is not None
        now[0] += 3.0  # a single chunk
        watched.saw({"token_ids": [1], "engine_data": {"kv_cache_hit": {"prompt_tokens": 100, "reused_tokens": 0}}})
        assert list(door_of(bench)._prefills) == [0.02, 0.03]
