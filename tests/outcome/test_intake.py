"""The bus into the tracker: phases, pauses, restarts, and messages that are no messages."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dynamo_semkv.bus.subscription import Message
from dynamo_semkv.contracts import subjects
from dynamo_semkv.contracts.announcement import ReplicaAnnouncement
from dynamo_semkv.contracts.codec import (
    JSON,
    MSGPACK,
    encode_announcement,
    encode_donor_event,
    encode_pack,
    encode_report,
    encode_route_event,
)
from dynamo_semkv.contracts.donor_events import DonorEvent, GenerationReset
from dynamo_semkv.contracts.identity import StableReplica, stable_worker_id
from dynamo_semkv.contracts.namespace import CacheNamespace
from dynamo_semkv.contracts.pack import PACK, Pack
from dynamo_semkv.contracts.report import MaterializationReport, Outcome
from dynamo_semkv.contracts.route_events import RouteOpened
from dynamo_semkv.outcome import intake as intake_module
from dynamo_semkv.outcome.intake import Intake, RouteJournal
from tests.outcome.build import Listener, ManualClock, comparable, observed, opened, report, route_id
from tests.outcome.fakes import FakeBroker, FakeSubscriber

WORKER = stable_worker_id("w-a")
ROUTES, REPORTS = subjects.ROUTE_STREAM, subjects.REPORT_STREAM


class Router:
    """One router's outcome side on the fake bus. Its own clock is far from the broker's."""

    def __init__(self, broker: FakeBroker, name: str = "router-1") -> None:
        self.clock = broker.clock
        self.listener = Listener(ttl_seconds=30.0, settle_seconds=1.0)
        self.subscriber = FakeSubscriber(broker)
        self.donor_events: list[DonorEvent] = []
        self.announcements: list[ReplicaAnnouncement] = []
        self.intake = Intake(
            self.subscriber,
            self.listener.tracker,
            apply_donor_event=lambda event, at: self.donor_events.append(event),
            announce=self.announcements.append,
            monotonic=lambda: self.clock() - 900.0,
            wall=lambda: 5e6,
        )
        self.journal = RouteJournal(broker, self.intake, name)

    async def start(self, *replay: str) -> Router:
        await self.intake.start()
        self.subscriber.replay(*replay)
        return self

    def totals(self) -> dict[str, Any]:
        return comparable(self.listener.history.totals())


def send_report(broker: FakeBroker, what: MaterializationReport) -> None:
    replica = StableReplica(what.stable_routing_id, what.dp_rank)
    broker.publish(subjects.reports(replica), encode_report(what))


@pytest.fixture
def broker() -> FakeBroker:
    return FakeBroker(ManualClock())


@pytest.fixture
async def routers(broker: FakeBroker):
    """Makes routers; closes all."""
    made: list[Router] = []

    async def make(*replay: str, name: str = "router-1") -> Router:
        made.append(Router(broker, name))
        return await made[-1].start(*replay)

    yield make
    for router in made:
        await router.intake.close()


async def test_own_events_count_at_once_and_their_echo_does_not(broker: FakeBroker, routers: Any) -> None:
    router = await routers(ROUTES, REPORTS)
    assert router.intake.live
    router.journal.opened(opened(1))
    assert router.listener.tracker.open_routes == 1
    send_report(broker, report(1))
    router.journal.observed(observed(1))
    broker.clock.advance(1.0)
    router.intake.tick()
    assert router.listener.only().confirmed_tokens == 800
    assert router.intake.counts["own_echoes"] == 2
    assert router.listener.tracker.stats.duplicates == 0
    assert router.journal.counts == {"published": 2}


async def test_openings_are_told_after_they_are_booked(broker: FakeBroker, routers: Any) -> None:
    router = await routers(ROUTES, REPORTS)
    heard = []

    def fails(event: RouteOpened) -> None:
        heard.append(event.route_id)
        raise RuntimeError("whoever listens is at fault")

    router.intake._route_opened = fails
    foreign = message(encode_route_event(opened(1, router="router-2")), subject=subjects.routes("router-2"))
    with pytest.raises(RuntimeError):
        router.intake.on_route_event(foreign)
    router.intake.on_route_event(message(encode_route_event(observed(1))))
    assert heard == [route_id(1)]
    assert router.listener.tracker.open_routes == 1


async def test_another_router_sees_the_same(broker: FakeBroker, routers: Any) -> None:
    one, two = await routers(ROUTES, REPORTS), await routers(ROUTES, REPORTS, name="router-2")
    for number in (1, 2, 3):
        it = one if number % 2 else two
        it.journal.opened(opened(number, router=it.journal.router_name))
        it.journal.observed(observed(number))
        send_report(broker, report(number, named=number != 2))
    broker.clock.advance(5.0)
    for router in (one, two):
        router.intake.tick()
    assert one.totals() == two.totals()
    assert one.totals()["requests"] == 3


@pytest.mark.parametrize("order", [(ROUTES, REPORTS), (REPORTS, ROUTES)])
async def test_restart_gives_equal_totals(broker: FakeBroker, routers: Any, order: tuple[str, str]) -> None:
    """Hours of routes: confirmed, declined, silent; equal prompts far apart whose report names no route."""
    first = await routers(ROUTES, REPORTS)
    for number in range(1, 40):
        first.journal.opened(opened(number, opened_at=broker.clock()))
        if number % 3:
            send_report(broker, report(number, named=bool(number % 2), confirmed=(number % 4) * 16))
        broker.clock.advance(2.0)
        first.intake.tick()
        first.journal.observed(observed(number, end="worker_lost" if number % 7 == 0 else "complete"))
        broker.clock.advance(60.0)
        first.intake.tick()
    assert first.totals()["requests"] == 39
    assert first.totals()["outcomes"]["unconfirmed", "no_report"] > 5

    broker.clock.advance(10_000.0)
    again = await routers(*order)
    broker.clock.advance(31.0)
    again.intake.tick()
    assert again.intake.live
    assert again.totals() == first.totals()


async def test_open_routes_of_the_past_keep_their_time(broker: FakeBroker, routers: Any) -> None:
    """The newest event of the past counts as of now, whatever the clocks say: its report may just be on its way."""
    first = await routers(ROUTES, REPORTS)
    first.journal.opened(opened(1))
    first.journal.observed(observed(1))
    again = await routers(ROUTES, REPORTS)
    broker.clock.advance(29.0)
    again.intake.tick()
    assert not again.listener.closed
    send_report(broker, report(1))
    broker.clock.advance(1.5)
    again.intake.tick()
    assert again.listener.only().outcome is Outcome.MATERIALIZED_EXACT


async def test_own_events_during_the_replay_wait_and_are_not_lost(broker: FakeBroker, routers: Any) -> None:
    router = await routers()
    broker.stop()
    router.journal.opened(opened(1))
    assert (router.listener.tracker.open_routes, router.intake.waiting) == (0, 1)
    broker.restart()
    router.subscriber.replay(ROUTES, REPORTS)
    assert (router.listener.tracker.open_routes, router.intake.waiting) == (1, 0)


async def test_own_events_are_bounded_while_the_broker_was_never_there(
    broker: FakeBroker, routers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake_module, "MAX_HELD_EVENTS", 3)
    router = await routers()
    for number in range(1, 6):
        router.journal.opened(opened(number))
    assert router.intake.waiting == 3
    assert router.intake.counts["own_dropped"] == 2
    router.subscriber.replay(ROUTES, REPORTS)  # the publisher got them all out meanwhile
    assert router.listener.tracker.open_routes == 5


async def test_time_stands_still_while_no_report_can_arrive(broker: FakeBroker, routers: Any) -> None:
    router = await routers(ROUTES, REPORTS)
    router.journal.opened(opened(1))
    router.journal.observed(observed(1))
    broker.clock.advance(5.0)
    router.intake.tick()
    broker.stop()
    for _ in range(10):
        router.intake.tick()
        broker.clock.advance(60.0)
    assert not router.listener.closed
    broker.restart()
    router.intake.tick()
    assert not router.listener.closed
    send_report(broker, report(1))
    broker.clock.advance(2.0)
    router.intake.tick()
    assert router.listener.only().outcome is Outcome.MATERIALIZED_EXACT


async def test_and_goes_on_afterwards(broker: FakeBroker, routers: Any) -> None:
    router = await routers(ROUTES, REPORTS)
    router.journal.opened(opened(1))
    router.journal.observed(observed(1))
    broker.stop()
    router.intake.tick()
    broker.clock.advance(600.0)
    broker.restart()
    router.intake.tick()
    broker.clock.advance(29.0)
    router.intake.tick()
    assert not router.listener.closed
    broker.clock.advance(2.0)
    router.intake.tick()
    assert router.listener.only().outcome is Outcome.UNCONFIRMED


async def test_wall_clock_is_never_asked_again(broker: FakeBroker, routers: Any) -> None:
    """etcd#12291: nothing is judged by a clock that somebody can set."""
    router = Router(broker)
    walls = iter([1e9])
    router.intake = Intake(
        router.subscriber,
        router.listener.tracker,
        apply_donor_event=lambda event, at: None,
        announce=lambda announcement: None,
        monotonic=broker.clock,
        wall=lambda: next(walls),
    )
    await router.start(ROUTES, REPORTS)
    router.journal = RouteJournal(broker, router.intake, "router-1")
    router.journal.opened(opened(1))
    router.journal.observed(observed(1))
    broker.clock.advance(31.0)
    router.intake.tick()
    assert router.listener.only().closed_at == 1e9 + 31.0
    await router.intake.close()


