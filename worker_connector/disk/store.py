"""DiskStore: one rank's KV blocks as files, the tier below its slab (rank/disk.py runs it on a thread of its own).

A block is found by a digest of its cache namespace, its block key and the geometry of its bytes (layout and
tensor-parallel shard), so another model, tenant, adapter, layout or shard is a miss. What is found is believed only
after the file's own header, the block's tokens and a checksum over everything agree (disk/block_file.py); a file that
fails any of these is removed.

* Whole chains: a block is kept only as long as the one that it continues is, so whatever is here can be reached from a
  prompt's start.
* Atomic: written to a file of its own in the same directory, then `os.replace`. A reader sees a whole file or none.
* Durable or not: without `fsync` (the default) a power failure may leave a renamed file with wrong bytes, which the
  checksum finds: a miss, never wrong KV. With `fsync` the file is flushed before it gets its name, and the directory
  after it. A process that dies loses nothing but the file that it was writing.
* Bounded: the least recently used ends of chains go before a new file is written; reads count as use, also over a
  restart (by the files' times).
* Resets are durable: `begin_epoch` makes everything older worthless on the disk too (disk/store_epoch.py); the files
  are removed after that.
* Only regular files are looked at: a link, a directory or a pipe under a block's name stays, is counted, and is neither
  followed nor waited for. A file that cannot be looked at just now stays too.
* One store a directory, by a lock on it. Any number of threads; files are read and written outside the store's lock.

All calls do I/O: never from an engine's callback. Files hold tenants' KV in the clear; they are readable by this user
only.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from dynamo_semkv.contracts.keys import BlockKey
from dynamo_semkv.telemetry.throttled import Throttled
from worker_connector.disk.block_file import OVERHEAD, BlockFormat, BlockRecord, NotRegular
from worker_connector.disk.store_epoch import new_epoch, read_epoch, write_epoch
from worker_connector.disk.store_lock import own
from worker_connector.errors import Refused

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)

_BLOCK_FILE = re.compile(r"[0-9a-f]{64}\.kv")
_UNFINISHED_FILE = re.compile(r"[0-9a-f]{64}\.[0-9]+\.unfinished")


@dataclass(frozen=True)
class _File:
    size: int
    key: BlockKey
    parent: BlockKey


@dataclass(frozen=True)
class DiskStats:
    """One reading of a store. `limit`: bytes that `size` may reach."""

    blocks: int
    size: int
    """Bytes of all files, those being written included."""
    limit: int


class DiskStore:
    """Thread-safe."""

    def __init__(
        self, directory: Path, geometry: str, bytes_per_block: int, limit_bytes: int, *, fsync: bool = False
    ) -> None:
        """`geometry`: 16 characters for layout and shard. Refused: directory in use or not writable, or a limit below
        one block. Knows no block before `take_over`."""
        if len(geometry.encode()) != 16:
            raise ValueError(f"geometry {geometry!r}: expected 16 characters")
        self._directory = directory
        self._format = BlockFormat(geometry.encode(), bytes_per_block)
        self._limit = limit_bytes
        self._fsync = fsync
        self._lock = threading.Lock()
        self._files: OrderedDict[str, _File] = OrderedDict()
        self._names: dict[BlockKey, str] = {}
        self._children: dict[BlockKey, set[str]] = {}
        self._writing: dict[str, int] = {}
        self._gone: list[BlockKey] = []
        self._numbers = count()
        self._life = 0
        self._doomed: list[tuple[str, int]] = []
        """Files of before a reset that are still here."""
        self._size = 0
        self.counts: Counter[str] = Counter()
        """`written`, `already_there`, `no_parent`, `no_room`, `read`, `missing`, `damaged`, `orphaned`, `evicted`,
        `write_errors`, `read_errors`, `remove_errors`, `touch_errors`, `unfinished`, `foreign`, `stale`, `odd` (not a
        regular file)."""
        smallest = OVERHEAD + bytes_per_block
        if limit_bytes < smallest:
            raise Refused(
                "connector.disk_bytes", limit_bytes, f"one block takes {smallest} bytes", "set it to a multiple of that"
            )
        self._owner = own(directory)
        epoch = read_epoch(directory)
        if epoch is None:
            try:
                write_epoch(directory, epoch := new_epoch())
            except OSError as error:
                self.close()
                raise Refused(
                    "connector.disk_path",
                    str(directory),
                    f"its epoch cannot be written: {error}",
                    "remove the directory",
                ) from error
        self._format = replace(self._format, epoch=epoch)

    @property
    def directory(self) -> Path:
        """Holds the block files, the lock and the epoch."""
        return self._directory

    def take_over(self, stopped: Callable[[], bool] = lambda: False) -> list[BlockRecord]:
        """Called before anything else, and again only when nothing else is going on. Finds what is here, parents before
        children, those used longest ago first among blocks of one ordinal. Removes what is unfinished, damaged in its
        head, of another geometry, or continues a block that is not here; touches no file that is not of its own making.
        Bytes are checked when they are read. `stopped`: asked for every file."""
        while True:
            format_ = self._format
            found: list[tuple[int, BlockRecord]] = []
            left, errors = 0, self.counts["read_errors"]
            for path in self._directory.iterdir():
                if stopped():
                    return []
                if not (_BLOCK_FILE.fullmatch(path.name) or _UNFINISHED_FILE.fullmatch(path.name)):
                    continue
                size, record = self._inspect(path, format_)
                if record is not None:
                    found.append((size, record))
                else:
                    left += size
            with self._lock:
                if format_ is self._format:  # else the store was reset meanwhile, and these are files of before
                    return self._install(found, left, complete=errors == self.counts["read_errors"])

    def _inspect(self, path: Path, format_: BlockFormat) -> tuple[int, BlockRecord | None]:
        """A block and the size of its file, or how many bytes of what is none are left here."""
        size = 0
        try:
            status = path.lstat()
            size = status.st_size
            if not stat.S_ISREG(status.st_mode):
                self.counts["odd"] += 1
                return size, None
            if _UNFINISHED_FILE.fullmatch(path.name):
                why: BlockRecord | str = "unfinished"
            else:
                why = format_.look(path, size)
        except FileNotFoundError:
            return 0, None
        except OSError as error:
            self.counts["read_errors"] += 1
            _throttled.warning("semkv disk store: a file could not be looked at, and stays: %s", error)
            return size, None
        if isinstance(why, str):
            self.counts[why] += 1
            return (0 if self._unlink(path) else size), None
        return size, replace(why, used=status.st_mtime_ns)

    def _install(self, found: list[tuple[int, BlockRecord]], left: int, *, complete: bool) -> list[BlockRecord]:
        """`complete` False: a block that others continue may be among what could not be looked at, so those stay
        without it."""
        self._files.clear()
        self._names.clear()
        self._children.clear()
        self._doomed.clear()
        keys = {record.key for _, record in found}
        kept: list[tuple[int, BlockRecord]] = []
        for size, record in sorted(found, key=lambda item: item[1].ordinal):
            if record.ordinal and record.parent not in keys:
                keys.discard(record.key)
                self.counts["orphaned"] += 1
                if not complete or not self._unlink(self._path(self._name(record.namespace, record.key))):
                    left += size
            else:
                kept.append((size, record))
        self._size = left  # what stays and is no block counts against the limit
        for size, record in sorted(kept, key=lambda item: item[1].used):
            self._enter(self._name(record.namespace, record.key), _File(size, record.key, record.parent))
            self._size += size
        self._make_room(0)
        self._gone.clear()
        there = [record for _, record in kept if record.key in self._names]
        return sorted(there, key=lambda record: (record.ordinal, record.used))

    def put(self, block: BlockRecord, payload: memoryview, epoch: bytes | None = None) -> bool:
        """True if the block is there afterwards. False: the block that it continues is not here, the disk is full or
        failed, another thread is just writing it, no room can be made, or the store was cleared meanwhile or has
        another epoch than `epoch`. ValueError for a payload or digest of another length. The caller keeps the payload
        unchanged until the call returns."""
        if payload.nbytes != self._format.payload:
            raise ValueError(f"payload of {payload.nbytes} bytes, expected {self._format.payload}")
        size, name = self._format.size_of(block), self._name(block.namespace, block.key)
        with self._lock:
            if epoch is not None and epoch != self._format.epoch:
                return False
            if name in self._files:
                self.counts["already_there"] += 1
                self._files.move_to_end(name)
                return True
            if not self._reserve(block, name, size):
                return False
            life = self._life
        unfinished = self._directory / f"{name}.{next(self._numbers)}.unfinished"
        try:
            self._format.write(unfinished, self._path(name), block, payload, fsync=self._fsync)
        except OSError as error:
            _remove_quietly(unfinished)
            with self._lock:
                del self._writing[name]
                self._size -= size
                self._forget_child(block.parent, name)
                self.counts["write_errors"] += 1
            _throttled.warning("semkv disk store: a block could not be written: %s", error)
            return False
        with self._lock:
            del self._writing[name]
            if life != self._life:
                self._forget_child(block.parent, name)
                if self._unlink(self._path(name)):
                    self._size -= size
                return False
            self._enter(name, _File(size, block.key, block.parent))
            if not self._continues(block):
                self._remove(name)
                self._gone.remove(block.key)  # nobody was told of it
                return False
            self.counts["written"] += 1
        return True

    def _reserve(self, block: BlockRecord, name: str, size: int) -> bool:
        """Room for a block that is not here. False: another thread is writing it, what it continues is not here, or no
        room can be made. Under the lock."""
        if name in self._writing:
            return False
        if not self._continues(block):
            self.counts["no_parent"] += 1
            return False
        # The parent counts as continued while this is written, or it could be removed to make room for its own child.
        self._children.setdefault(block.parent, set()).add(name)
        if not self._make_room(size):
            self.counts["no_room"] += 1
            self._forget_child(block.parent, name)
            return False
        self._writing[name] = size
        self._size += size
        return True

    def read_into(self, block: BlockRecord, target: memoryview) -> bool:
        """True: `target` holds the block, whose tokens are these and whose checksum holds. False: it is not there, or
        was not what it should be and is removed with what continues it; `target` then holds anything, so it must be
        memory that nobody is offered."""
        if target.nbytes != self._format.payload:
            raise ValueError(f"target of {target.nbytes} bytes, expected {self._format.payload}")
        with self._lock:
            name = self._name(block.namespace, block.key)
            if name not in self._files:
                self.counts["missing"] += 1
                return False
            self._files.move_to_end(name)
        try:
            sound = self._format.read(self._path(name), block, target)
        except FileNotFoundError:  # evicted meanwhile, or taken away by somebody
            with self._lock:
                self.counts["missing"] += 1
                self._remove_chain(name)
            return False
        except OSError as error:
            with self._lock:
                self.counts["odd" if isinstance(error, NotRegular) else "read_errors"] += 1
                if isinstance(error, NotRegular):
                    self._remove_chain(name)
            _throttled.warning("semkv disk store: a block could not be read: %s", error)
            return False
        if sound:
            self._touch(name)
        with self._lock:
            self.counts["read" if sound else "damaged"] += 1
            if not sound:
                self._remove_chain(name)
        return sound

    def contains(self, namespace: bytes, key: BlockKey) -> bool:
        """Is there a file? What is in it is known only by reading it."""
        with self._lock:
            return self._name(namespace, key) in self._files

    def take_gone(self) -> list[BlockKey]:
        """Blocks that left since the last call, children before parents; those that `clear` removed are not among
        them."""
        with self._lock:
            gone, self._gone = self._gone, []
            return gone

    def discard(self, namespace: bytes, key: BlockKey) -> None:
        """Removes a block and what continues it. Does nothing if it is not there."""
        with self._lock:
            self._remove_chain(self._name(namespace, key))

    @property
    def epoch(self) -> bytes:
        """Changes with every reset."""
        return self._format.epoch

    def begin_epoch(self) -> None:
        """What is here, and what is being written, is never served again, also not after a restart: the new epoch is on
        the disk on return. `sweep` removes the files themselves. OSError: the disk takes no epoch; what could be
        removed has been."""
        epoch = new_epoch()
        try:
            write_epoch(self._directory, epoch)
        except OSError:
            self._forget(epoch)
            self.sweep()  # a full disk has room again then
            write_epoch(self._directory, epoch)
        else:
            self._forget(epoch)

    def clear(self) -> None:
        """Removes every block, those included that are being written: weights or cache were reset. Raises OSError as
        `begin_epoch` does."""
        self.begin_epoch()
        self.sweep()

    def _forget(self, epoch: bytes) -> None:
        with self._lock:
            self._format = replace(self._format, epoch=epoch)
            self._life += 1
            self._doomed += [(name, file.size) for name, file in self._files.items()]
            self._files.clear()
            self._names.clear()
            self._children.clear()
            self._gone.clear()

    def sweep(self) -> None:
        """Removes the files of before the last `begin_epoch`."""
        with self._lock:
            doomed, self._doomed = self._doomed, []
        for name, size in doomed:
            if self._unlink(self._path(name)):  # else it keeps its room
                with self._lock:
                    self._size -= size

    def stats(self) -> DiskStats:
        """As the store counts; no I/O."""
        with self._lock:
            return DiskStats(len(self._files), self._size, self._limit)

    def close(self) -> None:
        """Releases the directory; files stay. Idempotent. No other call may follow."""
        if self._owner >= 0:
            os.close(self._owner)
            self._owner = -1

    # inside

    def _name(self, namespace: bytes, key: bytes) -> str:
        return self._format.name_of(namespace, key)

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.kv"

    def _continues(self, block: BlockRecord) -> bool:
        return block.ordinal == 0 or block.parent in self._names

    def _make_room(self, size: int) -> bool:
        """Ends of chains only. A block that others continue is as young as they are, so it goes behind them when its
        turn comes."""
        passed = 0
        while self._size + size > self._limit:
            if passed >= len(self._files):
                return False
            name, file = next(iter(self._files.items()))
            if self._children.get(file.key):
                self._files.move_to_end(name)
                passed += 1
                continue
            self.counts["evicted"] += 1
            self._remove(name)
            passed = 0
        return True

    def _enter(self, name: str, file: _File) -> None:
        self._files[name] = file
        self._names[file.key] = name
        self._children.setdefault(file.parent, set()).add(name)

    def _forget_child(self, parent: BlockKey, name: str) -> None:
        siblings = self._children.get(parent)
        if siblings is not None:
            siblings.discard(name)
            if not siblings:
                del self._children[parent]

    def _remove_chain(self, name: str) -> None:
        file = self._files.get(name)
        if file is None:
            return
        doomed = [(name, file)]
        for _, above in doomed:
            doomed.extend(
                (child, self._files[child]) for child in self._children.get(above.key, ()) if child in self._files
            )
        for child, _ in reversed(doomed):
            self._remove(child)

    def _remove(self, name: str) -> None:
        file = self._files.pop(name, None)
        if file is not None:
            self._size -= file.size
            self._names.pop(file.key, None)
            self._forget_child(file.parent, name)
            self._gone.append(file.key)
            self._unlink(self._path(name))  # where it fails, it takes room that is not counted until the next start

    def _touch(self, name: str) -> None:
        """Notes the use in the file's time, for the next start."""
        try:
            os.utime(self._path(name), follow_symlinks=False)
        except OSError as error:  # read-only, or evicted meanwhile: the block has been read all the same
            self.counts["touch_errors"] += 1
            _log.debug("semkv disk store: the use of a file could not be noted: %s", error)

    def _unlink(self, path: Path) -> bool:
        """True if the file is gone."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self.counts["remove_errors"] += 1
            _throttled.warning("semkv disk store: a file could not be removed: %s", error)
            return False
        return True


def _remove_quietly(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _throttled.warning("semkv disk store: an unfinished file stays until the next start: %s", error)
