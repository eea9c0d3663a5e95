"""FetchServer: the serving side of fetch/wire.py. Other workers of the fleet read resident blocks from it, each over
its own connection and thread; a stranger gets no further than the greeting.

A slow peer holds one row of memory and its connection, for `deadline_seconds` an exchange at most; never a lease, a
lock, or the engine.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import threading
import time
from collections import Counter

import numpy as np

from dynamo_semkv.contracts.keys import BlockKey
from dynamo_semkv.telemetry.throttled import Throttled
from worker_connector.fetch import wire
from worker_connector.fetch.transport import BlockExport, FetchFailed, Rows, Wanted, Why
from worker_connector.link.local_server import MAX_NEW, ConnectionServer
from worker_connector.memory.checksum import padded

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)

GREETING_SECONDS = 5.0
"""For the whole greeting, however it arrives."""
STRANGER_SECONDS = 0.002
"""Before the next connection where one has ended that did not greet. Under a flood of them pulls come late or not at
all; the engine, whose process this is, must not."""
IDLE_SECONDS = 10.0
"""Between two requests of a connection."""


class FetchServer:
    """OSError if the address cannot be had. `counts`: `greeted`, `unauthorized`, `malformed`, `busy`, `foreign`,
    `reset`, `timeout`, `lost`, `error`, `exchanges`, `sent_blocks`, `sent_bytes`; `crowded`, `accept_failed`
    (ConnectionServer)."""

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes,
        export: BlockExport,
        *,
        max_connections: int = 16,
        deadline_seconds: float = 1.0,
    ) -> None:
        self._secret = secret
        self._export = export
        self._max = max_connections
        self._deadline = deadline_seconds
        self._lock = threading.Lock()
        self._open = 0
        self.counts: Counter[str] = Counter()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=MAX_NEW)
        self.port: int = listening.getsockname()[1]
        self._server = ConnectionServer(
            listening, "semkv-fetch", self._serve, self.counts, pause_seconds=STRANGER_SECONDS
        )
        self._server.start()

    def close(self, timeout: float = 5.0) -> None:
        """Hangs all up. Idempotent."""
        self._server.close(timeout)

    def _serve(self, connection: socket.socket) -> None:
        admitted = False
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel = self._greet(connection)
            with self._lock:
                admitted = self._open < self._max
                self._open += admitted
            if admitted:  # one too many stays new, of which there are few, until it has been told
                self._server.settle(connection)
            self._listen(channel, admitted)
        except FetchFailed as failed:
            self._count(failed.why)
            if failed.why in (Why.UNAUTHORIZED, Why.MALFORMED):
                _throttled.warning(
                    "semkv connector: a worker that wanted blocks was refused: %s", failed, key=failed.why.value
                )
        except Exception:  # noqa: BLE001 - one connection's fault is that connection's; counted and logged
            with self._lock:
                self.counts["error"] += 1
            _throttled.exception("semkv connector: a worker that wanted blocks could not be served")
        finally:
            with self._lock:
                self._open -= admitted

    def _count(self, why: Why) -> None:
        with self._lock:  # of several threads
            self.counts[why.value] += 1

    def _greet(self, connection: socket.socket) -> wire.Channel:
        deadline = time.monotonic() + GREETING_SECONDS
        hello = wire.receive_greeting(connection, wire.Hello, deadline)
        if hello.protocol != wire.PROTOCOL or len(hello.nonce) != wire.NONCE_BYTES:
            raise wire.malformed(f"protocol {hello.protocol}, {len(hello.nonce)} bytes of nonce")
        mine = secrets.token_bytes(wire.NONCE_BYTES)
        wire.send_greeting(connection, wire.Challenge(mine), deadline)
        said = wire.receive_greeting(connection, wire.Proof, deadline).proof
        if not hmac.compare_digest(said, wire.proof(self._secret, b"puller", hello.nonce, mine)):
            raise FetchFailed(Why.UNAUTHORIZED, "it does not know the secret")
        welcome = wire.Welcome(wire.proof(self._secret, b"server", hello.nonce, mine))
        wire.send_greeting(connection, welcome, deadline)
        with self._lock:
            self.counts["greeted"] += 1
        return wire.Channel(connection, self._secret, hello.nonce, mine, serving=True)

    def _listen(self, channel: wire.Channel, admitted: bool) -> None:
        row: Rows | None = None
        while True:
            try:
                get = channel.receive(wire.REQUEST, time.monotonic() + IDLE_SECONDS)
            except FetchFailed as failed:
                if failed.why in (Why.LOST, Why.TIMEOUT):
                    return  # it has what it wanted
                raise
            wire.check_get(get)
            deadline = time.monotonic() + self._deadline
            if not admitted:
                self._refuse(channel, Why.BUSY, f"{self._max} connections", deadline)
                return
            wanted = Wanted(
                get.namespace,
                get.layout,
                get.shard,
                get.tokens_per_block,
                get.bytes_per_block,
                tuple(map(BlockKey, get.keys)),
                get.weights,
            )
            life = self._export.life()  # before the comparison, or it could be of a pool that is no more
            field = self._export.foreign(wanted)
            if field is not None:
                self._refuse(channel, Why.FOREIGN, field, deadline)
                return
            if row is None:  # only now: its size is our own pool's
                row = np.zeros((1, padded(wanted.bytes_per_block)), dtype=np.uint8)
            if not self._answer(channel, wanted, life, row, deadline):
                return

    def _answer(self, channel: wire.Channel, wanted: Wanted, life: str, row: Rows, deadline: float) -> bool:
        sent = 0
        for key in wanted.keys:
            block = self._export.read(wanted, key, row)
            if block is None:
                break
            channel.send(wire.Block(key, block.tokens, block.seal), deadline)
            channel.send_bytes(memoryview(row[0])[: wanted.bytes_per_block], deadline)
            sent += 1
        with self._lock:
            self.counts["exchanges"] += 1
            self.counts["sent_blocks"] += sent
            self.counts["sent_bytes"] += sent * wanted.bytes_per_block
        if self._export.life() != life:
            self._refuse(channel, Why.RESET, "the cache was reset while it was read", deadline)
            return False
        channel.send(wire.Done(life), deadline)
        return True

    def _refuse(self, channel: wire.Channel, why: Why, detail: str, deadline: float) -> None:
        self._count(why)
        channel.send(wire.Refused(why, detail), deadline)
