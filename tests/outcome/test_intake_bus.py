"""Intake and journal on a real broker that is killed in the middle: no outcome is lost, and a router that starts later
agrees."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from dynamo_semkv.bus.publisher import BusPublisher
from dynamo_semkv.bus.server import EmbeddedNats
from dynamo_semkv.bus.subscriber import BusSubscriber
from dynamo_semkv.contracts import subjects
from dynamo_semkv.contracts.codec import MSGPACK, encode_donor_event, encode_report
from dynamo_semkv.contracts.donor_events import DonorEvent, GenerationReset
from dynamo_semkv.contracts.identity import StableReplica, stable_worker_id
from dynamo_semkv.outcome import intake as intake_module
from dynamo_semkv.outcome.intake import Intake, RouteJournal
from tests.bus.waiting import settings, until
from tests.outcome.build import Listener, comparable, observed, opened, report

REPLICA = StableReplica("w-a", 0)


class Router:
    def __init__(self, url: str, name: str) -> None:
        self.listener = Listener(ttl_seconds=30.0, settle_seconds=0.05)
        self.publisher = BusPublisher(settings(url), name)
        self.subscriber = BusSubscriber(settings(url), name, heartbeat_seconds=0.2)
        self.donor_events: list[DonorEvent] = []
        self.intake = Intake(
            self.subscriber,
            self.listener.tracker,
            apply_donor_event=lambda event, at: self.donor_events.append(event),
            announce=lambda announcement: None,
        )
        self.journal = RouteJournal(self.publisher, self.intake, name)

    @property
    def requests(self) -> int:
        return self.listener.history.totals().requests


@asynccontextmanager
async def router(url: str, name: str) -> AsyncIterator[Router]:
    it = Router(url, name)
    it.publisher.start()
    await it.subscriber.start()
    await it.intake.start()
    try:
        yield it
    finally:
        await it.intake.close()
        await it.subscriber.close()
        await asyncio.to_thread(it.publisher.close, 5.0)


@pytest.mark.graph
async def test_killed_broker_loses_no_outcome(nats_server: EmbeddedNats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake_module, "TICK_SECONDS", 0.02)
    connector = BusPublisher(settings(nats_server.url), "connector")
    connector.start()

    def send(number: int) -> None:
        what = report(number, named=number % 2 == 0, prompt_key=number.to_bytes(16, "big"))
        connector.publish(
            subjects.reports(REPLICA), encode_report(what), content_type=MSGPACK, message_id=what.report_id
        )

    def serve(it: Router, number: int) -> None:
        it.journal.opened(opened(number, router=it.journal.router_name, prompt_key=number.to_bytes(16, "big")))
        send(number)
        it.journal.observed(observed(number))

    try:
        async with router(nats_server.url, "router-1") as one, router(nats_server.url, "router-2") as two:
            await until("both live", lambda: one.intake.live and two.intake.live)
            for number in range(1, 21):
                serve(one if number % 3 else two, number)
            await until("first routes closed", lambda: one.requests == two.requests == 20)
            nats_server.kill()
            for number in range(21, 41):
                serve(one if number % 3 else two, number)
            nats_server.start()
            for number in range(41, 61):
                serve(one if number % 3 else two, number)
            await until("all routes closed", lambda: one.requests == two.requests == 60)
            totals = comparable(one.listener.history.totals())
            assert totals == comparable(two.listener.history.totals())
            assert totals["confirmed_tokens"] == 60 * 800
            assert not one.listener.orphans
            async with router(nats_server.url, "router-3") as late:
                await until("replayed", lambda: late.requests == 60)
                assert comparable(late.listener.history.totals()) == totals
                assert late.intake.live
    finally:
        connector.close(5.0)


@pytest.mark.graph
async def test_both_donor_subjects_are_one_stream_in_order(nats_server: EmbeddedNats) -> None:
    emitter = BusPublisher(settings(nats_server.url), "emitter")
    emitter.start()
    try:
        worker = stable_worker_id(REPLICA.stable_routing_id)
        events = [
            DonorEvent(schema_version=1, event_id=n, worker_id=worker, dp_rank=0, data=GenerationReset(generation=n))
            for n in range(4)
        ]
        for event in events:
            subject = subjects.DONOR_EVENTS if event.event_id % 2 else subjects.donor_events(REPLICA)
            emitter.publish(subject, encode_donor_event(event))
            await until("stored", lambda n=event.event_id: emitter.stats().published > n)
        async with router(nats_server.url, "router-1") as it:
            await until("all donor events", lambda: len(it.donor_events) == 4)
            assert it.donor_events == events
            assert it.subscriber.caught_up(subjects.DONOR_STREAM)
    finally:
        emitter.close(5.0)
