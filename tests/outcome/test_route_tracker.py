"""Each route closes once, with the report that is its own, whatever else arrives."""

from __future__ import annotations

import pytest

from dynamo_semkv.contracts.report import Outcome, Reason
from dynamo_semkv.outcome.closed import JoinedBy, OrphanReason
from dynamo_semkv.outcome.route_tracker import SETTLE_SECONDS, TrackerLimits
from tests.outcome.build import Listener, observed, opened, report, route_id


def test_closes_with_report_and_end() -> None:
    it = Listener()
    it.tracker.opened(opened(), 1.0)
    it.tracker.report(report(), 2.0)
    assert not it.closed  # it still runs
    it.tracker.observed(observed(), 6.0)
    route = it.only()
    assert (route.outcome, route.reason, route.joined_by) == (
        Outcome.MATERIALIZED_EXACT,
        Reason.OK,
        JoinedBy.ROUTE_ID,
    )
    assert route.confirmed_tokens == 800
    assert it.tracker.open_routes == it.tracker.held_reports == 0


@pytest.mark.parametrize("order", ["ORE", "OER", "ROE", "REO", "EOR", "ERO"])
@pytest.mark.parametrize("named", [True, False])
def test_any_order_of_the_three_events(order: str, named: bool) -> None:
    it = Listener()
    for event in order:
        {
            "O": lambda: it.tracker.opened(opened(), 1.0),
            "R": lambda: it.tracker.report(report(named=named), 1.0),
            "E": lambda: it.tracker.observed(observed(), 1.0),
        }[event]()
    assert it.only().confirmed_tokens == 800
    assert it.only().joined_by is (JoinedBy.ROUTE_ID if named else JoinedBy.PROMPT_KEY)


UNPLACED = {
    "stable_routing_id": None,
    "dp_rank": None,
    "placed_tokens": 0,
    "hinted_tokens": 0,
    "decision_reason": "no_evidence",
}
ADVISED = {"end": "advised", "served_stable_routing_id": None, "served_dp_rank": None, "ttft_seconds": None}


@pytest.mark.parametrize("order", ["ORE", "OER", "ROE", "REO", "EOR", "ERO"])
def test_what_a_gateway_dispatched_takes_the_report_of_its_prompt_from_whichever_replica(order: str) -> None:
    it = Listener()
    for event in order:
        {
            "O": lambda: it.tracker.opened(opened(1, **UNPLACED), 1.0),
            "R": lambda: it.tracker.report(report(1, named=False, confirmed=0, stable_routing_id="w-z"), 1.0),
            "E": lambda: it.tracker.observed(observed(1, **ADVISED), 1.0),
        }[event]()
    route = it.only()
    assert route.joined_by is JoinedBy.PROMPT_KEY
    assert str(route.replica) == "w-z/0"
    assert not it.orphans


def test_a_report_goes_to_who_was_served_there_before_it_goes_to_an_advice() -> None:
    """The advice is the older one, and its request was never sent."""
    it = Listener()
    it.tracker.opened(opened(1, **UNPLACED), 1.0)
    it.tracker.observed(observed(1, **ADVISED), 1.0)
    it.tracker.opened(opened(2), 2.0)
    it.tracker.observed(observed(2), 3.0)
    it.tracker.report(report(2, named=False), 3.0)
    assert [r.route_id for r in it.closed] == [route_id(2)]
    it.tracker.expire(500.0)
    assert [(r.route_id, r.outcome) for r in it.closed[1:]] == [(route_id(1), Outcome.UNCONFIRMED)]


def test_a_pair_settles_before_it_closes() -> None:
    """An older route with the same prompt, heard of late, still gets the report that is its own."""
    it = Listener(settle_seconds=SETTLE_SECONDS)
    it.tracker.opened(opened(2), 1.0)
    it.tracker.report(report(7, named=False, confirmed=100), 1.1)
    it.tracker.observed(observed(2), 1.2)
    it.tracker.opened(opened(1), 1.3)
    it.tracker.observed(observed(1), 1.4)
    it.tracker.expire(2.1)
    assert not it.closed
    it.tracker.expire(3.2)
    assert [(r.route_id, r.confirmed_tokens) for r in it.closed] == [(route_id(1), 100)]


