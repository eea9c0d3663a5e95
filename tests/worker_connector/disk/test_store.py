"""Blocks on disk: what is read is what was written under these tokens, or it is a miss."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo_semkv.contracts.keys import child_key, root_key
from tests.worker_connector.harness import wait_for
from worker_connector.disk import block_file
from worker_connector.disk.block_file import OVERHEAD, BlockRecord
from worker_connector.disk.store import DiskStore
from worker_connector.errors import Refused

ROOT = Path(__file__).resolve().parents[3]
GEOMETRY = "0123456789abcdef"
SIZE = 1000
HEAD = 112
FILE = OVERHEAD + 64 + SIZE  # tokens, payload


def namespace(number: int = 0) -> bytes:
    return bytes([number]) * 32


def tokens_of(number: int) -> bytes:
    return number.to_bytes(4, "little") * 16


def record(number: int, scope: int = 0) -> BlockRecord:
    """The first block of some prompt."""
    root = root_key(namespace(scope))
    return BlockRecord(namespace(scope), child_key(root, tokens_of(number)), root, 0, tokens_of(number))


def chain(length: int, first: int = 100) -> list[BlockRecord]:
    found = [record(first)]
    for ordinal in range(1, length):
        tokens, parent = tokens_of(first + ordinal), found[-1].key
        found.append(BlockRecord(namespace(), child_key(parent, tokens), parent, ordinal, tokens))
    return found


def payload(number: int) -> memoryview:
    return memoryview(np.random.default_rng(number).integers(0, 256, SIZE, dtype=np.uint8)).cast("B")


@contextmanager
def store(directory: Path, blocks: int = 8, geometry: str = GEOMETRY, **options: Any) -> Iterator[DiskStore]:
    found = DiskStore(directory, geometry, SIZE, blocks * FILE, **options)
    try:
        found.take_over()
        yield found
    finally:
        found.close()


def put(it: DiskStore, number: int, scope: int = 0) -> bool:
    return it.put(record(number, scope), payload(number))


def get(it: DiskStore, number: int, scope: int = 0, **changes: Any) -> bytes | None:
    return read(it, replace(record(number, scope), **changes))


def has(it: DiskStore, number: int) -> bool:
    return it.contains(namespace(), record(number).key)


def read(it: DiskStore, block: BlockRecord) -> bytes | None:
    target = bytearray(SIZE)
    return bytes(target) if it.read_into(block, memoryview(target)) else None


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.kv"))


@pytest.mark.parametrize("fsync", [False, True])
def test_what_was_written_is_read(tmp_path: Path, fsync: bool) -> None:
    with store(tmp_path, fsync=fsync) as it:
        assert put(it, 1)
        assert get(it, 1) == bytes(payload(1))
        assert put(it, 1)  # there already: not written again
        assert (it.counts["written"], it.counts["already_there"]) == (1, 1)
        assert it.stats().size == FILE == files(tmp_path)[0].stat().st_size
        assert files(tmp_path)[0].stat().st_mode & 0o077 == 0


def test_survives_a_restart(tmp_path: Path) -> None:
    with store(tmp_path) as it:
        put(it, 1)
    with store(tmp_path) as it:
        assert get(it, 1) == bytes(payload(1))


def test_another_namespace_key_or_token_is_a_miss(tmp_path: Path) -> None:
    with store(tmp_path) as it:
        put(it, 1)
        assert get(it, 1, scope=1) is None
        assert get(it, 2) is None
        assert it.counts["missing"] == 2
        assert get(it, 1, tokens=tokens_of(9)) is None  # tokens are the proof, the key is not
        assert it.counts["damaged"] == 1


def test_files_of_another_geometry_are_refused(tmp_path: Path) -> None:
    with store(tmp_path) as it:
        put(it, 1)
    with store(tmp_path, geometry="f" * 16) as it:
        assert get(it, 1) is None
        assert it.counts["foreign"] == 1
        assert files(tmp_path) == []


def test_file_of_another_geometry_that_is_put_there_later_is_not_believed(tmp_path: Path) -> None:
    """By header, not only by name: as after a restored backup."""
    with store(tmp_path / "a") as one, store(tmp_path / "b", geometry="f" * 16) as other:
        put(one, 1)
        put(other, 1)
        files(tmp_path / "b")[0].write_bytes(files(tmp_path / "a")[0].read_bytes())
        assert get(other, 1) is None
        assert files(tmp_path / "b") == []


@pytest.mark.parametrize("region", ["header", "tokens", "payload", "checksum"])
def test_flipped_byte_is_a_miss_and_the_file_goes(tmp_path: Path, region: str) -> None:
    at = {"header": 40, "tokens": HEAD + 2, "payload": 600, "checksum": FILE - 1}[region]
    with store(tmp_path) as it:
        put(it, 1)
        raw = bytearray(files(tmp_path)[0].read_bytes())
        raw[at] ^= 1
        files(tmp_path)[0].write_bytes(raw)
        assert get(it, 1) is None
        assert (it.counts["damaged"], it.stats().blocks, files(tmp_path)) == (1, 0, [])
        assert put(it, 1)
        assert get(it, 1) == bytes(payload(1))


@pytest.mark.parametrize("length", [0, 50, HEAD, 700, FILE - 1, FILE + 1])
@pytest.mark.parametrize("restarted", [False, True])
def test_truncated_or_longer_file_is_a_miss(tmp_path: Path, length: int, restarted: bool) -> None:
    with store(tmp_path) as it:
        put(it, 1)
        if not restarted:
            os.truncate(files(tmp_path)[0], length)
            assert get(it, 1) is None
    if restarted:
        os.truncate(files(tmp_path)[0], length)
        with store(tmp_path) as it:
            assert get(it, 1) is None
    assert files(tmp_path) == []


def test_file_that_vanished_is_a_miss(tmp_path: Path) -> None:
    with store(tmp_path) as it:
        put(it, 1)
        files(tmp_path)[0].unlink()
        assert get(it, 1) is None


def test_bound_by_least_recent_use(tmp_path: Path) -> None:
    with store(tmp_path, blocks=3) as it:
        for number in (1, 2, 3):
            put(it, number)
        get(it, 1)
        put(it, 4)
        assert [get(it, number) is not None for number in (1, 2, 3, 4)] == [True, False, True, True]
        assert it.stats().size == sum(file.stat().st_size for file in files(tmp_path)) == 3 * FILE


def test_order_of_use_and_bound_hold_over_a_restart(tmp_path: Path) -> None:
    with store(tmp_path, blocks=3) as it:
        for number in (1, 2, 3):
            put(it, number)
        for age, file in zip(
            (30, 20, 10), [it._path(it._name(namespace(), record(n).key)) for n in (1, 2, 3)], strict=True
        ):
            os.utime(file, ns=(0, 10**18 - age))
        get(it, 1)
    with store(tmp_path, blocks=2) as it:
        assert [get(it, number) is not None for number in (1, 2, 3)] == [True, False, True]


def test_limit_below_one_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="one block takes"):
        DiskStore(tmp_path, GEOMETRY, SIZE, SIZE)


def test_directory_has_one_store(tmp_path: Path) -> None:
    with store(tmp_path), pytest.raises(Refused, match="another store is using it"):
        DiskStore(tmp_path, GEOMETRY, SIZE, 10 * FILE)
    with store(tmp_path):
        pass


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    for name in ("notes.kv", "a.unfinished", "README"):
        (tmp_path / name).write_text("mine")
    with store(tmp_path, blocks=1) as it:
        put(it, 1)
        put(it, 2)
        it.clear()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README", "a.unfinished", "epoch", "lock", "notes.kv"]


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_disk_fault_costs_the_block_only(tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with store(tmp_path, fsync=True) as it:
        with monkeypatch.context() as patch:
            patch.setattr(block_file, "_write_all", full) if step == "write" else patch.setattr(os, step, full)
            assert not put(it, 1)
        assert (it.counts["write_errors"], it.stats().size) == (1, 0)
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]
        assert put(it, 1)


def test_wrong_sizes_are_refused(tmp_path: Path) -> None:
    with store(tmp_path) as it:
        with pytest.raises(ValueError, match="payload of 3 bytes, expected 1000"):
            it.put(record(1), memoryview(b"abc"))
        with pytest.raises(ValueError, match="expected 32 and 16"):
            it.contains(b"short", record(1).key)
        with pytest.raises(ValueError, match="target of 3 bytes"):
            it.read_into(record(1), memoryview(bytearray(3)))
    with pytest.raises(ValueError, match="expected 16 characters"):
        DiskStore(tmp_path, "short", SIZE, 10 * FILE)


def test_discard_and_clear(tmp_path: Path) -> None:
    with store(tmp_path) as it:
        put(it, 1)
        put(it, 2)
        it.discard(namespace(), record(1).key)
        it.discard(namespace(), record(1).key)
        assert (has(it, 1), has(it, 2)) == (False, True)
        it.clear()
        assert (it.stats().blocks, it.stats().size, files(tmp_path)) == (0, 0, [])


def test_block_that_is_written_while_the_store_is_cleared_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store(tmp_path) as it:
        replace = os.replace

        def cleared_meanwhile(*arguments: Any) -> None:
            it.clear()
            replace(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", cleared_meanwhile)
            assert not put(it, 1)
        assert (it.stats().blocks, it.stats().size, files(tmp_path)) == (0, 0, [])


def test_file_that_cannot_be_removed_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any, **options: Any) -> None:
        raise PermissionError(errno.EPERM, "not permitted")

    with store(tmp_path, blocks=1) as it:
        put(it, 1)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", refused)
            assert put(it, 2)
        assert it.counts["remove_errors"] == 1
        assert get(it, 2) == bytes(payload(2))


def test_crash_in_the_middle_of_writing(tmp_path: Path) -> None:
    """A process that is killed while it writes leaves whole blocks, and at most something unfinished, which the next
    start removes."""
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from tests.worker_connector.disk.test_store import FILE, GEOMETRY, SIZE, DiskStore, put
        it = DiskStore(Path(sys.argv[1]), GEOMETRY, SIZE, 50 * FILE)
        number = 0
        while True:
            put(it, number)
            number += 1
        """
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT)
    try:
        wait_for(lambda: len(files(tmp_path)) > 20, timeout=60)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    name = "0" * 64
    (tmp_path / f"{name}.7.unfinished").write_bytes(b"SEMKVBLK")  # whether or not the kill hit a write
    with store(tmp_path, blocks=50) as it:
        assert it.counts["unfinished"] >= 1
        assert not list(tmp_path.glob("*.unfinished"))
        blocks, sound, number = it.stats().blocks, 0, 0
        while sound < blocks and number < 100_000:
            if has(it, number):
                assert get(it, number) == bytes(payload(number))
                sound += 1
            number += 1
        assert (sound, it.counts["damaged"]) == (blocks, 0)
        assert 0 < blocks <= 50


