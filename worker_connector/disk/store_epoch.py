"""The epoch of a disk store: a few random bytes in its directory, which every block's file carries in its name
(disk/block_file.py).

A reset puts another one in their place, durably and at once, so nothing that was written before is ever served again,
whatever becomes of its files: a disk that is slow, an unlink that fails, a process that dies. A directory that was
never reset has none, which is empty.
"""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

from worker_connector.disk.block_file import fsync_directory, open_regular

_log = logging.getLogger(__name__)

_FILE = "epoch"
_BYTES = 16


def read_epoch(directory: Path) -> bytes | None:
    """The store's epoch; empty if it was never reset. None: there is one that cannot be read, so nothing in the
    directory may be used."""
    try:
        with open_regular(directory / _FILE) as file:
            raw = file.read(_BYTES + 1)
    except FileNotFoundError:
        return b""
    except OSError as error:
        _log.warning("semkv disk store: its epoch cannot be read, nothing in it is used: %s", error)
        return None
    return raw if len(raw) == _BYTES else None


def new_epoch() -> bytes:
    """16 random bytes; not written yet."""
    return secrets.token_bytes(_BYTES)


def write_epoch(directory: Path, epoch: bytes) -> None:
    """Replaces the epoch, durably: it is on the disk on return. Raises OSError."""
    unfinished = directory / f"{_FILE}.new"
    descriptor = os.open(
        unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600
    )
    try:
        if os.write(descriptor, epoch) != len(epoch):
            raise OSError(f"{unfinished}: written in part")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.rename(unfinished, directory / _FILE)
    fsync_directory(directory)