def test_duplicates_change_nothing() -> None:
    it = Listener()
    for _ in range(3):
        it.tracker.opened(opened(), 1.0)
        it.tracker.report(report(), 2.0)
    for _ in range(3):
        it.tracker.observed(observed(), 6.0)
    it.tracker.opened(opened(), 7.0)
    it.tracker.report(report(), 7.0)
    it.tracker.expire(1_000.0)
    assert it.only().confirmed_tokens == 800
    assert it.tracker.stats.duplicates == 8
    assert not it.orphans


def test_without_a_report_it_closes_as_unconfirmed_after_its_time() -> None:
    it = Listener(ttl_seconds=30.0)
    it.tracker.opened(opened(), 1.0)
    it.tracker.expire(100.0)
    assert not it.closed  # a stream may run for minutes: the time to live counts from its end
    it.tracker.observed(observed(), 200.0)
    it.tracker.expire(229.0)
    assert not it.closed
    it.tracker.expire(230.0)
    assert (it.only().outcome, it.only().reason) == (Outcome.UNCONFIRMED, Reason.NO_REPORT)


@pytest.mark.parametrize(
    ("end", "outcome", "reason"),
    [
        ("complete", Outcome.UNCONFIRMED, Reason.NO_REPORT),
        ("error", Outcome.UNCONFIRMED, Reason.NO_REPORT),
        ("worker_lost", Outcome.UNCONFIRMED, Reason.WORKER_LOST),
        ("cancelled", Outcome.CANCELLED, Reason.CANCELLED),
    ],
)
def test_the_end_says_why_there_is_no_report(end: str, outcome: Outcome, reason: Reason) -> None:
    it = Listener()
    it.tracker.opened(opened(), 1.0)
    it.tracker.observed(observed(end=end), 2.0)
    it.tracker.expire(40.0)
    assert (it.only().outcome, it.only().reason) == (outcome, reason)


@pytest.mark.parametrize("reported", [True, False])
def test_router_killed_before_the_end_dynamo_12315(reported: bool) -> None:
    it = Listener(ttl_seconds=30.0, abandoned_seconds=300.0)
    it.tracker.opened(opened(), 1.0)
    if reported:
        it.tracker.report(report(), 2.0)
    it.tracker.expire(300.0)
    assert not it.closed
    it.tracker.expire(301.0)
    assert it.only().outcome is (Outcome.MATERIALIZED_EXACT if reported else Outcome.UNCONFIRMED)
    it.tracker.observed(observed(), 302.0)  # it lives after all: too late, and counted as known
    assert len(it.closed) == 1
    assert it.tracker.stats.duplicates == 1


def test_report_before_its_route_is_kept_for_a_while() -> None:
    it = Listener(ttl_seconds=30.0)
    it.tracker.report(report(), 1.0)
    it.tracker.expire(30.0)
    it.tracker.opened(opened(), 30.0)
    it.tracker.observed(observed(), 31.0)
    assert it.only().confirmed_tokens == 800


def test_report_of_nobody_becomes_an_orphan() -> None:
    it = Listener(ttl_seconds=30.0)
    it.tracker.report(report(), 1.0)
    it.tracker.expire(31.0)
    assert [o.reason for o in it.orphans] == [OrphanReason.NO_ROUTE]
    assert it.history.totals().orphans == {"no_route": 1}
    assert it.history.totals().confirmed_tokens == 0


def test_report_outlives_its_time_while_its_route_runs() -> None:
    it = Listener(ttl_seconds=30.0)
    it.tracker.opened(opened(), 1.0)
    it.tracker.report(report(), 2.0)
    for now in range(10, 200, 10):
        it.tracker.expire(float(now))
    it.tracker.observed(observed(), 200.0)
    assert it.only().confirmed_tokens == 800
    assert not it.orphans


