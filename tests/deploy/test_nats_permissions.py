"""deploy/nats on a real server: each role does its work, and the server refuses the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats
import nats.errors
import pytest

from dynamo_semkv.bus import inspection, setup
from dynamo_semkv.bus.setup import BusError, set_up
from dynamo_semkv.bus.streams import STREAMS
from dynamo_semkv.config.load import build
from dynamo_semkv.contracts import subjects
from dynamo_semkv.contracts.identity import StableReplica
from dynamo_semkv.observe.diagnosis import diagnose
from dynamo_semkv.observe.health import Level
from tests.bus.waiting import until
from tests.deploy import nats_example
from tests.deploy.nats_example import FOLDER, Broker
from tests.deploy.roles import KEPT, roles

MINE, OTHER = StableReplica("worker-0", 0), StableReplica("worker-1", 0)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with nats_example.running(FOLDER / "nats.conf", tmp_path_factory.mktemp("nats")) as broker:
        streams = asyncio.run(set_up(broker.settings("semkv-setup")))
        assert [stream.name for stream in streams] == list(STREAMS)
        yield broker


@asynccontextmanager
async def raw(broker: Broker, user: str):
    """A plain client, and what the server said against it."""
    said: list[str] = []

    async def on_error(error: Exception) -> None:
        said.append(str(error))

    settings = broker.settings(user)
    client = await nats.connect(
        settings.url, inbox_prefix=settings.inbox_prefix, error_cb=on_error, allow_reconnect=False
    )
    try:
        yield client, said
    finally:
        await client.close()


async def messages(broker: Broker) -> dict[str, int]:
    return {stream.name: stream.messages for stream in await set_up(broker.settings("semkv-setup"))}


@pytest.mark.graph
async def test_each_role_does_its_work(broker: Broker) -> None:
    async with roles(broker.settings("semkv-router"), broker.settings("worker-0"), MINE) as both:
        both.say_what_is_kept()
        await until("all four streams", lambda: len(both.at_router) == 4)
        await both.hint_arrives()
        assert all(publisher.stats().last_error is None for publisher in (both.router, both.worker))


@pytest.mark.graph
async def test_worker_cannot_speak_for_another(broker: Broker) -> None:
    before = await messages(broker)
    refused = [make(OTHER) for make in KEPT]
    refused += [
        subjects.DONOR_EVENTS,
        subjects.routes("router-1"),
        subjects.hints(OTHER),
        subjects.hints(MINE),
        "anything",
    ]
    async with raw(broker, "worker-0") as (client, said):
        for subject in refused:
            await client.publish(subject, b"forged")
        await client.flush()
        await until("every one refused", lambda: len(said) == len(refused))
    assert all("permissions violation for publish" in text.lower() for text in said)
    assert await messages(broker) == before


@pytest.mark.graph
@pytest.mark.parametrize(
    "subject", [">", subjects.hints(OTHER), "semantic-kv-events.>", "semkv.>", "_INBOX_router.>", "_INBOX.>"]
)
async def test_worker_cannot_listen_to_others(broker: Broker, subject: str) -> None:
    async with raw(broker, "worker-0") as (client, said):
        await client.subscribe(subject)
        await client.flush()
        await until("refused", lambda: said)
        assert "permissions violation for subscription" in said[0].lower()


@pytest.mark.graph
@pytest.mark.parametrize("user", ["worker-0", "semkv-router"])
async def test_only_the_setup_user_changes_streams(broker: Broker, user: str) -> None:
    before = await messages(broker)
    calls: list[tuple[str, bytes]] = [
        (f"$JS.API.STREAM.{verb}.{stream}", b"{}")
        for stream in STREAMS
        for verb in ("DELETE", "PURGE", "UPDATE", "CREATE")
    ]
    calls.append(("$JS.API.STREAM.CREATE.OTHER", b'{"name": "OTHER", "subjects": ["other.>"]}'))
    async with raw(broker, user) as (client, said):
        for subject, body in calls:
            await client.publish(subject, body, reply=client.new_inbox())
        await client.flush()
        await until("every one refused", lambda: len(said) == len(calls))
    assert await messages(broker) == before


@pytest.mark.graph
async def test_worker_cannot_read_streams(broker: Broker) -> None:
    async with raw(broker, "worker-0") as (client, said):
        for stream in STREAMS:
            for call in (
                f"CONSUMER.CREATE.{stream}",
                f"STREAM.MSG.GET.{stream}",
                f"DIRECT.GET.{stream}",
                f"STREAM.INFO.{stream}",
            ):
                await client.publish(f"$JS.API.{call}", b"{}", reply=client.new_inbox())
        await client.flush()
        await until("every one refused", lambda: len(said) == 4 * len(STREAMS))


@pytest.mark.graph
async def test_a_wrong_password_and_a_broker_without_us_are_told_apart(broker: Broker) -> None:
    wrong = broker.settings("semkv-setup", url=f"nats://semkv-setup:wrong@127.0.0.1:{broker.port}")
    with pytest.raises(BusError, match=r"bus\.url.*[Aa]uthorization"):
        await set_up(wrong)


@pytest.mark.graph
async def test_an_inbox_that_the_user_may_not_read_is_named(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "_API_SECONDS", 0.5)
    monkeypatch.setattr(inspection, "_API_SECONDS", 0.5)
    default = broker.settings("semkv-setup", inbox_prefix="_INBOX")
    with pytest.raises(BusError, match=r"bus\.inbox_prefix \('_INBOX'\)"):
        await set_up(default)
    seen = await inspection.inspect(default)
    assert "bus.inbox_prefix '_INBOX'" in str(seen.jetstream_error)
    (finding,) = (found for found in diagnose(build({}), seen, None, 1e9) if found.level is Level.FAIL)
    assert "bus.inbox_prefix" in finding.remedy


@pytest.mark.graph
async def test_tls_with_the_authority_works_and_without_it_is_refused(tmp_path: Path) -> None:
    certificate, key = nats_example.make_certificate(tmp_path)
    where: dict[str, Any] = {"SEMKV_NATS_CERT": str(certificate), "SEMKV_NATS_KEY": str(key)}
    with nats_example.running(FOLDER / "nats-tls.conf", tmp_path, scheme="tls", **where) as broker:
        assert len(await set_up(broker.settings("semkv-setup", tls_ca=str(certificate)))) == len(STREAMS)
        with pytest.raises(BusError, match="certificate"):
            await set_up(broker.settings("semkv-setup"))
