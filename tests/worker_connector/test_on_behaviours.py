"""The connector on the reference engine's less common paths, one at a time; random schedules of them are a test of their own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.worker_connector.harness import Bench, settings
from tests.worker_connector.reference_engine.running import Script, prompt, stepped
from worker_connector.reference_engine import SteppedEngine

TOKENS = prompt(61, vocabulary=16)


def bench() -> Bench:
    return Bench(settings(min_offer_tokens=8, min_donor_tokens=8))


def run_all(engine: SteppedEngine, bench: Bench) -> None:
    engine.run()
    bench.leader._last_batch -= 100.0
    bench.leader.sweep_idle()
    bench.check_balance()
    assert engine.faults == []


def test_saves_of_a_batch_that_is_dropped_do_not_stay_open() -> None:
    """No wait_for_save comes behind such a batch (py_executor.py, the second `_can_queue`)."""
    it, script = bench(), Script(dropped_batch=[True])
    engine = stepped(it.spec(), dice=script, dropped_batch_rate=1.0)
    engine.submit(TOKENS)
    engine.step()
    assert it.leader.snapshot()["open_saves"] == 0
    run_all(engine, it)


def test_saves_of_a_pass_that_fails_do_not_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    it = bench()
    engine = stepped(it.spec())

    def fail(*arguments: Any) -> None:
        raise OSError("the device is gone")

    monkeypatch.setattr(engine.model, "forward", fail)
    request = engine.submit(TOKENS)
    engine.step()
    assert engine.ended[request].finish_reason == "error"
    assert it.leader.snapshot()["open_saves"] == 0


def test_an_offer_is_loaded_although_the_first_report_comes_late() -> None:
    """A request deferred by the token-budget trim is reported as starting behind what it is served; its pages are empty all the same."""
    it, script = bench(), Script()
    engine = stepped(it.spec(), dice=script, token_budget_trim="defer")
    engine.submit(TOKENS)
    engine.run()
    engine.reset_prefix_cache()
    engine.submit(prompt(10, 1, vocabulary=16), max_new_tokens=8)
    engine.step()
    served = engine.submit(TOKENS)
    script.on["trim"] = [True]
    engine.step()
    assert served in engine.running
    run_all(engine, it)
    assert it.report_of(served).confirmed == 56
