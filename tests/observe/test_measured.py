"""Wrappers count around the stages and never get in their way."""

from __future__ import annotations

import pytest

from dynamo_semkv.evidence.deadline import LookupResult, LookupStatus
from dynamo_semkv.observe.measured import MeasuredLookup
from dynamo_semkv.observe.metrics import Metrics
from tests.observe.test_metrics import value


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
