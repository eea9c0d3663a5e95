"""Packs on a real broker: few messages, every record once and in its order, over kills of the broker; and what readers
make of them."""

from __future__ import annotations

import asyncio
import datetime
import itertools
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nats
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from dynamo_semkv.bus.acks import Acks, Message
from dynamo_semkv.bus.publisher import BusPublisher
from dynamo_semkv.bus.server import EmbeddedNats
from dynamo_semkv.bus.streams import stream_config
from dynamo_semkv.bus.subscriber import BusSubscriber
from dynamo_semkv.bus.subscription import ConsumerState
from dynamo_semkv.bus.subscription import Message as Record
from dynamo_semkv.contracts import subjects
from dynamo_semkv.contracts.codec import JSON, MSGPACK, encode_pack
from dynamo_semkv.contracts.pack import PACK, Pack
from tests.bus.waiting import kept, records, settings, stored, until, wait_for

A, B = "semkv.reports.a.0", "semkv.routes.r"
DONORS = "semantic-kv-events.a.0"
REPORTS = subjects.REPORT_STREAM

Make = Callable[..., BusPublisher]


def burst(
    bus: BusPublisher, server: EmbeddedNats, subject: str, payloads: Sequence[bytes], content_type: str = MSGPACK
) -> None:
    """Published while the broker is away, so that all of them wait together; then stored."""
    before = bus.stats().published
    for payload in payloads:
        assert bus.publish(subject, payload, content_type=content_type)
    server.start()
    wait_for("all stored", lambda: bus.stats().published >= before + len(payloads))


PAYLOADS = [b"%d" % number for number in range(200)]


async def test_a_burst_is_a_few_messages_and_every_record_is_read(absent_server: EmbeddedNats, publisher: Make) -> None:
    bus = publisher()
    burst(bus, absent_server, A, PAYLOADS)
    messages = await kept(absent_server, REPORTS)
    assert [len(records(message)) for message in messages] == [64, 64, 64, 8]
    assert {(message.headers or {}).get("content-type") for message in messages} == {PACK}
    assert len({(message.headers or {})["Nats-Msg-Id"] for message in messages}) == 4
    stats = bus.stats()
    assert (stats.published, stats.buffered, stats.buffered_bytes, stats.dropped) == (200, 0, 0, 0)
    found: list[Record] = []
    reader = BusSubscriber(settings(absent_server.url), "reader")
    reader.subscribe_stream(REPORTS, ">", found.append)
    await reader.start()
    await until("read", lambda: reader.caught_up(REPORTS))
    await reader.close()
    assert [record.payload for record in found] == PAYLOADS
    assert {(record.subject, record.content_type) for record in found} == {(A, MSGPACK)}
    assert [record.stream_seq for record in found] == [1] * 64 + [2] * 64 + [3] * 64 + [4] * 8
    assert all(one.timestamp <= later.timestamp for one, later in itertools.pairwise(found))
    assert reader.stats().delivered == 200


async def test_switched_off_each_record_is_a_message_as_before(absent_server: EmbeddedNats, publisher: Make) -> None:
    bus = publisher(pack_records=False)
    burst(bus, absent_server, A, PAYLOADS)
    messages = await kept(absent_server, REPORTS)
    assert [message.data for message in messages] == PAYLOADS
    assert {(message.headers or {}).get("content-type") for message in messages} == {MSGPACK}


async def test_streams_that_are_read_in_order_have_no_packs(absent_server: EmbeddedNats, publisher: Make) -> None:
    burst(publisher(), absent_server, DONORS, PAYLOADS[:20])
    assert [message.data for message in await kept(absent_server, subjects.DONOR_STREAM)] == PAYLOADS[:20]


