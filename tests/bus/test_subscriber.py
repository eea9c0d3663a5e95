"""BusSubscriber: replay, resume after crashes without gap or duplicate, streams made anew, hostile handlers."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import nats
import pytest
from nats.js import JetStreamContext

from dynamo_semkv.bus.publisher import BusPublisher
from dynamo_semkv.bus.server import EmbeddedNats
from dynamo_semkv.bus.streams import ensure_streams, stream_config
from dynamo_semkv.bus.subscriber import BusSubscriber
from dynamo_semkv.bus.subscription import Message
from dynamo_semkv.contracts import subjects
from tests.bus.waiting import settings, until

A, B = "semkv.reports.a.0", "semkv.reports.b.1"
REPORTS = subjects.REPORT_STREAM
ALL_REPORTS = f"{subjects.REPORTS}.>"

Make = Callable[..., BusSubscriber]


@pytest.fixture
async def subscriber(nats_server: EmbeddedNats) -> AsyncIterator[Make]:
    made: list[BusSubscriber] = []

    def make(**changes: Any) -> BusSubscriber:
        made.append(BusSubscriber(settings(nats_server.url), "test", **changes))
        return made[-1]

    yield make
    for one in made:
        await one.close()


async def publish(server: EmbeddedNats, *messages: tuple[str, bytes]) -> None:
    client = await nats.connect(server.url)
    await ensure_streams(client.jetstream(), settings(server.url))
    for subject, payload in messages:
        await client.jetstream().publish(subject, payload, headers={"content-type": "application/json"})
    await client.close()


async def jetstream(server: EmbeddedNats, act: Callable[[JetStreamContext], Any]) -> Any:
    client = await nats.connect(server.url)
    try:
        return await act(client.jetstream())
    finally:
        await client.close()


class Record:
    """A handler that keeps what it was given."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.caught_up_at: list[int] = []

    def __call__(self, message: Message) -> None:
        self.messages.append(message)

    def caught_up(self) -> None:
        self.caught_up_at.append(len(self.messages))

    @property
    def payloads(self) -> list[bytes]:
        return [message.payload for message in self.messages]


async def test_replay_then_live(nats_server: EmbeddedNats, subscriber: Make) -> None:
    await publish(nats_server, (A, b"1"), (B, b"2"), (A, b"3"))
    bus, record = subscriber(), Record()
    bus.subscribe_stream(REPORTS, ALL_REPORTS, record, on_caught_up=record.caught_up)
    assert not bus.caught_up(REPORTS)
    await bus.start()
    await until("replayed", lambda: bus.caught_up(REPORTS))
    assert [(m.subject, m.payload, m.stream_seq) for m in record.messages] == [(A, b"1", 1), (B, b"2", 2), (A, b"3", 3)]
    first = record.messages[0]
    assert first.content_type == "application/json"
    assert first.timestamp > 1.6e9
    await publish(nats_server, (B, b"4"))
    await until("live", lambda: len(record.messages) == 4)
    assert record.caught_up_at == [3]
    assert bus.stats().delivered == 4


async def test_an_empty_stream_is_caught_up_and_made_if_missing(nats_server: EmbeddedNats, subscriber: Make) -> None:
    bus, record = subscriber(), Record()
    bus.subscribe_stream(REPORTS, ALL_REPORTS, record, on_caught_up=record.caught_up)
    await bus.start()
    await until("caught up", lambda: bus.caught_up(REPORTS))
    assert not bus.caught_up(subjects.ROUTE_STREAM)
    assert record.caught_up_at == [0]


async def test_filters_and_late_subscriptions(nats_server: EmbeddedNats, subscriber: Make) -> None:
    await publish(nats_server, (A, b"1"), (B, b"2"))
    bus, only_a, late = subscriber(), Record(), Record()
    bus.subscribe_stream(REPORTS, A, only_a)
    await bus.start()
    await until("caught up", lambda: bus.caught_up(REPORTS))
    bus.subscribe_stream(REPORTS, B, late)
    await until("late one caught up", lambda: bus.caught_up(REPORTS))
    assert (only_a.payloads, late.payloads) == ([b"1"], [b"2"])