class TestReplicas:
    @pytest.mark.parametrize("other", [{"stable_routing_id": "w-b"}, {"dp_rank": 1}])
    @pytest.mark.parametrize("named", [True, False])
    @pytest.mark.parametrize("late", [True, False])
    def test_report_of_another_replica_is_an_orphan_llm_d_kv_cache_357(
        self, other: dict[str, object], named: bool, late: bool
    ) -> None:
        it = Listener()
        it.tracker.opened(opened(), 1.0)
        it.tracker.observed(observed(), 2.0)
        if late:
            it.tracker.expire(40.0)
        it.tracker.report(report(named=named, **other), 41.0 if late else 3.0)
        it.tracker.expire(100.0)
        assert [o.reason for o in it.orphans] == [OrphanReason.WRONG_REPLICA]
        assert it.only().outcome is Outcome.UNCONFIRMED
        assert it.only().confirmed_tokens == 0

    def test_the_replica_that_served_wins_over_the_pin(self) -> None:
        it = Listener()
        it.tracker.opened(opened(), 1.0)
        it.tracker.report(report(stable_routing_id="w-b"), 2.0)
        it.tracker.observed(observed(served_stable_routing_id="w-b"), 3.0)
        assert it.only().confirmed_tokens == 800
        assert str(it.only().replica) == "w-b/0"

    def test_a_route_that_dynamo_placed_joins_once_it_is_known_who_served(self) -> None:
        it = Listener()
        it.tracker.opened(opened(stable_routing_id=None, dp_rank=None), 1.0)
        it.tracker.report(report(named=False), 2.0)
        it.tracker.expire(3.0)
        assert not it.closed
        it.tracker.observed(observed(), 4.0)
        assert it.only().joined_by is JoinedBy.PROMPT_KEY

    def test_without_any_replica_known_only_the_route_id_joins(self) -> None:
        it = Listener()
        for number, named in ((1, True), (2, False)):
            it.tracker.opened(
                opened(number, stable_routing_id=None, dp_rank=None, prompt_key=bytes([number] * 16)), 1.0
            )
            it.tracker.observed(observed(number, served_stable_routing_id=None, served_dp_rank=None), 2.0)
            it.tracker.report(report(number, named=named, prompt_key=bytes([number] * 16)), 3.0)
        it.tracker.expire(100.0)
        assert {route.route_id: route.joined_by for route in it.closed} == {
            route_id(1): JoinedBy.ROUTE_ID,
            route_id(2): JoinedBy.NONE,
        }


class TestAttempts:
    def test_late_report_of_attempt_1_is_not_credited_to_attempt_2_dynamo_13191(self) -> None:
        it = Listener()
        it.tracker.opened(opened(1), 1.0)
        it.tracker.observed(observed(1, end="worker_lost"), 2.0)
        it.tracker.opened(opened(2, attempt=1), 3.0)
        it.tracker.report(report(1), 4.0)
        it.tracker.observed(observed(2), 5.0)
        it.tracker.expire(100.0)
        by_route = {route.route_id: route for route in it.closed}
        assert by_route[route_id(1)].confirmed_tokens == 800
        assert by_route[route_id(2)].outcome is Outcome.UNCONFIRMED

    def test_neither_when_attempt_1_has_closed(self) -> None:
        it = Listener()
        it.tracker.opened(opened(1), 1.0)
        it.tracker.observed(observed(1, end="worker_lost"), 2.0)
        it.tracker.expire(32.0)
        it.tracker.opened(opened(2, attempt=1), 33.0)
        it.tracker.observed(observed(2), 34.0)
        it.tracker.report(report(1), 35.0)
        it.tracker.expire(100.0)
        assert [o.reason for o in it.orphans] == [OrphanReason.LATE]
        assert sum(route.confirmed_tokens for route in it.closed) == 0

    def test_nor_without_a_route_id_when_attempt_2_went_elsewhere(self) -> None:
        it = Listener()
        it.tracker.opened(opened(1), 1.0)
        it.tracker.observed(observed(1, end="worker_lost"), 2.0)
        it.tracker.opened(opened(2, attempt=1, stable_routing_id="w-b"), 3.0)
        it.tracker.observed(observed(2, served_stable_routing_id="w-b"), 4.0)
        it.tracker.report(report(1, named=False), 5.0)
        it.tracker.expire(100.0)
        assert {r.route_id: r.confirmed_tokens for r in it.closed} == {route_id(1): 800, route_id(2): 0}


