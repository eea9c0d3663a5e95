"""The four streams: made once by any number of processes, brought to new settings, and the subjects they own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import nats
import pytest
from nats.js import JetStreamContext

from dynamo_semkv.bus.server import EmbeddedNats
from dynamo_semkv.bus.streams import STREAMS, ensure_streams, stream_of
from dynamo_semkv.contracts import subjects
from dynamo_semkv.contracts.identity import StableReplica
from tests.bus.waiting import settings

REPLICA = StableReplica("worker.0:a_b", 1)


@pytest.fixture
async def js(nats_server: EmbeddedNats) -> AsyncIterator[JetStreamContext]:
    client = await nats.connect(nats_server.url)
    yield client.jetstream()
    await client.close()


@pytest.mark.parametrize(
    ("subject", "stream"),
    [
        (subjects.DONOR_EVENTS, subjects.DONOR_STREAM),
        (subjects.donor_events(REPLICA), subjects.DONOR_STREAM),
        (subjects.reports(REPLICA), subjects.REPORT_STREAM),
        (subjects.routes("router-0"), subjects.ROUTE_STREAM),
        (subjects.announcements(REPLICA), subjects.ANNOUNCEMENT_STREAM),
        (subjects.hints(REPLICA), None),
        (subjects.REPORTS, None),
        (subjects.DONOR_EVENTS + "-x", None),
        ("other", None),
    ],
)
async def test_stream_of_says_what_the_broker_does(js: JetStreamContext, subject: str, stream: str | None) -> None:
    assert stream_of(subject) == stream
    await ensure_streams(js, settings("nats://unused"))
    try:
        kept = (await js.publish(subject, b"x", timeout=5)).stream
    except nats.js.errors.NoStreamResponseError:
        kept = None
    assert kept == stream


async def test_many_may_ensure_at_once_and_settings_are_brought_up_to_date(js: JetStreamContext) -> None:
    old, new = settings("nats://unused"), settings("nats://unused", stream_max_age_seconds=60.0)
    await asyncio.gather(*(ensure_streams(js, old) for _ in range(5)))
    await js.publish(subjects.reports(REPLICA), b"kept", timeout=5)
    await ensure_streams(js, new)
    await ensure_streams(js, new)
    for stream in STREAMS:
        config = (await js.stream_info(stream)).config
        assert config.max_age == 60.0
        assert config.max_bytes == 16 * 2**20
        assert config.duplicate_window == 60.0
    assert (await js.get_msg(subjects.REPORT_STREAM, 1)).data == b"kept"


async def test_announcements_keep_the_last_of_each_replica(js: JetStreamContext) -> None:
    await ensure_streams(js, settings("nats://unused"))
    other = StableReplica("worker-1", 0)
    for payload in (b"1", b"2", b"3"):
        await js.publish(subjects.announcements(REPLICA), payload)
    await js.publish(subjects.announcements(other), b"4")
    state = (await js.stream_info(subjects.ANNOUNCEMENT_STREAM)).state
    assert state.messages == 2
    last = await js.get_last_msg(subjects.ANNOUNCEMENT_STREAM, subjects.announcements(REPLICA))
    assert last.data == b"3"
