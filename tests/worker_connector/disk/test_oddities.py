"""Things in a store's directory that are no block files, or that the system keeps from being read: they cost themselves
only."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from dynamo_semkv.contracts.keys import child_key, root_key
from tests.worker_connector.disk.test_store import (
    FILE,
    GEOMETRY,
    SIZE,
    chain,
    files,
    get,
    has,
    namespace,
    payload,
    put,
    store,
)
from tests.worker_connector.scripted_disk import PROMPT, disk_of, donors, settle, stop, tier_of, with_disk
from worker_connector.disk import block_file
from worker_connector.disk.block_file import BlockFormat, BlockRecord
from worker_connector.errors import Refused
from worker_connector.rank.disk import check_room


def make(kind: str, path: Path) -> None:
    if kind == "dangling link":
        path.symlink_to("/nonexistent/x")
    elif kind == "directory":
        path.mkdir()
    else:
        os.mkfifo(path)


@pytest.mark.parametrize("kind", ["dangling link", "directory", "pipe"])
@pytest.mark.parametrize("name", ["0" * 64 + ".kv", "0" * 64 + ".1.unfinished"])
def test_what_is_no_regular_file_stays_is_counted_and_disturbs_nobody(tmp_path: Path, kind: str, name: str) -> None:
    with store(tmp_path, blocks=20) as it:
        put(it, 1)
    make(kind, tmp_path / name)
    size = (tmp_path / name).lstat().st_size
    with store(tmp_path, blocks=20) as it:
        assert (it.stats().blocks, it.stats().size, it.counts["odd"]) == (1, FILE + size, 1)
        assert get(it, 1) == bytes(payload(1))
        assert put(it, 2)
    assert os.path.lexists(tmp_path / name)


@pytest.mark.parametrize("kind", ["dangling link", "directory", "pipe"])
def test_block_file_that_became_something_else_is_a_miss(tmp_path: Path, kind: str) -> None:
    with store(tmp_path) as it:
        put(it, 1)
        (path,) = files(tmp_path)
        path.unlink()
        make(kind, path)
        assert get(it, 1) is None
        assert (it.counts["odd"], has(it, 1)) == (1, False)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES, errno.EIO])
def test_file_that_cannot_be_looked_at_just_now_stays_and_what_continues_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    blocks = chain(3)
    with store(tmp_path) as it:
        for number, block in enumerate(blocks):
            assert it.put(block, payload(number))
        first = it._name(blocks[0].namespace, blocks[0].key)
    opened = os.open

    def failing(path: Any, *arguments: Any, **options: Any) -> int:
        if Path(path).stem == first:
            raise OSError(code, os.strerror(code))
        return opened(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(block_file.os, "open", failing)
        with store(tmp_path) as it:
            assert (it.stats().blocks, it.stats().size, it.counts["read_errors"]) == (0, 3 * FILE, 1)
    with store(tmp_path) as it:
        assert it.stats().blocks == 3


def test_file_system_that_notes_no_use_serves_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, "read-only file system")

    with store(tmp_path) as it:
        put(it, 1)
        monkeypatch.setattr(os, "utime", read_only)
        assert get(it, 1) == bytes(payload(1))
        assert it.counts["touch_errors"] == 1


def test_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(Refused, match=r"connector.disk_path.*it cannot be written"), store(tmp_path):
        pass
    assert not (tmp_path / "victim").exists()


def crafted(directory: Path, tokens: bytes, words: bytes = b"") -> None:
    """A file that is whole and agrees with itself."""
    root = root_key(namespace())
    block = BlockRecord(namespace(), child_key(root, tokens), root, 0, tokens, words)
    form = BlockFormat(GEOMETRY.encode(), SIZE)
    path = directory / f"{form.name_of(block.namespace, block.key)}.kv"
    form.write(directory / "crafted", path, block, payload(0), fsync=False)


@pytest.mark.parametrize(("tokens", "words"), [(b"\1\2\3", 0), (b"", 0), (bytes(64), 2 << 20)])
def test_crafted_head_is_damage_and_is_not_read(
    tmp_path: Path, tokens: bytes, words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    crafted(tmp_path, tokens, bytes(words))
    asked: list[int] = []
    read = block_file._read_all
    monkeypatch.setattr(block_file, "_read_all", lambda file, size: asked.append(size) or read(file, size))
    with store(tmp_path, blocks=4_000) as it:
        assert (it.counts["damaged"], files(tmp_path)) == (1, [])
    assert max(asked) < 1 << 20


def test_found_block_of_another_length_is_no_donor(tmp_path: Path) -> None:
    engine = with_disk(tmp_path)
    engine.serve(PROMPT)
    settle(engine)
    it = disk_of(engine).store
    digest = engine.leader._namespaces.open_digest  # type: ignore[union-attr]
    root, tokens = root_key(digest), bytes(8)
    assert it.put(BlockRecord(digest, child_key(root, tokens), root, 0, tokens), memoryview(bytes(it._format.payload)))
    stop(engine)
    again = with_disk(tmp_path)
    settle(again)
    assert (tier_of(again).index.usable, len(donors(again.sink))) == (10, 1)
    stop(again)


def test_room_is_found_beside_a_link_to_nowhere(tmp_path: Path) -> None:
    make("dangling link", tmp_path / ("1" * 64 + ".kv"))
    with pytest.raises(Refused, match=r"connector.disk_bytes"):
        check_room(tmp_path, 1_000_000, lambda _: 100)
