"""Every record is kept and every answer passed on, and what is counted beside that never gets in the way."""

from __future__ import annotations

import pytest

from dynamo_semkv.evidence.deadline import LookupResult, LookupStatus
from dynamo_semkv.observe.metrics import Metrics
from dynamo_semkv.outcome.closed import JoinedBy, OrphanReason, OrphanReport, close_route
from dynamo_semkv.outcome.history import History
from dynamo_semkv.router.observed import ObservedHistory, ObservedJournal, ObservedLookup
from tests.observe.test_metrics import value
from tests.outcome.build import observed, opened, report


class Recorder:
    def __init__(self) -> None:
        self.events: list[object] = []
        self.opened = self.observed = self.events.append


def test_every_record_is_written_and_the_decision_counted() -> None:
    metrics, written = Metrics(), Recorder()
    journal = ObservedJournal(written, metrics)
    journal.opened(opened())
    journal.observed(observed())
    assert written.events == [opened(), observed()]
    assert value(metrics, "semkv_placement_total", mode="enforce", result="placed") == 1


def test_a_broken_counter_harms_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, written = Metrics(), Recorder()
    monkeypatch.setattr(metrics, "opened", lambda event: 1 / 0)
    ObservedJournal(written, metrics).opened(opened())
    assert written.events == [opened()]


def test_only_own_routes_that_close_now_are_counted() -> None:
    metrics, history, live = Metrics(), History(10), [False]
    measured = ObservedHistory(history, metrics, router="router-1", is_live=lambda: live[0])

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


class Runner:
    async def lookup(self, query: object) -> LookupResult:
        return LookupResult(LookupStatus.HIT, (), 0.001, {"fingerprint": (LookupStatus.HIT, 0.001)})


async def test_what_each_provider_answered_is_counted() -> None:
    metrics = Metrics()
    result = await ObservedLookup(Runner(), metrics).lookup(None)  # type: ignore[arg-type]
    assert result.status is LookupStatus.HIT
    assert value(metrics, "semkv_provider_lookup_total", provider="fingerprint", result="hit") == 1


async def test_a_broken_counter_harms_no_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics()
    monkeypatch.setattr(metrics, "provider_answered", lambda *answer: 1 / 0)
    result = await ObservedLookup(Runner(), metrics).lookup(None)  # type: ignore[arg-type]
    assert result.status is LookupStatus.HIT
