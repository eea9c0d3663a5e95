"""Wrappers count around the stages and never get in their way."""

from __future__ import annotations

import pytest

from dynamo_semkv.evidence.deadline import LookupResult, LookupStatus
from dynamo_semkv.observe.measured import MeasuredHistory, MeasuredLookup
from dynamo_semkv.observe.metrics import Metrics
from dynamo_semkv.outcome.closed import JoinedBy, OrphanReason, OrphanReport, close_route
from dynamo_semkv.outcome.history import History
from tests.observe.test_metrics import value
from tests.outcome.build import observed, opened, report


class Runner:
    async def lookup(self, query: object) -> LookupResult:
        return LookupResult(LookupStatus.HIT, (), 0.001, {"fingerprint": (LookupStatus.HIT, 0.001)})


async def test_lookup() -> None:
    metrics = Metrics()
    result = await MeasuredLookup(Runner(), metrics).lookup(None)  # type: ignore[arg-type]
    assert result.status is LookupStatus.HIT
    assert value(metrics, "semkv_provider_lookup_total", provider="fingerprint", result="hit") == 1


async def test_a_broken_counter_harms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics()
    monkeypatch.setattr(metrics, "provider_answered", lambda *answer: 1 / 0)
    result = await MeasuredLookup(Runner(), metrics).lookup(None)  # type: ignore[arg-type]
    assert result.status is LookupStatus.HIT


def test_only_own_routes_that_close_now_are_counted() -> None:
    metrics, history, live = Metrics(), History(10), [False]
    measured = MeasuredHistory(history, metrics, router="router-1", is_live=lambda: live[0])

    def close(number: int, router: str) -> None:
        start = opened(number, router=router)
        measured.add(close_route(start, observed(number), report(number), JoinedBy.ROUTE_ID, 1.0))
        measured.add_orphan(OrphanReport(report(number), OrphanReason.LATE, 1.0))

    close(1, "router-1")  # the past: whoever closed it has counted it
    live[0] = True
    close(2, "router-1")
    close(3, "router-2")
    assert value(metrics, "semkv_materialized_tokens_total") == 800
    assert value(metrics, "semkv_outcome_total", outcome="orphan_report", reason="late") == 2
    assert history.totals().funnel.tokens["materialized"] == 2_400
    assert history.totals().orphans == {"late": 3}
