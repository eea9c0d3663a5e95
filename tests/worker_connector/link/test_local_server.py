"""The local socket server of the connector: shortages, crowds, and peers that never greet."""

from __future__ import annotations

import errno
import logging
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.worker_connector.harness import wait_for
from tests.worker_connector.link.test_wire import Listener, dial, hello, is_hung_up
from worker_connector.link import local_server, rank_endpoint
from worker_connector.link.local_server import MAX_NEW, LocalServer
from worker_connector.link.rank_endpoint import RankEndpoint
from worker_connector.link.wire import read_from_leader


class Echo:
    """Settles a connection at its first byte, and gives bytes back."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.counts: Counter[str] = Counter()
        self.server = LocalServer(self.path, "semkv-test", self._serve, self.counts)

    def _serve(self, connection: socket.socket) -> None:
        while byte := connection.recv(1):
            self.server.settle(connection)
            connection.sendall(byte)

    def dial(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(self.path)  # waits where the backlog is full
        connection.settimeout(10)
        return connection


def answers(connection: socket.socket) -> bool:
    connection.sendall(b"x")
    return connection.recv(1) == b"x"


@pytest.fixture
def echo(socket_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Echo]:
    monkeypatch.setattr(local_server, "_PAUSE_SECONDS", 0.005)
    made = Echo(socket_folder / "s")
    yield made
    made.server.close()


class Short:
    """A listening socket that is out of descriptors for a while."""

    def __init__(self, real: socket.socket, failures: int) -> None:
        self._real = real
        self._failures = failures

    def accept(self) -> Any:
        if self._failures:
            self._failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._real.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def test_shortage_of_descriptors_ends_no_server(echo: Echo, caplog: pytest.LogCaptureFixture) -> None:
    echo.server._listening = Short(echo.server._listening, 5)  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING):
        echo.server.start()
        with echo.dial() as connection:
            assert answers(connection)
    assert echo.counts["accept_failed"] == 5
    assert [record.args[-1] for record in caplog.records if isinstance(record.args, tuple)] == [1, 2, 4]


def test_shortage_of_threads_costs_that_connection_only(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    echo.server.start()
    start = threading.Thread.start

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with echo.dial() as refused:
        assert is_hung_up(refused)
    monkeypatch.setattr(threading.Thread, "start", start)
    with echo.dial() as connection:
        assert answers(connection)
    assert echo.counts["accept_failed"] == 1


def test_new_connections_are_bounded_and_settled_ones_stay(echo: Echo) -> None:
    echo.server.start()
    with echo.dial() as known:
        assert answers(known)
        silent = [echo.dial() for _ in range(MAX_NEW + 2)]
        assert is_hung_up(silent[0])
        assert is_hung_up(silent[1])
        assert answers(silent[2])
        assert answers(known)
        assert echo.counts["crowded"] == 2
        for each in silent:
            each.close()


def test_close_ends_new_connections_too(echo: Echo) -> None:
    echo.server.start()
    silent = [echo.dial() for _ in range(3)]
    wait_for(lambda: len(echo.server.threads) == 4)
    threads = echo.server.threads
    echo.server.close()
    assert not any(thread.is_alive() for thread in threads)
    for each in silent:
        assert is_hung_up(each)
        each.close()


def test_greeting_that_dribbles_is_ended_and_a_good_rank_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte is in time, the greeting never ends."""
    monkeypatch.setattr(rank_endpoint, "HELLO_SECONDS", 0.3)
    listener = Listener()
    endpoint = RankEndpoint(3)
    endpoint.start(listener)
    try:
        with dial(endpoint, struct.pack(">I", 200_000)) as slow:
            slow.settimeout(0.02)
            for _ in range(500):
                try:
                    slow.sendall(b"\0")
                    if slow.recv(1) == b"":
                        break
                except TimeoutError:
                    continue
                except ConnectionError:
                    break
            else:
                raise AssertionError("the greeting was waited for as long as it dribbled")
        with dial(endpoint, hello(endpoint)) as good:
            assert read_from_leader(good).number == 0
            wait_for(lambda: listener.connected == [1])
    finally:
        endpoint.close()
