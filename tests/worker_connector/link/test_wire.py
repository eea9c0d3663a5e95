"""The socket between ranks and their leader: who may connect, what is read, and what becomes of results when a
connection is lost."""

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

from dynamo_semkv.contracts.keys import BlockKey
from tests.worker_connector.harness import wait_for
from tests.worker_connector.link.test_rank_aggregator import ready
from worker_connector.disk.block_file import BlockRecord
from worker_connector.disk.messages import DiskFound
from worker_connector.link import remote_channel
from worker_connector.link.channel import ForwardDone, RankChannel, RankResult, SaveDone, SlotsDamaged
from worker_connector.link.leader_link import LeaderLink
from worker_connector.link.metadata import ConnectorMetadata
from worker_connector.link.rank_endpoint import RankEndpoint
from worker_connector.link.remote_channel import RemoteChannel
from worker_connector.link.wire import (
    MAX_FRAME,
    MAX_SLOTS,
    Acknowledged,
    Endpoint,
    Hello,
    Numbered,
    frame,
    read_from_leader,
    read_from_rank,
    split,
)


class Listener:
    def __init__(self) -> None:
        self.results: list[RankResult] = []
        self.connected: list[int] = []
        self.lost: list[int] = []

    def on_result(self, result: RankResult) -> None:
        self.results.append(result)

    def rank_connected(self, rank: int) -> None:
        self.connected.append(rank)

    def rank_lost(self, rank: int) -> None:
        self.lost.append(rank)


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def endpoint(listener: Listener) -> Iterator[RankEndpoint]:
    made = RankEndpoint(3)
    made.start(listener)
    yield made
    made.close()


@pytest.fixture
def channels() -> Iterator[list[RemoteChannel]]:
    made: list[RemoteChannel] = []
    yield made
    for channel in made:
        channel.close()


def dial(endpoint: RankEndpoint, *frames: bytes) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(10)
    connection.connect(endpoint.address.path)
    for data in frames:
        connection.sendall(data)
    return connection


def hello(endpoint: RankEndpoint, **changes: Any) -> bytes:
    return frame(Hello(**{"protocol": 1, "token": endpoint.address.token, "rank": 1, "session": "s"} | changes))


def is_hung_up(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    "changes", [{"token": "wrong"}, {"token": ""}, {"rank": 0}, {"rank": 3}, {"rank": -1}, {"protocol": 2}]
)
def test_stranger_is_refused(endpoint: RankEndpoint, listener: Listener, changes: dict[str, Any]) -> None:
    with dial(endpoint, hello(endpoint, **changes)) as connection:
        assert is_hung_up(connection)
    wait_for(lambda: endpoint.counts["refused"] == 1)
    assert (listener.connected, listener.lost, listener.results) == ([], [], [])


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">I", MAX_FRAME + 1),
        struct.pack(">I", 3) + b"\xc1\xc1\xc1",
        struct.pack(">I", 1) + b"\x80",
        struct.pack(">I", 200) + b"\x91" * 200,
        b"\x80\x04cos\nsystem\n",
    ],
)
@pytest.mark.parametrize("greeted", [True, False])
def test_garbage_ends_that_connection_only(
    endpoint: RankEndpoint, listener: Listener, channels: list[RemoteChannel], garbage: bytes, greeted: bool
) -> None:
    channels.append(RemoteChannel(1, endpoint.address, 2))
    channels[0].post(ForwardDone(2, 1))
    with dial(endpoint, *([hello(endpoint)] if greeted else []), garbage) as connection:
        if greeted:
            assert read_from_leader(connection).number == 0
        assert is_hung_up(connection)
    wait_for(lambda: endpoint.counts["refused"] == 1)
    channels[0].post(ForwardDone(2, 2))
    wait_for(lambda: listener.results == [ForwardDone(2, 1), ForwardDone(2, 2)])


@pytest.mark.parametrize(
    "message", [Numbered(1, ForwardDone(2, 1)), Numbered(2, ForwardDone(1, 1)), Hello(1, "again", 1, "s")]
)
def test_rank_that_sends_results_of_another_or_out_of_order_is_disconnected(
    endpoint: RankEndpoint, listener: Listener, message: Any
) -> None:
    with dial(endpoint, hello(endpoint), frame(message)) as connection:
        read_from_leader(connection)
        assert is_hung_up(connection)
    wait_for(lambda: listener.lost == [1])
    assert listener.results == []


