"""Properties: any interleaving and duplication of the same events gives the same closed routes and totals; nothing
counts twice."""

from __future__ import annotations

from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_semkv.contracts.report import MaterializationReport
from dynamo_semkv.contracts.route_events import RouteObserved, RouteOpened
from dynamo_semkv.outcome.closed import placed_on
from tests.outcome.build import Listener, comparable, observed, opened, report, route_id

Event = RouteOpened | RouteObserved | MaterializationReport
REPLICAS = [("w-a", 0), ("w-a", 1), ("w-b", 0)]
PROMPTS = [b"p" * 16, b"q" * 16]


class Timed(NamedTuple):
    at: float
    event: Event


@st.composite
def one_request(draw: st.DrawFn, number: int) -> list[Timed]:
    """The events of one request, in the order of their making: few prompts and replicas, so that equal ones meet."""
    prompt = draw(st.sampled_from(PROMPTS))
    pin = draw(st.none() | st.sampled_from(REPLICAS))
    # Mostly the pin holds; Dynamo may also have sent it elsewhere, or nobody knows.
    served = pin if pin is not None and draw(st.integers(0, 4)) else draw(st.none() | st.sampled_from(REPLICAS))
    evidence = draw(st.integers(0, 1_000))
    hinted = draw(st.integers(0, evidence)) if pin else 0
    start = 10.0 * number + draw(st.integers(0, 9))
    events = [
        Timed(
            start,
            opened(
                number,
                prompt_key=prompt,
                opened_at=start,
                evidence_tokens=evidence,
                placed_tokens=hinted,
                hinted_tokens=hinted,
                stable_routing_id=pin[0] if pin else None,
                dp_rank=pin[1] if pin else None,
            ),
        )
    ]
    replica = served or pin or REPLICAS[0]
    if draw(st.integers(0, 9)) == 0:
        replica = draw(st.sampled_from(REPLICAS))
    # Mostly its own route; under a shared hint another one, which may not even exist.
    names = draw(st.sampled_from([number, number, None, number - 1, number + 1, 999]))
    for epoch in range(draw(st.integers(0, 2))):
        events.append(
            Timed(
                start + 1.0 + epoch,
                report(
                    number,
                    report_id=f"report-{number}-{epoch}",
                    route_id=route_id(names) if names is not None else None,
                    epoch=epoch,
                    prompt_key=prompt,
                    stable_routing_id=replica[0],
                    dp_rank=replica[1],
                    confirmed=draw(st.sampled_from([0, 64, 960])),
                ),
            )
        )
    if draw(st.integers(0, 4)):
        end = observed(
            number,
            served_stable_routing_id=served[0] if served else None,
            served_dp_rank=served[1] if served else None,
            end=draw(st.sampled_from(["complete", "cancelled", "worker_lost"])),
            engine_cached_tokens=draw(st.sampled_from([None, 64])),
        )
        events.append(Timed(start + 5.0, end))
    return events


@st.composite
def scenario(draw: st.DrawFn) -> list[Timed]:
    return [timed for number in range(1, draw(st.integers(1, 5)) + 1) for timed in draw(one_request(number))]


def feed(it: Listener, timed: Timed) -> None:
    if isinstance(timed.event, RouteOpened):
        it.tracker.opened(timed.event, timed.at)
    elif isinstance(timed.event, RouteObserved):
        it.tracker.observed(timed.event, timed.at)
    else:
        it.tracker.report(timed.event, timed.at)


def result(it: Listener) -> dict[str, Any]:
    return {
        "closed": {
            r.route_id: (r.outcome, r.reason, r.report, r.joined_by, r.observed, r.cross_check) for r in it.closed
        },
        "orphans": sorted((o.report.report_id, o.reason.value) for o in it.orphans),
        "totals": comparable(it.history.totals()),
    }


@given(scenario(), st.data())
@settings(max_examples=200, deadline=None)
def test_any_interleaving_and_duplication_gives_the_same(events: list[Timed], data: st.DataObject) -> None:
    straight, shuffled = Listener(settle_seconds=1.0), Listener(settle_seconds=1.0)
    for timed in sorted(events, key=lambda t: t.at):
        feed(straight, timed)
    again = data.draw(st.lists(st.sampled_from(events), max_size=6))
    for timed in data.draw(st.permutations(events + again)):
        feed(shuffled, timed)
    for it in (straight, shuffled):
        for now in (200.0, 1_000.0, 2_000.0):
            it.tracker.expire(now)
        assert it.tracker.open_routes == it.tracker.held_reports == 0
    assert result(straight) == result(shuffled)


@given(scenario(), st.data())
@settings(max_examples=200, deadline=None)
def test_nothing_counts_twice_whenever_time_passes(events: list[Timed], data: st.DataObject) -> None:
    """Also with routes that run out of time in between: every route closes once, every confirmed token is on one
    side."""
    it = Listener(
        ttl_seconds=data.draw(st.sampled_from([5.0, 30.0])), settle_seconds=data.draw(st.sampled_from([0, 1]))
    )
    again = data.draw(st.lists(st.sampled_from(events), max_size=6))
    for timed in data.draw(st.permutations(events + again)):
        feed(it, timed)
        if data.draw(st.booleans()):
            it.tracker.expire(data.draw(st.floats(0.0, 400.0)))
    for now in (1_000.0, 2_000.0, 3_000.0):
        it.tracker.expire(now)

    assert it.tracker.stats.callback_errors == 0  # the history refuses a route that closes twice
    starts = {t.event.route_id for t in events if isinstance(t.event, RouteOpened)}
    assert sorted(r.route_id for r in it.closed) == sorted(starts)
    reports = {t.event.report_id: t.event for t in events if isinstance(t.event, MaterializationReport)}
    used = [r.report.report_id for r in it.closed if r.report] + [o.report.report_id for o in it.orphans]
    assert len(used) == len(set(used)) == len(reports) - it.tracker.stats.superseded
    totals = it.history.totals()
    assert totals.confirmed_tokens == totals.funnel.tokens["materialized"] + totals.unhinted_tokens
    orphaned = sum(orphan.report.confirmed for orphan in it.orphans)
    assert totals.confirmed_tokens + orphaned == sum(reports[i].confirmed for i in used)
    steps = list(totals.funnel.tokens.values())
    assert steps == sorted(steps, reverse=True)
    assert min(steps) >= 0
    for route in it.closed:
        if route.report is not None and (name := route.replica) is not None:
            by_pin_only = route.observed is None and placed_on(route.opened) is not None
            assert by_pin_only or tuple(name) == (route.report.stable_routing_id, route.report.dp_rank)