def test_concurrent_readers_and_writers_see_whole_blocks_or_none(tmp_path: Path) -> None:
    """Under eviction all the time: three blocks fit, eight are wanted."""
    wrong: list[object] = []

    def work(it: DiskStore, seed: int) -> None:
        try:
            for number in np.random.default_rng(seed).integers(0, 8, 150):
                if seed % 2:
                    put(it, int(number))
                found = get(it, int(number))
                if found is not None and found != bytes(payload(int(number))):
                    wrong.append(number)
        except BaseException as error:  # noqa: BLE001 - told to the test's own thread
            wrong.append(error)

    with store(tmp_path, blocks=3) as it:
        threads = [threading.Thread(target=work, args=(it, seed)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong
        assert (it.counts["damaged"], it.counts["write_errors"], it.counts["read_errors"]) == (0, 0, 0)
        assert it.counts["read"] > 0
        assert it.counts["evicted"] > 0
        assert it.stats().size == sum(file.stat().st_size for file in files(tmp_path)) <= 3 * FILE


# chains


def test_a_block_is_kept_only_with_the_one_that_it_continues(tmp_path: Path) -> None:
    blocks = chain(3)
    with store(tmp_path) as it:
        assert not it.put(blocks[1], payload(1))
        assert it.counts["no_parent"] == 1
        assert all(it.put(block, payload(block.ordinal)) for block in blocks)
        it.discard(blocks[1].namespace, blocks[1].key)
        assert it.take_gone() == [blocks[2].key, blocks[1].key]
        assert [read(it, block) is not None for block in blocks] == [True, False, False]


def test_chains_are_evicted_from_their_end(tmp_path: Path) -> None:
    """Least recent use alone would take the first block, which was written first, and leave nothing that can be
    reached."""
    long, short = chain(3), record(1)
    with store(tmp_path, blocks=4) as it:
        for block in (*long, short):
            it.put(block, payload(block.ordinal))
        it.put(record(2), payload(0))
        it.put(record(3), payload(0))
        assert it.take_gone() == [long[2].key, short.key]  # the first block went behind its child when it was looked at
        assert [read(it, block) is not None for block in long] == [True, True, False]


def test_room_for_a_child_is_not_made_by_its_parent(tmp_path: Path) -> None:
    blocks = chain(2)
    with store(tmp_path, blocks=1) as it:
        assert it.put(blocks[0], payload(0))
        assert not it.put(blocks[1], payload(1))
        assert (it.counts["no_room"], it.take_gone()) == (1, [])
        assert it.put(record(7), payload(7))  # the parent has no child, and may go for another


def test_damage_takes_what_continues_it_along(tmp_path: Path) -> None:
    blocks = chain(3)
    with store(tmp_path) as it:
        for block in blocks:
            it.put(block, payload(block.ordinal))
        path = it._path(it._name(blocks[1].namespace, blocks[1].key))
        raw = bytearray(path.read_bytes())
        raw[500] ^= 1
        path.write_bytes(raw)
        assert read(it, blocks[1]) is None
        assert it.take_gone() == [blocks[2].key, blocks[1].key]
        assert len(files(tmp_path)) == 1


def test_restart_finds_whole_chains_parents_first_and_says_whose(tmp_path: Path) -> None:
    blocks = [replace(block, words=b"whose") for block in chain(4)]
    with store(tmp_path) as it:
        for block in blocks:
            it.put(block, payload(block.ordinal))
        path = it._path(it._name(blocks[2].namespace, blocks[2].key))
    path.unlink()
    again = DiskStore(tmp_path, GEOMETRY, SIZE, 8 * FILE)
    found = again.take_over()
    assert [replace(block, used=0) for block in found] == blocks[:2]
    assert again.counts["orphaned"] == 1
    assert len(files(tmp_path)) == again.stats().blocks == 2
    again.close()


def test_head_that_does_not_belong_to_its_key_is_damaged(tmp_path: Path) -> None:
    """Found without reading the bytes: the key of a block is that of its tokens behind its parent's key."""
    with store(tmp_path) as it:
        put(it, 1)
    (path,) = files(tmp_path)
    raw = bytearray(path.read_bytes())
    raw[HEAD + 1] ^= 1
    path.write_bytes(raw)
    with store(tmp_path) as it:
        assert (it.counts["damaged"], it.stats().blocks, files(tmp_path)) == (1, 0, [])


def test_directory_that_cannot_be_written_is_refused_with_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match=r"connector.disk_path.*cannot be written.*Remedy"):
        DiskStore(tmp_path / "file" / "below", GEOMETRY, SIZE, 8 * FILE)
