"""KV cache events from the process that drains an engine to the process in which its scheduler, and so the connector,
runs.

TensorRT-LLM runs its executor in worker processes unless it is told otherwise (`TLLM_WORKER_USE_SINGLE_PROCESS`), while
the events come out in the process that made the `LLM`. Both have the engine's `DYN_STABLE_ROUTING_ID`, and rank 0 is on
the same machine. So a leader listens on a Unix-domain socket that is named after the id and its data-parallel rank, in
a directory that only this user can enter, and whoever drains writes there: length-prefixed msgpack, nothing is
unpickled.

Events may be lost on the way (nobody listens yet, too many wait): their ids then have a gap, which is what losses look
like anyway.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import stat
import struct
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from dynamo_semkv.telemetry.throttled import Throttled
from worker_connector.link.local_server import LocalServer

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)

MAX_FRAME = 16 * 1024 * 1024
MAX_WAITING = 20_000
_AT_ONCE = 256
_PAUSE_SECONDS = 0.5
_LENGTH = struct.Struct(">I")


def pipe_path(stable_routing_id: str, dp_rank: int, base: Path | None = None) -> Path:
    """In a directory of this user's own, which is made if need be. PermissionError if it is somebody else's, or open to
    others."""
    directory = (base or Path(tempfile.gettempdir())) / f"semkv-events-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{directory} must be a directory of this user that nobody else can enter")
    name = hashlib.blake2b(
        f"{stable_routing_id}/{dp_rank}".encode(), digest_size=12, person=b"semkv-events"
    ).hexdigest()
    return directory / name


class KvEventListener:
    """The leader's end. `hear` gets lists of events on this thread; it must not raise."""

    def __init__(self, path: Path, hear: Callable[[list[Any]], None]) -> None:
        self._path = path
        self._hear = hear
        self._server: LocalServer | None = None
        self.counts: Counter[str] = Counter()
        """`connected`, `refused`; `crowded`, `accept_failed` (LocalServer)."""

    def start(self) -> None:
        """Once. OSError if the socket cannot be made, or an engine of the same name is listening."""
        if self._path.exists():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                try:
                    probe.connect(str(self._path))
                except OSError:
                    self._path.unlink(missing_ok=True)  # left by a process that has died
                else:
                    raise OSError(f"{self._path}: another engine of this name is listening")
        self._server = LocalServer(str(self._path), "semkv-kv-events", self._read, self.counts)
        self._server.start()

    def close(self, timeout: float = 5.0) -> None:
        """Idempotent."""
        if self._server is not None and not self._server.closed:
            self._server.close(timeout)
            self._path.unlink(missing_ok=True)

    def _read(self, connection: socket.socket) -> None:
        try:
            self.counts["connected"] += 1
            while True:
                (size,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
                if size > MAX_FRAME:
                    raise ValueError(f"a frame of {size} bytes, at most {MAX_FRAME} are allowed")
                events = msgspec.msgpack.decode(_exactly(connection, size))
                if not isinstance(events, list):
                    raise ValueError(f"{type(events).__name__}, expected a list of events")
                if self._server is not None:
                    self._server.settle(connection)
                self._hear(events)
        except (OSError, EOFError):
            pass  # the other side has gone
        except (ValueError, RecursionError) as error:
            self.counts["refused"] += 1
            _throttled.warning("semkv connector: a connection with KV cache events was refused: %s", error)


class KvEventSender:
    """The other end. `send` never raises and never waits; a thread of its own connects, and again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._wake = threading.Condition()
        self._waiting: deque[Mapping[str, Any]] = deque(maxlen=MAX_WAITING)
        self._closing = False
        self.counts: Counter[str] = Counter()
        """`sent`, `not_events` (what msgpack cannot say)."""
        self._thread = threading.Thread(target=self._run, name="semkv-kv-events-out", daemon=True)
        self._thread.start()

    def send(self, events: Iterable[Mapping[str, Any]]) -> None:
        with self._wake:
            self._waiting.extend(events)  # the oldest go when there are too many
            self._wake.notify_all()

    def close(self, timeout: float = 5.0) -> None:
        """What waits is given up. Idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closing or bool(self._waiting))
                if self._closing:
                    return
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                    connection.settimeout(_PAUSE_SECONDS * 10)
                    connection.connect(str(self._path))
                    self._write(connection)
            except OSError:
                pass  # nobody listens yet, or not any more: what waits is kept, within its bound
            with self._wake:
                if self._wake.wait_for(lambda: self._closing, _PAUSE_SECONDS):
                    return

    def _write(self, connection: socket.socket) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closing or bool(self._waiting))
                if self._closing:
                    return
                batch = [self._waiting.popleft() for _ in range(min(_AT_ONCE, len(self._waiting)))]
            # A batch that fails on the way is lost: sent twice it would be ignored, and this is the gap that a loss is.
            for payload in self._payloads(batch):
                connection.sendall(_LENGTH.pack(len(payload)) + payload)
            self.counts["sent"] += len(batch)

    def _payloads(self, batch: list[Mapping[str, Any]]) -> list[bytes]:
        try:
            whole = msgspec.msgpack.encode(batch)
        except (TypeError, ValueError, OverflowError, RecursionError):
            if len(batch) == 1:
                self.counts["not_events"] += 1
                return []
            return [payload for event in batch for payload in self._payloads([event])]
        if len(whole) <= MAX_FRAME:
            return [whole]
        half = len(batch) // 2
        return [*self._payloads(batch[:half]), *self._payloads(batch[half:])] if half else []


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError("the other side closed the connection")
        parts += part
    return bytes(parts)