def test_results_are_taken_once_and_in_order_over_lost_connections(
    endpoint: RankEndpoint, listener: Listener, channels: list[RemoteChannel]
) -> None:
    channel = RemoteChannel(1, endpoint.address, 1)
    channels.append(channel)
    for number in range(300):
        channel.post(SaveDone(1, number, True))
        if number % 60 == 30:
            # The leader has taken some of what this connection brought, and more is on its way.
            wait_for(lambda least=number - 30: len(listener.results) > least and channel._connection is not None)
            with channel._wake:
                channel._hang_up()
    wait_for(lambda: len(listener.results) == 300)
    assert listener.results == [SaveDone(1, number, True) for number in range(300)]
    wait_for(lambda: not channel._unacknowledged)
    assert channel.counts["lost"] >= 1
    assert channel.counts["new_sessions"] == 0


def test_result_that_was_taken_and_not_acknowledged_is_not_taken_twice(
    endpoint: RankEndpoint, listener: Listener
) -> None:
    first = frame(Numbered(1, SaveDone(1, 5, True)))
    with dial(endpoint, hello(endpoint), first) as connection:
        assert read_from_leader(connection).number == 0
        wait_for(lambda: len(listener.results) == 1)
    wait_for(lambda: listener.lost == [1])
    with dial(endpoint, hello(endpoint), first, frame(Numbered(2, SaveDone(1, 6, True)))) as connection:
        wait_for(lambda: len(listener.results) == 2)
        assert read_from_leader(connection).number == 1
    assert listener.results == [SaveDone(1, 5, True), SaveDone(1, 6, True)]
    assert endpoint.counts["duplicates"] == 1


def test_new_connection_of_a_rank_takes_the_place_of_the_old_one(endpoint: RankEndpoint, listener: Listener) -> None:
    with dial(endpoint, hello(endpoint)) as old:
        read_from_leader(old)
        with dial(endpoint, hello(endpoint)) as new:
            read_from_leader(new)
            assert is_hung_up(old)
            assert listener.lost == []
    wait_for(lambda: listener.lost == [1])


def test_connection_that_its_rank_gave_up_before_the_answer_is_no_loss(
    endpoint: RankEndpoint, listener: Listener
) -> None:
    """As when the leader's process was busy for so long that its rank connected again."""
    with endpoint._rank_locks[1]:
        dial(endpoint, hello(endpoint)).close()
        wait_for(lambda: 1 in endpoint._connections)
    wait_for(lambda: 1 not in endpoint._connections)
    assert (listener.connected, listener.lost, endpoint.counts["lost"]) == ([], [], 0)
    with dial(endpoint, hello(endpoint)) as later:
        read_from_leader(later)
        wait_for(lambda: listener.connected == [1])
    wait_for(lambda: listener.lost == [1])


