"""DiskStore: KV blocks as files, for a tier below the slab. Not used by the connector yet (docs/connector.md, "Limits").

A block is found by a digest of its cache namespace, its block key and the geometry of its bytes, so another model, tenant, adapter or
layout is a miss. What is found is believed only after the file's own header, the block's tokens and a checksum over everything agree; a
file that fails any of these is removed. No pickle: a fixed header, the tokens, the bytes.

    magic 8 | version u32 | tokens u32 | payload u64 | geometry 16 | namespace 32 | key 16 | tokens ... | payload ... | checksum 32

* Atomic: written to a file of its own in the same directory, then `os.replace`. A reader sees a whole file or none.
* Durable or not: without `fsync` (the default) a power failure may leave a renamed file with wrong bytes, which the checksum finds: a miss,
  never wrong KV. With `fsync` the file is flushed before it gets its name, and the directory after it. A process that dies
  loses nothing but the file that it was writing.
* Bounded: the least recently used files go before a new one is written; reads count as use, also over a restart (by the files' times).
* One store a directory, by a lock on it. Any number of threads; files are read and written outside the store's lock.

All calls do I/O: never from an engine's callback. Files hold tenants' KV in the clear; they are readable by this user only.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import struct
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import BinaryIO

from worker_connector.refusal import Refused

_log = logging.getLogger(__name__)

_MAGIC = b"SEMKVBLK"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQ16s32s16s")
_CHECKSUM_BYTES = 32
_BLOCK_FILE = re.compile(r"[0-9a-f]{64}\.kv")
_UNFINISHED_FILE = re.compile(r"[0-9a-f]{64}\.[0-9]+\.unfinished")
_LOCK_FILE = "lock"


@dataclass(frozen=True)
class DiskStats:
    blocks: int
    size: int
    """Bytes of all files, those being written included."""
    limit: int


class DiskStore:
    """Thread-safe."""

    def __init__(
        self, directory: Path, geometry: str, bytes_per_block: int, limit_bytes: int, *, fsync: bool = False
    ) -> None:
        """`geometry`: `PoolGeometry.fingerprint`. Takes over what an earlier store left there, removes what is unfinished or of another
        geometry, and touches no file that is not of its own making. Refused: directory in use, or a limit below one block."""
        if len(geometry.encode()) != 16:
            raise ValueError(f"geometry {geometry!r}: expected 16 characters")
        self._directory = directory
        self._geometry = geometry.encode()
        self._payload = bytes_per_block
        self._limit = limit_bytes
        self._fsync = fsync
        self._lock = threading.Lock()
        self._files: OrderedDict[str, int] = OrderedDict()
        self._writing: dict[str, int] = {}
        self._numbers = count()
        self._life = 0
        self._size = 0
        self.counts: Counter[str] = Counter()
        """`written`, `already_there`, `read`, `missing`, `damaged`, `evicted`, `write_errors`, `read_errors`, `remove_errors`,
        `unfinished`, `foreign`."""
        smallest = _HEADER.size + bytes_per_block + _CHECKSUM_BYTES
        if limit_bytes < smallest:
            raise Refused(
                "disk store size", limit_bytes, f"one block takes {smallest} bytes", "set it to a multiple of that"
            )
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._owner = _own(directory)
        try:
            self._take_over()
        except BaseException:
            os.close(self._owner)
            raise

    def put(self, namespace: bytes, key: bytes, tokens: bytes, payload: memoryview) -> bool:
        """True if the block is there afterwards. False: the disk is full or failed, another thread is just writing it, no room can be made,
        or the store was cleared meanwhile. ValueError for a payload or digest of another length. The caller keeps the payload unchanged
        until the call returns."""
        name = self._name(namespace, key)
        if payload.nbytes != self._payload:
            raise ValueError(f"payload of {payload.nbytes} bytes, expected {self._payload}")
        size = _HEADER.size + len(tokens) + self._payload + _CHECKSUM_BYTES
        with self._lock:
            if name in self._files:
                self.counts["already_there"] += 1
                self._files.move_to_end(name)
                return True
            if name in self._writing or not self._make_room(size):
                return False
            self._writing[name] = size
            self._size += size
            life = self._life
        unfinished = self._directory / f"{name}.{next(self._numbers)}.unfinished"
        try:
            self._write(unfinished, self._path(name), self._header(namespace, key, tokens), tokens, payload)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            with self._lock:
                del self._writing[name]
                self._size -= size
                self.counts["write_errors"] += 1
            _log.warning("semkv disk store: a block could not be written: %s", error)
            return False
        with self._lock:
            del self._writing[name]
            self._files[name] = size
            if life != self._life:
                self._remove(name)
                return False
            self.counts["written"] += 1
        return True

    def read_into(self, namespace: bytes, key: bytes, tokens: bytes, target: memoryview) -> bool:
        """True: `target` holds the block, whose tokens are these and whose checksum holds. False: it is not there, or was not what it
        should be and is removed; `target` then holds anything, so it must be memory that nobody is offered."""
        name = self._name(namespace, key)
        if target.nbytes != self._payload:
            raise ValueError(f"target of {target.nbytes} bytes, expected {self._payload}")
        with self._lock:
            if name not in self._files:
                self.counts["missing"] += 1
                return False
            self._files.move_to_end(name)
        try:
            with open(self._path(name), "rb", buffering=0) as file:
                sound = self._read(file, self._header(namespace, key, tokens), tokens, target)
                if sound:
                    os.utime(file.fileno())  # the order of use, for the next start
        except FileNotFoundError:  # evicted meanwhile
            with self._lock:
                self.counts["missing"] += 1
            return False
        except OSError as error:
            with self._lock:
                self.counts["read_errors"] += 1
            _log.warning("semkv disk store: a block could not be read: %s", error)
            return False
        with self._lock:
            self.counts["read" if sound else "damaged"] += 1
            if not sound:
                self._remove(name)
        return sound

    def contains(self, namespace: bytes, key: bytes) -> bool:
        """Is there a file? What is in it is known only by reading it."""
        with self._lock:
            return self._name(namespace, key) in self._files

    def discard(self, namespace: bytes, key: bytes) -> None:
        """Does nothing if it is not there."""
        with self._lock:
            self._remove(self._name(namespace, key))

    def clear(self) -> None:
        """Removes every block, those included that are being written: weights or cache were reset."""
        with self._lock:
            self._life += 1
            for name in list(self._files):
                self._remove(name)

    def stats(self) -> DiskStats:
        with self._lock:
            return DiskStats(len(self._files), self._size, self._limit)

    def close(self) -> None:
        """Gives the directory free; files stay. Idempotent. No other call may follow."""
        if self._owner >= 0:
            os.close(self._owner)
            self._owner = -1

    # inside

    def _name(self, namespace: bytes, key: bytes) -> str:
        if len(namespace) != 32 or len(key) != 16:
            raise ValueError(f"namespace of {len(namespace)} and key of {len(key)} bytes, expected 32 and 16")
        return hashlib.blake2b(namespace + key + self._geometry, digest_size=32, person=b"semkv-disk-name").hexdigest()

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.kv"

    def _header(self, namespace: bytes, key: bytes, tokens: bytes) -> bytes:
        return _HEADER.pack(_MAGIC, _VERSION, len(tokens), self._payload, self._geometry, namespace, key)

    def _write(self, unfinished: Path, path: Path, header: bytes, tokens: bytes, payload: memoryview) -> None:
        with _create(unfinished) as file:
            for part in (header, tokens, payload, _checksum(header, tokens, payload)):
                _write_all(file, part)
            if self._fsync:
                os.fsync(file.fileno())
        os.replace(unfinished, path)
        if self._fsync:
            _fsync_directory(self._directory)

    def _read(self, file: BinaryIO, header: bytes, tokens: bytes, target: memoryview) -> bool:
        expected = len(header) + len(tokens) + self._payload + _CHECKSUM_BYTES
        if os.fstat(file.fileno()).st_size != expected:
            return False
        if _read_all(file, len(header)) != header or _read_all(file, len(tokens)) != tokens:
            return False
        view, at = target.cast("B"), 0
        while at < self._payload:
            got = file.readinto(view[at:])  # type: ignore[attr-defined]  # unbuffered files have it
            if not got:
                return False
            at += got
        return _read_all(file, _CHECKSUM_BYTES) == _checksum(header, tokens, target)

    def _make_room(self, size: int) -> bool:
        while self._size + size > self._limit:
            if not self._files:
                return False
            self.counts["evicted"] += 1
            self._remove(next(iter(self._files)))
        return True

    def _remove(self, name: str) -> None:
        size = self._files.pop(name, None)
        if size is not None:
            self._size -= size
            try:
                self._path(name).unlink(missing_ok=True)
            except OSError as error:
                self.counts["remove_errors"] += 1  # it takes room that is not counted until the next start
                _log.warning("semkv disk store: a file could not be removed: %s", error)

    def _take_over(self) -> None:
        found: list[tuple[int, str, int]] = []
        for path in self._directory.iterdir():
            if _UNFINISHED_FILE.fullmatch(path.name):
                self.counts["unfinished"] += 1
                path.unlink()
            elif _BLOCK_FILE.fullmatch(path.name):
                if self._is_ours(path):
                    status = path.stat()
                    found.append((status.st_mtime_ns, path.stem, status.st_size))
                else:
                    self.counts["foreign"] += 1
                    path.unlink()
        for _, name, size in sorted(found):
            self._files[name] = size
            self._size += size
        self._make_room(0)

    def _is_ours(self, path: Path) -> bool:
        """By the header alone: the bytes are checked when they are read."""
        with open(path, "rb") as file:
            raw = file.read(_HEADER.size)
        if len(raw) < _HEADER.size:
            return False
        magic, version, tokens, payload, geometry, namespace, key = _HEADER.unpack(raw)
        size = _HEADER.size + tokens + payload + _CHECKSUM_BYTES
        return (
            (magic, version, payload, geometry) == (_MAGIC, _VERSION, self._payload, self._geometry)
            and path.stat().st_size == size
            and self._name(namespace, key) == path.stem
        )


def _own(directory: Path) -> int:
    """The lock of the directory, held until it is closed or the process ends."""
    descriptor = os.open(directory / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise Refused(
            "disk store directory", str(directory), "another store is using it", "give each rank a directory of its own"
        ) from error
    return descriptor


def _checksum(header: bytes, tokens: bytes, payload: memoryview) -> bytes:
    digest = hashlib.blake2b(header, digest_size=_CHECKSUM_BYTES, person=b"semkv-disk-sum")
    digest.update(tokens)
    digest.update(payload)
    return digest.digest()


@contextmanager
def _create(path: Path) -> Iterator[BinaryIO]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb", buffering=0) as file:
        yield file


def _write_all(file: BinaryIO, part: bytes | memoryview) -> None:
    view = memoryview(part).cast("B")
    while view:
        view = view[file.write(view) :]


def _read_all(file: BinaryIO, size: int) -> bytes:
    parts = []
    while size:
        part = file.read(size)
        if not part:
            break
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _fsync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
