"""TcpTransport: the pulling side of fetch/wire.py. One connection a pull; none is kept, so nothing of a peer lasts
longer."""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable

from worker_connector.fetch import wire
from worker_connector.fetch.transport import Answer, FetchFailed, Rows, Sent, Wanted, Why
from worker_connector.link.local_server import hang_up


class TcpTransport:
    """Any thread."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False

    def connect(self, host: str, port: int, deadline: float) -> TcpSource:
        """`host`: an IP address; no name is ever looked up."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            connection = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:  # no descriptor left, or no IPv6 here
            raise FetchFailed(Why.UNREACHABLE, str(error)) from error
        with self._lock:
            closed = self._closed
            self._open.add(connection)
        try:
            if closed:
                raise FetchFailed(Why.LOST, "closed")
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            connection.connect((host, port))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return TcpSource(connection, self._greet(connection, deadline), self._drop)
        except FetchFailed:
            self._drop(connection)
            raise
        except TimeoutError as error:
            self._drop(connection)
            raise FetchFailed(Why.TIMEOUT, "connecting") from error
        except OSError as error:
            self._drop(connection)
            raise FetchFailed(Why.UNREACHABLE, str(error)) from error

    def close(self) -> None:
        """Hangs up: pulls in hand end now."""
        with self._lock:
            self._closed = True
            for connection in self._open:
                hang_up(connection)  # the thread that reads from it closes it

    def _drop(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.discard(connection)
        connection.close()

    def _greet(self, connection: socket.socket, deadline: float) -> wire.Channel:
        mine = secrets.token_bytes(wire.NONCE_BYTES)
        wire.send_greeting(connection, wire.Hello(wire.PROTOCOL, mine), deadline)
        hers = wire.receive_greeting(connection, wire.Challenge, deadline).nonce
        if len(hers) != wire.NONCE_BYTES:
            raise wire.malformed(f"a nonce of {len(hers)} bytes")
        wire.send_greeting(connection, wire.Proof(wire.proof(self._secret, b"puller", mine, hers)), deadline)
        try:
            welcome = wire.receive_greeting(connection, wire.Welcome, deadline)
        except FetchFailed as error:
            if error.why is Why.LOST:  # a server hangs up on a wrong proof without a word
                raise FetchFailed(Why.UNAUTHORIZED, "the other side did not take our proof") from error
            raise
        if not hmac.compare_digest(welcome.proof, wire.proof(self._secret, b"server", mine, hers)):
            raise FetchFailed(Why.UNAUTHORIZED, "the other side does not know the secret")
        return wire.Channel(connection, self._secret, mine, hers, serving=False)


class TcpSource:
    """One connection to a worker that has blocks; a BlockSource over TCP."""

    def __init__(self, connection: socket.socket, channel: wire.Channel, drop: Callable[[socket.socket], None]) -> None:
        self._connection = connection
        self._channel = channel
        self._drop = drop

    def read(self, wanted: Wanted, into: Rows, deadline: float) -> Answer:
        """Asks for blocks and reads them into `into`, as BlockSource.read says."""
        channel = self._channel
        channel.send(wire.Get(*wanted), deadline)
        blocks: list[Sent] = []
        while True:
            said = channel.receive(wire.ANSWER, deadline)
            if isinstance(said, wire.Refused):
                raise FetchFailed(said.why, repr(said.detail[:200]))
            if isinstance(said, wire.Done):
                return Answer(said.life, tuple(blocks))
            at = len(blocks)
            if at >= len(wanted.keys) or said.key != wanted.keys[at]:
                raise wire.malformed("a block that was not asked for")
            channel.receive_into(memoryview(into[at])[: wanted.bytes_per_block], deadline)
            blocks.append(Sent(said.tokens, said.seal))

    def close(self) -> None:
        """Ends the connection."""
        self._drop(self._connection)
