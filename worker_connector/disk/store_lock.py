"""Only one disk store uses a directory: it holds a lock on a file there, which ends with its process. A link in place
of that file is not followed."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from worker_connector.errors import Refused


class InUse(Refused):
    """Another store is using the directory."""


def own(directory: Path) -> int:
    """Makes the directory if need be and locks it. Returns the lock's descriptor; the lock is held until that is closed
    or the process ends. Raises InUse, or Refused where the directory cannot be written."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(
            directory / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600
        )
    except OSError as error:
        raise Refused(
            "connector.disk_path",
            str(directory),
            f"it cannot be written: {error.strerror}",
            "name a directory that can",
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise InUse(
            "connector.disk_path",
            str(directory),
            "another store is using it",
            "give each engine a directory of its own",
        ) from error
    return descriptor
