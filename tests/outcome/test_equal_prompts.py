"""Equal prompts on one replica, joined by prompt alone: the engine's own count in the stream tells their reports
apart."""

from __future__ import annotations

from dynamo_semkv.outcome.closed import CrossCheck
from tests.outcome.build import Listener, observed, opened, report, route_id


def loose(number: int, local: int):
    return report(number, named=False, confirmed=0, local_tokens=local)


def test_reports_that_come_engine_by_engine_after_an_outage_find_their_own_routes() -> None:
    it = Listener(ttl_seconds=30.0)
    for number, cached in ((1, 0), (2, 480)):
        it.tracker.opened(opened(number, stable_routing_id=None, hinted_tokens=0), float(number))
        it.tracker.observed(observed(number, engine_cached_tokens=cached), number + 0.5)
    it.tracker.report(loose(2, 480), 5.0)
    it.tracker.expire(20.0)
    assert [route.route_id for route in it.closed] == [route_id(2)]
    it.tracker.report(loose(1, 0), 20.0)
    it.tracker.expire(22.0)
    assert {r.route_id: r.report.local_tokens for r in it.closed if r.report} == {route_id(1): 0, route_id(2): 480}
    assert {r.cross_check for r in it.closed} == {CrossCheck.EQUAL}
    assert not it.orphans


def test_a_count_that_differs_is_shown_in_the_end_and_not_hidden() -> None:
    it = Listener(ttl_seconds=30.0)
    it.tracker.opened(opened(1, stable_routing_id=None, hinted_tokens=0), 1.0)
    it.tracker.observed(observed(1, engine_cached_tokens=64), 2.0)
    it.tracker.report(loose(1, 32), 2.0)
    it.tracker.expire(20.0)
    assert not it.closed
    it.tracker.expire(40.0)
    assert it.only().report is not None
    assert it.only().cross_check is CrossCheck.DIFFERS
    assert not it.orphans