async def test_a_pack_whose_acknowledgement_is_lost_is_stored_once(
    absent_server: EmbeddedNats, publisher: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is a record alone: neither is put together with others when it goes again."""
    send = Acks.send
    deaf: dict[str, int] = defaultdict(int)

    async def lose(
        self: Acks, subject: str, heads: Sequence[Message], timeout: float, stream: str
    ) -> list[Exception | None]:
        told = await send(self, subject, heads, timeout, stream)
        deaf[subject] += 1
        if deaf[subject] <= 2:
            return [nats.errors.TimeoutError() for _ in told]
        return told

    monkeypatch.setattr(Acks, "send", lose)
    bus = publisher()
    assert bus.publish(B, b"alone")
    burst(bus, absent_server, A, PAYLOADS[:10])
    wait_for("both", lambda: bus.stats().published == 11)
    assert await stored(absent_server) == {A: PAYLOADS[:10], B: [b"alone"]}
    assert len(await kept(absent_server)) == 2
    assert deaf[A] >= 3


async def test_records_that_the_session_s_end_puts_back_are_neither_packed_nor_stored_again(
    nats_server: EmbeddedNats, publisher: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was stored and not acknowledged comes back as it was, and what waited beside it is packed without it."""
    send, goes_on = Acks.send, threading.Event()

    async def hold(
        self: Acks, subject: str, heads: Sequence[Message], timeout: float, stream: str
    ) -> list[Exception | None]:
        told = await send(self, subject, heads, timeout, stream)
        if not goes_on.is_set():
            await asyncio.Event().wait()  # until the session ends
        return told

    monkeypatch.setattr(Acks, "send", hold)
    bus = publisher()

    def in_flight() -> int:
        return sum(head.record_count for _, heads in list(bus._batches.values()) for head in heads)

    for number, payload in enumerate((b"alone", b"alone too"), 1):
        assert bus.publish(A, payload)
        wait_for("its batch", lambda number=number: in_flight() == number)
    for payload in PAYLOADS[:10]:
        assert bus.publish(A, payload)
    wait_for("all in flight", lambda: in_flight() == 12)

    async def all_stored() -> bool:
        return sum(len(found) for found in (await stored(nats_server, REPORTS)).values()) == 12

    end = asyncio.get_running_loop().time() + 30.0
    while not await all_stored():
        assert asyncio.get_running_loop().time() < end
    nats_server.kill()
    wait_for("the session has ended", lambda: not bus._batches)
    assert bus.publish(A, b"later")
    assert bus.publish(A, b"too")
    assert bus.stats().buffered == 14
    goes_on.set()
    nats_server.start()
    wait_for("all acknowledged", lambda: bus.stats().published == 14)
    assert (await stored(nats_server, REPORTS))[A] == [b"alone", b"alone too", *PAYLOADS[:10], b"later", b"too"]


async def test_a_pack_that_the_stream_refuses_is_taken_apart_and_only_what_is_impossible_is_lost(
    nats_server: EmbeddedNats, publisher: Make
) -> None:
    client = await nats.connect(nats_server.url)
    config = stream_config(REPORTS, settings(nats_server.url)).evolve(max_msg_size=900)  # headers included
    await client.jetstream().add_stream(config)
    await client.close()
    nats_server.kill()
    bus = publisher(manage_streams=False)
    payloads = [b"%d" % number * 40 for number in range(10)]
    for payload in [*payloads, b"x" * 2_000, *payloads]:
        assert bus.publish(A, payload)
    nats_server.start()
    wait_for("told of all", lambda: not bus.stats().buffered)
    stats = bus.stats()
    assert (stats.published, stats.dropped, stats.buffered_bytes) == (20, 1, 0)
    assert (await stored(nats_server, REPORTS))[A] == [*payloads, *payloads]


async def test_nothing_is_sent_for_which_the_broker_ends_the_connection(
    nats_server: EmbeddedNats, publisher: Make
) -> None:
    """Of more than its `max_payload`, headers included; it would be sent again, for ever."""
    for size, dropped in ((2**20 - 200, 0), (2**20 - 40, 1), (2**20, 1)):
        bus = publisher()
        for payload in (b"before", b"x" * size, b"after"):
            assert bus.publish(A, payload, content_type=MSGPACK)
        wait_for("told of all", lambda bus=bus: not bus.stats().buffered)
        assert bus.stats().reconnects == 0
        assert (bus.stats().published, bus.stats().dropped) == (3 - dropped, dropped)
        assert bus.close(5.0)


stored_records = st.lists(
    st.tuples(
        st.sampled_from([A, B, "semkv.reports.b.1", DONORS]),
        st.sampled_from([JSON, MSGPACK]),
        st.sampled_from([1, 10, 400, 3_000, 17_000]),
    ),
    max_size=120,
)


@pytest.mark.graph
@hypothesis_settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow])
@given(found=stored_records, pack=st.booleans(), kills=st.integers(0, 2))
def test_any_records_arrive_once_and_in_order_over_kills_of_the_broker(
    found: list[tuple[str, str, int]], pack: bool, kills: int
) -> None:
    """With packs and without: what went in by subject is what a reader gets, and every count is of records."""

    async def run(server: EmbeddedNats) -> None:
        bus = BusPublisher(settings(server.url, pack_records=pack), "test")
        read: dict[str, list[tuple[bytes, str | None]]] = defaultdict(list)
        reader = BusSubscriber(settings(server.url), "reader")
        for stream in (REPORTS, subjects.ROUTE_STREAM, subjects.DONOR_STREAM):
            reader.subscribe_stream(stream, ">", lambda got: read[got.subject].append((got.payload, got.content_type)))
        bus.start()
        await reader.start()
        sent: dict[str, list[tuple[bytes, str | None]]] = defaultdict(list)
        try:
            for at, (subject, content_type, size) in enumerate(found):
                payload = b"%d " % at + b"x" * size
                assert bus.publish(subject, payload, content_type=content_type)
                sent[subject].append((payload, content_type))
                if kills and at % 50 == 25:
                    await until("some of it", lambda: bus.stats().published > 0)
                    server.kill()
                    await asyncio.to_thread(server.start)
                elif at % 7 == 0:
                    await asyncio.sleep(0.001)
            for _ in range(kills):
                server.kill()
                await asyncio.to_thread(server.start)
            await until("all stored", lambda: not bus.stats().buffered)
            await until("all read", lambda: sum(map(len, read.values())) >= len(found))
            await until("to the end", lambda: reader.caught_up(REPORTS))
        finally:
            await reader.close()
            await asyncio.to_thread(bus.close, 0.0)
        assert read == sent
        stats = bus.stats()
        assert (stats.published, stats.dropped, stats.buffered, stats.buffered_bytes) == (len(found), 0, 0, 0)
        assert reader.stats().delivered == len(found)

    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedNats(Path(folder) / "nats")
        server.start()
        try:
            asyncio.run(run(server))
        finally:
            server.kill()