@pytest.mark.parametrize("crash", [True, False], ids=["kill -9", "stop"])
async def test_crashes_leave_no_gap_and_no_duplicate(nats_server: EmbeddedNats, subscriber: Make, crash: bool) -> None:
    """A publisher goes on while the broker is ended and restarted; two subscribers, one with a filter, follow."""
    bus, everything, only_b = subscriber(), Record(), Record()
    bus.subscribe_stream(REPORTS, ALL_REPORTS, everything)
    bus.subscribe_stream(REPORTS, B, only_b)
    await bus.start()
    publisher = BusPublisher(settings(nats_server.url), "test-publisher")
    publisher.start()
    try:
        sent = 0
        for round_number in range(3):
            for _ in range(150):
                publisher.publish(B if sent % 3 == 0 else A, str(sent).encode())
                sent += 1
            await until("some of it arrived", lambda at=150 * round_number: len(everything.messages) > at)
            (nats_server.kill if crash else nats_server.stop)()
            nats_server.start()
        await until("all arrived", lambda: len(everything.messages) >= sent and bus.caught_up(REPORTS))
    finally:
        publisher.close(timeout=0.0)
    numbers = [m.stream_seq for m in everything.messages]
    assert numbers == sorted(numbers)
    assert sorted(set(numbers)) == list(range(1, numbers[-1] + 1))
    by_subject = {name: [int(m.payload) for m in everything.messages if m.subject == name] for name in (A, B)}
    assert by_subject == {
        A: [n for n in range(sent) if n % 3],
        B: [n for n in range(sent) if n % 3 == 0],
    }
    assert [int(m.payload) for m in only_b.messages] == by_subject[B]
    assert bus.stats().reconnects >= 2  # the last restart may come after everything was handed over


async def test_a_consumer_that_vanishes_is_made_again(nats_server: EmbeddedNats, subscriber: Make) -> None:
    await publish(nats_server, (A, b"1"))
    bus, record = subscriber(heartbeat_seconds=0.1), Record()
    bus.subscribe_stream(REPORTS, ALL_REPORTS, record, on_caught_up=record.caught_up)
    await bus.start()
    await until("caught up", lambda: bus.caught_up(REPORTS))

    async def delete_consumers(js: JetStreamContext) -> None:
        for consumer in await js.consumers_info(REPORTS):
            await js.delete_consumer(REPORTS, consumer.name)

    await jetstream(nats_server, delete_consumers)
    await publish(nats_server, (A, b"2"), (A, b"3"))
    await until("resumed", lambda: len(record.messages) == 3)
    assert record.payloads == [b"1", b"2", b"3"]
    assert bus.stats().resumed >= 1
    assert bus.stats().reconnects == 0
    assert record.caught_up_at[-1] == 3


@pytest.mark.parametrize("start", ["all", "new", "last_per_subject"])
async def test_a_stream_made_anew_is_read_from_its_start(
    nats_server: EmbeddedNats, subscriber: Make, start: Any
) -> None:
    """Even if the new one has already more messages than were seen of the old."""
    await publish(nats_server, (A, b"old"), (A, b"old too"))
    bus, record = subscriber(heartbeat_seconds=0.1), Record()
    bus.subscribe_stream(REPORTS, ALL_REPORTS, record, start=start)
    await bus.start()
    await until("caught up", lambda: bus.caught_up(REPORTS))
    seen = len(record.messages)
    assert seen == {"all": 2, "new": 0, "last_per_subject": 1}[start]
    await jetstream(nats_server, lambda js: js.delete_stream(REPORTS))
    await publish(nats_server, *((A, str(n).encode()) for n in range(4)))
    await until("read anew", lambda: record.payloads[-1:] == [b"3"])
    anew = record.payloads[seen:]
    # With last_per_subject, what was the last when the new stream was found depends on when that was.
    assert anew == [b"0", b"1", b"2", b"3"][-len(anew) if start == "last_per_subject" else 0 :]
    assert bus.stats().restarted == 1


