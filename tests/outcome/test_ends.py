"""Every end has its own outcome, and waits for a report only where one is owed."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_semkv.contracts.report import Outcome, Reason
from dynamo_semkv.outcome.closed import report_is_owed
from dynamo_semkv.outcome.route_tracker import UNOWED_SECONDS
from tests.outcome.build import Listener, observed, opened, report, route_id

TTL = 30.0


@pytest.mark.parametrize(
    ("end", "outcome", "reason", "after"),
    [
        ({"end": "error", "output_tokens": 0}, Outcome.REFUSED, Reason.REQUEST_REFUSED, UNOWED_SECONDS),
        ({"end": "no_worker", "output_tokens": 0}, Outcome.REFUSED, Reason.NO_WORKER, UNOWED_SECONDS),
        ({"end": "cancelled", "output_tokens": 0}, Outcome.CANCELLED, Reason.BEFORE_FIRST_TOKEN, UNOWED_SECONDS),
        ({"end": "cancelled", "output_tokens": 7}, Outcome.CANCELLED, Reason.CANCELLED, TTL),
        ({"end": "error", "output_tokens": 7}, Outcome.UNCONFIRMED, Reason.NO_REPORT, TTL),
        ({"end": "worker_lost", "output_tokens": 0}, Outcome.UNCONFIRMED, Reason.WORKER_LOST, TTL),
        ({"end": "complete", "output_tokens": 7}, Outcome.UNCONFIRMED, Reason.NO_REPORT, TTL),
    ],
)
def test_an_end_without_a_report(end: dict[str, Any], outcome: Outcome, reason: Reason, after: float) -> None:
    it = Listener(ttl_seconds=TTL)
    it.tracker.opened(opened(), 0.0)
    it.tracker.observed(observed(**end), 1.0)
    it.tracker.expire(1.0 + after - 0.1)
    assert it.closed == []
    it.tracker.expire(1.0 + after)
    route = it.only()
    assert (route.outcome, route.reason) == (outcome, reason)


@pytest.mark.parametrize("end", ["error", "cancelled"])
def test_a_report_that_nobody_owed_counts_all_the_same(end: str) -> None:
    """The engine had asked the connector before the request ended."""
    it = Listener(ttl_seconds=TTL)
    it.tracker.opened(opened(), 0.0)
    it.tracker.observed(observed(end=end, output_tokens=0), 1.0)
    it.tracker.report(report(), 2.0)
    it.tracker.expire(10.0)
    route = it.only()
    assert route.report is not None
    assert route.confirmed_tokens == 800


def test_a_refused_route_takes_no_report_of_another_request_with_its_prompt() -> None:
    it = Listener(ttl_seconds=TTL)
    it.tracker.opened(opened(1), 0.0)
    it.tracker.opened(opened(2), 0.1)
    it.tracker.observed(observed(1, end="error", output_tokens=0), 0.2)
    it.tracker.report(report(2, named=False), 0.3)
    it.tracker.observed(observed(2), 0.4)
    it.tracker.expire(60.0)
    assert {route.route_id: route.confirmed_tokens for route in it.closed} == {route_id(1): 0, route_id(2): 800}


def test_what_is_not_over_yet_owes_a_report() -> None:
    assert report_is_owed(None)


def test_a_connector_cannot_say_that_a_request_was_refused() -> None:
    it = Listener(ttl_seconds=TTL)
    it.tracker.opened(opened(), 0.0)
    it.tracker.observed(observed(), 1.0)
    it.tracker.report(report(outcome=Outcome.REFUSED, reason=Reason.REQUEST_REFUSED), 2.0)
    it.tracker.expire(60.0)
    assert it.only().outcome is Outcome.UNKNOWN
