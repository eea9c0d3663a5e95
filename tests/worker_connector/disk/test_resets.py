"""What a reset forgets stays forgotten: whatever the disk, its files or the process do afterwards."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from dynamo_semkv.contracts.errors import ContractError
from tests.worker_connector.disk.test_store import has, payload, put, record, store
from tests.worker_connector.scripted import ScriptedEngine
from tests.worker_connector.scripted_disk import PROMPT, disk_of, donors, files, settle, stop, tier_of, with_disk
from worker_connector.disk import store_epoch
from worker_connector.errors import Refused
from worker_connector.leader import cache_reset


def served(path: Path) -> ScriptedEngine:
    engine = with_disk(path)
    engine.serve(PROMPT)
    settle(engine)
    assert len(files(path)) == 10
    return engine


def die(engine: ScriptedEngine) -> None:
    """As by SIGKILL: nothing is done any more, and the lock goes."""
    store = disk_of(engine).store
    os.close(store._owner)
    store._owner = -1


def assert_forgotten(path: Path) -> None:
    engine = with_disk(path)
    settle(engine)
    assert (tier_of(engine).index.usable, donors(engine.sink), files(path)) == (0, {}, [])
    assert engine.ask(engine.request(PROMPT)) == 0
    engine.serve(PROMPT)
    settle(engine)
    stop(engine)
    again = with_disk(path)
    settle(again)
    assert tier_of(again).index.usable == 10  # what is written after it is there
    stop(again)


def test_process_that_dies_right_after_a_reset_serves_nothing_of_before(tmp_path: Path) -> None:
    engine = served(tmp_path)
    engine.leader.reset_cache()
    die(engine)
    assert len(files(tmp_path)) == 10  # nobody had the time to remove them
    assert_forgotten(tmp_path)


def test_close_obeys_a_reset_that_waits(tmp_path: Path) -> None:
    engine = served(tmp_path)
    tier_of(engine).clear()  # as it comes with a batch where there are several ranks
    stop(engine)
    assert files(tmp_path) == []
    assert_forgotten(tmp_path)


def test_new_weights_are_as_durable(tmp_path: Path) -> None:
    engine = served(tmp_path)
    before = disk_of(engine).store.epoch
    engine.leader.weights_changed("step-42")
    assert disk_of(engine).store.epoch != before
    die(engine)
    assert_forgotten(tmp_path)


def test_files_that_cannot_be_removed_are_not_served_and_keep_their_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.EIO, "input/output error")

    engine = served(tmp_path)
    size = disk_of(engine).store.stats().size
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        engine.leader.reset_cache()
        settle(engine)
    stats = disk_of(engine).store.stats()
    assert (stats.blocks, stats.size, disk_of(engine).store.counts["remove_errors"]) == (0, size, 10)
    stop(engine)
    assert_forgotten(tmp_path)


def test_directory_that_was_never_looked_through_is_reset_too(tmp_path: Path) -> None:
    stop(served(tmp_path))
    engine = with_disk(tmp_path)
    engine.leader.reset_cache()
    settle(engine)
    assert tier_of(engine).index.usable == 0
    stop(engine)
    assert_forgotten(tmp_path)


def test_writing_that_was_ordered_before_a_reset_is_not_done_after_it(tmp_path: Path) -> None:
    engine = with_disk(tmp_path)
    settle(engine)
    engine.serve(PROMPT)
    engine.leader.reset_cache()
    assert disk_of(engine).run_pending(1) == 1
    assert files(tmp_path) == []
    stop(engine)


def test_store_takes_nothing_of_an_earlier_epoch(tmp_path: Path) -> None:
    with store(tmp_path) as it:
        epoch = it.epoch
        it.begin_epoch()
        assert not it.put(record(1), payload(1), epoch)
        assert it.put(record(1), payload(1), it.epoch)


def test_reset_during_the_first_look_finds_nothing_of_before(tmp_path: Path) -> None:
    with store(tmp_path) as it:
        put(it, 1)
        asked: list[bool] = []

        def reset_once() -> bool:
            if not asked:
                asked.append(True)
                it.begin_epoch()
            return False

        assert it.take_over(reset_once) == []
        assert not has(it, 1)


def test_disk_that_takes_no_epoch_is_said_to_the_caller_and_nothing_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    engine = served(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(store_epoch.os, "rename", refused)
        with pytest.raises(OSError, match="no space left"):
            engine.leader.reset_cache()
    assert files(tmp_path) == []  # removed at once instead
    settle(engine)
    assert tier_of(engine).index.usable == 0
    stop(engine)
    assert_forgotten(tmp_path)


@pytest.mark.parametrize("what", ["short", "directory", "link"])
def test_epoch_that_cannot_be_read_makes_everything_stale(tmp_path: Path, what: str) -> None:
    with store(tmp_path) as it:
        put(it, 1)
        it.begin_epoch()
        put(it, 2)
    (tmp_path / "epoch").unlink()
    if what == "short":
        (tmp_path / "epoch").write_bytes(b"short")
    elif what == "directory":
        (tmp_path / "epoch").mkdir()
        with pytest.raises(Refused, match="its epoch cannot be written"), store(tmp_path):
            pass
        return
    else:
        (tmp_path / "epoch").symlink_to(tmp_path / "nothing")
    with store(tmp_path) as it:
        assert it.stats().blocks == 0
        put(it, 3)
    with store(tmp_path) as it:
        assert has(it, 3)


# who is told


@pytest.mark.parametrize("name", ["", " ", "x" * 600, "x" * 10_000_000, "\ud800", "a\x00b", "a\nb", "\x1b[2J", 7])
def test_name_of_weights_is_checked_before_anything_is_done(tmp_path: Path, name: Any) -> None:
    engine = served(tmp_path)
    leader = engine.leader
    before = (leader._generation, leader._namespaces.base, disk_of(engine).store.epoch)  # type: ignore[union-attr]
    cache_reset.owns_cache(leader)
    for change in (leader.weights_changed, cache_reset.weights_changed):
        with pytest.raises(ContractError, match=r"^revision: got .*, allowed: 1 to 256 printable characters") as raised:
            change(name)
        assert len(str(raised.value)) < 300
    assert (leader._generation, leader._namespaces.base, disk_of(engine).store.epoch) == before  # type: ignore[union-attr]
    stop(engine)


def test_name_that_is_too_long_behind_the_model_s_forgets_everything_and_says_so(tmp_path: Path) -> None:
    engine = served(tmp_path)
    before = engine.leader._generation
    engine.leader._llm_args.model = "m" * 400
    with pytest.raises(ContractError, match="at most 512 characters"):
        engine.leader.weights_changed("r" * 200)
    assert engine.leader._generation != before
    die(engine)
    engine.leader._llm_args.model = "m"


class Owner:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.told: list[str] = []

    def reset_cache(self) -> None:
        self.told.append("reset")
        if self.error is not None:
            raise self.error

    def weights_changed(self, revision: str) -> None:
        self.told.append(revision)
        if self.error is not None:
            raise self.error


def test_every_owner_is_told_when_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    owners = [Owner(), Owner(OSError("disk")), Owner()]
    monkeypatch.setattr(cache_reset, "_owners", owners)
    with pytest.raises(OSError, match="disk"):
        cache_reset.reset_cache()
    with pytest.raises(OSError, match="disk"):
        cache_reset.weights_changed(" step-2 ")
    assert [owner.told for owner in owners] == [["reset", "step-2"]] * 3
