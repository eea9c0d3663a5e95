"""RemoteChannel: a rank's connection to a leader in another process. `post` only appends to a queue; a thread connects,
sends, and sends again over the next connection.

The queue keeps what the leader has not acknowledged, in order, up to a bound. When the bound is reached results are
lost, and with them the proof that this rank's slab holds what the leader believes. The rank then begins a new session
with a new incarnation, which makes the leader begin a new cache generation."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections import Counter, deque

import msgspec

from dynamo_semkv.telemetry.throttled import Throttled
from worker_connector.link.channel import RankReady, RankResult
from worker_connector.link.frames import WireError
from worker_connector.link.wire import PROTOCOL, Endpoint, Hello, Numbered, frame, machine_id, read_from_leader, split

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)

CAPACITY = 8_192
"""Results that may wait to be acknowledged: those of some seconds of a busy engine."""
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 2.0
_ANSWER_SECONDS = 30.0
"""Seconds in which a leader that accepted the connection must answer; it may be busy. Connecting again earlier would
only give it more to do, and it could take the abandoned connection for the present one."""
_ERROR_AFTER = 5
"""Failed connections before an error is logged."""
_OTHER_MACHINE = (
    ": they are on different machines. Remedy: keep tensor_parallel_size within one machine, or set "
    "connector.materialization: off"
)


class RemoteChannel:
    """The rank's end. Thread-safe."""

    def __init__(self, channel_id: int, endpoint: Endpoint, number: int, *, capacity: int = CAPACITY) -> None:
        """Starts the thread; RuntimeError where that fails. `number`: of this rank. `capacity`: results that may wait
        to be acknowledged."""
        self.channel_id = channel_id
        self._endpoint = endpoint
        self._number = number
        self._capacity = capacity
        self._wake = threading.Condition()
        self._session = secrets.token_hex(8)
        self._ready: RankReady | None = None
        self._unacknowledged: deque[tuple[int, bytes]] = deque()
        """Numbers and frames."""
        self._last = 0
        """Number of the last result that was posted; those that follow are of the last result that was sent over this
        connection, and of the last that was acknowledged."""
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
        """Queues a result for the thread. Never blocks and never raises."""
        with self._wake:
            if isinstance(result, RankReady):
                self._ready = result
            for part in split(result):
                self._append(part)
            self._wake.notify_all()

    def close(self, timeout: float = 5.0) -> None:
        """Ends connection and thread, waiting `timeout` seconds at most. What was not sent is dropped. Idempotent."""
        with self._wake:
            self._closing = True
            self._hang_up()
            self._wake.notify_all()
        self._thread.join(timeout)

    # with `_wake` held

    def _append(self, result: RankResult) -> None:
        if len(self._unacknowledged) >= self._capacity:
            self._start_new_session()
        try:
            data = frame(Numbered(self._last + 1, result))
        except WireError:
            _throttled.exception("semkv connector: rank %d: a result is too large for its leader", self._number)
            self._start_new_session()
            return
        self._last += 1
        self._unacknowledged.append((self._last, data))

    def _start_new_session(self) -> None:
        self.counts["new_sessions"] += 1
        _throttled.error(
            "semkv connector: rank %d: results for the leader were lost; its slab counts as empty", self._number
        )
        self._session = secrets.token_hex(8)
        self._unacknowledged.clear()
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
                pass  # it has ended already, and the thread will notice

    # on the thread

    def _run(self) -> None:
        pause = _FIRST_PAUSE
        closing = False
        while not closing:
            if self._run_connection():
                pause = _FIRST_PAUSE
            with self._wake:
                closing = self._wake.wait_for(lambda: self._closing, pause)
            pause = min(pause * 2, _LONGEST_PAUSE)

    def _run_connection(self) -> bool:
        """Runs one connection from its start to its end; True if the leader answered."""
        answered = False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                session = self._connect(connection)
                taken = read_from_leader(connection).number
                connection.settimeout(None)
                answered = True
                self.counts["connected"] += 1
                self._begin_at(session, taken)
                reader = threading.Thread(target=self._read, args=(connection, session), daemon=True)
                reader.start()
                self._failures = 0
                try:
                    self._write(connection, session)
                finally:
                    reader.join()
        except (OSError, EOFError, RuntimeError, WireError) as error:  # also a shortage of descriptors or threads
            self._failed(error)
        finally:
            with self._wake:
                self._connection = None
            self.counts["lost"] += answered
        return answered

    def _connect(self, connection: socket.socket) -> str:
        """Connects and greets; returns the session that was named."""
        connection.settimeout(_LONGEST_PAUSE)
        connection.connect(self._endpoint.path)
        connection.settimeout(_ANSWER_SECONDS)
        with self._wake:
            self._connection = connection
            if self._closing:
                self._hang_up()
            session = self._session
        connection.sendall(frame(Hello(PROTOCOL, self._endpoint.token, self._number, session)))
        return session

    def _begin_at(self, session: str, taken: int) -> None:
        """The leader has taken the first `taken` results of this session."""
        with self._wake:
            if session == self._session and taken < self._acknowledged:
                self._start_new_session()  # the leader has forgotten what it acknowledged
            self._on_acknowledged(session, taken)
            self._sent = taken if session == self._session else 0

    def _write(self, connection: socket.socket, session: str) -> None:
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._is_over(session) or self._last > self._sent)
                    if self._is_over(session):
                        return
                    frames = [data for number, data in self._unacknowledged if number > self._sent]
                    self._sent = self._last
                connection.sendall(b"".join(frames))
        finally:
            with self._wake:
                self._hang_up()

    def _is_over(self, session: str) -> bool:
        return self._closing or session != self._session or self._connection is None

    def _read(self, connection: socket.socket, session: str) -> None:
        try:
            while True:
                self._on_acknowledged(session, read_from_leader(connection).number)
        except (OSError, EOFError, WireError):
            with self._wake:  # ends the writer too, and the thread connects again
                self._hang_up()
                self._connection = None
                self._wake.notify_all()

    def _on_acknowledged(self, session: str, number: int) -> None:
        with self._wake:
            while session == self._session and self._unacknowledged and self._unacknowledged[0][0] <= number:
                self._acknowledged = self._unacknowledged.popleft()[0]

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        if self._failures >= _ERROR_AFTER:
            other = self._endpoint.machine and machine_id() and machine_id() != self._endpoint.machine
            _throttled.error(
                "semkv connector: rank %d cannot reach its leader at %s (%s)%s. Nothing is loaded or saved until it "
                "can; requests are served as without the connector.",
                self._number,
                self._endpoint.path,
                error,
                _OTHER_MACHINE if other else "",
            )