class TestEqualPrompts:
    def test_each_report_closes_one_route_the_oldest_first(self) -> None:
        it = Listener()
        for number in (1, 2):
            it.tracker.opened(opened(number), 1.0)
            it.tracker.observed(observed(number), 2.0)
        it.tracker.report(report(7, named=False, confirmed=100), 3.0)
        assert [(r.route_id, r.confirmed_tokens) for r in it.closed] == [(route_id(1), 100)]
        it.tracker.report(report(8, named=False, confirmed=200), 4.0)
        assert [(r.route_id, r.confirmed_tokens) for r in it.closed][1:] == [(route_id(2), 200)]

    def test_two_requests_that_shared_one_hint(self) -> None:
        it = Listener()
        for number in (1, 2):
            it.tracker.opened(opened(number), 1.0)
            it.tracker.observed(observed(number), 2.0)
        it.tracker.report(report(7, route_id=route_id(2), confirmed=100), 3.0)
        it.tracker.report(report(8, route_id=route_id(2), confirmed=200), 4.0)
        assert {r.route_id: r.confirmed_tokens for r in it.closed} == {route_id(2): 100, route_id(1): 200}
        assert not it.orphans

    def test_a_third_report_has_nothing_left(self) -> None:
        it = Listener()
        it.tracker.opened(opened(1), 1.0)
        it.tracker.observed(observed(1), 2.0)
        for number in (7, 8):
            it.tracker.report(report(number, named=False), 3.0)
        it.tracker.expire(100.0)
        assert [o.reason for o in it.orphans] == [OrphanReason.ALREADY_REPORTED]
        assert it.history.totals().confirmed_tokens == 800

    def test_another_prompt_is_never_joined_by_its_replica_alone(self) -> None:
        it = Listener()
        it.tracker.opened(opened(1), 1.0)
        it.tracker.observed(observed(1), 2.0)
        it.tracker.report(report(7, named=False, prompt_key=b"q" * 16), 3.0)
        it.tracker.expire(100.0)
        assert it.only().outcome is Outcome.UNCONFIRMED


class TestAllocatedAgain:
    """One engine request with a report for each allocation."""

    @pytest.mark.parametrize("named", [True, False])
    @pytest.mark.parametrize("settle", [0.0, 1.0])
    def test_closes_one_route_and_counts_once(self, named: bool, settle: float) -> None:
        it = Listener(settle_seconds=settle)
        for number in (1, 2):
            it.tracker.opened(opened(number), 1.0)
        first = report(1, named=named, confirmed=0, epoch=0, reason=Reason.NOT_HONOURED)
        second = report(1, named=named, confirmed=500, epoch=1, report_id="report-1-again")
        it.tracker.report(first, 2.0)
        it.tracker.report(second, 3.0)
        it.tracker.observed(observed(1), 4.0)
        it.tracker.observed(observed(2), 4.0)
        it.tracker.report(report(1, named=named, confirmed=500, epoch=2, report_id="report-1-late"), 4.5)
        it.tracker.expire(100.0)
        assert {r.route_id: r.confirmed_tokens for r in it.closed} == {route_id(1): 500, route_id(2): 0}
        assert it.tracker.stats.superseded == 2
        assert not it.orphans