async def test_a_broker_that_lost_its_store_is_read_from_the_start(nats_server: EmbeddedNats, subscriber: Make) -> None:
    await publish(nats_server, (A, b"1"), (A, b"2"))
    bus, record = subscriber(), Record()
    bus.subscribe_stream(REPORTS, ALL_REPORTS, record)
    await bus.start()
    await until("caught up", lambda: bus.caught_up(REPORTS))
    nats_server.kill()
    shutil.rmtree(nats_server.store_dir / "jetstream")
    nats_server.start()
    await publish(nats_server, (A, b"3"))
    await until("the new one read", lambda: len(record.messages) == 3)
    assert record.payloads == [b"1", b"2", b"3"]
    assert record.messages[2].stream_seq == 1


async def test_last_per_subject(nats_server: EmbeddedNats, subscriber: Make) -> None:
    one, two = f"{subjects.ANNOUNCEMENTS}.a.0", f"{subjects.ANNOUNCEMENTS}.a.1"
    await publish(nats_server, (one, b"1"), (two, b"2"), (one, b"3"))
    bus, record = subscriber(), Record()
    bus.subscribe_stream(subjects.ANNOUNCEMENT_STREAM, f"{subjects.ANNOUNCEMENTS}.>", record, start="last_per_subject")
    await bus.start()
    await until("caught up", lambda: bus.caught_up(subjects.ANNOUNCEMENT_STREAM))
    assert record.payloads == [b"2", b"3"]
    nats_server.kill()
    nats_server.start()
    await publish(nats_server, (two, b"4"))
    await until("the next one", lambda: len(record.messages) == 3)
    assert record.payloads == [b"2", b"3", b"4"]


async def test_new_means_since_the_first_connection(nats_server: EmbeddedNats, subscriber: Make) -> None:
    """What comes during an outage that began before anything was delivered is not skipped."""
    await publish(nats_server, (A, b"before"))
    bus, record = subscriber(), Record()
    bus.subscribe_stream(REPORTS, ALL_REPORTS, record, start="new")
    await bus.start()
    await until("caught up", lambda: bus.caught_up(REPORTS))
    nats_server.kill()
    await until("disconnected", lambda: not bus.stats().connected)
    assert not bus.caught_up(REPORTS)
    nats_server.start()
    await publish(nats_server, (A, b"after"))
    await until("delivered", lambda: record.messages)
    assert record.payloads == [b"after"]


async def test_what_retention_took_is_counted(nats_server: EmbeddedNats, subscriber: Make) -> None:
    await publish(nats_server, (A, b"1"))
    bus, record = subscriber(heartbeat_seconds=0.1), Record()
    bus.subscribe_stream(REPORTS, ALL_REPORTS, record)
    await bus.start()
    await until("caught up", lambda: bus.caught_up(REPORTS))
    await bus.close()

    again = subscriber()
    again.subscribe_stream(REPORTS, ALL_REPORTS, record)
    again._streams[0] = bus._streams[0]  # the same subscription after an outage of the process's network
    await publish(nats_server, (A, b"2"), (A, b"3"))
    fewer = stream_config(REPORTS, settings(nats_server.url)).evolve(max_msgs=1)
    await jetstream(nats_server, lambda js: js.update_stream(fewer))
    await again.start()
    await until("caught up", lambda: again.caught_up(REPORTS))
    assert record.payloads == [b"1", b"3"]
    assert again.stats().expired == 1


