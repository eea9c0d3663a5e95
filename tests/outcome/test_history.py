"""Totals, the bounded record, and the course over time."""

from __future__ import annotations

import pytest

from dynamo_semkv.contracts.report import Outcome
from dynamo_semkv.outcome.closed import JoinedBy, OrphanReason, OrphanReport, close_route
from dynamo_semkv.outcome.history import BUCKET_SECONDS, BUCKETS, History
from dynamo_semkv.outcome.totals import MAX_DECISIONS, MAX_REPLICAS, OTHER, TtftSample
from tests.outcome.build import observed, opened, report, route_id


def closed(number: int = 1, *, at: float = 10.0, start=None, end=None, what=None):
    return close_route(start or opened(number), end or observed(number), what, JoinedBy.ROUTE_ID, at)


def test_totals_of_a_hit_a_decline_and_a_silence() -> None:
    history = History(100)
    history.add(closed(1, what=report(1, confirmed=800, local_tokens=64)))
    history.add(closed(2, what=report(2, confirmed=0)))
    history.add(closed(3, start=opened(3, hinted_tokens=0, placed_tokens=0, stable_routing_id=None)))
    totals = history.totals()
    assert totals.requests == 3
    assert totals.funnel.tokens == {
        "input": 3_000,
        "evidence": 2_400,
        "placed": 1_600,
        "hinted": 1_600,
        "materialized": 800,
        "beyond_dynamo": 800,
    }
    assert totals.funnel.requests == {
        "input": 3,
        "evidence": 3,
        "placed": 2,
        "hinted": 2,
        "materialized": 1,
        "beyond_dynamo": 1,
    }
    assert totals.outcomes == {
        ("materialized_exact", "ok"): 1,
        ("declined", "not_resident"): 1,
        ("unconfirmed", "no_report"): 1,
    }
    replica = totals.replicas["w-a/0"]
    assert (replica.placed_requests, replica.placed_tokens) == (2, 1_600)
    assert (replica.served_requests, replica.confirmed_tokens, replica.declined_requests) == (3, 800, 1)
    assert totals.local_tokens == 64


def test_a_replica_has_declined_what_the_outcomes_call_declined() -> None:
    history = History(100)
    history.add(closed(1, what=report(1, confirmed=0)))
    history.add(closed(2, what=report(2, confirmed=0, outcome=Outcome.NO_DONOR)))
    totals = history.totals()
    assert {outcome for outcome, _ in totals.outcomes} == {"declined", "no_donor"}
    assert totals.replicas["w-a/0"].declined_requests == 1


def test_placed_here_served_there() -> None:
    history = History(100)
    history.add(closed(end=observed(served_stable_routing_id="w-b"), what=report(stable_routing_id="w-b")))
    replicas = history.totals().replicas
    assert (replicas["w-a/0"].placed_tokens, replicas["w-a/0"].confirmed_tokens) == (800, 0)
    assert (replicas["w-b/0"].placed_tokens, replicas["w-b/0"].confirmed_tokens) == (0, 800)


def test_orphans_are_counted_apart() -> None:
    history = History(100)
    history.add_orphan(OrphanReport(report(), OrphanReason.LATE, 5.0))
    totals = history.totals()
    assert totals.orphans == {"late": 1}
    assert (totals.confirmed_tokens, totals.requests) == (0, 0)


def test_would_have() -> None:
    history = History(100)
    shadow = {"mode": "shadow", "placed_tokens": 0, "hinted_tokens": 0, "stable_routing_id": None, "dp_rank": None}
    history.add(closed(1, start=opened(1, shadow_choice="w-a/0", **shadow)))
    history.add(closed(2, start=opened(2, shadow_choice="w-b/1", **shadow)))
    assert (history.totals().would_have, history.totals().would_have_agreed) == (2, 1)


def test_a_route_is_counted_once_only() -> None:
    history = History(100)
    history.add(closed())
    with pytest.raises(ValueError, match="already"):
        history.add(closed())
    assert history.totals().requests == 1


