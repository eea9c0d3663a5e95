"""Attacks on the pull: what would bring wrong bytes in, hold a request for nothing, or wear a worker out. Each was
found to work once."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from typing import Any

import pytest

from tests.worker_connector.fetch.test_wire import WANTED, Store, connect, greet, rows, soon, why
from tests.worker_connector.harness import MIB, wait_for
from tests.worker_connector.pulling import (
    SECRET,
    TOKENS,
    between,
    desk,
    fetch_settings,
    hint,
    pull,
    results,
    worker,
    workers,
)
from tests.worker_connector.scripted import ScriptedEngine, llm_args
from tests.worker_connector.scripted_disk import settle
from worker_connector.fetch import server as fetch_server
from worker_connector.fetch import wire
from worker_connector.fetch.client import TcpTransport
from worker_connector.fetch.peers import Address, NotAllowed, Peers
from worker_connector.fetch.server import FetchServer
from worker_connector.fetch.transport import Answer, Sent, Why

# other workers' resets


def test_after_a_reset_without_a_name_nothing_comes_from_workers_that_were_not_reset_yet() -> None:
    """Weights are replaced one worker after the other, each told by `reset_cache`: both namespaces are the same, and
    their KV is not."""
    with workers(worker(), worker()) as (a, b):
        a.serve(TOKENS)
        b.leader.reset_cache()
        assert pull(b, a) == 0
        assert results(b) == {"own_reset": 1}
        assert b.leader.resident_blocks() == 0
        b.leader.weights_changed("step-1")
        assert pull(b, a) == 0  # its old blocks have another name
        a.leader.weights_changed("step-1")
        a.serve(TOKENS)
        assert pull(b, a) == 5


def test_after_a_reset_without_a_name_nothing_is_given_to_workers_that_were_not_reset_yet() -> None:
    with workers(worker(), worker()) as (a, b):
        a.leader.reset_cache()
        a.serve(TOKENS)
        assert pull(b, a) == 0
        assert results(b) == {"foreign": 1}
        assert "sent_blocks" not in a.parts.snapshot()["fetch"]["serving"]


def test_a_source_that_is_reset_without_a_name_between_exchanges_takes_everything_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Also from the disk, which would bring it up again."""
    monkeypatch.setattr("worker_connector.fetch.fetcher.MAX_KEYS", 2)
    with workers(worker(), worker(fetch_settings(disk_path=str(tmp_path), disk_bytes=MIB))) as (a, b):
        a.serve(TOKENS)

        def reset(wanted: Any) -> None:
            if watched.reads == 2:
                settle(b)
                a.leader.reset_cache()

        watched = between(b, before=reset)
        assert pull(b, a) == 0
        assert results(b) == {"foreign": 1}
        settle(b)
        assert b.leader.resident_blocks() == 0
        assert b.parts.snapshot()["disk"]["blocks"] == 0
        b.rank.close()


# other weights under the same name


def model(path: Any, change: int | None = None) -> str:
    """A directory of weights; `change`: of one byte in each sampled stretch."""
    path.mkdir()
    raw = bytearray(300_000)
    if change is not None:
        for at in range(0, len(raw), 1_000):
            raw[at] = change
    (path / "model.safetensors").write_bytes(raw)
    (path / "config.json").write_text("{}")
    return str(path)


@pytest.mark.parametrize("meanwhile", ["weights", "config", "model_kwargs", None])
def test_a_directory_with_other_weights_is_another_model(meanwhile: str | None, tmp_path: Any) -> None:
    """A fleet is rolled over to the next weights in the directory of the last ones: same name, same shapes, other
    KV."""
    path = model(tmp_path / "latest")
    options: dict[str, Any] = {}
    old = worker(args=llm_args(4, model=path))
    if meanwhile == "weights":
        (tmp_path / "latest").rename(tmp_path / "before")
        model(tmp_path / "latest", change=1)
    elif meanwhile == "config":
        (tmp_path / "latest" / "config.json").write_text('{"rope_theta": 1e6}')
    elif meanwhile == "model_kwargs":
        options = {"model_kwargs": {"rope_theta": 1e6}}
    with workers(old, worker(args=llm_args(4, model=path, **options))) as (a, b):
        a.serve(TOKENS)
        assert pull(b, a) == (5 if meanwhile is None else 0)
        assert results(b) == ({"complete": 1} if meanwhile is None else {"foreign": 1})


def test_weights_that_cannot_be_read_are_compared_with_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(_: Any) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("worker_connector.assembly.weights_print", unreadable)
    engine = ScriptedEngine(fetch_settings())
    assert engine.parts.fetch is None
    engine.serve(TOKENS)
    assert engine.leader.resident_blocks() == 5
    engine.parts.close()