# What a subscription makes of packs, without a broker.


def arrived(payload: bytes, sequence: int = 1, consumer: int = 1, content_type: str = PACK) -> Any:
    """A message of a stream, as nats-py hands it over."""
    numbers = SimpleNamespace(consumer=consumer, stream=sequence)
    now = datetime.datetime.now(datetime.timezone.utc)
    metadata = SimpleNamespace(sequence=numbers, num_pending=0, num_delivered=1, timestamp=now)
    return SimpleNamespace(subject=A, data=payload, headers={"content-type": content_type}, metadata=metadata)


def pack_of(*payloads: bytes) -> bytes:
    return encode_pack(Pack(content_type=JSON, records=payloads))


def subscribed(handler: Callable[[Record], None], **more: Any) -> BusSubscriber:
    bus = BusSubscriber(settings("nats://127.0.0.1:1"), "test")
    bus.subscribe_stream(REPORTS, ">", handler, **more)
    return bus


async def give(bus: BusSubscriber, message: Any, consumer: ConsumerState | None = None) -> None:
    consumer = consumer or ConsumerState(asyncio.get_running_loop().create_future())
    await bus._on_stream_message(None, bus._streams[0], consumer, message)  # type: ignore[arg-type]


async def test_a_handler_that_fails_on_a_record_gets_the_others(caplog: pytest.LogCaptureFixture) -> None:
    found: list[bytes] = []

    def fails_on_two(record: Record) -> None:
        found.append(record.payload)
        if record.payload == b"2":
            raise ValueError("bad")

    bus = subscribed(fails_on_two)
    await give(bus, arrived(pack_of(b"1", b"2", b"3")))
    assert found == [b"1", b"2", b"3"]
    assert (bus.stats().delivered, bus.stats().handler_errors) == (3, 1)
    assert "a handler failed (1 so far)" in caplog.text


