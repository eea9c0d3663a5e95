"""RankEndpoint: the leader's end of the connections of ranks in other processes (tensor parallelism within one
machine).

A socket in a directory that only this user can enter; a rank shows the random token that the metadata carried, and
belongs to this user. One thread a rank; what it reads goes to the listener on that thread, never on the engine's. A
rank that sends invalid messages is disconnected and may come back; one that is gone is reported as lost, and as here
again when its connection is back. A rank that is only slow is not lost: once it is connected, only the end of its
connection counts as a loss, and the kernel reports that at once."""

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
from typing import Protocol

from dynamo_semkv.telemetry.throttled import Throttled
from worker_connector.link.channel import RankResult
from worker_connector.link.local_server import MAX_NEW, LocalServer, hang_up
from worker_connector.link.wire import (
    PROTOCOL,
    Endpoint,
    Hello,
    Numbered,
    Seen,
    WireError,
    frame,
    machine_id,
    read_from_rank,
)

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)

HELLO_SECONDS = 5.0
"""Limit for the whole greeting, in however many pieces it arrives."""
_MAX_PATH = 100
"""The kernel's limit is 108 bytes."""


class RankListener(Protocol):
    """The leader. Called on the endpoint's threads; must not raise."""

    def on_result(self, result: RankResult) -> None:
        """Takes one result of a rank. Each comes once, in the order in which the rank sent them."""
        ...

    def rank_here(self, rank: int) -> None:
        """The rank is connected, for the first time or again."""

    def rank_lost(self, rank: int) -> None:
        """The rank is not connected any more."""


class _Session:
    """How many results were taken of one session of a rank."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen = 0


class RankEndpoint:
    """`world`: ranks under this leader, itself included; ranks 1 to world - 1 connect."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._token = secrets.token_hex(32)
        self._directory = _private_directory()
        path = os.path.join(self._directory, "ranks")
        self.counts: Counter[str] = Counter()
        """`connected`, `lost`, `refused`, `duplicates`; `crowded`, `accept_failed` (LocalServer)."""
        self._server = LocalServer(path, "semkv-ranks", self._serve, self.counts, max(MAX_NEW, world * 2))
        self.address = Endpoint(path, self._token, machine_id())
        self._listener: RankListener | None = None
        self._lock = threading.Lock()
        self._connections: dict[int, socket.socket] = {}
        self._here: set[int] = set()
        """Ranks that were reported to the listener. A connection that ends before that, because its rank gave up on it,
        is no loss."""
        self._sessions: dict[int, _Session] = {}
        self._turn: dict[int, threading.Lock] = {rank: threading.Lock() for rank in range(1, world)}

    def start(self, listener: RankListener) -> None:
        """Once."""
        self._listener = listener
        self._server.start()

    def close(self, timeout: float = 5.0) -> None:
        """Ends all threads and removes the socket. Idempotent."""
        self._server.close(timeout)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _serve(self, connection: socket.socket) -> None:
        rank: int | None = None
        try:
            rank, session = self._greet(connection)
            if session is None:
                return
            with self._turn[rank]:  # an older connection of this rank has handed over all that it read
                connection.sendall(frame(Seen(session.seen)))
                self._announce(rank, connection)
                self._listen(connection, rank, session)
        except (OSError, EOFError, WireError) as error:
            if isinstance(error, WireError):
                self.counts["refused"] += 1
                _throttled.warning("semkv connector: a connection of rank %s was refused: %s", rank, error)
        finally:
            hang_up(connection)
            if rank is not None:
                self._drop(rank, connection)

    def _greet(self, connection: socket.socket) -> tuple[int, _Session | None]:
        """Reads the greeting. Returns the rank and its session, None where this is closing. WireError for anybody
        else."""
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
                self._here.add(rank)
        if current and self._listener is not None:
            self.counts["connected"] += 1
            self._listener.rank_here(rank)

    def _listen(self, connection: socket.socket, rank: int, session: _Session) -> None:
        assert self._listener is not None
        while True:
            message = read_from_rank(connection)
            if not isinstance(message, Numbered):
                raise WireError("a second greeting")
            if message.result.rank != rank:
                raise WireError(f"rank {rank} speaks for rank {message.result.rank}")
            if message.number <= session.seen:
                self.counts["duplicates"] += 1
            elif message.number != session.seen + 1:
                raise WireError(f"result {message.number} after {session.seen}")
            else:
                self._listener.on_result(message.result)
                session.seen = message.number
            connection.sendall(frame(Seen(session.seen)))

    def _drop(self, rank: int, connection: socket.socket) -> None:
        with self._lock:
            if self._connections.get(rank) is not connection:
                return
            del self._connections[rank]
            was_here = rank in self._here
            self._here.discard(rank)
        if was_here and not self._server.closed and self._listener is not None:
            self.counts["lost"] += 1
            self._listener.rank_lost(rank)


def _private_directory() -> str:
    """Mode 0700, with a path short enough for a socket."""
    directory = tempfile.mkdtemp(prefix="semkv-")
    if len(os.path.join(directory, "ranks").encode()) > _MAX_PATH:
        os.rmdir(directory)
        directory = tempfile.mkdtemp(prefix="semkv-", dir="/tmp")
    return directory