def test_leader_that_answers_late_is_waited_for(
    socket_folder: Path, channels: list[RemoteChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process may be busy for longer than a rank pauses between two attempts; it connects once nevertheless."""
    monkeypatch.setattr(remote_channel, "_LONGEST_PAUSE", 0.05)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(socket_folder / "ranks"))
        listening.listen()
        listening.settimeout(10)
        channels.append(RemoteChannel(1, Endpoint(str(socket_folder / "ranks"), "t", ""), 1))
        connection, _ = listening.accept()
        with connection:
            assert isinstance(read_from_rank(connection), Hello)
            connection.settimeout(0.3)
            with pytest.raises(TimeoutError):
                connection.recv(1)
            connection.sendall(frame(Acknowledged(0)))
            wait_for(lambda: channels[0].counts["connected"] == 1)


def test_rank_that_waits_for_an_answer_ends_at_once(socket_folder: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(socket_folder / "ranks"))
        listening.listen()
        listening.settimeout(10)
        channel = RemoteChannel(1, Endpoint(str(socket_folder / "ranks"), "t", ""), 1)
        connection, _ = listening.accept()
        with connection:
            read_from_rank(connection)
            channel.close()
            assert not channel._thread.is_alive()


def test_more_results_than_may_wait_begin_a_session_with_an_empty_slab(
    endpoint: RankEndpoint, listener: Listener, channels: list[RemoteChannel]
) -> None:
    nowhere = endpoint.address._replace(path="/nowhere/ranks")
    channel = RemoteChannel(1, nowhere, 1, capacity=5)
    channels.append(channel)
    channel.post(ready(1))
    for number in range(12):
        channel.post(SaveDone(1, number, True))
        assert len(channel._unacknowledged) <= 5
    channel._endpoint = endpoint.address
    wait_for(lambda: len(listener.results) >= 2)
    again = listener.results[0]
    assert again != ready(1)
    assert getattr(again, "slots", None) == ready(1).slots
    assert channel.counts["new_sessions"] >= 1


def test_rank_outlives_a_shortage_of_descriptors_and_threads(
    endpoint: RankEndpoint, listener: Listener, channels: list[RemoteChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread goes on, and connects when the shortage is over."""
    failed: list[str] = []
    make_socket, start = socket.socket, threading.Thread.start

    def few_sockets(*arguments: Any, **options: Any) -> socket.socket:
        if threading.current_thread().name == "semkv-rank-1" and len(failed) < 2:
            failed.append("socket")
            raise OSError(errno.EMFILE, "Too many open files")
        return make_socket(*arguments, **options)

    def few_threads(thread: threading.Thread) -> None:
        if "_read" in thread.name and len(failed) < 4:
            failed.append("thread")
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(remote_channel.socket, "socket", few_sockets)
    monkeypatch.setattr(threading.Thread, "start", few_threads)
    channels.append(RemoteChannel(1, endpoint.address, 1))
    channels[0].post(SaveDone(1, 7, True))
    wait_for(lambda: listener.results == [SaveDone(1, 7, True)])
    assert failed == ["socket"] * 2 + ["thread"] * 2


def test_rank_without_a_thread_for_its_leader_tries_again_with_the_next_metadata(
    endpoint: RankEndpoint, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[str] = Counter()
    rank: Any = object()
    link = LeaderLink(RankChannel(1), rank, 1, True, counts)
    link.post(ready(1))
    metadata = ConnectorMetadata(2, "g", 1, endpoint=endpoint.address)

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        link.follow(metadata, lambda channel_id: None)
        assert (link.remote, counts) == (None, Counter())
    link.follow(metadata, lambda channel_id: None)
    wait_for(lambda: listener.results == [ready(1)])
    remote = link.remote
    here = RankChannel(3)
    link.follow(ConnectorMetadata(3, "g", 2), lambda channel_id: here)
    assert (link.remote, here.rank) == (None, rank)
    assert remote is not None
    assert not remote._thread.is_alive()


def test_large_damage_is_split() -> None:
    slots = tuple(range(3 * MAX_SLOTS + 1))
    parts = split(SlotsDamaged(1, slots, True))
    assert [slot for part in parts for slot in part.slots] == list(slots)  # type: ignore[union-attr]
    assert all(len(frame(Numbered(1, part))) < MAX_FRAME for part in parts)


def test_leader_on_another_machine_is_named_and_costs_nothing(
    caplog: pytest.LogCaptureFixture, channels: list[RemoteChannel]
) -> None:
    with caplog.at_level(logging.ERROR):
        channel = RemoteChannel(1, Endpoint("/nowhere/ranks", "t", "another-machine"), 1)
        channels.append(channel)
        channel.post(ready(1))
        wait_for(lambda: "different machines" in caplog.text, 20)
    assert "tensor_parallel_size" in caplog.text
    channel.close()
    assert not channel._thread.is_alive()


def test_temporary_directory_with_a_path_too_long_for_a_socket_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    endpoint = RankEndpoint(2)
    try:
        assert endpoint.address.path.startswith("/tmp/semkv-")
    finally:
        endpoint.close()
    assert list(long.iterdir()) == []


def test_closed_endpoint_ends_its_threads(listener: Listener, channels: list[RemoteChannel]) -> None:
    endpoint = RankEndpoint(2)
    endpoint.start(listener)
    channels.append(RemoteChannel(1, endpoint.address, 1))
    wait_for(lambda: listener.connected == [1])
    threads = list(endpoint._server.threads)
    endpoint.close()
    endpoint.close()
    assert not any(thread.is_alive() for thread in threads)
    assert listener.lost == []


def test_what_a_disk_holds_is_sent_in_parts_and_its_end_once() -> None:
    blocks = tuple(
        BlockRecord(b"n" * 32, BlockKey(bytes([n]) * 16), BlockKey(b"p" * 16), n, bytes(4 * 4096), b"w" * 900)
        for n in range(100)
    )
    parts = split(DiskFound(1, 3, blocks, True))
    assert tuple(block for part in parts for block in part.blocks) == blocks  # type: ignore[union-attr]
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]  # type: ignore[union-attr]
    assert all(len(frame(Numbered(1, part))) <= MAX_FRAME for part in parts)
    assert split(DiskFound(1, 3, (), True)) == [DiskFound(1, 3, (), True)]
    assert not any(part.last for part in split(DiskFound(1, 3, blocks, False)))  # type: ignore[union-attr]


def test_result_that_fits_no_frame_begins_a_session_and_raises_nothing(
    endpoint: RankEndpoint, listener: Listener, channels: list[RemoteChannel]
) -> None:
    channel = RemoteChannel(1, endpoint.address, 1)
    channels.append(channel)
    channel.post(ready(1))
    block = BlockRecord(b"n" * 32, BlockKey(b"k" * 16), BlockKey(b"p" * 16), 0, bytes(2 * MAX_FRAME))
    channel.post(DiskFound(1, 3, (block,), True))
    channel.post(SaveDone(1, 7, True))
    wait_for(lambda: SaveDone(1, 7, True) in listener.results)
    assert channel.counts["new_sessions"] == 1