@pytest.mark.parametrize("how", ["doubt", "cancelled"])
async def test_a_pack_that_is_left_in_its_middle_is_gone_on_with(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection ends between two records, as it may wherever the loop gets its turn: no gap, no duplicate."""
    monkeypatch.setattr("dynamo_semkv.bus.subscriber._YIELD_SECONDS", -1.0)  # after each
    found: list[bytes] = []
    consumer = ConsumerState(asyncio.get_running_loop().create_future())

    def ends(record: Record) -> None:
        found.append(record.payload)
        if record.payload == b"2":
            if how == "doubt":
                consumer.fail("why not")
            else:
                reading.cancel()

    bus = subscribed(ends)
    payload = pack_of(b"1", b"2", b"3", b"4")
    reading = asyncio.ensure_future(give(bus, arrived(payload), consumer))
    await asyncio.gather(reading, return_exceptions=True)
    assert found == [b"1", b"2"]
    assert bus._streams[0].last_seq is None  # so it comes again
    if consumer.failed.done():
        consumer.failed.exception()
    await give(bus, arrived(payload))
    await give(bus, arrived(pack_of(b"5", b"6"), sequence=2, consumer=1))
    assert found == [b"1", b"2", b"3", b"4", b"5", b"6"]
    assert (bus._streams[0].last_seq, bus.stats().delivered) == (2, 6)


async def test_a_pack_of_another_stream_under_the_same_number_is_read_whole() -> None:
    """The stream was made anew while a pack was half read."""
    found: list[bytes] = []
    bus = subscribed(lambda record: found.append(record.payload))
    subscription = bus._streams[0]
    subscription.begun, subscription.last_seq = (1, 2), 0
    before, after = (datetime.datetime(2026, 1, day, tzinfo=datetime.timezone.utc) for day in (1, 2))
    subscription.made_at = before
    bus._choose_position(subscription, SimpleNamespace(created=after, state=SimpleNamespace(last_seq=1, first_seq=1)))  # type: ignore[arg-type]
    await give(bus, arrived(pack_of(b"1", b"2", b"3")))
    assert found == [b"1", b"2", b"3"]


async def test_what_is_known_is_not_handed_over_and_counts() -> None:
    asked: list[tuple[str, int]] = []
    found: list[bytes] = []

    def known(subject: str, count: int) -> bool:
        asked.append((subject, count))
        return count != 2

    bus = subscribed(lambda record: found.append(record.payload), known=known)
    await give(bus, arrived(pack_of(b"1", b"2", b"3")))
    await give(bus, arrived(pack_of(b"4", b"5"), sequence=2))
    await give(bus, arrived(b"6", sequence=3, content_type=JSON))
    assert asked == [(A, 3), (A, 2), (A, 1)]
    assert found == [b"4", b"5"]
    assert (bus.stats().delivered, bus._streams[0].last_seq) == (6, 3)


async def test_who_fails_when_asked_what_is_known_is_given_it() -> None:
    found: list[bytes] = []
    bus = subscribed(lambda record: found.append(record.payload), known=lambda subject, count: count == 1 // 0)
    await give(bus, arrived(pack_of(b"1", b"2")))
    assert found == [b"1", b"2"]
    assert bus.stats().handler_errors == 1


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"no pack", pack_of(b"1")[:-1], pack_of(b"1") + b" " * 20_000])
async def test_a_pack_that_cannot_be_read_is_handed_over_as_it_is(payload: bytes) -> None:
    found: list[Record] = []
    bus = subscribed(found.append)
    await give(bus, arrived(payload))
    assert [(record.payload, record.content_type) for record in found] == [(payload, PACK)]
    assert (bus.stats().delivered, bus.stats().handler_errors) == (1, 0)
