"""Servers with a thread for each connection: `LocalServer` for this user's processes on this machine, over a
Unix-domain socket; `ConnectionServer` for any listening socket.

A connection is new until `settle` is called for it. At most `max_new` connections may be new: for one more, the server
hangs up the oldest. A shortage of descriptors or threads does not end a server: it counts the failure, waits, and
accepts again.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable

from dynamo_semkv.telemetry.throttled import Throttled

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)

MAX_NEW = 32
_MAX_PATH = 107
"""Bytes in the path of a Unix-domain socket on Linux."""
_PAUSE_SECONDS = 0.2


class ConnectionServer:
    """Accepts connections on one socket, and serves each of them on a thread of its own."""

    def __init__(
        self,
        listening: socket.socket,
        name: str,
        serve: Callable[[socket.socket], None],
        counts: Counter[str],
        max_new: int = MAX_NEW,
        pause_seconds: float = 0.0,
    ) -> None:
        """Owns `listening`, a bound socket, and closes it. `serve` runs on a connection's own thread and must not
        raise; the connection is closed after it. `counts` gets `crowded` (hung up for the next) and `accept_failed`.
        `pause_seconds`: after a connection has ended that was never settled, and before the next is accepted, so that a
        flood of strangers takes little of the process's time."""
        self._name = name
        self._serve = serve
        self._counts = counts
        self._max_new = max_new
        self._pause = pause_seconds
        self._stranger = threading.Event()
        """Set when a connection has ended that was never settled, until the pause that follows."""
        self._lock = threading.Lock()
        self._settled: dict[socket.socket, bool] = {}
        """Each connection, in the order in which they came, and whether it is settled."""
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()
        self._listening = listening

    @property
    def closed(self) -> bool:
        """True once `close` was called."""
        return self._closed.is_set()

    @property
    def threads(self) -> list[threading.Thread]:
        """A copy of the list; some of the threads may have ended."""
        with self._lock:
            return list(self._threads)

    def start(self) -> None:
        """Accepts connections from now on. To be called once; RuntimeError where no thread can be started."""
        self._spawn(self._accept, "accept")

    def settle(self, connection: socket.socket) -> None:
        """The other end is known: the connection does not make room for others any more."""
        with self._lock:
            if connection in self._settled:
                self._settled[connection] = True

    def close(self, timeout: float = 5.0) -> None:
        """Hangs up all connections and ends the threads, waiting `timeout` seconds at most. Idempotent."""
        with self._lock:
            self._closed.set()
            connections = list(self._settled)
        hang_up(self._listening)
        self._listening.close()
        for connection in connections:
            hang_up(connection)
        deadline = time.monotonic() + timeout
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _spawn(self, run: Callable[..., None], name: str, *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, name=f"{self._name}-{name}", daemon=True)
        thread.start()
        with self._lock:
            self._threads = [known for known in self._threads if known.is_alive()]
            self._threads.append(thread)

    def _accept(self) -> None:
        while True:
            if self._pause and self._stranger.is_set():
                self._stranger.clear()
                self._closed.wait(self._pause)
            try:
                connection, _ = self._listening.accept()
            except OSError as error:
                if self._wait_after(error):
                    return
                continue
            with self._lock:
                if self._closed.is_set():
                    connection.close()
                    return
                new = [known for known, settled in self._settled.items() if not settled]
                if len(new) >= self._max_new:
                    self._stranger.set()
                    del self._settled[new[0]]  # its thread closes it
                    self._counts["crowded"] += 1
                    hang_up(new[0])
                self._settled[connection] = False
            try:
                self._spawn(self._run, "serve", connection)
            except RuntimeError as error:  # no thread can be started now
                self._end(connection)
                if self._wait_after(error):
                    return

    def _wait_after(self, error: Exception) -> bool:
        """Waits before the next attempt to accept; True if the server is closed."""
        if self._closed.is_set():
            return True
        self._counts["accept_failed"] += 1
        _throttled.warning("semkv connector: %s: no connection can be accepted: %s", self._name, error, key=self._name)
        return self._closed.wait(_PAUSE_SECONDS)

    def _run(self, connection: socket.socket) -> None:
        try:
            if self._admits(connection):
                self._serve(connection)
        except OSError:
            pass  # hung up before it could be looked at
        finally:
            self._end(connection)

    def _admits(self, connection: socket.socket) -> bool:
        return True

    def _end(self, connection: socket.socket) -> None:
        hang_up(connection)
        with self._lock:
            if not self._settled.pop(connection, True):
                self._stranger.set()
        connection.close()


class LocalServer(ConnectionServer):
    """A server on a Unix-domain socket of mode 0600, for processes of this user only."""

    def __init__(
        self, path: str, name: str, serve: Callable[[socket.socket], None], counts: Counter[str], max_new: int = MAX_NEW
    ) -> None:
        """Binds and listens at `path`. `counts` also gets `refused` (another user's). OSError where that fails."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(path)
            os.chmod(path, 0o600)
            listening.listen(max_new)
        except OSError:
            listening.close()
            raise
        super().__init__(listening, name, serve, counts, max_new)

    def _admits(self, connection: socket.socket) -> bool:
        if not other_user(connection):
            return True
        self._counts["refused"] += 1
        _throttled.warning("semkv connector: %s: a connection of another user was refused", self._name)
        return False


def other_user(connection: socket.socket) -> bool:
    """True if the other end belongs to another user; False also where the system does not say."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return False  # the mode of the socket's directory still keeps others out
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, option, struct.calcsize("3i")))
    return bool(user != os.getuid())


def hang_up(connection: socket.socket) -> None:
    """Ends the connection and wakes the thread that reads from it, which must close it: a descriptor that another
    thread closed could name another file by the time it is read from."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # not connected, or already hung up


def socket_directory(name_bytes: int) -> str:
    """Where sockets go whose paths have `name_bytes` below this directory at most: the system's temporary directory, or
    /tmp where its own path is too long for that. Processes with one `TMPDIR` get one answer."""
    directory = tempfile.gettempdir()
    return directory if len(os.fsencode(directory)) + 1 + name_bytes <= _MAX_PATH else "/tmp"
