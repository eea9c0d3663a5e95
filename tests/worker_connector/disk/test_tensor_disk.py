"""A disk below the slabs of several ranks, each a process of its own: a block on disk is what all ranks can read of
it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from dynamo_semkv.contracts.location import Tier
from tests.worker_connector.harness import wait_for
from tests.worker_connector.link.test_tensor_parallel import TOKENS, finish, make, processes, saved
from tests.worker_connector.scripted_disk import donors, files, tier_of
from tests.worker_connector.tensor_engine import TensorEngine
from worker_connector.disk.tier import DiskTier
from worker_connector.link.channel import RankResult, SaveDone

__all__ = ["make", "processes"]

Make = Callable[..., TensorEngine]


def written(make: Make, path: Path) -> TensorEngine:
    engine = saved(make(disk_path=str(path)))
    engine.settle_disks()
    assert sorted(len(files(directory)) for directory in path.iterdir()) == [10, 10]
    return engine


def files_of(engine: TensorEngine, path: Path, rank: int) -> list[Path]:
    own = engine.rank.disk_thread.store.directory  # type: ignore[union-attr]
    (other,) = [directory for directory in path.iterdir() if directory != own]
    return files(own if rank == 0 else other)


def drop_slab(engine: TensorEngine) -> None:
    """The prompt leaves all slabs."""
    ledger = engine.leader._life.ledger  # type: ignore[union-attr]
    assert ledger is not None
    ledger.remove(next(entry for entry in ledger.entries() if entry.ordinal == 0))
    engine.idle()
    assert engine.resident() == 0


def test_brought_up_and_loaded_on_every_rank(make: Make, tmp_path: Path) -> None:
    engine = written(make, tmp_path)
    (donor,) = donors(engine.sink)
    drop_slab(engine)
    assert donors(engine.sink) == {donor: (40, "disk")}
    request = engine.request(TOKENS)
    assert engine.ask(request) == 0
    engine.settle_disks()
    assert engine.prefill(request) == 40  # every forward pass checks the shards of all ranks
    finish(engine, request)
    wait_for(lambda: bool(engine.sink.reports) and engine.sink.reports[-1].request_id == request.request_id)
    assert engine.report_of(request).tier is Tier.DISK
    assert donors(engine.sink) == {donor: (40, "host_pinned")}
    wait_for(lambda: engine.leader.snapshot()["leases"] == 0)
    engine.check_balance()


@pytest.mark.parametrize("rank", [0, 1])
def test_file_that_one_rank_has_not_is_served_by_none(make: Make, tmp_path: Path, rank: int) -> None:
    engine = written(make, tmp_path)
    drop_slab(engine)
    files_of(engine, tmp_path, rank)[0].unlink()
    request = engine.request(TOKENS)
    engine.ask(request)
    engine.settle_disks()
    offered = engine.prefill(request)
    assert offered < 40
    assert tier_of(engine).index.usable < 10
    finish(engine, request)
    engine.settle_disks()
    wait_for(lambda: engine.leader.snapshot()["leases"] == 0)
    engine.check_balance()


def test_what_a_rank_saved_is_awaited_however_late_the_leader_hears_of_it(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the other rank's results come after many iterations; here they come when the engine has asked
    for the 50th time."""
    engine = make(disk_path=str(tmp_path))
    engine.meet()
    engine.settle_disks()
    held = threading.Event()
    heard, asked = engine.leader.on_result, count(1)

    def late(result: RankResult) -> None:
        if isinstance(result, SaveDone):
            held.wait(30)
        heard(result)

    def answered(tier: DiskTier) -> bool:
        if next(asked) == 50:
            held.set()
        return plain(tier)

    plain = engine._answered
    monkeypatch.setattr(engine.leader, "on_result", late)
    monkeypatch.setattr(engine, "_answered", answered)
    engine.serve(TOKENS)
    engine.settle_disks()
    engine.check_balance()
    assert tier_of(engine).index.usable == 10


def test_restart_of_all_ranks_finds_the_blocks(make: Make, tmp_path: Path) -> None:
    first = written(make, tmp_path)
    first.rank.close()
    first.close()
    second = make(disk_path=str(tmp_path))
    second.meet()
    second.settle_disks()
    assert list(donors(second.sink).values()) == [(40, "disk")]
    request = second.request(TOKENS)
    assert second.ask(request) == 0
    second.settle_disks()
    assert second.prefill(request) == 40


def test_restart_of_one_rank_begins_anew_and_loses_no_file(make: Make, tmp_path: Path) -> None:
    """A rank that registered its pool again is another one: what it has on disk is told to the new books."""
    engine = written(make, tmp_path)
    engine.others[0].register_again()
    wait_for(lambda: engine.leader.snapshot()["counts"].get("pool_changed", 0) == 1)
    engine.settle_disks()
    assert tier_of(engine).index.usable == 10
    request = engine.request(TOKENS)
    assert engine.ask(request) == 0
    engine.settle_disks()
    assert engine.prefill(request) == 40


def test_reset_empties_the_disks_of_all_ranks(make: Make, tmp_path: Path) -> None:
    engine = written(make, tmp_path)
    engine.leader.reset_cache()
    engine.settle_disks()
    assert files(tmp_path) == []
    request = engine.request(TOKENS)
    assert engine.ask(request) == 0
    engine.settle_disks()
    assert engine.ask(request) == 0
