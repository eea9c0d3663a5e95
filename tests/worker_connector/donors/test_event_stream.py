"""The engine's streaming publisher over real sockets: a leader subscribes by the engine's own arguments, and hears of
what it missed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq

from tests.worker_connector.donors.test_device_donors import later
from tests.worker_connector.donors.test_device_events import TOKENS, donate, exact
from tests.worker_connector.harness import wait_for
from tests.worker_connector.scripted import llm_args
from tests.worker_connector.scripted_disk import donors
from tests.worker_connector.stream_publisher import CLEARED, StreamPublisher, removed, stored
from worker_connector.assembly import assemble_leader, assemble_rank
from worker_connector.donors.event_stream import EventStream, StreamAddress, stream_address
from worker_connector.engine_api.geometry import PoolGeometry

SIZE = 4
HASHES = [-(2**63) + n for n in range(10)]


def config(publisher: StreamPublisher, *, replay: bool = True, **changes: Any) -> SimpleNamespace:
    options = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": publisher.endpoint,
        "replay_endpoint": publisher.replay if replay else None,
        "topic": "",
    }
    return SimpleNamespace(**options | changes)


def args_with(events: Any) -> SimpleNamespace:
    args = llm_args(SIZE)
    args.kv_cache_config.kv_events_config = events
    return args


@pytest.fixture
def publisher() -> Iterator[StreamPublisher]:
    found = StreamPublisher()
    yield found
    found.close()


class Heard:
    def __init__(self, address: StreamAddress | None) -> None:
        assert address is not None
        self.events: list[dict[str, Any]] = []
        self.stream = EventStream(address, self.events.extend)
        self.stream.start()

    def kinds(self) -> list[str]:
        return [event["data"]["type"] for event in list(self.events)]


def subscribed(publisher: StreamPublisher, *, replay: bool = True) -> Heard:
    heard = Heard(stream_address(args_with(config(publisher, replay=replay)), 0))
    publisher.wait_for_subscriber()
    return heard


def test_batches_arrive_in_order(publisher: StreamPublisher) -> None:
    heard = subscribed(publisher)
    publisher.publish(stored(None, HASHES[:2], range(8), SIZE), removed(HASHES[1]))
    publisher.publish(CLEARED)
    wait_for(lambda: len(heard.events) == 3)
    heard.stream.close()
    assert heard.kinds() == ["stored", "removed", "cleared"]
    assert [event["event_id"] for event in heard.events] == [0, 1, 2]


def test_what_was_published_before_it_came_is_asked_for(publisher: StreamPublisher) -> None:
    publisher.publish(stored(None, HASHES[:1], range(4), SIZE))
    publisher.publish(stored(None, HASHES[1:2], range(4), SIZE))
    heard = subscribed(publisher)
    publisher.publish(removed(HASHES[0]))
    wait_for(lambda: len(heard.events) == 3)
    heard.stream.close()
    assert [event["event_id"] for event in heard.events] == [0, 1, 2]
    assert heard.stream.counts == {"batches": 1, "replayed": 3}


@pytest.mark.parametrize("replay", [True, False])
def test_batch_that_was_lost_is_asked_for_or_a_gap(replay: bool, publisher: StreamPublisher) -> None:
    heard = subscribed(publisher, replay=replay)
    publisher.publish(stored(None, HASHES[:1], range(4), SIZE))
    publisher.publish(stored(None, HASHES[1:2], range(4), SIZE), lost=True)
    publisher.publish(removed(HASHES[0]))
    publisher.publish(removed(HASHES[0]))
    wait_for(lambda: len(heard.events) == (4 if replay else 3))
    heard.stream.close()
    assert [event["event_id"] for event in heard.events] == ([0, 1, 2, 3] if replay else [0, 2, 3])


def test_what_the_publisher_has_forgotten_stays_a_gap(publisher: StreamPublisher) -> None:
    heard = subscribed(publisher)
    publisher.publish(stored(None, HASHES[:1], range(4), SIZE))
    publisher.publish(stored(None, HASHES[1:2], range(4), SIZE), lost=True)
    wait_for(lambda: len(heard.events) == 1)
    publisher.kept.clear()
    publisher.publish(removed(HASHES[0]))
    wait_for(lambda: len(heard.events) == 2)
    heard.stream.close()
    assert [event["event_id"] for event in heard.events] == [0, 2]


def test_publisher_that_counts_from_its_beginning_again_is_another_one(publisher: StreamPublisher) -> None:
    heard = subscribed(publisher)
    for _ in range(3):
        publisher.publish(stored(None, HASHES[:1], range(4), SIZE))
    wait_for(lambda: len(heard.events) == 3)
    publisher.number = 0
    publisher.kept.clear()
    publisher.publish(stored(None, HASHES[1:2], range(4), SIZE))
    wait_for(lambda: len(heard.events) == 5)
    heard.stream.close()
    assert heard.kinds()[3:] == ["cleared", "stored"]
    assert heard.stream.counts["restarted"] == 1


def test_strange_messages_are_counted_and_passed_over(publisher: StreamPublisher) -> None:
    heard = subscribed(publisher)
    publisher._socket.send_multipart((b"", b"no number"))
    publisher._socket.send_multipart((b"", b"1", b""))
    publisher.publish(stored(None, HASHES[:1], range(4), SIZE))
    wait_for(lambda: bool(heard.events))
    heard.stream.close()
    assert heard.stream.counts == {"strange": 2, "batches": 1}


def test_ipc_endpoint_is_the_rank_s_own(tmp_path: Path) -> None:
    base = f"ipc://{tmp_path}/events"
    publisher = StreamPublisher(endpoint=f"{base}_dp2")
    events = {"enable_kv_cache_events": True, "endpoint": base}
    heard = Heard(stream_address(args_with(events), 2))
    publisher.wait_for_subscriber()
    publisher.publish(CLEARED)
    wait_for(lambda: heard.kinds() == ["cleared"])
    heard.stream.close()
    publisher.close()


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://*:5557", 0, "tcp://127.0.0.1:5557"),
        ("tcp://0.0.0.0:5557", 3, "tcp://127.0.0.1:5560"),
        ("tcp://10.0.0.1:5557", 1, "tcp://10.0.0.1:5558"),
        ("ipc:///tmp/kv", 0, "ipc:///tmp/kv"),
        ("inproc://kv", 2, "inproc://kv_dp2"),
    ],
)
def test_each_rank_publishes_at_an_endpoint_of_its_own(endpoint: str, rank: int, expected: str) -> None:
    events = {"enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": endpoint}
    address = stream_address(args_with(events), rank)
    assert address == StreamAddress(expected, expected, "")


@pytest.mark.parametrize("endpoint", ["http://h:1", "tcp://h", "tcp://h:x", "tcp://h:0", "tcp://h:65535", "5557"])
def test_endpoint_that_is_none_is_named(endpoint: str) -> None:
    with pytest.raises(ValueError, match="kv_events_config"):
        stream_address(args_with({"enable_kv_cache_events": True, "endpoint": endpoint}), 1)


@pytest.mark.parametrize(
    "events", [None, {}, {"enable_kv_cache_events": False}, {"enable_kv_cache_events": True, "publisher": "null"}]
)
def test_engine_that_does_not_publish_has_no_stream(events: Any) -> None:
    assert stream_address(args_with(events), 0) is None
    assert stream_address(SimpleNamespace(), 0) is None


def test_donors_of_an_exact_deployment_follow_the_stream(publisher: StreamPublisher) -> None:
    engine = exact()
    address = stream_address(args_with(config(publisher)), 0)
    assert address is not None
    taken = threading.Event()

    def hear(events: list[Any]) -> None:
        engine.leader.kv_events(events)
        taken.set()

    stream = EventStream(address, hear)
    stream.start()
    publisher.wait_for_subscriber()

    def publish(event: dict[str, Any]) -> None:
        taken.clear()
        publisher.publish(event)
        assert taken.wait(30)
        later(engine)

    donor = donate(engine, TOKENS)
    publish(stored(None, HASHES, TOKENS, SIZE))
    assert donors(engine.sink) == {donor: (40, "device")}
    publish(removed(*HASHES[::-1]))
    assert donors(engine.sink) == {donor: (40, "host_pinned")}
    publish(stored(None, HASHES, TOKENS, SIZE))
    publish(CLEARED)
    assert donors(engine.sink) == {donor: (40, "host_pinned")}
    stream.close()


def test_assembled_connector_hears_the_engine_s_own_publisher(
    publisher: StreamPublisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    args = args_with(config(publisher))
    env = {
        "DYN_STABLE_ROUTING_ID": "engine-z",
        "SEMKV_CONNECTOR__SLAB_BYTES": "1048576",
        "SEMKV_BUS__URL": "nats://127.0.0.1:1",
    }
    parts = assemble_leader(args, env)
    try:
        assemble_rank(args, env).register(PoolGeometry.from_tensor(torch.zeros(4, 1, 2, 8), SIZE))
        publisher.wait_for_subscriber()
        publisher.publish(stored(None, HASHES, TOKENS, SIZE))
        wait_for(lambda: parts.leader.snapshot()["kv_events"]["blocks"] == 10)
    finally:
        parts.close()


def test_endpoint_that_cannot_be_had_costs_the_engine_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    args = args_with({"enable_kv_cache_events": True, "endpoint": "tcp://nowhere"})
    env = {
        "DYN_STABLE_ROUTING_ID": "engine-w",
        "SEMKV_CONNECTOR__SLAB_BYTES": "1048576",
        "SEMKV_BUS__URL": "nats://127.0.0.1:1",
    }
    parts = assemble_leader(args, env)
    try:
        assemble_rank(args, env).register(PoolGeometry.from_tensor(torch.zeros(4, 1, 2, 8), SIZE))
        wait_for(lambda: "KV event stream is not heard" in caplog.text)
    finally:
        parts.close()
    bad = EventStream(StreamAddress("tcp://no host:1", None, ""), lambda events: None)
    bad.start()
    wait_for(lambda: bad.counts["failed"] == 1)
    bad.close()
    assert zmq.Context.instance() is not None
