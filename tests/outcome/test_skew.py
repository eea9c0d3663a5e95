"""Clocks of routers and workers that disagree: what is joined, counted and learned does not depend on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynamo_semkv.config.schema import ScoringConfig
from dynamo_semkv.contracts.evidence import Bucket, MatchType
from dynamo_semkv.contracts.location import Tier
from dynamo_semkv.outcome.calibration import Calibration
from tests.outcome.build import Listener, comparable, observed, opened, report

DAY = 86_400.0
NOW = 5_000_000.0
KNOWN: dict[str, Any] = {"match_type": MatchType.EXACT_EQUIVALENT, "overlap": Bucket.HIGH, "tier": Tier.HOST_PINNED}


def told(skew_of: dict[int, float]) -> tuple[Listener, Calibration]:
    """Six routes, two at a time; route n comes from a router whose clock is off by `skew_of[n]`."""
    listener, calibration = Listener(), Calibration(ScoringConfig())
    for number in range(1, 7):
        off, at = skew_of.get(number, 0.0), NOW + number
        listener.tracker.opened(opened(number, opened_at=at + off, prompt_key=bytes([number]) * 16, **KNOWN), at)
        cached = 100 if number == 3 else 800
        listener.tracker.observed(observed(number, observed_at=at + off + 0.5, engine_cached_tokens=cached), at + 0.5)
        if number != 5:
            listener.tracker.report(report(number, prompt_key=bytes([number]) * 16, named=number % 2 == 0), at + 0.6)
        listener.tracker.expire(at + 0.7)
    listener.tracker.expire(NOW + 1_000.0)
    for route in listener.closed:
        calibration.add(replace(route, saving=calibration.saving_of(route)))
    return listener, calibration


@pytest.mark.parametrize("skew", [DAY, -DAY, 1e-3, NOW])
def test_a_router_whose_clock_is_off_closes_and_teaches_the_same(skew: float) -> None:
    straight, learned = told({})
    crooked, also = told({2: skew, 3: -skew, 5: skew, 6: skew})
    assert len(crooked.closed) == 6
    outcomes = [(r.route_id, r.outcome, r.reason, r.joined_by, r.closed_at, r.cross_check) for r in straight.closed]
    assert outcomes == [
        (r.route_id, r.outcome, r.reason, r.joined_by, r.closed_at, r.cross_check) for r in crooked.closed
    ]
    assert comparable(straight.history.totals()) == comparable(crooked.history.totals())
    assert [bucket.requests for bucket in straight.history.course()] == [
        bucket.requests for bucket in crooked.history.course()
    ]
    assert learned.snapshot() == also.snapshot()
    assert straight.history.totals().cross_checks == {"equal": 4, "differs": 1, "unknown": 1}
