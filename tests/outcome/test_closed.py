"""What is derived from one closed route: the funnel, the TTFT class, the cross-check."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_semkv.contracts.report import MaterializationReport, Outcome, Reason
from dynamo_semkv.contracts.route_events import RouteObserved, RouteOpened
from dynamo_semkv.outcome.closed import ClosedRoute, CrossCheck, Funnel, JoinedBy, TtftClass, close_route
from tests.outcome.build import observed, opened, report

ANY_INT = st.integers(-(2**40), 2**40)


def closed(
    start: RouteOpened, end: RouteObserved | None = None, what: MaterializationReport | None = None
) -> ClosedRoute:
    return close_route(start, end, what, JoinedBy.NONE, 10.0)


@given(ANY_INT, ANY_INT, ANY_INT, ANY_INT, ANY_INT)
def test_funnel_never_grows_downstream_and_loses_no_confirmed_token(
    input_tokens: int, evidence: int, placed: int, hinted: int, confirmed: int
) -> None:
    funnel = Funnel.of(
        opened(input_tokens=input_tokens, evidence_tokens=evidence, placed_tokens=placed, hinted_tokens=hinted),
        confirmed,
    )
    assert funnel.input >= funnel.evidence >= funnel.placed >= funnel.hinted >= funnel.materialized >= 0
    assert funnel.materialized + funnel.unhinted == max(0, confirmed)


def test_confirmed_without_a_hint_is_no_success_of_a_hint() -> None:
    route = closed(opened(hinted_tokens=0), observed(), report(confirmed=300))
    assert (route.funnel.materialized, route.funnel.unhinted) == (0, 300)


@pytest.mark.parametrize(
    ("dynamo", "served", "ours"),
    [
        ("w-b/0", "w-a", 800),
        ("w-a/1", "w-a", 800),  # another rank has another cache
        ("w-a/0", "w-a", 0),  # Dynamo's own router would have gone there
        (None, "w-a", 0),  # a router of before did not say what Dynamo would have chosen
        ("w-b/0", "w-b", 0),  # the pin did not hold, so Dynamo chose
    ],
)
def test_ours_is_only_what_dynamo_would_not_have_chosen(dynamo: str | None, served: str, ours: int) -> None:
    start, end = opened(dynamo_choice=dynamo), observed(served_stable_routing_id=served)
    route = closed(start, end, report(confirmed=800, stable_routing_id=served))
    assert (route.funnel.materialized, route.funnel.beyond_dynamo) == (800, ours)


def test_a_placement_is_not_reuse() -> None:
    assert closed(opened(), observed(), None).funnel.materialized == 0


@pytest.mark.parametrize("claimed", [Outcome.UNCONFIRMED, Outcome.ORPHAN_REPORT])
def test_a_connector_cannot_give_the_routers_verdicts(claimed: Outcome) -> None:
    route = closed(opened(), observed(), report(confirmed=0, outcome=claimed))
    assert (route.outcome, route.reason) == (Outcome.UNKNOWN, Reason.NOT_RESIDENT)


@pytest.mark.parametrize(
    ("local", "confirmed", "engine", "expected"),
    [
        (0, 0, None, TtftClass.COLD),
        (64, 0, 64, TtftClass.COLD),
        (0, 0, 640, None),  # the engine knows of reuse that the report does not
        (640, 0, 640, TtftClass.WARM),
        (0, 640, 640, TtftClass.LOADED),
        (320, 512, None, TtftClass.LOADED),
        (320, 128, None, None),
        (640, 128, None, None),
        (256, 0, None, None),
    ],
)
def test_ttft_class(local: int, confirmed: int, engine: int | None, expected: TtftClass | None) -> None:
    what = report(confirmed=confirmed, local_tokens=local)
    assert closed(opened(), observed(engine_cached_tokens=engine), what).ttft_class is expected


@pytest.mark.parametrize(("engine", "expected"), [(0, TtftClass.COLD), (640, None), (None, None)])
def test_ttft_class_without_a_report(engine: int | None, expected: TtftClass | None) -> None:
    """Cached tokens may be the device's or loaded: without the report nobody can tell, so nobody guesses."""
    assert closed(opened(), observed(engine_cached_tokens=engine)).ttft_class is expected


def test_no_ttft_class_without_a_first_token() -> None:
    assert closed(opened(), observed(ttft_seconds=None), report(confirmed=0)).ttft_class is None
    assert closed(opened(), None, report(confirmed=0)).ttft_class is None


@pytest.mark.parametrize(
    ("engine", "expected"), [(896, CrossCheck.EQUAL), (895, CrossCheck.DIFFERS), (None, CrossCheck.UNKNOWN)]
)
def test_cross_check(engine: int | None, expected: CrossCheck) -> None:
    what = report(confirmed=800, local_tokens=96)
    assert closed(opened(), observed(engine_cached_tokens=engine), what).cross_check is expected


def test_cross_check_without_a_report_or_an_end() -> None:
    assert closed(opened(), observed(engine_cached_tokens=5)).cross_check is CrossCheck.UNKNOWN
    assert closed(opened(), None, report()).cross_check is CrossCheck.UNKNOWN
