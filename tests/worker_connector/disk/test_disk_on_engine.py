"""The disk tier below a real engine: KV of a process that has ended serves the next one, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dynamo_semkv.contracts.location import Tier
from dynamo_semkv.contracts.report import Outcome
from tests.worker_connector.harness import MIB, Bench, ended, engine, prompt, run, settings
from tests.worker_connector.scripted_disk import donors, files

torch.set_num_threads(1)


def bench_on(path: Path) -> Bench:
    return Bench(settings(4 * MIB, disk_path=str(path), disk_bytes=64 * MIB))


def settle(bench: Bench) -> None:
    """The engine has told the end of its requests, and the disks have done what followed."""
    ended(bench)
    for worker in bench.workers:
        disk = worker.rank.disk_thread
        assert disk is not None
        while disk.run_pending():
            pass


@pytest.mark.parametrize("manager", ["v1", "v2"])
def test_e2e_persistent_cache(tmp_path: Path, manager: str) -> None:
    """As TensorRT-LLM's own test of that name: run, destroy the engine, make another one, and the same prompt is
    restored from disk."""
    tokens = prompt(200, 1)
    first = bench_on(tmp_path)
    with engine(first, kv_cache_manager=manager) as running:
        _, cold = run(running, tokens, max_new_tokens=8)
        settle(first)
        assert cold.stats.cached_tokens == 0
    assert len(files(tmp_path)) == 6
    second = bench_on(tmp_path)
    with engine(second, kv_cache_manager=manager) as running:
        settle(second)
        ((donor, said),) = donors(second.sink).items()
        assert said == (192, "disk")
        second.leader.hint_received(donor)
        settle(second)
        request_id, warm = run(running, tokens, max_new_tokens=8)
        settle(second)
    assert warm.token_ids == cold.token_ids
    assert warm.stats.cached_tokens == 192
    report = second.report_of(request_id)
    assert (report.outcome, report.confirmed, report.tier) == (Outcome.MATERIALIZED_EXACT, 192, Tier.DISK)
    second.check_balance()


def test_owners_of_attention_data_parallelism_have_a_store_each(tmp_path: Path) -> None:
    bench = bench_on(tmp_path)
    with engine(bench, data_parallel_size=2) as running:
        for rank in range(2):
            run(running, prompt(200, rank), dp_rank=rank)
        settle(bench)
        assert [scheduler.snapshot()["disk"]["blocks"] for scheduler in bench.schedulers] == [6, 6]
    assert len(files(tmp_path)) == 12
    bench.check_balance()


def test_a_small_slab_above_a_disk_serves_more_than_it_holds(tmp_path: Path) -> None:
    """The slab holds 64 blocks and the device 24; twelve prompts of 8 blocks come round and round, each announced by a
    hint."""
    bench = Bench(settings(MIB, disk_path=str(tmp_path), disk_bytes=64 * MIB))
    prompts = [prompt(260, seed) for seed in range(12)]
    with engine(bench, num_blocks=24) as running:
        said = {}
        for seed, tokens in enumerate(prompts):
            before = set(donors(bench.sink))
            run(running, tokens)
            settle(bench)
            (said[seed],) = set(donors(bench.sink)) - before
        reused = 0
        for seed, tokens in enumerate(prompts):
            bench.leader.hint_received(said[seed])
            settle(bench)
            _, again = run(running, tokens)
            settle(bench)
            reused += again.stats.cached_tokens
        assert reused == 12 * 256
    assert set(donors(bench.sink)) == set(said.values())
    bench.check_balance()


def test_what_a_tenant_left_on_disk_under_the_key_of_before_is_served_to_nobody(tmp_path: Path) -> None:
    """Rotation of the salt key: the same salt is another tenant now. Without a salt nothing has changed."""
    tokens, open_tokens = prompt(200, 1), prompt(200, 2)
    first = bench_on(tmp_path)
    with engine(first) as running:
        run(running, tokens, cache_salt="tenant a")
        run(running, open_tokens)
        settle(first)
    assert len(files(tmp_path)) == 12
    rotated = Bench(replace(settings(4 * MIB, disk_path=str(tmp_path), disk_bytes=64 * MIB), salt_key=b"another key"))
    with engine(rotated) as running:
        settle(rotated)
        for donor in donors(rotated.sink):
            rotated.leader.hint_received(donor)
        settle(rotated)
        for salt in ("tenant a", "tenant b"):
            _, cold = run(running, tokens, cache_salt=salt)
            assert cold.stats.connector_served_tokens == 0
        _, warm = run(running, open_tokens)
        assert warm.stats.connector_served_tokens == 192
        settle(rotated)
    rotated.check_balance()
