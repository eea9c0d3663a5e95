"""A server that is too old, or that obeys what it does not understand, is named at start and by doctor."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nats
import pytest
from nats.js.errors import APIError

from dynamo_semkv.bus.connection import Connection
from dynamo_semkv.bus.inspection import BusInspection, inspect
from dynamo_semkv.bus.server import EmbeddedNats
from dynamo_semkv.bus.server_check import LENIENT, objection
from dynamo_semkv.bus.setup import BusError, set_up
from dynamo_semkv.bus.streams import STREAMS, stream_config
from dynamo_semkv.bus.subscriber import BusSubscriber
from dynamo_semkv.config.schema import BusConfig, Config
from dynamo_semkv.observe.diagnosis import diagnose
from dynamo_semkv.observe.health import Level
from tests.bus.waiting import until


def found(version: tuple[int, int] | None, strict: bool | None) -> list[Level]:
    seen = BusInspection("b:4222", server_version=version, strict=strict, jetstream_error="off")
    return [finding.level for finding in diagnose(Config(), seen, None, 0.0) if finding.check == "broker"]


@pytest.mark.parametrize(
    ("version", "strict", "levels"),
    [
        ((2, 10), None, [Level.FAIL]),
        ((1, 99), False, [Level.FAIL]),
        ((2, 11), True, []),
        ((2, 11), False, [Level.FAIL]),
        ((2, 15), False, [Level.FAIL]),
        ((2, 15), None, []),
        ((3, 0), True, []),
        (None, None, []),
    ],
)
def test_doctor_says_what_a_server_lacks(
    version: tuple[int, int] | None, strict: bool | None, levels: list[Level]
) -> None:
    assert found(version, strict) == levels


@pytest.mark.parametrize(("version", "lines"), [((2, 10), 1), ((2, 11), 0), ((2, 15), 0)])
def test_a_connection_warns_once_of_an_old_server(
    version: tuple[int, int], lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    connection = Connection(BusConfig(), "test")
    client: Any = SimpleNamespace(connected_server_version=SimpleNamespace(major=version[0], minor=version[1]))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            connection._warn_about_version(client)
    assert len([r for r in caplog.records if "is older than 2.11" in r.getMessage()]) == lines


async def test_version_and_strictness_of_a_real_server_are_seen(nats_server: EmbeddedNats) -> None:
    seen = await inspect(BusConfig(url=nats_server.url))
    assert seen.server_version is not None
    assert objection(seen.server_version) is None
    assert seen.strict is True
    await set_up(BusConfig(url=nats_server.url))


@pytest.fixture
def lenient_server(tmp_path: Path) -> Iterator[EmbeddedNats]:
    server = EmbeddedNats(tmp_path / "nats", jetstream="strict: false")
    server.start()
    yield server
    server.kill()


async def test_a_lenient_server_is_refused_by_set_up_named_by_doctor_and_warned_of_at_start(
    lenient_server: EmbeddedNats, caplog: pytest.LogCaptureFixture
) -> None:
    settings = BusConfig(url=lenient_server.url)
    with pytest.raises(BusError, match="strict: true"):
        await set_up(settings)
    seen = await inspect(settings)
    assert seen.strict is False
    (told,) = [finding for finding in diagnose(Config(), seen, None, 0.0) if finding.check == "broker"]
    assert (told.level, told.detail) == (Level.FAIL, LENIENT)
    caplog.clear()
    subscriber = BusSubscriber(settings, "test")
    for stream in STREAMS:
        subscriber.subscribe_stream(stream, ">", lambda message: None)
    with caplog.at_level(logging.WARNING):
        await subscriber.start()
        try:
            await until("all are read", lambda: all(subscriber.caught_up(stream) for stream in STREAMS))
        finally:
            await subscriber.close()
    assert [r.getMessage().partition(":")[0] for r in caplog.records if "strict: true" in r.getMessage()] == [
        "bus test"
    ]


async def test_streams_of_an_earlier_release_are_named_until_set_up_guards_them(nats_server: EmbeddedNats) -> None:
    settings = BusConfig(url=nats_server.url)
    client = await nats.connect(nats_server.url)
    js = client.jetstream()
    for stream in STREAMS:
        await js.add_stream(stream_config(stream, settings).evolve(deny_purge=False, deny_delete=False))
    await js.publish("semkv.routes.r", b"kept")

    def bare(seen: BusInspection) -> list[str]:
        told = diagnose(Config(bus=settings), seen, None, 0.0)
        return [f.detail for f in told if f.level is Level.FAIL and "purged" in f.detail]

    try:
        (told,) = bare(await inspect(settings))
        assert all(stream in told for stream in STREAMS)
        assert {stream.name: stream.messages for stream in await set_up(settings)}["SEMKV_ROUTES"] == 1
        assert bare(await inspect(settings)) == []
        with pytest.raises(APIError, match="not permitted"):
            await js.purge_stream("SEMKV_ROUTES")
        with pytest.raises(APIError, match="not permitted"):
            await js.delete_msg("SEMKV_ROUTES", 1)
    finally:
        await client.close()
