"""One KV block as a file: what is in it, how it is written whole or not at all, and when it is believed. All calls do
I/O.

    magic 8 | version u32 | tokens u32 | payload u64 | words u32 | ordinal u32 | geometry 16 | namespace 32
    | key 16 | parent 16 | words ... | tokens ... | payload ... | checksum 32

No pickle: a fixed header, the namespace in words (so that a later process can say whose block it is), the tokens, the
bytes. The checksum is over all that stands before it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dynamo_semkv.contracts.keys import BlockKey, child_key, root_key

_MAGIC = b"SEMKVBLK"
_VERSION = 2
_HEADER = struct.Struct("<8sIIQII16s32s16s16s")
_CHECKSUM_BYTES = 32
OVERHEAD = _HEADER.size + _CHECKSUM_BYTES
"""Bytes of a file beside words, tokens and payload."""
_MAX_HEAD = 1024 * 1024
"""Bytes of words and tokens: more is no block of ours, and is not read."""


class NotRegular(OSError):
    """What has a block's name is a link, a directory, a pipe or a device."""


@dataclass(frozen=True)
class BlockRecord:
    """A block without its bytes. `tokens`: little-endian u32. `words`: its namespace in an encoding of the caller's;
    not compared by `read_block`, which trusts the digest."""

    namespace: bytes
    key: BlockKey
    parent: BlockKey
    """Of block 0: `root_key(namespace)`."""
    ordinal: int
    tokens: bytes
    words: bytes = b""
    used: int = 0
    """When an earlier process used it last: the file's time in nanoseconds. Not written to the file."""


@dataclass(frozen=True)
class BlockFormat:
    """What all files of one store have in common. `geometry`: 16 bytes for layout and shard; `payload`: bytes of a
    block."""

    geometry: bytes
    payload: int
    epoch: bytes = b""
    """Part of every file's name: after a reset no older file has the name that its content asks for."""

    def size_of(self, block: BlockRecord) -> int:
        """Bytes of this block's file."""
        return OVERHEAD + len(block.words) + len(block.tokens) + self.payload

    def name_of(self, namespace: bytes, key: bytes) -> str:
        """64 hex digits over namespace (32 bytes), key (16), geometry and epoch: the file name without its suffix.
        ValueError for other lengths."""
        if len(namespace) != 32 or len(key) != 16:
            raise ValueError(f"namespace of {len(namespace)} and key of {len(key)} bytes, expected 32 and 16")
        return hashlib.blake2b(
            namespace + key + self.geometry + self.epoch, digest_size=32, person=b"semkv-disk-name"
        ).hexdigest()

    def write(self, unfinished: Path, path: Path, block: BlockRecord, payload: memoryview, *, fsync: bool) -> None:
        """Writes to `unfinished`, then renames it to `path`. Raises OSError."""
        head = self._header(block, len(block.words)) + block.words + block.tokens
        with _create(unfinished) as file:
            for part in (head, payload, _checksum(head, payload)):
                _write_all(file, part)
            if fsync:
                os.fsync(file.fileno())
        os.replace(unfinished, path)
        if fsync:
            fsync_directory(path.parent)

    def read(self, path: Path, block: BlockRecord, target: memoryview) -> bool:
        """Reads the payload into `target`; False if the file is not that of this block, or not what was written. Raises
        OSError, NotRegular among them."""
        with open_regular(path) as file:
            return self._read(file, block, target)

    def _read(self, file: BinaryIO, block: BlockRecord, target: memoryview) -> bool:
        raw = _read_all(file, _HEADER.size)
        if len(raw) != _HEADER.size:
            return False
        words = _HEADER.unpack(raw)[4]
        if words + len(block.tokens) > _MAX_HEAD:
            return False
        size = OVERHEAD + words + len(block.tokens) + self.payload
        if os.fstat(file.fileno()).st_size != size or raw != self._header(block, words):
            return False
        head = raw + _read_all(file, words + len(block.tokens))
        if not head.endswith(block.tokens):
            return False
        view, at = target.cast("B"), 0
        while at < self.payload:
            got = file.readinto(view[at:])  # type: ignore[attr-defined]  # unbuffered files have it
            if not got:
                return False
            at += got
        return _read_all(file, _CHECKSUM_BYTES) == _checksum(head, target)

    def look(self, path: Path, size: int) -> BlockRecord | str:
        """What block a file says to be, by its head alone; else why it is none of ours: `foreign` (another version,
        geometry or size of a block), `damaged` (its length or its key does not fit its content) or `stale` (its name
        does not: it is from before a reset). Raises OSError, NotRegular among them."""
        with open_regular(path) as file:
            raw = _read_all(file, _HEADER.size)
            if len(raw) != _HEADER.size:
                return "damaged"
            magic, version, tokens, payload, words, ordinal, geometry, namespace, key, parent = _HEADER.unpack(raw)
            if (magic, version, payload, geometry) != (_MAGIC, _VERSION, self.payload, self.geometry):
                return "foreign"
            if OVERHEAD + words + tokens + payload != size or words + tokens > _MAX_HEAD or not tokens or tokens % 4:
                return "damaged"
            head = _read_all(file, words + tokens)
            if len(head) != words + tokens:
                return "damaged"
        block = BlockRecord(namespace, key, parent, ordinal, head[words:], head[:words])
        if not _is_chained(block):
            return "damaged"
        return block if self.name_of(namespace, key) == path.stem else "stale"

    def _header(self, block: BlockRecord, words: int) -> bytes:
        return _HEADER.pack(
            _MAGIC,
            _VERSION,
            len(block.tokens),
            self.payload,
            words,
            block.ordinal,
            self.geometry,
            block.namespace,
            block.key,
            block.parent,
        )


def _is_chained(block: BlockRecord) -> bool:
    """True if the key is that of these tokens after this parent."""
    start = block.parent == root_key(block.namespace)
    return start is (block.ordinal == 0) and child_key(block.parent, block.tokens) == block.key


def _checksum(head: bytes, payload: memoryview) -> bytes:
    digest = hashlib.blake2b(head, digest_size=_CHECKSUM_BYTES, person=b"semkv-disk-sum")
    digest.update(payload)
    return digest.digest()


def open_regular(path: Path) -> BinaryIO:
    """Opens a file to read it unbuffered. Follows no link and waits for no pipe's other end. Raises NotRegular, or
    another OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise NotRegular(error.errno, "not a regular file", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegular(errno.EINVAL, "not a regular file", str(path))
    return open(descriptor, "rb", buffering=0)


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


def fsync_directory(directory: Path) -> None:
    """Flushes the directory, so that a rename in it survives a power failure. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