# requests that wait for nothing


@pytest.mark.parametrize("address", ["tcp://10.0.0.1:7011", "http://127.0.0.1:1"])
def test_a_request_is_not_held_for_an_address_that_is_not_followed(address: str) -> None:
    """Whatever the threads that pull are busy with: none runs here."""
    with workers(worker()) as (b,):
        future = desk(b).fetch(TOKENS, hint(address))
        assert future is not None
        assert future.done()


def test_a_peer_that_sends_what_was_not_asked_for_is_left_alone_for_a_while() -> None:
    with workers(worker(), worker()) as (a, b):
        a.serve(TOKENS)

        def lie(answer: Answer, rows: Any) -> Answer:
            return answer._replace(blocks=tuple(Sent(b"\xff" * 16, block.seal) for block in answer.blocks))

        between(b, after=lie)
        assert pull(b, a) == 0
        future = desk(b).fetch(TOKENS, hint(a))
        assert future is not None
        assert future.done()
        assert results(b) == {"wrong_tokens": 1, "resting": 1}


def test_one_pull_at_a_time_tries_a_peer_that_hung() -> None:
    now = [0.0]
    peers = Peers("127.0.0.0/8", lambda: now[0])
    there = "tcp://127.0.0.1:7011"

    def rests(**options: bool) -> bool:
        try:
            peers.address(there, **options)
        except NotAllowed as error:
            return error.kind == "resting"
        return False

    assert not rests(trying=True)
    assert not rests(trying=True)  # nothing is known against it
    peers.failed(Address("127.0.0.1", 7011))
    assert rests()
    now[0] += 1.5
    assert not rests()  # asked only
    assert not rests(trying=True)
    assert rests()
    peers.failed(Address("127.0.0.1", 7011))
    now[0] += 1.5
    assert rests()  # for twice as long
    now[0] += 1.0
    assert not rests(trying=True)
    peers.worked(Address("127.0.0.1", 7011))
    assert not rests(trying=True)
    assert not rests(trying=True)


async def test_whoever_stops_waiting_takes_nothing_from_others_and_no_thread() -> None:
    """`wait_for` cancels what it waited for; a thread that then could not answer would end, and after two of those
    nothing is pulled."""
    with workers(worker(), worker()) as (a, b):
        a.serve(TOKENS)
        first, second = (desk(b).fetch(TOKENS, hint(a)) for _ in range(2))
        assert first is not None
        assert second is not None
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(first), 0.01)
        assert desk(b).fetcher.run_pending() == 1
        assert second.result(10) == 5


def test_no_descriptor_is_no_fault_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: Any, **__: Any) -> socket.socket:
        raise OSError(24, "Too many open files")

    with workers(worker(), worker()) as (a, b):
        a.serve(TOKENS)
        source = hint(a).source_control_endpoint
        monkeypatch.setattr("worker_connector.fetch.client.socket.socket", none_left)
        assert pull(b, source) == 0
        monkeypatch.undo()
        assert results(b) == {"unreachable": 1}


# wear


