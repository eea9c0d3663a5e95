"""BusPublisher: everything persistent arrives once and in order over broker crashes; nothing ever blocks or raises."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import nats
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_semkv.bus.publisher import BusPublisher
from dynamo_semkv.bus.server import EmbeddedNats
from dynamo_semkv.bus.streams import STREAMS, ensure_streams, stream_config
from dynamo_semkv.contracts import subjects
from tests.bus.test_acks import PartlyDeaf, opened
from tests.bus.waiting import settings, stored, wait_for

A, B = "semkv.reports.a.0", "semkv.reports.b.1"
HINT = "semkv.hints.a.0"

Make = Callable[..., BusPublisher]


async def test_what_is_published_is_kept_with_its_headers(nats_server: EmbeddedNats, publisher: Make) -> None:
    bus = publisher()
    assert bus.publish(A, b"payload", content_type="application/msgpack", message_id="id-1")
    assert bus.close(timeout=30.0)
    client = await nats.connect(nats_server.url)
    message = await client.jetstream().get_msg(subjects.REPORT_STREAM, 1)
    await client.close()
    assert (message.subject, message.data) == (A, b"payload")
    assert message.headers == {"content-type": "application/msgpack", "Nats-Msg-Id": "id-1"}
    assert bus.stats().published == 1


async def test_crashes_lose_duplicate_and_reorder_nothing(nats_server: EmbeddedNats, publisher: Make) -> None:
    """Threads publish on four subjects while the broker is killed and restarted three times."""
    bus = publisher()
    names = [A, B, subjects.DONOR_EVENTS + ".a.0", "semkv.routes.r"]
    per_subject = 400
    gate = threading.Semaphore(0)

    def produce(subject: str) -> None:
        for n in range(per_subject):
            if n % 100 == 50:
                gate.acquire()  # until the broker is down, so that every life of it has work
            assert bus.publish(subject, str(n).encode())

    threads = [threading.Thread(target=produce, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for round_number in range(4):
        # More than all that could be published before this life of the broker.
        earlier = max(0, 200 + 400 * (round_number - 1))
        wait_for("some of this life arrived", lambda than=earlier: bus.stats().published > than)
        nats_server.kill()
        gate.release(len(names))
        nats_server.start()
    for thread in threads:
        thread.join()
    assert bus.close(timeout=60.0)
    assert await stored(nats_server) == {name: [str(n).encode() for n in range(per_subject)] for name in names}
    stats = bus.stats()
    assert (stats.published, stats.dropped, stats.buffered) == (len(names) * per_subject, 0, 0)
    assert stats.reconnects >= 3


async def test_a_lost_acknowledgement_stores_no_second_copy(nats_server: EmbeddedNats, publisher: Make) -> None:
    """The stream has the message already, under its id, as after a crash between storing and acknowledging."""
    client = await nats.connect(nats_server.url)
    await ensure_streams(client.jetstream(), settings(nats_server.url))
    await client.jetstream().publish(A, b"1", headers={"Nats-Msg-Id": "first"})
    await client.close()
    bus = publisher()
    bus.publish(A, b"1", message_id="first")
    wait_for("acknowledged", lambda: bus.stats().published == 1)
    bus.publish(A, b"2", message_id="second")
    assert bus.close(timeout=30.0)
    assert await stored(nats_server) == {A: [b"1", b"2"]}


async def test_streams_that_were_deleted_come_back(nats_server: EmbeddedNats, publisher: Make) -> None:
    bus = publisher()
    bus.publish(A, b"1")
    wait_for("first stored", lambda: bus.stats().published == 1)
    client = await nats.connect(nats_server.url)
    await client.jetstream().delete_stream(subjects.REPORT_STREAM)
    await client.close()
    bus.publish(A, b"2")
    assert bus.close(timeout=30.0)
    assert await stored(nats_server) == {A: [b"2"]}


@pytest.mark.parametrize(
    "limits", [{"max_buffered_messages": 10}, {"max_buffered_bytes": 1024}], ids=["messages", "bytes"]
)
async def test_the_buffer_is_bounded(absent_server: EmbeddedNats, publisher: Make, limits: dict[str, int]) -> None:
    bus = publisher(**limits)
    accepted = [bus.publish(A, b"x" * 100) for _ in range(50)]
    assert accepted == [True] * 10 + [False] * 40
    stats = bus.stats()
    assert (stats.buffered, stats.buffered_bytes, stats.dropped, stats.published) == (10, 1000, 40, 0)
    absent_server.start()
    wait_for("what was accepted arrived", lambda: bus.stats().published == 10)
    assert bus.stats().dropped == 40
    assert await stored(absent_server) == {A: [b"x" * 100] * 10}


async def test_a_loss_is_told_once_and_when_there_is_room(absent_server: EmbeddedNats, publisher: Make) -> None:
    told: list[tuple[str, str, bool]] = []

    def on_loss(subject: str) -> None:
        told.append((subject, threading.current_thread().name, bus.publish(subject, b"reset")))
        raise ValueError("the owner's own fault")

    bus = publisher(on_loss=on_loss, max_buffered_messages=10)
    for n in range(15):
        bus.publish(A, str(n).encode())
    bus.publish(B, b"too much")
    assert told == []
    absent_server.start()
    wait_for("answer to the loss stored", lambda: bus.stats().published == 12)
    assert told == [(A, "semkv-bus-test", True), (B, "semkv-bus-test", True)]
    assert await stored(absent_server) == {A: [str(n).encode() for n in range(10)] + [b"reset"], B: [b"reset"]}
    stats = bus.stats()
    assert (stats.dropped, stats.callback_errors) == (6, 2)

    absent_server.kill()  # a second outage is a second episode
    for n in range(11):
        bus.publish(A, str(n).encode())
    absent_server.start()
    wait_for("told again", lambda: len(told) == 3)
    assert told[2][0] == A


async def test_what_the_broker_will_never_take_is_dropped_and_holds_up_nothing(
    nats_server: EmbeddedNats, publisher: Make
) -> None:
    lost: list[str] = []
    bus = publisher(on_loss=lost.append)
    bus.publish(A, b"before")
    bus.publish(A, b"x" * (2 * 2**20))  # max_payload is 1 MiB
    bus.publish(A, b"after")
    wait_for("the others arrived", lambda: bus.stats().published == 2)
    wait_for("told", lambda: lost == [A])
    assert bus.stats().dropped == 1
    assert await stored(nats_server) == {A: [b"before", b"after"]}


async def test_hints_are_sent_when_connected_and_forgotten_when_not(nats_server: EmbeddedNats, publisher: Make) -> None:
    client = await nats.connect(nats_server.url, allow_reconnect=False)
    heard = await client.subscribe("semkv.hints.>")
    await client.flush()
    bus = publisher()
    wait_for("connected", lambda: bus.stats().connected)
    assert bus.publish(HINT, b"now", content_type="application/msgpack", persistent=False)
    message = await heard.next_msg(timeout=30)
    assert (message.subject, message.data, message.headers) == (HINT, b"now", {"content-type": "application/msgpack"})
    await client.close()

    nats_server.kill()
    wait_for("disconnected", lambda: not bus.stats().connected)
    assert not bus.publish(HINT, b"lost", persistent=False)
    assert bus.publish(A, b"waits")
    stats = bus.stats()
    assert (stats.dropped, stats.buffered) == (1, 1)
    nats_server.start()
    assert bus.close(timeout=30.0)
    assert await stored(nats_server) == {A: [b"waits"]}


async def test_hints_do_not_wait_for_jetstream(nats_server: EmbeddedNats, publisher: Make) -> None:
    """An account whose JetStream does not answer: here a subject that somebody else swallows."""
    client = await nats.connect(nats_server.url)
    heard = await client.subscribe(HINT)
    swallowed = asyncio.Event()

    async def swallow(_: object) -> None:
        swallowed.set()

    bus = publisher()
    wait_for("connected", lambda: bus.stats().connected)
    for stream in STREAMS:
        await until_deleted(client, stream)
    await client.subscribe("$JS.API.STREAM.CREATE.>", cb=swallow)
    await client.flush()
    bus.publish(A, b"stuck")
    bus.publish(HINT, b"free", persistent=False)
    assert (await heard.next_msg(timeout=30)).data == b"free"
    await client.close()


async def until_deleted(client: nats.aio.client.Client, stream: str) -> None:
    js = client.jetstream()
    while True:
        try:
            await js.delete_stream(stream)
            return
        except nats.js.errors.NotFoundError:
            await asyncio.sleep(0.005)


def test_a_broker_that_is_never_there_blocks_nobody(absent_server: EmbeddedNats) -> None:
    bus = BusPublisher(settings(absent_server.url), "test")
    bus.start()
    assert bus.publish(A, b"kept")
    wait_for("a try failed", lambda: bus.stats().last_error)
    # An hour is offered and not used: there was never a broker to wait for.
    assert not bus.close(timeout=3600.0)
    stats = bus.stats()
    assert (stats.connected, stats.buffered, stats.dropped) == (False, 0, 1)
    assert not bus.publish(A, b"after close")
    assert bus.stats().refused == 1
    assert not any(thread.name == "semkv-bus-test" for thread in threading.enumerate())


def test_publish_before_start_is_refused(absent_server: EmbeddedNats) -> None:
    bus = BusPublisher(settings(absent_server.url), "test")
    assert not bus.publish(A, b"early")
    assert bus.close()
    assert bus.stats().refused == 1


BAD_SUBJECTS: list[Any] = [
    "",
    ".",
    "a..b",
    "a.",
    ".a",
    "a b",
    "a.*",
    "a.>",
    "a\r\nPUB x 0",
    "ä",
    "x" * 600,
    None,
    7,
    b"a",
]


@pytest.mark.parametrize("subject", BAD_SUBJECTS)
def test_bad_subjects_are_refused(nats_server: EmbeddedNats, publisher: Make, subject: Any) -> None:
    bus = publisher()
    assert not bus.publish(subject, b"", persistent=False)
    assert bus.stats().refused == 1


def test_bad_arguments_are_refused(publisher: Make) -> None:
    bus = publisher()
    wrong: list[dict[str, Any]] = [
        {"subject": A, "payload": "text"},
        {"subject": A, "payload": None},
        {"subject": A, "payload": b"", "content_type": "a\r\nb"},
        {"subject": A, "payload": b"", "message_id": ""},
        {"subject": A, "payload": b"", "message_id": 7},
        {"subject": "not.one.of.our.streams", "payload": b""},
    ]
    assert [bus.publish(**arguments) for arguments in wrong] == [False] * len(wrong)
    assert bus.stats().refused == len(wrong)


@given(subject=st.text(max_size=20), payload=st.binary(max_size=20), persistent=st.booleans())
def test_publish_never_raises(subject: str, payload: bytes, persistent: bool) -> None:
    bus = BusPublisher(settings("nats://127.0.0.1:1"), "test")  # not started: every call is refused
    assert bus.publish(subject, payload, persistent=persistent) is False


async def test_of_messages_sent_together_those_that_failed_are_sent_again_in_their_order(
    absent_server: EmbeddedNats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo_semkv.bus.publisher._ACK_SECONDS", 0.01)
    bus = BusPublisher(settings(absent_server.url), "test")
    bus.start()
    for payload in (b"1", b"22", b"333", b"4444", b"55555"):
        assert bus.publish(A, payload)
    client = PartlyDeaf()
    client.answers = {
        b"22": b"503",
        b"333": b'{"error": {"code": 400, "err_code": 1, "description": "no"}}',
        b"4444": None,
    }
    acks = await opened(client)
    heads = list(bus._outbox._kept[A])
    left = await bus._send(client, acks, A, heads)
    assert left == [heads[1], heads[3]]  # with their ids
    stats = bus.stats()
    assert (stats.published, stats.dropped, stats.buffered, stats.buffered_bytes) == (2, 1, 2, 6)
    client.answers.clear()
    assert not await bus._send(client, acks, A, left)
    assert (bus.stats().published, bus.stats().buffered, bus.stats().buffered_bytes) == (4, 0, 0)
    bus.close(timeout=0.0)


async def test_reports_do_not_wait_in_the_process_for_a_broker_that_is_slow_to_acknowledge(
    nats_server: EmbeddedNats, publisher: Make
) -> None:
    """What is handed to the connection outlives a publisher that is killed."""
    bus = publisher()
    assert bus.publish(A, b"first")
    wait_for("first stored", lambda: bus.stats().published == 1)
    os.kill(nats_server.pid, signal.SIGSTOP)
    try:
        for number in range(5):
            assert bus.publish(A, b"%d" % number)
            wait_for("given to the connection", lambda: not bus._outbox._kept)
        assert (bus.stats().published, bus.stats().buffered) == (1, 5)
    finally:
        os.kill(nats_server.pid, signal.SIGCONT)
    wait_for("all stored", lambda: bus.stats().buffered == 0)
    assert (await stored(nats_server))[A] == [b"first", b"0", b"1", b"2", b"3", b"4"]


async def test_a_batch_that_ends_before_its_first_step_loses_nothing(
    nats_server: EmbeddedNats, publisher: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = publisher()
    assert bus.publish(A, b"first")
    wait_for("first stored", lambda: bus.stats().published == 1)

    def ended_at_once(coroutine: Any) -> asyncio.Future[Any]:
        task = asyncio.ensure_future(coroutine)
        if "_send_until_stored" in coroutine.__qualname__ and not ended:
            ended.append(task.cancel())
        return task

    ended: list[bool] = []
    monkeypatch.setattr(
        "dynamo_semkv.bus.publisher.asyncio", SimpleNamespace(**{**vars(asyncio), "ensure_future": ended_at_once})
    )
    assert bus.publish(A, b"second")
    wait_for("ended", lambda: ended == [True])
    nats_server.kill()  # with the connection end its batches
    nats_server.start()
    wait_for("second stored", lambda: bus.stats().published == 2)
    assert (await stored(nats_server))[A] == [b"first", b"second"]


async def test_messages_that_come_while_a_subject_is_busy_need_no_wake_and_none_is_forgotten(
    nats_server: EmbeddedNats, publisher: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task of a busy subject lingers, so publishers do not wake it; one that publishes as it ends must."""
    monkeypatch.setattr("dynamo_semkv.bus.pace.GATHER_SECONDS", 0.001)
    monkeypatch.setattr("dynamo_semkv.bus.pace.GATHER_BUSY_SECONDS", 0.001)
    monkeypatch.setattr("dynamo_semkv.bus.pace.BUSY", 5.0)
    bus = publisher()
    for number in range(60):
        assert bus.publish(A, b"%d" % number)
        await asyncio.sleep(0.0005 * (number % 9))  # around the moment at which it ends
    await asyncio.to_thread(wait_for, "all stored", lambda: not bus.stats().buffered)
    assert sorted((await stored(nats_server))[A]) == sorted(b"%d" % number for number in range(60))


