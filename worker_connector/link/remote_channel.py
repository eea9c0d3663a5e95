"""RemoteChannel: a rank's connection to a leader in another process. `post` only appends; a thread connects, sends, and
sends again.

What the leader has not acknowledged is kept, in order and bounded, over lost connections. When the bound is reached
results are lost, and with them the proof that this rank's slab holds what the leader believes: the rank then begins a
new session as a new incarnation, and the leader a new cache generation."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections import Counter, deque

import msgspec

from dynamo_semkv.telemetry.throttled import Throttled
from worker_connector.link.channel import LocalRank, RankReady, RankResult
from worker_connector.link.wire import (
    PROTOCOL,
    Endpoint,
    Hello,
    Numbered,
    WireError,
    WireResult,
    frame,
    machine_id,
    read_from_leader,
    split,
)

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)

CAPACITY = 8_192
"""Results that wait to be acknowledged; some seconds of a busy engine."""
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 2.0
_ANSWER_SECONDS = 30.0
"""Seconds that a leader which accepted the connection may take to answer, since it may be busy. Connecting again
earlier would only give it more to do, and it could take a connection that is given up for the present one."""
_LOUD_AFTER = 5
"""Attempts to connect before it is worth an error."""
_ELSEWHERE = (
    ": they are on different machines. Remedy: keep tensor_parallel_size within one machine, or set "
    "connector.materialization: off"
)


class RemoteChannel:
    """The rank's side of a channel, used like `RankChannel`."""

    def __init__(self, channel_id: int, endpoint: Endpoint, number: int, *, capacity: int = CAPACITY) -> None:
        self.channel_id = channel_id
        self.rank: LocalRank | None = None
        """Nothing is asked of it through this channel: the leader is in another process."""
        self._endpoint = endpoint
        self._number = number
        self._capacity = capacity
        self._wake = threading.Condition()
        self._session = secrets.token_hex(8)
        self._ready: RankReady | None = None
        self._unseen: deque[tuple[int, bytes]] = deque()
        self._last = 0
        self._sent = 0
        self._acknowledged = 0
        self._connection: socket.socket | None = None
        self._closing = False
        self._failures = 0
        self.counts: Counter[str] = Counter()
        """`connected`, `lost`, `new_sessions`."""
        self._thread = threading.Thread(target=self._run, name=f"semkv-rank-{number}", daemon=True)
        self._thread.start()

    def post(self, result: RankResult) -> None:
        """Never blocks and never raises."""
        with self._wake:
            if isinstance(result, RankReady):
                self._ready = result
            for part in split(result):
                self._append(part)
            self._wake.notify_all()

    @property
    def has_leader(self) -> bool:
        """Always True: the leader made the metadata that led here, and results wait for it."""
        return True

    def close(self, timeout: float = 5.0) -> None:
        """Ends connection and thread, waiting `timeout` seconds at most. What was not sent is dropped."""
        with self._wake:
            self._closing = True
            self._hang_up()
            self._wake.notify_all()
        self._thread.join(timeout)

    # under the lock

    def _append(self, result: WireResult) -> None:
        if len(self._unseen) >= self._capacity:
            self._begin_anew()
        try:
            data = frame(Numbered(self._last + 1, result))
        except WireError:
            _throttled.exception("semkv connector: rank %d: a result is too large for its leader", self._number)
            self._begin_anew()
            return
        self._last += 1
        self._unseen.append((self._last, data))

    def _begin_anew(self) -> None:
        self.counts["new_sessions"] += 1
        _throttled.error(
            "semkv connector: rank %d: results for the leader were lost; its slab counts as empty", self._number
        )
        self._session = secrets.token_hex(8)
        self._unseen.clear()
        self._last = self._sent = self._acknowledged = 0
        self._hang_up()
        if self._ready is not None:
            self._ready = msgspec.structs.replace(self._ready, incarnation=secrets.token_hex(8))
            self._append(self._ready)

    def _hang_up(self) -> None:
        if self._connection is not None:
            try:
                self._connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # gone already: the thread is on its way out of it

    # the thread

    def _run(self) -> None:
        pause = _FIRST_PAUSE
        while True:
            with self._wake:
                if self._closing:
                    return
            if self._talk():
                pause = _FIRST_PAUSE
            with self._wake:
                if self._wake.wait_for(lambda: self._closing, pause):
                    return
            pause = min(pause * 2, _LONGEST_PAUSE)

    def _talk(self) -> bool:
        """Runs one connection from its start to its end; True if the leader answered."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        met = False
        try:
            connection.settimeout(_LONGEST_PAUSE)
            connection.connect(self._endpoint.path)
            connection.settimeout(_ANSWER_SECONDS)
            with self._wake:
                if self._closing:
                    return False
                session = self._session
                self._connection = connection
            connection.sendall(frame(Hello(PROTOCOL, self._endpoint.token, self._number, session)))
            seen = read_from_leader(connection).number
            connection.settimeout(None)
            met = True
            self._failures = 0
            self.counts["connected"] += 1
            reader = threading.Thread(target=self._read, args=(connection, session), daemon=True)
            with self._wake:
                if session == self._session and seen < self._acknowledged:
                    self._begin_anew()  # a leader that knows nothing of what it acknowledged
                self._take(session, seen)
                self._sent = seen if session == self._session else 0
            reader.start()
            self._write(connection, session)
            reader.join()
        except (OSError, EOFError, WireError) as error:
            self._failed(error)
        finally:
            with self._wake:
                self._connection = None
            connection.close()
            if met:
                self.counts["lost"] += 1
        return met

    def _write(self, connection: socket.socket, session: str) -> None:
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(
                        lambda: (
                            self._closing
                            or session != self._session
                            or self._connection is None
                            or self._last > self._sent
                        )
                    )
                    if self._closing or session != self._session or self._connection is None:
                        return
                    frames = [data for number, data in self._unseen if number > self._sent]
                    self._sent = self._last
                connection.sendall(b"".join(frames))
        finally:
            with self._wake:
                self._hang_up()

    def _read(self, connection: socket.socket, session: str) -> None:
        try:
            while True:
                self._take(session, read_from_leader(connection).number)
        except (OSError, EOFError, WireError):
            with self._wake:  # the writer ends too, and connects again
                self._hang_up()
                self._connection = None
                self._wake.notify_all()

    def _take(self, session: str, seen: int) -> None:
        with self._wake:
            while session == self._session and self._unseen and self._unseen[0][0] <= seen:
                self._acknowledged = self._unseen.popleft()[0]

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        if self._failures >= _LOUD_AFTER:
            other = self._endpoint.machine and machine_id() and machine_id() != self._endpoint.machine
            _throttled.error(
                "semkv connector: rank %d does not reach its leader at %s (%s)%s. Nothing is loaded or saved until it "
                "does; requests are served as without the connector.",
                self._number,
                self._endpoint.path,
                error,
                _ELSEWHERE if other else "",
            )
