"""What a worker names as the subject of the broker's answer leads nowhere that is not its own, on the oldest and the
newest server.

Permissions of NATS cover the subject that is published to, not the one that is to be answered on. A publish into a
stream is answered with an acknowledgement, so whoever may publish could have the broker itself publish anywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats
import pytest

from dynamo_semkv.bus.publisher import BusPublisher
from dynamo_semkv.bus.setup import BusError, set_up
from dynamo_semkv.bus.streams import STREAMS
from dynamo_semkv.config.schema import BusConfig
from dynamo_semkv.contracts import subjects
from dynamo_semkv.contracts.identity import StableReplica
from tests.bus.waiting import until
from tests.deploy import nats_example
from tests.deploy.nats_example import FOLDER, Broker

pytestmark = pytest.mark.graph

MINE, OTHER = StableReplica("worker-0", 0), StableReplica("worker-1", 0)
OWN_SUBJECTS = (subjects.reports(MINE), subjects.donor_events(MINE), subjects.announcements(MINE))
REPLIES = [
    *(f"$JS.API.STREAM.{verb}.{stream}" for verb in ("PURGE", "DELETE", "UPDATE") for stream in STREAMS),
    "$JS.API.STREAM.MSG.DELETE.SEMKV_ROUTES",
    "$JS.API.CONSUMER.CREATE.SEMKV_ROUTES",
    subjects.hints(OTHER),
    subjects.reports(OTHER),
    subjects.donor_events(OTHER),
    subjects.announcements(OTHER),
    subjects.routes("router-1"),
    subjects.DONOR_EVENTS,
    "_INBOX_router.x",
    "_INBOX_worker-1.x",
    "$SYS.REQ.SERVER.PING",
]


@pytest.fixture(scope="module", params=sorted(nats_example.SERVERS))
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    folder = tmp_path_factory.mktemp(f"nats-{request.param}")
    with nats_example.running(FOLDER / "nats.conf", folder, server=request.param) as broker:
        asyncio.run(set_up(broker.settings("semkv-setup")))
        yield broker


async def connected(broker: Broker, user: str) -> Any:
    settings = broker.settings(user)
    return await nats.connect(settings.url, inbox_prefix=settings.inbox_prefix, allow_reconnect=False)


async def stored(broker: Broker) -> dict[str, int]:
    return {stream.name: stream.messages for stream in await set_up(broker.settings("semkv-setup"))}


async def test_no_reply_of_a_worker_reaches_a_stream_an_api_or_another_worker(broker: Broker) -> None:
    router = BusPublisher(broker.settings("semkv-router"), "router")
    router.start()
    for n in range(5):
        assert router.publish(subjects.routes("router-1"), b"route %d" % n, message_id=f"{broker.port}-{n}")
    await until("the routes are stored", lambda: router.stats().published == 5)
    heard: list[tuple[str, bytes]] = []

    async def hear(message: Any) -> None:
        heard.append((message.subject, message.data))

    worker, other, reader = [await connected(broker, user) for user in ("worker-0", "worker-1", "semkv-router")]
    try:
        await other.subscribe(subjects.hints(OTHER), cb=hear)
        await other.subscribe("_INBOX_worker-1.>", cb=hear)
        await reader.subscribe("_INBOX_router.>", cb=hear)
        await other.flush()
        await reader.flush()
        before = await stored(broker)
        assert before["SEMKV_ROUTES"] >= 1
        for reply in REPLIES:
            for subject in OWN_SUBJECTS:
                await worker.publish(subject, b'{"keep": 0}', reply=reply)
        # The last answer is one that may be heard: then all before it have been given.
        inbox = worker.new_inbox()
        answers = await worker.subscribe(inbox)
        for subject in OWN_SUBJECTS:
            await worker.publish(subject, b"last", reply=inbox)
        for _ in OWN_SUBJECTS:
            await answers.next_msg(30.0)
        router.publish(subjects.hints(OTHER), b"a hint", persistent=False)
        await until("the router's own hint", lambda: (subjects.hints(OTHER), b"a hint") in heard)
        after = await stored(broker)
    finally:
        for client in (worker, other, reader):
            await client.close()
        await asyncio.to_thread(router.close, 2.0)
    assert after["SEMKV_ROUTES"] == before["SEMKV_ROUTES"]
    own = len(REPLIES) + 1
    assert after["SEMKV_REPORTS"] == before["SEMKV_REPORTS"] + own
    assert after["SEMKV_DONORS"] == before["SEMKV_DONORS"] + own
    assert after["SEMKV_ANNOUNCEMENTS"] == max(before["SEMKV_ANNOUNCEMENTS"], 1), (
        "the last of each replica, and of no other"
    )
    assert heard == [(subjects.hints(OTHER), b"a hint")]


async def test_a_trace_that_a_worker_asks_for_reaches_no_one_else(broker: Broker) -> None:
    """`Nats-Trace-Dest` names one more subject on which the broker speaks; older servers hold it against no
    permission."""
    heard: list[tuple[str, bytes]] = []

    async def hear(message: Any) -> None:
        heard.append((message.subject, message.data))

    worker, other, reader = [await connected(broker, user) for user in ("worker-0", "worker-1", "semkv-router")]
    try:
        for client, subject in (
            (other, subjects.hints(OTHER)),
            (other, "_INBOX_worker-1.>"),
            (reader, "_INBOX_router.>"),
        ):
            await client.subscribe(subject, cb=hear)
            await client.flush()
        before = await stored(broker)
        for target in (reply for reply in REPLIES if not reply.startswith("$")):
            for more in ({}, {"Nats-Trace-Only": "true"}):
                await worker.publish(subjects.reports(MINE), b"traced", headers={"Nats-Trace-Dest": target, **more})
        assert (await worker.request(subjects.reports(MINE), b"last", timeout=30.0)).data
        for client in (other, reader):
            await client.flush()
        after = await stored(broker)
    finally:
        for client in (worker, other, reader):
            await client.close()
    assert heard == []
    assert {**after, "SEMKV_REPORTS": 0} == {**before, "SEMKV_REPORTS": 0}


async def test_a_router_s_reply_removes_nothing(broker: Broker) -> None:
    """It shares the account of the streams, so its replies reach JetStream, which obeys none of them."""
    router = await connected(broker, "semkv-router")
    try:
        for n in range(3):
            await router.request(subjects.routes("router-2"), b"route %d" % n, timeout=30.0)
        before = await stored(broker)
        calls = [reply for reply in REPLIES if reply.startswith("$JS.")]
        for reply in calls:
            await router.publish(subjects.routes("router-2"), b"", reply=reply)
        await router.request(subjects.routes("router-2"), b"last", timeout=30.0)
        after = await stored(broker)
    finally:
        await router.close()
    assert after == {**before, "SEMKV_ROUTES": before["SEMKV_ROUTES"] + len(calls) + 1}


@pytest.mark.parametrize("server", sorted(nats_example.SERVERS))
async def test_streams_outlive_a_forged_purge_where_nothing_else_stops_it(server: str, tmp_path: Path) -> None:
    """One account for all and a lenient server, as a fleet's own broker may be: what the streams themselves refuse is
    left."""
    (tmp_path / "nats.conf").write_text("jetstream { store_dir: $SEMKV_NATS_STORE, strict: false }")
    with nats_example.running(tmp_path / "nats.conf", tmp_path, server=server) as broker:
        settings = BusConfig(url=f"nats://127.0.0.1:{broker.port}", stream_max_bytes=16 * 2**20)
        with pytest.raises(BusError, match=r"the streams are made, but .*strict: true"):
            await set_up(settings)
        client = await nats.connect(settings.url, allow_reconnect=False)
        try:
            for n in range(3):
                await client.request(subjects.routes("router-1"), b"route %d" % n, timeout=30.0)
            for call in ("PURGE", "MSG.DELETE"):
                await client.publish(subjects.reports(MINE), b"", reply=f"$JS.API.STREAM.{call}.SEMKV_ROUTES")
            await client.request(subjects.reports(MINE), b"last", timeout=30.0)
            info = await client.jetstream().stream_info("SEMKV_ROUTES")
        finally:
            await client.close()
    assert (info.state.messages, info.state.first_seq) == (3, 1)


async def test_nobody_purges_a_stream(broker: Broker) -> None:
    """Whoever may manage the streams may remove one whole; a message leaves by age and size alone."""
    client = await connected(broker, "semkv-setup")
    try:
        for stream in STREAMS:
            answer = await client.request(f"$JS.API.STREAM.PURGE.{stream}", b"", timeout=5)
            assert b"stream purge not permitted" in answer.data
    finally:
        await client.close()
