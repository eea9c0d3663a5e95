"""A broker that takes connections and keeps nothing is told of, once an outage and in its own words."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.js.api import StorageType, StreamConfig

from dynamo_semkv.bus.inspection import inspect
from dynamo_semkv.bus.publisher import BusPublisher
from dynamo_semkv.bus.server import EmbeddedNats
from dynamo_semkv.bus.streams import STREAMS
from dynamo_semkv.config.schema import Config
from dynamo_semkv.contracts import subjects
from dynamo_semkv.observe.diagnosis import diagnose
from tests.bus.waiting import settings, until

DONORS, REPORTS = "semantic-kv-events.1.0", "semkv.reports.a.0"
Make = Callable[..., BusPublisher]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        r.getMessage()
        for r in caplog.records
        if r.levelno == logging.WARNING and "the broker refuses" in r.getMessage()
    ]


@pytest.fixture
def small_server(tmp_path: Path) -> Any:
    """Has room for two of the four streams at the default `bus.stream_max_bytes`."""
    server = EmbeddedNats(tmp_path / "nats", jetstream="max_file: 512MB")
    server.start()
    yield server
    server.kill()


async def test_a_broker_without_room_is_told_once_with_its_words(
    small_server: EmbeddedNats, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    bus = BusPublisher(settings(small_server.url, stream_max_bytes=256 * 2**20), "test")
    bus.start()
    try:
        await until("two streams are refused", lambda: len(bus.stats().refused_streams) == len(STREAMS) - 2)
        refused = bus.stats().refused_streams
        assert all("insufficient storage" in words and "10047" in words for words in refused.values()), refused
        assert subjects.ROUTE_STREAM in refused
        bus.publish("semkv.routes.r", b"x")
        await until("it was tried", lambda: "NoStream" in (bus.stats().last_error or ""))
        assert "10047" in bus.stats().refused_streams[subjects.ROUTE_STREAM]
        assert len(warnings(caplog)) == len(refused), "one warning an outage"
    finally:
        bus.close(0.0)


async def test_the_streams_that_there_is_room_for_are_made_all_the_same(small_server: EmbeddedNats) -> None:
    bus = BusPublisher(settings(small_server.url, stream_max_bytes=256 * 2**20), "test")
    bus.start()
    try:
        await until("some are refused", lambda: bool(bus.stats().refused_streams))
        kept = next(s for s in (subjects.DONOR_STREAM, subjects.REPORT_STREAM) if s not in bus.stats().refused_streams)
        bus.publish(DONORS if kept == subjects.DONOR_STREAM else REPORTS, b"x")
        await until("it is stored", lambda: bus.stats().published == 1)
    finally:
        bus.close(0.0)


async def test_an_acknowledgement_of_somebody_else_s_stream_is_none(
    nats_server: EmbeddedNats, publisher: Make, caplog: pytest.LogCaptureFixture
) -> None:
    client = await nats.connect(nats_server.url)
    js = client.jetstream()
    await js.add_stream(StreamConfig(name="FOREIGN", subjects=["semkv.reports.>"], storage=StorageType.MEMORY))
    bus = publisher()
    bus.publish(REPORTS, b"x")
    await until(
        "the foreign stream is named", lambda: "FOREIGN" in bus.stats().refused_streams.get(subjects.REPORT_STREAM, "")
    )
    assert (bus.stats().published, bus.stats().buffered) == (0, 1)
    assert len([w for w in warnings(caplog) if subjects.REPORT_STREAM in w]) == 1
    await js.delete_stream("FOREIGN")
    await until("it is stored where it belongs", lambda: bus.stats().published == 1)
    assert bus.stats().refused_streams == {}
    assert (await js.stream_info(subjects.REPORT_STREAM)).state.messages == 1
    await client.close()


async def test_publishes_that_nobody_answers_are_told(
    nats_server: EmbeddedNats, publisher: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A subject that somebody only listens to: the broker has responders and no acknowledgement comes."""
    monkeypatch.setattr("dynamo_semkv.bus.publisher._ACK_SECONDS", 0.05)
    client = await nats.connect(nats_server.url)
    await client.subscribe("semkv.reports.>")
    await client.flush()
    bus = publisher(manage_streams=False)
    bus.publish(REPORTS, b"x")
    await until("it is told", lambda: subjects.REPORT_STREAM in bus.stats().refused_streams)
    assert "TimeoutError" in bus.stats().refused_streams[subjects.REPORT_STREAM]
    assert len(warnings(caplog)) == 1
    await client.close()


async def test_doctor_names_the_stream_that_has_our_subjects(nats_server: EmbeddedNats) -> None:
    client = await nats.connect(nats_server.url)
    await client.jetstream().add_stream(
        StreamConfig(name="FOREIGN", subjects=["semkv.reports.>"], storage=StorageType.MEMORY)
    )
    await client.close()
    config = Config(bus=settings(nats_server.url))
    found = diagnose(config, await inspect(config.bus), None, 0.0)
    told = [finding.detail for finding in found if finding.check == "streams"]
    assert "stream FOREIGN has subjects of SEMKV_REPORTS, so SEMKV_REPORTS cannot be made" in told