async def test_of_many_batches_that_fail_one_sees_to_the_streams(
    nats_server: EmbeddedNats, publisher: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that stores nothing is not asked for its streams by each of them."""
    asked: list[float] = []

    async def refused(*_: Any) -> None:
        asked.append(asyncio.get_running_loop().time())
        raise nats.errors.TimeoutError

    monkeypatch.setattr("dynamo_semkv.bus.publisher.ensure_streams", refused)
    bus = publisher()
    for n in range(1_200):
        assert bus.publish("semkv.routes.r", str(n).encode())
    wait_for("it was tried again and again", lambda: len(asked) >= 4)
    after_start = asked[1:]
    assert all(later - sooner >= 1.0 for sooner, later in itertools.pairwise(after_start))


async def test_a_subject_that_cannot_be_stored_is_in_no_other_s_way(nats_server: EmbeddedNats, publisher: Make) -> None:
    client = await nats.connect(nats_server.url)
    await client.jetstream().add_stream(stream_config(subjects.REPORT_STREAM, settings(nats_server.url)))
    await client.close()
    bus = publisher(manage_streams=False)
    for n in range(1_200):
        assert bus.publish("semkv.routes.r", str(n).encode())
    wait_for("all that may be on their way are", lambda: len(bus._batches) >= 16)
    assert bus.publish(A, b"stored")
    wait_for("the report is stored", lambda: bus.stats().published == 1)
