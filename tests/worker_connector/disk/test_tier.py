"""The tier below the slab: what leaves the slab comes back before it is offered, with the right bytes, or does not come
back."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynamo_semkv.contracts.location import Tier
from dynamo_semkv.contracts.report import Outcome
from tests.worker_connector.harness import MIB, settings
from tests.worker_connector.leader.test_residency import Recorder, believed_and_true
from tests.worker_connector.scripted import OPTIONS, ScriptedEngine, llm_args
from tests.worker_connector.scripted_disk import (
    PROMPT,
    chain_of,
    crowd,
    disk_of,
    donors,
    files,
    flip,
    settle,
    stop,
    tier_of,
    with_disk,
)
from worker_connector.disk import block_file
from worker_connector.disk import tier as disk_tier
from worker_connector.engine_api.geometry import PoolGeometry


def test_what_left_the_slab_is_brought_up_after_a_miss_and_offered_then(tmp_path: Path) -> None:
    engine = with_disk(tmp_path)
    engine.serve(PROMPT)
    settle(engine)
    assert len(files(tmp_path)) == 10
    crowd(engine)
    missed = engine.request(PROMPT)
    assert engine.prefill(missed) == 0  # served by computing: nobody waits for a disk
    engine.finish(missed)
    assert engine.leader.snapshot()["disk"]["missed"] == 1


def test_second_request_is_served_from_disk_with_the_right_bytes(tmp_path: Path) -> None:
    engine = with_disk(tmp_path)
    engine.serve(PROMPT)
    crowd(engine)
    asked = engine.request(PROMPT)
    assert engine.ask(asked) == 0
    settle(engine)
    assert tier_of(engine).counts["staged"] == 10
    assert engine.prefill(asked) == 40  # `prefill` asks again, and checks every byte that the forward pass reads
    asked.tokens.append(1)
    engine.finish(asked)
    report = engine.report_of(asked)
    assert (report.outcome, report.confirmed, report.tier) == (Outcome.MATERIALIZED_EXACT, 40, Tier.DISK)
    again = engine.serve(PROMPT)
    assert engine.report_of(again).tier is Tier.HOST_PINNED  # it is the slab's now
    engine.check_balance()


def test_part_that_is_in_the_slab_serves_while_the_rest_is_brought_up(tmp_path: Path) -> None:
    engine = with_disk(tmp_path)
    engine.serve(PROMPT)
    settle(engine)
    ledger = engine.leader._life.ledger  # type: ignore[union-attr]
    assert ledger is not None
    entry = next(entry for entry in ledger.entries() if entry.ordinal == 6)
    ledger.remove(entry)
    engine.idle()
    assert [engine.ask(engine.request(PROMPT)) for _ in range(2)] == [24, 24]
    settle(engine)
    assert engine.prefill(engine.request(PROMPT)) == 40


@pytest.mark.parametrize("scope", [{"cache_salt": "b"}, {"lora_task_id": 1}, {"multimodal_hashes": [[1] * 8]}])
def test_other_scope_is_another_block(tmp_path: Path, scope: dict[str, Any]) -> None:
    engine = with_disk(tmp_path)
    engine.serve(PROMPT, cache_salt="a")
    crowd(engine)
    request = engine.request(PROMPT, **scope)
    assert engine.ask(request) == 0
    settle(engine)
    assert engine.ask(request) == 0
    assert tier_of(engine).counts["missed"] == 0


def test_other_prompt_behind_the_same_blocks_gets_those_only(tmp_path: Path) -> None:
    engine = with_disk(tmp_path)
    engine.serve(PROMPT)
    crowd(engine)
    other = PROMPT[:20] + [7] * 21
    engine.ask(engine.request(other))
    settle(engine)
    assert tier_of(engine).counts["staged"] == 5
    assert engine.prefill(engine.request(other)) == 20


@pytest.mark.parametrize("block", [0, 4, 9])
def test_damaged_file_is_never_offered_nor_what_continues_it(tmp_path: Path, block: int) -> None:
    engine = with_disk(tmp_path)
    engine.serve(PROMPT)
    crowd(engine)
    tier = tier_of(engine)
    chosen = chain_of(engine)[block]
    store = disk_of(engine).store
    flip(store._path(store._name(chosen.digest, chosen.key)), -40)
    request = engine.request(PROMPT)
    engine.ask(request)
    settle(engine)
    assert store.counts["damaged"] == 1
    assert engine.prefill(request) == block * 4
    assert tier.index.get(chosen.key) is None


def test_restart_finds_the_blocks_and_registers_their_donors_again(tmp_path: Path) -> None:
    first = with_disk(tmp_path)
    first.serve(PROMPT)
    settle(first)
    (donor,) = donors(first.sink)
    generation = first.leader.snapshot()["generation"]
    stop(first)
    second = with_disk(tmp_path)
    settle(second)
    ((restored, said),) = donors(second.sink).items()
    assert said == (40, "disk")
    assert restored != donor
    assert second.leader.snapshot()["generation"] != generation
    assert second.ask(request := second.request(PROMPT)) == 0
    settle(second)
    assert second.prefill(request) == 40
    assert donors(second.sink) == {restored: (40, "host_pinned")}
    assert second.leader.snapshot()["event_publisher"].get("residency_errors", 0) == 0


def test_restart_with_other_weights_shares_nothing(tmp_path: Path) -> None:
    first = with_disk(tmp_path)
    first.serve(PROMPT)
    settle(first)
    stop(first)
    second = with_disk(tmp_path, args=llm_args(4, revision="2"))
    settle(second)
    assert donors(second.sink) == {}
    request = second.request(PROMPT)
    assert second.ask(request) == 0
    settle(second)
    assert second.ask(request) == 0


def test_restart_with_another_layout_finds_nothing_and_leaves_the_files(tmp_path: Path) -> None:
    first = with_disk(tmp_path)
    first.serve(PROMPT)
    settle(first)
    stop(first)
    second = with_disk(tmp_path, windows=(None, None))
    settle(second)
    assert donors(second.sink) == {}
    request = second.request(PROMPT)
    second.ask(request)
    settle(second)
    assert second.ask(request) == 0
    stop(second)
    third = with_disk(tmp_path)
    settle(third)
    assert list(donors(third.sink).values()) == [(40, "disk")]


def test_engine_of_another_name_finds_them_too(tmp_path: Path) -> None:
    """A pod that is replaced has a new name; what its blocks are has not changed."""
    first = with_disk(tmp_path)
    first.serve(PROMPT)
    settle(first)
    stop(first)
    it = settings(MIB, disk_path=str(tmp_path), **OPTIONS)
    second = ScriptedEngine(replace(it, stable_routing_id="engine-b"))
    settle(second)
    assert list(donors(second.sink).values()) == [(40, "disk")]


def test_hint_brings_a_donor_up_before_its_request_comes(tmp_path: Path) -> None:
    engine = with_disk(tmp_path)
    engine.serve(PROMPT)
    (donor,) = donors(engine.sink)
    crowd(engine)
    assert donors(engine.sink)[donor] == (40, "disk")
    engine.leader.hint_received(donor)
    settle(engine)
    assert donors(engine.sink)[donor] == (40, "host_pinned")
    assert engine.prefill(engine.request(PROMPT)) == 40
    engine.leader.hint_received("unknown")


def test_donor_is_evicted_when_it_is_gone_from_both(tmp_path: Path) -> None:
    engine = with_disk(tmp_path)
    engine.serve(PROMPT)
    (donor,) = donors(engine.sink)
    crowd(engine)
    store = disk_of(engine).store
    chain = chain_of(engine)
    store.discard(chain[0].digest, chain[0].key)
    engine.leader.hint_received(donor)  # its order finds nothing, and tells what has gone
    settle(engine)
    assert donor not in donors(engine.sink)
    assert engine.ask(engine.request(PROMPT)) == 0


def test_dynamo_is_told_of_the_slab_only(tmp_path: Path) -> None:
    """Its residency sink knows the host tier; a block on disk is not there until it was brought up."""
    engine = with_disk(tmp_path)
    recorder = Recorder()
    engine.leader.attach_residency(recorder)  # type: ignore[arg-type]
    engine.serve(PROMPT)
    crowd(engine, 40)
    believed, true = believed_and_true(engine, recorder)
    assert believed == true
    engine.ask(engine.request(PROMPT))
    settle(engine)
    engine.idle()
    believed, true = believed_and_true(engine, recorder)
    assert believed == true


def test_cancelled_request_leaves_nothing_on_disk(tmp_path: Path) -> None:
    engine = with_disk(tmp_path)
    request = engine.request(PROMPT)
    engine.prefill(request, chunk=16)
    request.is_finished_due_to_cancellation = True
    engine.finish(request)
    settle(engine)
    assert len(files(tmp_path)) == 8  # what later reports proved to be computed, and no more
    engine.check_balance()


def test_reset_cache_empties_the_disk_too(tmp_path: Path) -> None:
    engine = with_disk(tmp_path)
    engine.serve(PROMPT)
    settle(engine)
    engine.serve([5] * 41)  # its writing is ordered, and not done
    engine.leader.reset_cache()
    settle(engine)
    assert files(tmp_path) == []
    assert donors(engine.sink) == {}
    request = engine.request(PROMPT)
    assert engine.ask(request) == 0
    settle(engine)
    assert engine.ask(request) == 0
    engine.serve(PROMPT)
    settle(engine)
    assert len(files(tmp_path)) == 10
    engine.check_balance()


def test_reset_while_blocks_are_brought_up_offers_none_of_them(tmp_path: Path) -> None:
    engine = with_disk(tmp_path)
    engine.serve(PROMPT)
    crowd(engine)
    request = engine.request(PROMPT)
    engine.ask(request)
    engine.leader.reset_cache()
    settle(engine)
    assert engine.ask(request) == 0
    assert tier_of(engine).in_flight == 0
    engine.finish(request)
    engine.check_balance()


def test_disk_that_takes_nothing_costs_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    engine = with_disk(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(block_file, "_write_all", full)
        engine.serve(PROMPT)
        settle(engine)
        assert files(tmp_path) == []
        assert engine.prefill(engine.request(PROMPT)) == 40
    engine.serve([*PROMPT, *range(100, 105)])  # continues it: its whole chain is tried again
    settle(engine)
    assert len(files(tmp_path)) == 11


def test_what_is_damaged_in_the_slab_does_not_become_a_file(tmp_path: Path) -> None:
    engine = with_disk(tmp_path)
    engine.serve(PROMPT)
    slab = engine.rank.slab
    assert slab is not None
    entry = next(entry for entry in engine.leader._life.ledger.entries() if entry.ordinal == 3)  # type: ignore[union-attr]
    slab.rows[entry.slot, 0] ^= 1
    settle(engine)
    assert len(files(tmp_path)) == 3
    assert tier_of(engine).counts["spill_failed"] == 7


def test_bytes_in_flight_are_bounded_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = with_disk(tmp_path)
    size = tier_of(engine)._bytes
    monkeypatch.setattr(disk_tier, "SPILL_BYTES", 3 * size)
    monkeypatch.setattr(disk_tier, "SPILL_ORDER_BYTES", 2 * size)
    engine.serve(PROMPT)
    assert engine.leader.snapshot()["ledger"]["leased"] == 3
    crowd(engine)
    monkeypatch.setattr(disk_tier, "STAGE_BYTES", 4 * size)
    monkeypatch.setattr(disk_tier, "STAGE_ORDER_BYTES", 2 * size)
    engine.ask(engine.request(PROMPT))
    assert engine.leader.snapshot()["ledger"]["pending"] == 4
    disk_of(engine).run_pending(1)
    assert tier_of(engine).counts["staged"] == 2
    assert engine.leader.snapshot()["ledger"]["pending"] == 4
    settle(engine)
    assert tier_of(engine).counts["staged"] == 10


def test_bounded_by_disk_bytes_with_the_least_recently_used_gone(tmp_path: Path) -> None:
    engine = with_disk(tmp_path, disk_bytes=MIB)
    for n in range(1, 200):
        engine.serve([1000 * n + i for i in range(41)])
        settle(engine)
    store = disk_of(engine).store
    assert sum(file.stat().st_size for file in files(tmp_path)) == store.stats().size <= MIB
    assert store.counts["evicted"] > 0
    assert tier_of(engine).index.usable == store.stats().blocks


def test_pool_that_is_registered_anew_reads_its_directory_again(tmp_path: Path) -> None:
    engine = with_disk(tmp_path)
    engine.serve(PROMPT)
    settle(engine)
    engine.rank.register(PoolGeometry.from_layout(engine.layout()))
    settle(engine)
    request = engine.request(PROMPT)
    engine.ask(request)
    settle(engine)
    assert engine.prefill(request) == 40


def test_two_engines_share_a_path_and_not_a_directory(tmp_path: Path) -> None:
    one = with_disk(tmp_path)
    it = settings(MIB, disk_path=str(tmp_path), **OPTIONS)
    other = ScriptedEngine(replace(it, stable_routing_id="engine-b"))
    one.serve(PROMPT)
    settle(one)
    settle(other)
    assert len({disk_of(engine).store.directory for engine in (one, other)}) == 2
    assert other.ask(other.request(PROMPT)) == 0