def test_five_hundred_pulls_that_fail_leave_no_thread_and_no_descriptor() -> None:
    with workers(worker(), worker(fetch_settings(SECRET + b"!"))) as (a, b):
        a.serve(TOKENS)
        server = desk(a)._server
        assert server is not None
        fetcher = desk(b).fetcher
        monkey = fetcher._peers

        def pulls(count: int) -> None:
            for _ in range(count):
                monkey._resting.clear()
                assert pull(b, a) == 0

        def settled() -> tuple[int, int]:
            wait_for(lambda: sum(thread.is_alive() for thread in server._server.threads) == 1)
            return threading.active_count(), descriptors()

        pulls(5)
        before = settled()
        pulls(495)
        after = settled()
        assert after[0] <= before[0]
        assert after[1] <= before[1]
        assert results(b) == {"unauthorized": 500}
        b.check_balance()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def test_whoever_closes_waits_for_no_peer_that_hangs() -> None:
    """A pull that went on for its whole budget would enter blocks, and hold its socket, when all else is closed."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(30.0)
        engine = worker(fetch_settings(fetch={"deadline_ms": 60_000.0}))
        it = desk(engine)
        it.fetcher._manual = False
        it.fetcher.start()
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        pulls = [it.fetch([first, *TOKENS], hint(endpoint)) for first in range(4)]
        hanging = [silent.accept()[0] for _ in range(2)]  # both threads wait for an answer
        engine.parts.close(60.0)
        for connection in hanging:
            connection.close()
        assert all(future is not None and future.result(0) == 0 for future in pulls)
        assert not any(thread.is_alive() for thread in it.fetcher._threads)


def test_one_too_many_stays_among_the_few_that_are_new() -> None:
    """Who knows the secret is let in, but waits in no greater number than strangers do."""
    server = FetchServer("127.0.0.1", 0, SECRET, Store(), max_connections=1, deadline_seconds=5.0)
    first = connect(server)
    first.read(WANTED, rows(), soon())
    idle = [greet(server)[0] for _ in range(40)]
    try:
        wait_for(lambda: server.counts["crowded"] >= 40 - 32)
        assert list(server._server._settled.values()).count(True) == 1
        late = connect(server)
        assert why(lambda: late.read(WANTED, rows(), soon())) is Why.BUSY
        late.close()
        assert len(first.read(WANTED, rows(), soon()).blocks) == 3
    finally:
        first.close()
        for connection in idle:
            connection.close()
        server.close()


def test_a_flood_of_strangers_is_accepted_slowly_and_peers_are_not() -> None:
    server = FetchServer("127.0.0.1", 0, SECRET, Store())
    acceptor = server._server
    pauses: list[float | None] = []
    wait = acceptor._closed.wait

    def noted(timeout: float | None = None) -> bool:
        pauses.append(timeout)
        return wait(timeout)

    acceptor._closed.wait = noted  # type: ignore[method-assign]
    for _ in range(3):
        source = connect(server)
        assert len(source.read(WANTED, rows(), soon()).blocks) == 3
        source.close()
    wait_for(lambda: not acceptor._settled)
    assert pauses == []
    for _ in range(3):
        socket.create_connection(("127.0.0.1", server.port), 10).close()
    wait_for(lambda: server.counts["lost"] == 3)
    wait_for(lambda: connect(server).close() or fetch_server.STRANGER_SECONDS in pauses)
    server.close()


def test_our_own_proof_sent_back_is_no_proof() -> None:
    """Reflection: a stranger sends each side's words back to itself."""
    listening = socket.create_server(("127.0.0.1", 0))

    def mirror() -> None:
        connection, _ = listening.accept()
        with connection:
            hello = wire.receive_greeting(connection, wire.Hello, soon())
            wire.send_greeting(connection, wire.Challenge(hello.nonce), soon())
            proof = wire.receive_greeting(connection, wire.Proof, soon())
            wire.send_greeting(connection, wire.Welcome(proof.proof), soon())
            connection.recv(1)

    thread = threading.Thread(target=mirror, daemon=True)
    thread.start()
    try:
        port = listening.getsockname()[1]
        assert why(lambda: TcpTransport(SECRET).connect("127.0.0.1", port, soon())) is Why.UNAUTHORIZED
    finally:
        thread.join(10)
        listening.close()


def test_a_greeting_that_was_overheard_is_worth_nothing_a_second_time() -> None:
    """Replay: the same words again, to another random number."""
    server = FetchServer("127.0.0.1", 0, SECRET, Store())
    said: wire.Proof | None = None
    for welcome in (True, False):
        with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
            wire.send_greeting(connection, wire.Hello(wire.PROTOCOL, b"n" * wire.NONCE_BYTES), soon())
            nonce = wire.receive_greeting(connection, wire.Challenge, soon()).nonce
            said = said or wire.Proof(wire.proof(SECRET, b"puller", b"n" * wire.NONCE_BYTES, nonce))
            wire.send_greeting(connection, said, soon())
            if welcome:
                wire.receive_greeting(connection, wire.Welcome, soon())
            else:
                assert connection.recv(1) == b""
    wait_for(lambda: server.counts["unauthorized"] and server.counts["greeted"])  # each counted by a thread of its own
    assert (server.counts["unauthorized"], server.counts["greeted"]) == (1, 1)
    server.close()


def test_prompts_that_end_alike_are_two_pulls_and_equal_ones_still_one() -> None:
    """What is under way is found by the end of the prompt: the first to finish must not take the other one's place with
    it."""
    tail = list(range(1_000, 1_081))
    one, other = [1, 2, 3, 4, *tail], [5, 6, 7, 8, *tail]
    with workers(worker(), worker()) as (a, b):
        fetcher = desk(b).fetcher
        first, second = (desk(b).fetch(tokens, hint(a, 20)) for tokens in (one, other))
        assert first is not second
        order = fetcher._next()
        assert order is not None
        fetcher._work(order)
        assert desk(b).fetch(other, hint(a, 20)) is second
        assert fetcher.run_pending() == 1
        assert not fetcher._open
