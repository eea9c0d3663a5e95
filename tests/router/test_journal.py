"""The journal writes every record, and what it adds around that never gets in its way."""

from __future__ import annotations

import pytest

from dynamo_semkv.observe.metrics import Metrics
from dynamo_semkv.router.journal import ObservedJournal
from tests.observe.test_metrics import value
from tests.outcome.build import observed, opened


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