def message(payload: bytes, content_type: str | None = MSGPACK, subject: str = "any") -> Message:
    return Message(subject, payload, content_type, 1, 1.0)


async def test_donor_events_and_announcements_are_handed_on(broker: FakeBroker, routers: Any) -> None:
    router = await routers(subjects.DONOR_STREAM, subjects.ANNOUNCEMENT_STREAM)
    event = DonorEvent(schema_version=1, event_id=0, worker_id=WORKER, dp_rank=0, data=GenerationReset(generation="g"))
    replica = StableReplica("w-a", 0)
    for content_type in (JSON, MSGPACK, None):
        raw = encode_donor_event(event, content_type or JSON)
        broker.publish(subjects.donor_events(replica), raw, content_type=content_type)
    broker.publish(subjects.DONOR_EVENTS, encode_donor_event(event))
    assert router.donor_events == [event] * 4
    announcement = ReplicaAnnouncement(
        version="1.0",
        stable_routing_id="w-a",
        dp_rank=0,
        generation="g",
        model="tiny",
        namespace=CacheNamespace(model="tiny"),
        materialization="exact",
    )
    broker.publish(subjects.announcements(replica), encode_announcement(announcement))
    assert router.announcements == [announcement]


async def test_who_speaks_in_another_name_is_not_heard(broker: FakeBroker, routers: Any) -> None:
    """A broker that knows its users lets a worker publish under its own name only; what is said there of another worker
    is dropped."""
    router = await routers(ROUTES, REPORTS, subjects.DONOR_STREAM, subjects.ANNOUNCEMENT_STREAM)
    it = router.intake
    other, rank = StableReplica("w-b", 0), StableReplica("w-a", 1)
    event = DonorEvent(schema_version=1, event_id=0, worker_id=WORKER, dp_rank=0, data=GenerationReset(generation="g"))
    announcement = ReplicaAnnouncement(
        version="1.0",
        stable_routing_id="w-a",
        dp_rank=0,
        generation="g",
        model="tiny",
        namespace=CacheNamespace(model="tiny"),
        materialization="exact",
    )
    it.on_route_event(message(encode_route_event(opened(1)), subject=subjects.routes("router-2")))
    for replica in (other, rank):
        it.on_donor_event(message(encode_donor_event(event), JSON, subjects.donor_events(replica)))
        it.on_announcement(message(encode_announcement(announcement), subject=subjects.announcements(replica)))
        it.on_report(message(encode_report(report(1)), subject=subjects.reports(replica)))
    it.on_donor_event(message(encode_donor_event(event), JSON, "semantic-kv-events.w-a.zero"))
    assert router.donor_events == router.announcements == []
    assert router.listener.tracker.open_routes == 0
    assert {name: n for name, n in it.counts.items() if name.endswith("foreign_subject")} == {
        "donors.foreign_subject": 3,
        "announcements.foreign_subject": 2,
        "reports.foreign_subject": 2,
        "routes.foreign_subject": 1,
    }


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"not msgpack", b"\x80", bytes(100_000)])
async def test_garbage_is_counted_and_dropped(
    broker: FakeBroker, routers: Any, payload: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    router = await routers(ROUTES, REPORTS)
    it = router.intake
    for _ in range(100):
        for handler in (it.on_donor_event, it.on_announcement, it.on_route_event, it.on_report):
            handler(message(payload))
    for stream in ("donors", "announcements", "routes", "reports"):
        assert it.counts[f"{stream}.messages"] == 100
        assert it.counts[f"{stream}.malformed"] + it.counts[f"{stream}.unsupported_version"] == 100
    assert len(caplog.records) < 50


async def test_another_major_version_is_counted_apart(broker: FakeBroker, routers: Any) -> None:
    router = await routers(ROUTES, REPORTS)
    router.intake.on_report(message(encode_report(report(version="2.0"))))
    router.intake.on_route_event(message(encode_route_event(opened(version="2.0"))))
    assert (
        router.intake.counts["reports.unsupported_version"] == router.intake.counts["routes.unsupported_version"] == 1
    )
    broker.clock.advance(5.0)
    assert router.intake.unsupported("reports") == (5.0, "2.0")
    assert router.intake.unsupported("donors") is None


@pytest.mark.parametrize("time", [float("nan"), float("inf")])
async def test_times_that_are_no_numbers_are_refused(broker: FakeBroker, routers: Any, time: float) -> None:
    router = await routers(ROUTES, REPORTS)
    for event in (opened(opened_at=time), observed(observed_at=time), observed(ttft_seconds=time)):
        router.intake.on_route_event(message(encode_route_event(event)))
    assert router.intake.counts["routes.malformed"] == 3


async def test_the_journal_never_raises(broker: FakeBroker, routers: Any) -> None:
    router = await routers(ROUTES, REPORTS)
    router.journal._publisher = None
    router.journal.opened(opened(1))
    assert router.journal.counts == {"errors": 1}
    assert router.listener.tracker.open_routes == 1


async def test_a_full_buffer_is_counted(broker: FakeBroker, routers: Any) -> None:
    router = await routers(ROUTES, REPORTS)
    broker.publish = lambda *args, **kwargs: False
    router.journal.opened(opened(1))
    assert router.journal.counts == {"not_published": 1}
    assert router.listener.tracker.open_routes == 1  # what this router knows of itself does not depend on the bus


async def test_a_tick_that_fails_is_not_the_last(
    broker: FakeBroker, routers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake_module, "TICK_SECONDS", 0.001)
    router = await routers(ROUTES, REPORTS)
    monkeypatch.setattr(router.listener.tracker, "expire", lambda now: 1 / 0)
    for _ in range(1_000):
        if router.intake.counts["tick_errors"] >= 2:
            break
        await asyncio.sleep(0.002)
    assert router.intake.counts["tick_errors"] >= 2


async def test_names_of_equal_routes_differ_per_attempt(broker: FakeBroker, routers: Any) -> None:
    router = await routers(ROUTES, REPORTS)
    for number in (1, 2):
        router.journal.opened(opened(number, attempt=number - 1, request_id="chatcmpl-1"))
    assert router.listener.tracker.open_routes == 2
    assert {route_id(1), route_id(2)} == set(router.listener.tracker._routes)


async def test_an_own_event_is_not_read_again_when_it_comes_back(broker: FakeBroker, routers: Any) -> None:
    one, two = await routers(ROUTES, REPORTS), await routers(ROUTES, REPORTS, name="router-2")
    one.journal.opened(opened(1, router="router-1"))
    one.journal.observed(observed(1))
    assert one.intake.counts["own_echoes"] == 2
    assert one.intake.counts["routes.messages"] == 2
    assert two.intake.counts["own_echoes"] == 0
    assert (one.listener.tracker.stats.duplicates, one.listener.tracker.open_routes) == (0, 1)
    assert two.listener.tracker.open_routes == 1


async def test_own_events_that_come_back_in_a_pack_are_counted_and_not_read(broker: FakeBroker, routers: Any) -> None:
    it = (await routers(ROUTES, REPORTS)).intake
    assert it.is_own_echo(subjects.routes("router-1"), 12)
    assert not it.is_own_echo(subjects.routes("router-2"), 3)
    assert (it.counts["own_echoes"], it.counts["routes.messages"]) == (12, 12)
    it.counts["own_dropped"] = 1  # one that was dropped while the past was read comes back only so
    assert not it.is_own_echo(subjects.routes("router-1"), 12)
    reading = Router(broker).intake
    assert not reading.is_own_echo(subjects.routes("router-1"), 12)


async def test_a_pack_that_the_bus_could_not_take_apart_is_refused_as_any_message(
    broker: FakeBroker, routers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    it = (await routers(ROUTES, REPORTS)).intake
    sound = encode_pack(Pack(content_type=MSGPACK, records=(encode_report(report(1)),)))
    newer = encode_pack(Pack(version="3.0", records=(b"",)))
    for payload in (sound[:-1], b"\xc1", sound + bytes(20_000), sound):
        it.on_report(message(payload, PACK, subjects.reports(StableReplica("w-a", 0))))
    it.on_report(message(newer, PACK, subjects.reports(StableReplica("w-a", 0))))
    assert (
        it.counts["reports.malformed"],
        it.counts["reports.unsupported_version"],
        it.counts["reports.messages"],
    ) == (4, 1, 5)
    assert it.unsupported("reports") == (0.0, "3.0")
    assert "reports.malformed: message dropped: pack: " in caplog.text
    assert "reports.unsupported_version: message dropped: pack.version: got '3.0', allowed: 2.x" in caplog.text


@pytest.mark.parametrize("live", [True, False], ids=["live", "replayed"])
async def test_what_was_stored_twice_counts_once(broker: FakeBroker, routers: Any, live: bool) -> None:
    """An outage between storing and acknowledging that outlasts the broker's memory for ids: a whole pack comes
    again."""
    other = await routers(ROUTES, REPORTS) if live else None
    for _ in range(2):
        for number in range(1, 6):
            key = number.to_bytes(16, "big")
            broker.publish(
                subjects.routes("router-2"), encode_route_event(opened(number, router="router-2", prompt_key=key))
            )
            broker.publish(subjects.routes("router-2"), encode_route_event(observed(number)))
        for number in range(1, 6):
            said = report(number, prompt_key=number.to_bytes(16, "big"))
            broker.publish(subjects.reports(StableReplica("w-a", 0)), encode_report(said))
    router = other or await routers(ROUTES, REPORTS)
    broker.clock.advance(5.0)
    router.intake.tick()
    assert router.listener.tracker.stats.closed == 5
    assert router.listener.tracker.stats.duplicates == 15
    assert (router.totals()["requests"], router.totals()["confirmed_tokens"]) == (5, 5 * 800)
    assert not router.listener.orphans