@pytest.mark.parametrize("raised", [ValueError("bad"), asyncio.CancelledError(), KeyError()])
async def test_hostile_handlers_end_nothing(
    nats_server: EmbeddedNats, subscriber: Make, raised: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    await publish(nats_server, *((A, str(n).encode()) for n in range(20)))
    bus, record = subscriber(), Record()

    def hostile(message: Message) -> None:
        record(message)
        raise raised

    def hostile_too() -> None:
        raise raised

    bus.subscribe_stream(REPORTS, ALL_REPORTS, hostile, on_caught_up=hostile_too)
    bus.subscribe_core("semkv.hints.>", hostile)
    await bus.start()
    await until("replayed", lambda: bus.caught_up(REPORTS))
    await publish(nats_server, (A, b"live"))
    await until("live", lambda: len(record.messages) == 21)
    assert bus.stats().handler_errors == 22
    assert bus.stats().resumed == 0
    logged = [entry for entry in caplog.records if "a handler failed" in entry.message]
    assert len(logged) == 5  # the 1st, 2nd, 4th, 8th and 16th


async def test_core_messages_while_connected(nats_server: EmbeddedNats, subscriber: Make) -> None:
    bus, record = subscriber(), Record()
    bus.subscribe_core("semkv.hints.a.0", record)
    await bus.start()
    publisher = BusPublisher(settings(nats_server.url), "test-publisher")
    publisher.start()
    try:
        for life in range(2):
            # A core message is lost until the subscription has reached the broker: send until one is heard.
            seen = len(record.messages)
            while len(record.messages) == seen:
                publisher.publish("semkv.hints.a.0", f"life {life}".encode(), persistent=False)
                await asyncio.sleep(0.005)
            if life == 0:
                nats_server.kill()
                await until("disconnected", lambda: not bus.stats().connected)
                record.messages.clear()
                nats_server.start()
    finally:
        publisher.close(timeout=0.0)
    last = record.messages[-1]
    assert (last.subject, last.payload, last.stream_seq) == ("semkv.hints.a.0", b"life 1", 0)


async def test_a_replay_leaves_the_loop_to_others(nats_server: EmbeddedNats, subscriber: Make) -> None:
    """While 2,000 messages are handed over, other work of the loop gets its turns."""
    publisher = BusPublisher(settings(nats_server.url), "test-publisher")
    publisher.start()
    for n in range(2000):
        assert publisher.publish(f"{subjects.REPORTS}.a.{n % 8}", str(n).encode())
    assert await asyncio.to_thread(publisher.close, 60.0)
    bus, record = subscriber(), Record()
    turns_during_replay = 0
    bus.subscribe_stream(REPORTS, ALL_REPORTS, record)
    await bus.start()
    while not bus.caught_up(REPORTS):
        await asyncio.sleep(0)
        turns_during_replay += 0 < len(record.messages) < 2000
    assert len(record.messages) == 2000
    assert turns_during_replay > 3


async def test_a_flood_of_costly_messages_leaves_the_loop_between_a_few_of_them(
    nats_server: EmbeddedNats, subscriber: Make
) -> None:
    """A donor event costs up to half a millisecond; a request waits at most for two or three of them at each of its
    turns."""
    await publish(nats_server, *((A, str(n).encode()) for n in range(100)))
    bus, handled, most = subscriber(), 0, 0

    def costly(_: Message) -> None:
        nonlocal handled
        handled += 1
        until_then = time.perf_counter() + 0.0005
        while time.perf_counter() < until_then:
            pass

    bus.subscribe_stream(REPORTS, ALL_REPORTS, costly)
    await bus.start()
    while handled < 100:
        before = handled
        await asyncio.sleep(0)
        most = max(most, handled - before)
    assert 1 <= most <= 4


async def test_a_broker_that_is_never_there(absent_server: EmbeddedNats, subscriber: Make) -> None:
    bus, record = subscriber(), Record()
    bus.subscribe_stream(REPORTS, ALL_REPORTS, record)
    await bus.start()
    await until("a try failed", lambda: bus.stats().last_error)
    assert not bus.caught_up(REPORTS)
    assert not bus.stats().connected
    absent_server.start()
    await publish(absent_server, (A, b"1"))
    await until("delivered", lambda: record.payloads == [b"1"])
    await bus.close()
    await publish(absent_server, (A, b"2"))
    assert record.payloads == [b"1"]


async def test_close_before_start_and_bad_start(subscriber: Make) -> None:
    bus = subscriber()
    with pytest.raises(ValueError, match="allowed: all, last_per_subject, new"):
        bus.subscribe_stream(REPORTS, ALL_REPORTS, lambda _: None, start="newest")  # type: ignore[arg-type]
    await bus.close()