class TestBounds:
    def test_too_many_open_routes_close_the_oldest(self) -> None:
        it = Listener(limits=TrackerLimits(open_routes=3))
        for number in range(1, 6):
            it.tracker.opened(opened(number), float(number))
        assert [route.route_id for route in it.closed] == [route_id(1), route_id(2)]
        assert it.tracker.open_routes == 3
        assert it.tracker.stats.evicted_routes == 2

    def test_too_many_reports_of_nobody(self) -> None:
        it = Listener(limits=TrackerLimits(held_reports=3))
        for number in range(1, 6):
            it.tracker.report(report(number), float(number))
        assert [o.reason for o in it.orphans] == [OrphanReason.EVICTED] * 2
        assert it.tracker.held_reports == 3

    def test_ends_without_a_beginning_are_dropped_and_counted(self) -> None:
        it = Listener(limits=TrackerLimits(open_routes=3))
        for number in range(1, 6):
            it.tracker.observed(observed(number), float(number))
        it.tracker.expire(100.0)
        assert it.tracker.stats.unmatched_ends == 5

    def test_memory_is_flat_after_many_routes(self) -> None:
        it = Listener(limits=TrackerLimits(remembered=50), settle_seconds=1.0)
        for number in range(1, 501):
            it.tracker.opened(opened(number, prompt_key=number.to_bytes(16, "big")), float(number))
            it.tracker.report(report(number, prompt_key=number.to_bytes(16, "big")), float(number))
            it.tracker.observed(observed(number), float(number))
            it.tracker.expire(float(number))
        it.tracker.expire(1_000.0)
        assert len(it.closed) == 500
        sizes = {name: len(value) for name, value in vars(it.tracker).items() if hasattr(value, "__len__")}
        assert {name: size for name, size in sizes.items() if size > 50} == {}
        assert len(it.tracker._by_prompt._members) == len(it.tracker._reports._by_prompt._members) == 0


class TestClock:
    def test_forward_jump_costs_at_most_an_unconfirmed(self) -> None:
        it = Listener()
        it.tracker.opened(opened(), 1.0)
        it.tracker.observed(observed(), 2.0)
        it.tracker.expire(3_602.0)
        it.tracker.report(report(), 4.0)
        assert it.only().outcome is Outcome.UNCONFIRMED
        assert [o.reason for o in it.orphans] == [OrphanReason.LATE]

    def test_backward_jump_keeps_nothing_for_ever(self) -> None:
        it = Listener(ttl_seconds=30.0)
        it.tracker.opened(opened(1), 7_200.0)
        it.tracker.observed(observed(1), 7_200.0)
        it.tracker.report(report(2), 7_200.0)
        it.tracker.opened(opened(3), 7_200.0)
        it.tracker.expire(3_600.0)
        assert not it.closed
        it.tracker.expire(3_630.0)
        assert [r.route_id for r in it.closed] == [route_id(1)]
        assert [o.reason for o in it.orphans] == [OrphanReason.NO_ROUTE]
        it.tracker.expire(3_900.0)
        assert len(it.closed) == 2

    def test_time_that_did_not_count_is_given_back(self) -> None:
        it = Listener(ttl_seconds=30.0)
        it.tracker.opened(opened(), 1.0)
        it.tracker.observed(observed(), 2.0)
        it.tracker.rebase(600.0)
        it.tracker.expire(620.0)
        it.tracker.report(report(), 621.0)
        assert it.only().confirmed_tokens == 800


def test_a_listener_that_fails_is_counted_and_harms_nothing() -> None:
    it = Listener()
    it.tracker._on_close = lambda route: 1 / 0
    it.tracker.opened(opened(), 1.0)
    it.tracker.report(report(), 2.0)
    it.tracker.observed(observed(), 3.0)
    assert it.tracker.stats.callback_errors == 1
    assert it.tracker.open_routes == 0


def test_evicted_donor_is_stale_placed_but_not_materialized_llm_d_router_2896() -> None:
    it = Listener()
    it.tracker.opened(opened(), 1.0)
    it.tracker.report(report(confirmed=0, outcome=Outcome.STALE_DONOR, reason=Reason.DONOR_EVICTED), 2.0)
    it.tracker.observed(observed(), 3.0)
    tokens = it.history.totals().funnel.tokens
    assert it.only().outcome is Outcome.STALE_DONOR
    assert (tokens["placed"], tokens["materialized"]) == (800, 0)
