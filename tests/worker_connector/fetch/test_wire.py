"""The protocol between workers: strangers, hostile bytes, peers that are slow, die or lie, and the bounds of both
sides."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from dynamo_semkv.contracts.keys import BlockKey
from tests.worker_connector.harness import wait_for
from tests.worker_connector.pulling import SECRET
from worker_connector.fetch import server as fetch_server
from worker_connector.fetch import wire
from worker_connector.fetch.client import TcpTransport
from worker_connector.fetch.server import FetchServer
from worker_connector.fetch.transport import FetchFailed, Rows, Sent, Wanted, Why
from worker_connector.memory.checksum import seals

SIZE = 5_000
KEYS = tuple(BlockKey(bytes([n]) * 16) for n in range(4))
WANTED = Wanted(b"n" * 32, "layout", "0/1", 4, SIZE, KEYS)


class Store:
    """Three of four blocks."""

    def __init__(self) -> None:
        self.delay: Callable[[int], None] = lambda index: None

    def life(self) -> str:
        return "one"

    def foreign(self, wanted: Wanted) -> str | None:
        return None if wanted.layout == "layout" else "layout"

    def read(self, wanted: Wanted, key: BlockKey, into: Rows) -> Sent | None:
        index = KEYS.index(key)
        if index == 3:
            return None
        self.delay(index)
        into[0] = 0
        into[0, :SIZE] = index + 1
        return Sent(bytes([index]) * 16, int(seals(into)[0]))


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def server(store: Store) -> Iterator[FetchServer]:
    made = FetchServer("127.0.0.1", 0, SECRET, store, max_connections=2, deadline_seconds=5.0)
    yield made
    made.close()


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


def rows() -> Rows:
    return np.zeros((4, 8192), dtype=np.uint8)


def connect(server: FetchServer, secret: bytes = SECRET) -> Any:
    return TcpTransport(secret).connect("127.0.0.1", server.port, soon())


def why(call: Callable[[], object]) -> Why:
    with pytest.raises(FetchFailed) as failed:
        call()
    return failed.value.why


def test_what_is_there_comes_in_order_and_the_end_says_of_which_life(server: FetchServer) -> None:
    source, into = connect(server), rows()
    for _ in range(2):
        answer = source.read(WANTED, into, soon())
        assert answer.life == "one"
        assert [block.tokens for block in answer.blocks] == [bytes([n]) * 16 for n in range(3)]
        assert [block.seal for block in answer.blocks] == list(map(int, seals(into[:3])))
    assert (into[:3, :SIZE] == np.array([[1], [2], [3]])).all()
    source.close()
    wait_for(lambda: server.counts["exchanges"] == 2)
    assert server.counts["sent_bytes"] == 6 * SIZE


def test_ipv6(store: Store) -> None:
    try:
        made = FetchServer("::1", 0, SECRET, store)
    except OSError:
        pytest.skip("no IPv6 loopback here")
    source = TcpTransport(SECRET).connect("::1", made.port, soon())
    assert len(source.read(WANTED, rows(), soon()).blocks) == 3
    source.close()
    made.close()


def test_another_layout_is_refused(server: FetchServer) -> None:
    source = connect(server)
    assert why(lambda: source.read(WANTED._replace(layout="x"), rows(), soon())) is Why.FOREIGN


def test_neither_side_trusts_one_without_the_secret(server: FetchServer) -> None:
    assert why(lambda: connect(server, b"another secret of it")) is Why.UNAUTHORIZED
    wait_for(lambda: server.counts["unauthorized"] == 1)
    with fake_server(b"a secret that is not ours") as port:
        assert why(lambda: TcpTransport(SECRET).connect("127.0.0.1", port, soon())) is Why.UNAUTHORIZED


def test_the_secret_is_never_on_the_wire_and_a_stranger_hears_nothing_made_of_it(server: FetchServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 10) as stranger:
        wire.send_greeting(stranger, wire.Hello(1, b"n" * 32), soon())
        challenge = wire.receive_greeting(stranger, wire.Challenge, soon())
        wire.send_greeting(stranger, wire.Proof(wire.proof(SECRET, b"server", b"n" * 32, challenge.nonce)), soon())
        assert ended(stranger, nothing=True)  # not even a refusal
    wait_for(lambda: server.counts["unauthorized"] == 1)


def test_more_than_may_pull_at_once_are_told(server: FetchServer) -> None:
    sources = [connect(server) for _ in range(2)]
    for source in sources:
        source.read(WANTED, rows(), soon())
    third = connect(server)
    assert why(lambda: third.read(WANTED, rows(), soon())) is Why.BUSY
    for source in (*sources, third):
        source.close()

    def served() -> bool:
        again = connect(server)
        try:
            return len(again.read(WANTED, rows(), soon()).blocks) == 3
        except FetchFailed:
            return False
        finally:
            again.close()

    wait_for(served)


# hostile clients


def ended(connection: socket.socket, *, nothing: bool = False) -> bool:
    """We say no more, and the other side hangs up; having said `nothing`."""
    try:
        connection.shutdown(socket.SHUT_WR)
        while said := connection.recv(10_000):
            assert not nothing, said
    except TimeoutError:
        return False
    except OSError:  # it hung up on what it had not read
        return True
    return True


def greet(server: FetchServer) -> tuple[socket.socket, wire.Channel]:
    connection = socket.create_connection(("127.0.0.1", server.port), 10)
    return connection, TcpTransport(SECRET)._greet(connection, soon())


def test_fuzzed_greetings_end_their_connection_and_nothing_else(server: FetchServer) -> None:
    dice = random.Random(7)
    for _ in range(60):
        size = dice.choice([0, 1, 5, 40, 256, 257, 2**31, 2**32 - 1])
        body = dice.randbytes(min(size, 300))
        with socket.create_connection(("127.0.0.1", server.port), 10) as stranger:
            stranger.sendall(struct.pack(">I", size) + body)
            assert ended(stranger)
    assert len(connect(server).read(WANTED, rows(), soon()).blocks) == 3


BAD_REQUESTS = {
    "no keys": wire.Get(*WANTED._replace(keys=())),
    "too many keys": wire.Get(*WANTED._replace(keys=KEYS * 65)),
    "a short key": wire.Get(*WANTED._replace(keys=(BlockKey(b"x"),))),
    "a huge block": wire.Get(*WANTED._replace(bytes_per_block=2**62)),
    "no block": wire.Get(*WANTED._replace(bytes_per_block=0)),
    "negative tokens": wire.Get(*WANTED._replace(tokens_per_block=-1)),
    "an answer": wire.Done("x"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_requests_that_no_honest_peer_sends(server: FetchServer, name: str) -> None:
    connection, channel = greet(server)
    with connection:
        channel.send(BAD_REQUESTS[name], soon())  # type: ignore[arg-type]
        assert ended(connection)
    wait_for(lambda: server.counts["malformed"] == 1)
    assert len(connect(server).read(WANTED, rows(), soon()).blocks) == 3


def test_fuzzed_requests_of_an_insider(server: FetchServer) -> None:
    """Right MACs around anything at all."""
    dice = random.Random(11)
    whole = msgspec.msgpack.encode(wire.Get(*WANTED))
    for _ in range(60):
        raw = bytearray(whole)
        for _ in range(dice.randint(1, 6)):
            raw[dice.randrange(len(raw))] = dice.randrange(256)
        connection, channel = greet(server)
        with connection:
            channel.send_bytes(bytes(raw[: dice.randint(0, len(raw))]), soon())
            assert ended(connection)
    assert len(connect(server).read(WANTED, rows(), soon()).blocks) == 3
    assert server.counts["accept_failed"] == 0


def test_frames_are_neither_changed_nor_repeated_nor_oversized(server: FetchServer) -> None:
    body = msgspec.msgpack.encode(wire.Get(*WANTED))
    for sabotage in ("changed", "repeated", "oversized"):
        connection, channel = greet(server)
        with connection:
            mac = wire._mac(channel._out_key, 0, body)
            if sabotage == "changed":
                connection.sendall(struct.pack(">I", len(body)) + body[:-1] + b"\x00" + mac)
            elif sabotage == "repeated":
                channel.send(wire.Get(*WANTED), soon())
                while not isinstance(said := channel.receive(wire.ANSWER, soon()), wire.Done):
                    assert isinstance(said, wire.Block)
                    channel.receive_into(memoryview(bytearray(SIZE)), soon())
                connection.sendall(struct.pack(">I", len(body)) + body + mac)
            else:
                connection.sendall(struct.pack(">I", wire.MAX_MESSAGE + 1))
            assert ended(connection)
    wait_for(lambda: server.counts["malformed"] == 3)


def test_a_peer_that_never_greets_is_hung_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_server, "GREETING_SECONDS", 0.2)
    made = FetchServer("127.0.0.1", 0, SECRET, store)
    with socket.create_connection(("127.0.0.1", made.port), 10) as silent:
        silent.sendall(b"\0")
        assert silent.recv(100) == b""
    made.close()


def test_a_peer_that_reads_nothing_holds_a_thread_for_the_deadline_only() -> None:
    big = 64 * 1024 * 1024

    class Big(Store):
        def read(self, wanted: Wanted, key: BlockKey, into: Rows) -> Sent | None:
            return Sent(b"", 0)

    made = FetchServer("127.0.0.1", 0, SECRET, Big(), deadline_seconds=0.2)
    connection, channel = greet(made)
    with connection:
        channel.send(wire.Get(*WANTED._replace(bytes_per_block=big)), soon())
        wait_for(lambda: made.counts["timeout"] == 1)
    made.close()


# hostile servers


class fake_server:
    """Greets as it should, then does what it is told."""

    def __init__(self, secret: bytes, then: Callable[[socket.socket, wire.Channel], None] = lambda c, ch: None) -> None:
        self._secret = secret
        self._then = then
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        connection, _ = self._listening.accept()
        with connection:
            try:
                hello = wire.receive_greeting(connection, wire.Hello, soon())
                wire.send_greeting(connection, wire.Challenge(b"m" * 32), soon())
                wire.receive_greeting(connection, wire.Proof, soon())
                proof = wire.proof(self._secret, b"server", hello.nonce, b"m" * 32)
                wire.send_greeting(connection, wire.Welcome(proof), soon())
                channel = wire.Channel(connection, self._secret, hello.nonce, b"m" * 32, serving=True)
                self._then(connection, channel)
            except FetchFailed:
                pass  # the client has hung up, as it should

    def __enter__(self) -> int:
        self._thread.start()
        return int(self._listening.getsockname()[1])

    def __exit__(self, *_: object) -> None:
        self._thread.join(10)
        self._listening.close()


def block(key: BlockKey = KEYS[0]) -> wire.Block:
    return wire.Block(key, b"t" * 16, 1)


def answering(*parts: Any) -> Callable[[socket.socket, wire.Channel], None]:
    def then(connection: socket.socket, channel: wire.Channel) -> None:
        channel.receive(wire.REQUEST, soon())
        for part in parts:
            if callable(part):
                part(connection)
            elif isinstance(part, bytes):
                channel.send_bytes(part, soon())
            else:
                channel.send(part, soon())

    return then


def cut(connection: socket.socket) -> None:
    connection.sendall(struct.pack(">I", SIZE) + b"x" * 100)
    connection.shutdown(socket.SHUT_RDWR)


LIES = {
    "dies before a block": ((), Why.LOST),
    "dies in a block": ((block(), cut), Why.LOST),
    "a block that was not asked for": ((block(BlockKey(b"z" * 16)),), Why.MALFORMED),
    "too short a block": ((block(), b"x" * (SIZE - 1)), Why.MALFORMED),
    "too long a block": ((block(), b"x" * (SIZE + 1)), Why.MALFORMED),
    "too many blocks": ((*[part for key in KEYS for part in (block(key), b"x" * SIZE)], block()), Why.MALFORMED),
    "a request": ((wire.Get(*WANTED),), Why.MALFORMED),
    "no message": ((b"\xc1\xc1",), Why.MALFORMED),
    "an unknown reason": ((msgspec.msgpack.encode({"type": "Refused", "why": "mood", "detail": ""}),), Why.MALFORMED),
    "a huge message": ((lambda connection: connection.sendall(b"\xff\xff\xff\xff"),), Why.MALFORMED),
    "refused": ((wire.Refused(Why.BUSY, "x" * 10_000),), Why.BUSY),
}


@pytest.mark.parametrize("name", LIES)
def test_what_a_lying_or_dying_source_costs_is_the_pull(name: str) -> None:
    parts, expected = LIES[name]
    with fake_server(SECRET, answering(*parts)) as port:
        source = TcpTransport(SECRET).connect("127.0.0.1", port, soon())
        assert why(lambda: source.read(WANTED, rows(), soon())) is expected
        source.close()


def test_fuzzed_answers_never_crash_the_side_that_pulls() -> None:
    dice = random.Random(3)
    whole = [msgspec.msgpack.encode(m) for m in (block(), wire.Done("one"), wire.Refused(Why.BUSY, ""))]
    for _ in range(40):
        raw = bytearray(dice.choice(whole))
        for _ in range(dice.randint(1, 4)):
            raw[dice.randrange(len(raw))] = dice.randrange(256)
        with fake_server(SECRET, answering(bytes(raw))) as port:
            source = TcpTransport(SECRET).connect("127.0.0.1", port, soon())
            try:
                source.read(WANTED, rows(), soon())
            except FetchFailed:
                pass
            source.close()


def test_a_slow_source_costs_the_budget_and_no_more(server: FetchServer, store: Store) -> None:
    going_on = threading.Event()
    store.delay = lambda index: None if index < 1 else going_on.wait(10) and None  # type: ignore[func-returns-value]
    source = connect(server)
    try:
        assert why(lambda: source.read(WANTED, rows(), soon(0.2))) is Why.TIMEOUT
    finally:
        going_on.set()
        source.close()


def test_a_source_that_dribbles_costs_the_budget_and_no_more() -> None:
    done = threading.Event()

    def dribble(connection: socket.socket) -> None:
        try:
            while not done.is_set():
                connection.sendall(b"\0")
                time.sleep(0.01)
        except OSError:
            pass

    with fake_server(
        SECRET, answering(block(), lambda connection: connection.sendall(struct.pack(">I", SIZE)), dribble)
    ) as port:
        source = TcpTransport(SECRET).connect("127.0.0.1", port, soon())
        assert why(lambda: source.read(WANTED, rows(), soon(0.3))) is Why.TIMEOUT
        source.close()
        done.set()


def test_one_that_accepts_and_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert why(lambda: TcpTransport(SECRET).connect("127.0.0.1", port, soon(0.2))) is Why.TIMEOUT
