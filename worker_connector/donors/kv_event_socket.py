"""KV cache events from the process that drains an engine to the process in which its scheduler, and so the connector,
runs.

TensorRT-LLM runs its executor in worker processes unless it is told otherwise (`TLLM_WORKER_USE_SINGLE_PROCESS`), while
the events come out in the process that made the `LLM`. Both have the engine's `DYN_STABLE_ROUTING_ID`, and rank 0 is on
the same machine. So a leader listens on a Unix-domain socket that is named after the id and its data-parallel rank, in
a directory that only this user can enter, and the process that drains the engine writes there: msgpack in frames
(link/frames.py), nothing is unpickled.

Events may be lost on the way (nobody listens yet, too many wait). Their ids then have a gap, as after any other loss.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import stat
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from dynamo_semkv.telemetry.throttled import Throttled
from worker_connector.link.frames import framed, read_frame
from worker_connector.link.local_server import LocalServer, socket_directory

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)

MAX_FRAME = 16 * 1024 * 1024
"""Bytes."""
MAX_WAITING = 20_000
"""Events that wait to be sent."""
_AT_ONCE = 256
_PAUSE_SECONDS = 0.5
_NAME_BYTES = 64
"""Of the socket's path below the directory for sockets, at most."""


def event_socket_path(stable_routing_id: str, dp_rank: int, base: Path | None = None) -> Path:
    """The socket's path, in a directory of this user below `base` (`socket_directory`), which is made if need be.
    PermissionError if the directory is another user's or open to others."""
    directory = (base or Path(socket_directory(_NAME_BYTES))) / f"semkv-events-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{directory} must be a directory of this user that nobody else can enter")
    name = hashlib.blake2b(
        f"{stable_routing_id}/{dp_rank}".encode(), digest_size=12, person=b"semkv-events"
    ).hexdigest()
    return directory / name


class KvEventListener:
    """The leader's end."""

    def __init__(self, path: Path, on_events: Callable[[list[Any]], None]) -> None:
        """`on_events` gets lists of whatever was sent, on a thread of each connection; it must not raise."""
        self._path = path
        self._on_events = on_events
        self._server: LocalServer | None = None
        self.counts: Counter[str] = Counter()
        """`connected`, `refused`; `crowded`, `accept_failed` (LocalServer)."""

    def start(self) -> None:
        """Listens from now on. To be called once. OSError if the socket or its thread cannot be had, or another engine
        of the same name is listening."""
        if self._path.exists():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                try:
                    probe.connect(str(self._path))
                except OSError:
                    self._path.unlink(missing_ok=True)  # left by a process that has died
                else:
                    raise OSError(f"{self._path}: another engine of this name is listening")
        self._server = LocalServer(str(self._path), "semkv-kv-events", self._read, self.counts)
        try:
            self._server.start()
        except RuntimeError as error:
            self.close()
            raise OSError(f"{self._path}: {error}") from error

    def close(self, timeout: float = 5.0) -> None:
        """Ends the threads, waiting `timeout` seconds at most, and removes the socket. Idempotent."""
        if self._server is not None and not self._server.closed:
            self._server.close(timeout)
            self._path.unlink(missing_ok=True)

    def _read(self, connection: socket.socket) -> None:
        try:
            self.counts["connected"] += 1
            while True:
                events = msgspec.msgpack.decode(read_frame(connection, MAX_FRAME))
                if not isinstance(events, list):
                    raise ValueError(f"{type(events).__name__}, expected a list of events")
                if self._server is not None:
                    self._server.settle(connection)
                self._on_events(events)
        except (OSError, EOFError):
            pass  # the connection has ended
        except (ValueError, RecursionError) as error:
            self.counts["refused"] += 1
            _throttled.warning("semkv connector: a connection with KV cache events was refused: %s", error)


class KvEventSender:
    """The end of the process that drains the engine. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Starts the thread that connects to `path`, again and again. RuntimeError where no thread can be started."""
        self._path = path
        self._wake = threading.Condition()
        self._waiting: deque[Mapping[str, Any]] = deque(maxlen=MAX_WAITING)
        self._closing = False
        self.counts: Counter[str] = Counter()
        """`sent`, `not_events` (msgpack cannot encode them, or one is too large for a frame)."""
        self._thread = threading.Thread(target=self._run, name="semkv-kv-events-out", daemon=True)
        self._thread.start()

    def send(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Queues events for the thread, in order. Never raises and never waits."""
        with self._wake:
            self._waiting.extend(events)  # the queue drops the oldest when there are too many
            self._wake.notify_all()

    def close(self, timeout: float = 5.0) -> None:
        """Ends the thread, waiting `timeout` seconds at most; drops the events that wait. Idempotent."""
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
                pass  # nobody listens now: what waits is kept, up to its bound
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
            # A batch that fails on the way is lost, which the listener sees by the gap in the ids: events that are sent
            # twice would be ignored.
            for frame in self._frames(batch):
                connection.sendall(frame)
            self.counts["sent"] += len(batch)

    def _frames(self, batch: list[Mapping[str, Any]]) -> list[bytes]:
        """The batch in one frame. If it cannot be encoded, or is too large, the frames of its halves."""
        try:
            return [framed(msgspec.msgpack.encode(batch), MAX_FRAME)]
        except (TypeError, ValueError, OverflowError, RecursionError):  # WireError is a ValueError
            if len(batch) == 1:
                self.counts["not_events"] += 1
                return []
        half = len(batch) // 2
        return [*self._frames(batch[:half]), *self._frames(batch[half:])]
