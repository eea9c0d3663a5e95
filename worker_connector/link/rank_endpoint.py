"""RankEndpoint: the leader's end of the connections of ranks in other processes (tensor parallelism within one
machine).

The socket is in a directory that only this user can enter. A rank must belong to this user and show the random token
that the metadata carried. Each rank has a thread, which reads its results and calls the listener with them; the
engine's thread never waits for that. A rank that sends invalid messages is disconnected and may connect again. A rank
is lost only when its connection ends, which the kernel reports at once: a slow rank is not lost."""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from dynamo_semkv.telemetry.throttled import Throttled
from worker_connector.link.channel import RankResult
from worker_connector.link.frames import WireError
from worker_connector.link.local_server import MAX_NEW, LocalServer, hang_up, socket_directory
from worker_connector.link.wire import (
    PROTOCOL,
    Acknowledged,
    Endpoint,
    Hello,
    Numbered,
    frame,
    machine_id,
    read_from_rank,
)

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)

HELLO_SECONDS = 5.0
"""Limit for the whole greeting, in however many pieces it arrives."""
_NAME_BYTES = 24
"""Of "semkv-", mkdtemp's own characters, and the socket's name."""


class RankListener(Protocol):
    """What the leader does with results and losses. Called on the endpoint's threads; must not raise."""

    def on_result(self, result: RankResult) -> None:
        """Takes one result of a rank. Each comes once, in the order in which the rank posted them."""
        ...

    def rank_connected(self, rank: int) -> None:
        """The rank has a connection, for the first time or again."""

    def rank_lost(self, rank: int) -> None:
        """The rank's connection has ended."""


@dataclass
class _Session:
    """One session of a rank, and the number of the last result that was taken of it."""

    name: str
    taken: int = 0


class RankEndpoint:
    """The socket, its threads, and what was taken of each rank."""

    def __init__(self, world: int) -> None:
        """`world`: ranks under this leader, itself included; ranks 1 to world - 1 connect. OSError where the socket
        cannot be made."""
        self._world = world
        self._token = secrets.token_hex(32)
        self._directory = tempfile.mkdtemp(prefix="semkv-", dir=socket_directory(_NAME_BYTES))  # mode 0700
        path = os.path.join(self._directory, "ranks")
        self.counts: Counter[str] = Counter()
        """`connected`, `lost`, `refused`, `duplicates`; `crowded`, `accept_failed` (LocalServer)."""
        self._server = LocalServer(path, "semkv-ranks", self._serve, self.counts, max(MAX_NEW, world * 2))
        self.address = Endpoint(path, self._token, machine_id())
        self._listener: RankListener | None = None
        self._lock = threading.Lock()
        self._connections: dict[int, socket.socket] = {}
        self._announced: set[int] = set()
        """Ranks that the listener believes to be connected. A connection that ends before that, because its rank gave
        up on it, is no loss."""
        self._sessions: dict[int, _Session] = {}
        self._rank_locks = {rank: threading.Lock() for rank in range(1, world)}
        """Held for as long as results of the rank are read: a newer connection waits until the older has handed over
        all that it read."""

    def start(self, listener: RankListener) -> None:
        """Accepts ranks from now on. To be called once."""
        self._listener = listener
        self._server.start()

    def close(self, timeout: float = 5.0) -> None:
        """Ends all threads, waiting `timeout` seconds at most, and removes the socket. Idempotent."""
        self._server.close(timeout)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _serve(self, connection: socket.socket) -> None:
        rank: int | None = None
        try:
            rank, session = self._greet(connection)
            if session is None:
                return
            with self._rank_locks[rank]:
                connection.sendall(frame(Acknowledged(session.taken)))
                self._announce(rank, connection)
                self._listen(connection, rank, session)
        except (OSError, EOFError, WireError) as error:
            if isinstance(error, WireError):
                self.counts["refused"] += 1
                _throttled.warning("semkv connector: a connection of rank %s was refused: %s", rank, error)
        finally:
            hang_up(connection)
            if rank is not None:
                self._forget(rank, connection)

    def _greet(self, connection: socket.socket) -> tuple[int, _Session | None]:
        """Reads the greeting. Returns the rank and its session; None for a session where the endpoint is closing.
        WireError for a stranger."""
        hello = read_from_rank(connection, time.monotonic() + HELLO_SECONDS)
        if not isinstance(hello, Hello) or hello.protocol != PROTOCOL:
            raise WireError(f"expected a greeting of protocol {PROTOCOL}")
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            raise WireError("wrong token")
        if not 1 <= hello.rank < self._world:
            raise WireError(f"rank {hello.rank}, expected 1 to {self._world - 1}")
        connection.settimeout(None)
        with self._lock:
            if self._server.closed:
                return hello.rank, None
            older = self._connections.get(hello.rank)
            self._connections[hello.rank] = connection
            session = self._sessions.get(hello.rank)
            if session is None or session.name != hello.session:
                session = self._sessions[hello.rank] = _Session(hello.session)
        self._server.settle(connection)
        if older is not None:
            hang_up(older)
        return hello.rank, session

    def _announce(self, rank: int, connection: socket.socket) -> None:
        with self._lock:
            current = self._connections.get(rank) is connection
            if current:
                self._announced.add(rank)
        if current and self._listener is not None:
            self.counts["connected"] += 1
            self._listener.rank_connected(rank)

    def _listen(self, connection: socket.socket, rank: int, session: _Session) -> None:
        assert self._listener is not None
        while True:
            message = read_from_rank(connection)
            if not isinstance(message, Numbered):
                raise WireError("a second greeting")
            if message.result.rank != rank:
                raise WireError(f"rank {rank} sends a result of rank {message.result.rank}")
            if message.number <= session.taken:
                self.counts["duplicates"] += 1
            elif message.number != session.taken + 1:
                raise WireError(f"result {message.number} after {session.taken}")
            else:
                self._listener.on_result(message.result)
                session.taken = message.number
            connection.sendall(frame(Acknowledged(session.taken)))

    def _forget(self, rank: int, connection: socket.socket) -> None:
        with self._lock:
            if self._connections.get(rank) is not connection:
                return
            del self._connections[rank]
            was_announced = rank in self._announced
            self._announced.discard(rank)
        if was_announced and not self._server.closed and self._listener is not None:
            self.counts["lost"] += 1
            self._listener.rank_lost(rank)