def test_record_is_bounded_and_totals_are_not_cut() -> None:
    history = History(3)
    for number in range(1, 6):
        history.add(closed(number))
    assert [route.route_id for route in history.recent(10)] == [route_id(5), route_id(4), route_id(3)]
    assert [route.route_id for route in history.recent(1)] == [route_id(5)]
    assert history.get(route_id(1)) is None
    assert history.get(route_id(5)) is not None
    assert history.totals().requests == 5


def test_names_from_peers_cannot_grow_the_totals() -> None:
    history = History(1)
    for number in range(1, MAX_REPLICAS + 50):
        name = f"w-{number}"
        start = opened(
            number, decision_reason=f"because {number}", lookup=f"l{number}", mode=f"m{number}", stable_routing_id=name
        )
        history.add(closed(number, start=start, end=observed(number, end=f"e{number}", served_stable_routing_id=name)))
    totals = history.totals()
    assert len(totals.replicas) == MAX_REPLICAS + 1
    assert totals.replicas[OTHER].served_requests == 49
    assert len(totals.decisions) == MAX_DECISIONS + 1
    assert set(totals.lookups) == set(totals.modes) == set(totals.ends) == {OTHER}
    assert sum(totals.decisions.values()) == totals.requests


def test_course_keeps_an_hour_in_any_order() -> None:
    forth, back = History(1_000), History(1_000)
    times = [number * BUCKET_SECONDS + 1 for number in range(BUCKETS + 40)]
    for number, at in enumerate(times, start=1):
        forth.add(closed(number, at=at))
    for number, at in reversed(list(enumerate(times, start=1))):
        back.add(closed(number, at=at))
    assert forth.course() == back.course()
    assert len(forth.course()) == BUCKETS
    assert forth.course()[-1].start == (BUCKETS + 39) * BUCKET_SECONDS
    assert sum(bucket.tokens["input"] for bucket in forth.course()) == BUCKETS * 1_000


def test_since_is_the_oldest_opening() -> None:
    history = History(1)
    assert history.since is None
    for number in (7, 3, 9):
        history.add(closed(number))
    assert history.since == 3.0


def test_quantiles() -> None:
    sample = TtftSample()
    assert sample.quantile(0.5) is None
    for value in range(1, 102):
        sample.add(float(value))
    assert (sample.quantile(0.0), sample.quantile(0.5), sample.quantile(0.95), sample.quantile(1.0)) == (1, 51, 96, 101)


def test_ttft_by_class() -> None:
    history = History(10)
    history.add(closed(1, what=report(1, confirmed=800), end=observed(1, ttft_seconds=0.1)))
    history.add(closed(2, what=report(2, confirmed=0), end=observed(2, ttft_seconds=0.9)))
    ttft = history.totals().ttft
    assert {name: (sample.count, sample.quantile(0.5)) for name, sample in ttft.items()} == {
        "cold": (1, 0.9),
        "warm": (0, None),
        "loaded": (1, 0.1),
    }


def test_attempts_of_a_request_are_found_and_forgotten_with_their_routes() -> None:
    history = History(2)
    history.add(closed(2, start=opened(2, request_id="r", attempt=1)))
    history.add(closed(1, start=opened(1, request_id="r", attempt=0)))
    assert [[route.opened.attempt for route in attempts] for attempts in history.of_request("r")] == [[0, 1]]
    assert history.of_request("other") == []
    history.add(closed(3, start=opened(3, request_id=None)))
    assert [[route.route_id for route in attempts] for attempts in history.of_request("r")] == [[route_id(1)]]
    history.add(closed(4))
    assert history.of_request("r") == []


def test_requests_of_two_tenants_that_chose_one_id_are_two_requests() -> None:
    history = History(10)
    for number, tenant, attempt in ((1, "aa", 0), (2, "bb", 0), (3, "aa", 1), (4, None, 0)):
        history.add(closed(number, start=opened(number, request_id="r", tenant=tenant, attempt=attempt)))
    found = [[route.route_id for route in attempts] for attempts in history.of_request("r")]
    assert found == [[route_id(1), route_id(3)], [route_id(2)], [route_id(4)]]
