"""A route belongs to the router that opened it: no other opens it again or ends it, whatever comes first."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_semkv.bus.subscription import Message
from dynamo_semkv.contracts import subjects
from dynamo_semkv.contracts.codec import MSGPACK, encode_route_event
from dynamo_semkv.contracts.route_events import RouteEvent
from dynamo_semkv.outcome.early_ends import EarlyEnds
from dynamo_semkv.outcome.route_tracker import TrackerLimits
from tests.outcome.build import Listener, ManualClock, observed, opened, report, route_id
from tests.outcome.fakes import FakeBroker
from tests.outcome.test_intake import REPORTS, ROUTES, Router, send_report

MINE, OTHER = subjects.routes("router-1"), subjects.routes("router-2")
FORGED: dict[str, Any] = {"end": "cancelled", "output_tokens": 0, "served_stable_routing_id": "w-evil"}


def said(event: RouteEvent, subject: str) -> Message:
    return Message(subject, encode_route_event(event), MSGPACK, 1, 1_000.0)


@pytest.fixture
async def reader():
    """A router that opened none of the routes and hears of them on the bus."""
    router = Router(FakeBroker(ManualClock()), "router-3")
    await router.start(ROUTES, REPORTS)
    yield router
    await router.intake.close()


def settled(router: Router) -> None:
    router.clock.advance(2.0)
    router.intake.tick()


async def test_an_end_of_another_router_is_dropped_and_counted(reader: Router) -> None:
    hear = reader.intake.on_route_event
    hear(said(opened(1), MINE))
    hear(said(observed(1, **FORGED), OTHER))
    assert reader.intake.counts["routes.foreign_subject"] == 1
    hear(said(observed(1), MINE))
    send_report(reader.subscriber.broker, report(1))
    settled(reader)
    route = reader.listener.only()
    assert route.observed == observed(1)
    assert route.confirmed_tokens == 800


async def test_an_end_before_its_opening_is_kept_by_who_told_it(reader: Router) -> None:
    hear = reader.intake.on_route_event
    hear(said(observed(1, **FORGED), OTHER))
    hear(said(observed(1), MINE))
    hear(said(opened(1), MINE))
    send_report(reader.subscriber.broker, report(1))
    settled(reader)
    assert reader.listener.only().observed == observed(1)
    reader.clock.advance(60.0)
    settled(reader)
    assert reader.listener.tracker.stats.unmatched_ends == 1, "the forged one"


async def test_of_the_past_too_only_the_opener_ends_a_route() -> None:
    broker = FakeBroker(ManualClock())
    for event, subject in ((opened(1), MINE), (observed(1, **FORGED), OTHER), (observed(1), MINE)):
        broker.publish(subject, encode_route_event(event), content_type=MSGPACK)
    send_report(broker, report(1))
    router = await Router(broker).start(ROUTES, REPORTS)
    settled(router)
    assert router.intake.live
    assert router.listener.only().observed == observed(1)
    assert router.intake.counts["routes.foreign_subject"] == 1
    await router.intake.close()


async def test_a_route_is_opened_once_and_another_router_is_told_apart_from_an_echo(reader: Router) -> None:
    heard: list[str] = []
    reader.intake._route_opened = lambda event: heard.append(event.router)
    hear = reader.intake.on_route_event
    hear(said(opened(1), MINE))
    hear(said(opened(1, router="router-2", input_tokens=9), OTHER))
    hear(said(opened(1), MINE))
    assert reader.intake.counts["routes.foreign_subject"] == 1
    assert reader.listener.tracker.stats.duplicates == 1
    assert heard == ["router-1", "router-1"]
    hear(said(observed(1), MINE))
    send_report(reader.subscriber.broker, report(1))
    settled(reader)
    assert reader.listener.only().opened == opened(1)


async def test_a_router_ends_its_own_routes_while_the_past_is_read() -> None:
    broker = FakeBroker(ManualClock())
    router = await Router(broker).start()
    router.journal.opened(opened(1))
    router.intake.on_route_event(said(observed(1, **FORGED), OTHER))
    router.journal.observed(observed(1))
    send_report(broker, report(1))
    router.subscriber.replay(ROUTES, REPORTS)
    settled(router)
    assert router.listener.only().observed == observed(1)
    await router.intake.close()


def test_who_floods_early_ends_gives_up_its_own() -> None:
    listener = Listener(limits=TrackerLimits(open_routes=10))
    tracker = listener.tracker
    tracker.observed(observed(1), 1.0, subject=MINE)
    for number in range(2, 200):
        tracker.observed(observed(number), 1.0, subject=OTHER)
    tracker.opened(opened(1), 2.0)
    tracker.report(report(1), 2.0)
    assert listener.only().observed == observed(1)
    assert tracker.stats.unmatched_ends == 198 - 10 + 1


def test_who_floods_openings_gives_up_its_own() -> None:
    listener = Listener(limits=TrackerLimits(open_routes=10))
    tracker = listener.tracker
    tracker.opened(opened(1), 1.0)
    for number in range(2, 200):
        tracker.opened(opened(number, router="router-2", prompt_key=b"q" * 16), 1.0)
    assert (tracker.open_routes, tracker.stats.evicted_routes) == (10, 189)
    assert {route.opened.router for route in listener.closed} == {"router-2"}
    tracker.observed(observed(1), 2.0, subject=MINE)
    tracker.report(report(1), 2.0)
    assert listener.closed[-1].opened == opened(1)


def test_what_is_taken_or_late_is_kept_no_longer() -> None:
    ends = EarlyEnds(30.0, 10)
    assert ends.add(observed(1), MINE, 1.0)
    assert not ends.add(observed(1), MINE, 2.0)
    assert ends.add(observed(2), None, 1.0)
    assert ends.take(route_id(1), OTHER) is None
    assert ends.take(route_id(1), MINE) == observed(1)
    assert ends.take(route_id(1), MINE) is None
    assert ends.take(route_id(2), OTHER) == observed(2), "what the caller vouches for is anybody's"
    ends.add(observed(3), MINE, 1.0)
    ends.expire(32.0)
    assert (ends.take(route_id(3), MINE), ends.unmatched) == (None, 1)
