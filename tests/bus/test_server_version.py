"""An old nats-server is named at start and by doctor; a lax one by doctor."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_semkv.bus.connection import Connection
from dynamo_semkv.bus.inspection import BusInspection, inspect
from dynamo_semkv.bus.server import EmbeddedNats
from dynamo_semkv.bus.server_version import advice, objection
from dynamo_semkv.config.schema import BusConfig, Config
from dynamo_semkv.observe.diagnosis import diagnose
from dynamo_semkv.observe.health import Level


def found(version: tuple[int, int] | None) -> list[Level]:
    seen = BusInspection("b:4222", server_version=version, jetstream_error="off")
    return [finding.level for finding in diagnose(Config(), seen, None, 0.0) if finding.check == "broker"]


@pytest.mark.parametrize(
    ("version", "levels"),
    [
        ((2, 10), [Level.FAIL]),
        ((1, 99), [Level.FAIL]),
        ((2, 11), [Level.WARN]),
        ((2, 12), []),
        ((3, 0), []),
        (None, []),
    ],
)
def test_doctor_says_what_an_old_server_lacks(version: tuple[int, int] | None, levels: list[Level]) -> None:
    assert found(version) == levels


@pytest.mark.parametrize(("version", "lines"), [((2, 10), 1), ((2, 11), 0), ((2, 15), 0)])
def test_a_connection_warns_once_of_an_old_server(
    version: tuple[int, int], lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    connection = Connection(BusConfig(), "test")
    client: Any = SimpleNamespace(connected_server_version=SimpleNamespace(major=version[0], minor=version[1]))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            connection._see_version(client)
    assert len([r for r in caplog.records if "is older than 2.11" in r.getMessage()]) == lines


async def test_the_version_of_a_real_server_is_seen(nats_server: EmbeddedNats) -> None:
    seen = await inspect(BusConfig(url=nats_server.url))
    assert seen.server_version is not None
    assert objection(*seen.server_version) is None
    assert advice(*seen.server_version) is None
