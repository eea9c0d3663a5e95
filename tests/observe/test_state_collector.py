"""The collector reads a running router, and no part of it that fails takes the others along."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_semkv.config.load import Loaded
from dynamo_semkv.config.schema import Config, PlacementConfig, PlacementMode
from dynamo_semkv.observe.metrics import Metrics
from dynamo_semkv.observe.state_collector import BusParts, Readings, RouteParts, StateCollector
from dynamo_semkv.outcome.intake import Intake
from tests.observe.fake_state import fake_catalog, fake_replicas, fake_state
from tests.observe.test_metrics import value
from tests.outcome.build import Listener, ManualClock, observed, opened, report
from tests.outcome.fakes import FakeBroker, FakeSubscriber


class Stats:
    """A publisher or subscriber that only knows how it is."""

    def __init__(self, stats: Any) -> None:
        self.stats = lambda: stats

    def caught_up(self, stream: str) -> bool:
        return True


def make_collector(listener: Listener, metrics: Metrics | None = None, **parts: Any) -> StateCollector:
    clock = ManualClock()
    state = fake_state(listener.history)
    intake = Intake(
        FakeSubscriber(FakeBroker(clock)),
        listener.tracker,
        apply_donor_event=lambda e, at: None,
        announce=lambda a: None,
    )
    intake.counts["reports.messages"] = 5
    intake.counts["reports.malformed"] = 2
    readings = {
        "catalog": fake_catalog,
        "providers": lambda: {"fingerprint": {"breaker": "closed"}},
        "calibration": lambda: {"routes": 7, "cells": []},
        "configuration": lambda: {"reloaded_at": 4_000.0, "last_reload_error": None, "restart_needed": ["bus.url"]},
        "replicas": fake_replicas,
        "fallbacks": lambda: {"hint_error": 3},
        **parts,
    }
    config = Config(placement=PlacementConfig(mode=PlacementMode.CANARY, canary_percent=20.0))
    return StateCollector(
        "router-1",
        Loaded(config, "abc", "test"),
        RouteParts(listener.history, listener.tracker, intake),
        BusParts(Stats(state.publisher), Stats(state.subscriber)),
        Readings(**readings),
        metrics or Metrics(),
        wall=lambda: 5_000.0,
        monotonic=clock,
    )


def busy_listener() -> Listener:
    it = Listener()
    it.tracker.opened(opened(1), 1.0)
    it.tracker.report(report(1), 2.0)
    it.tracker.observed(observed(1), 3.0)
    it.tracker.opened(opened(2), 4.0)
    return it


def test_everything_is_read() -> None:
    metrics = Metrics()
    collector = make_collector(busy_listener(), metrics)
    snapshot = collector.snapshot()
    assert (snapshot["mode"], snapshot["canary_percent"], snapshot["config_hash"]) == ("canary", 20.0, "abc")
    assert (snapshot["requests"], snapshot["open_routes"], snapshot["now"]) == (1, 1, 5_000.0)
    assert snapshot["models"] == ["SmolLM2-135M-Instruct"]
    reports = next(row for row in snapshot["streams"] if row["name"] == "reports")
    assert (reports["messages"], reports["malformed"]) == (5, 2)
    assert collector.readiness().plain()["state"] in {"ready", "degraded", "not_ready"}
    assert value(metrics, "semkv_fallback_total", reason="hint_error") == 3
    assert (snapshot["reloaded_at"], snapshot["last_reload_error"]) == (4_000.0, None)
    assert snapshot["restart_needed"] == ["bus.url"]
    collector.reload(Loaded(Config(), "def", "test"))
    assert (collector.snapshot()["mode"], collector.snapshot()["config_hash"]) == ("shadow", "def")
    assert snapshot["calibration"] == {"routes": 7, "cells": []}
    assert "semkv_open_routes 1.0" in collector.metrics_text()


@pytest.mark.parametrize("part", ["catalog", "providers", "calibration", "configuration", "replicas", "fallbacks"])
def test_a_part_that_fails_shows_as_unknown(part: str, caplog: pytest.LogCaptureFixture) -> None:
    collector = make_collector(busy_listener(), **{part: lambda: 1 / 0})
    for _ in range(3):
        assert collector.snapshot()["requests"] == 1
        assert "semkv_ready" in collector.metrics_text()
    assert len(caplog.records) == 1
