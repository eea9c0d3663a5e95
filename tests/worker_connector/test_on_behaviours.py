"""The connector on the reference engine's less common paths, one at a time; random schedules of them are a test of
their own."""

from __future__ import annotations

from typing import Any

import pytest

import worker_connector.rank.rank as rank_module
from dynamo_semkv.contracts.report import Outcome
from tests.worker_connector.harness import Bench, settings
from tests.worker_connector.reference_engine.running import Script, prompt, stepped
from worker_connector.leader.active_requests import ActiveRequests
from worker_connector.reference_engine import SteppedEngine

TOKENS = prompt(61, vocabulary=16)


def bench(**options: Any) -> Bench:
    return Bench(settings(min_offer_tokens=8, min_donor_tokens=8), **options)


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


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drop", [0, 1, 4])
def test_nothing_is_saved_from_pages_that_were_taken_back_unsaid(drop: int, overlap: bool) -> None:
    """A request gets other pages than it was reported to have, and another one gets those. Dropped is a batch that
    completes no block (its saves would be answered as failed): the first one, or the one whose decode needs a new
    page."""
    it, script = bench(), Script(dropped_batch=[False] * drop + [True])
    engine = stepped(it.spec(), dice=script, dropped_batch_reverts=True, overlap_scheduling=overlap)
    first = engine.submit(TOKENS[:5], max_new_tokens=20)
    for _ in range(drop + 1):
        engine.step()
    engine.submit(prompt(5, 1, vocabulary=16), max_new_tokens=20)
    run_all(engine, it)
    engine.reset_prefix_cache()
    engine.submit([*TOKENS[:5], *engine.ended[first].token_ids])
    run_all(engine, it)


@pytest.mark.parametrize("noticed", [True, False])
@pytest.mark.parametrize("salt", [None, "tenant-b"])
def test_a_page_that_another_tenant_was_given_behind_a_dropped_batch_is_not_saved_as_ours(
    salt: str | None, noticed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tape on which it was: a prompt of whole blocks, the batch of its first decode dropped, under overlap
    scheduling. Ranks in other processes tell of passes too late for the drop to be noticed; that somebody else was
    given the page is enough."""
    if not noticed:
        monkeypatch.setattr(ActiveRequests, "batch_dropped", lambda *_: None)
    it, script = bench(), Script(dropped_batch=[False, True])
    engine = stepped(it.spec(), dice=script, dropped_batch_reverts=True, overlap_scheduling=True)
    first = engine.submit(TOKENS[:16], max_new_tokens=20)
    engine.step()
    engine.step()
    engine.submit(prompt(9, 1, vocabulary=16), max_new_tokens=20, cache_salt=salt)
    run_all(engine, it)
    engine.reset_prefix_cache()
    turn = engine.submit([*TOKENS[:16], *engine.ended[first].token_ids], max_new_tokens=4)
    run_all(engine, it)
    assert it.report_of(turn).confirmed >= 16
    if not noticed:
        assert it.leader.counts["pages_reassigned"] >= 1


def test_a_prefix_that_the_engine_shares_between_requests_is_saved_of_both() -> None:
    it = bench()
    engine = stepped(it.spec())
    for end in (1, 2):
        engine.submit([*TOKENS[:32], *prompt(9, end, vocabulary=16)], max_new_tokens=20)
        engine.step()
    run_all(engine, it)
    assert it.leader.counts["pages_reassigned"] == 0


@pytest.mark.parametrize(("overlap", "resident"), [(False, 96), (True, 56)])
def test_a_pass_of_one_token_looks_like_a_dropped_batch_under_overlap_scheduling(overlap: bool, resident: int) -> None:
    """The report behind it does not get on: what is decoded then is not saved. Bytes stay right, which is what
    counts."""
    it = bench()
    engine = stepped(it.spec(), overlap_scheduling=overlap)
    engine.submit(TOKENS[:57])
    engine.run()
    engine.reset_prefix_cache()
    served = engine.submit(TOKENS[:57], max_new_tokens=40)
    run_all(engine, it)
    engine.reset_prefix_cache()
    turn = engine.submit([*TOKENS[:57], *engine.ended[served].token_ids])
    run_all(engine, it)
    assert it.report_of(turn).confirmed == resident


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
    """A request deferred by the token-budget trim is reported as starting behind what it is served; its pages are empty
    all the same."""
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


def test_a_failed_load_restarts_its_request_on_the_real_runtime_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dialect B: the request leaves the batch, and is computed without what it was offered."""
    it = bench(restarts_failed=True)
    engine = stepped(it.spec(), dialect="B")
    engine.submit(TOKENS)
    engine.run()
    engine.reset_prefix_cache()

    def fail(*arguments: Any) -> None:
        raise OSError("the copy failed")

    monkeypatch.setattr(rank_module, "copy_to_pages", fail)
    request = engine.submit(TOKENS, max_new_tokens=2)
    run_all(engine, it)
    assert engine.ended[request].finish_reason == "length"
    first, second = [report for report in it.sink.reports if report.request_id == request]
    assert (first.outcome, first.confirmed) == (Outcome.LOAD_FAILED, 0)
    assert (second.offered, second.confirmed) == (0, 0)


def test_nothing_is_offered_behind_part_of_a_block() -> None:
    """And what the request computes is saved all the same."""
    it = bench()
    engine = stepped(it.spec(), enable_partial_reuse=True)
    engine.submit(TOKENS)
    engine.run()
    engine.reset_prefix_cache()
    engine.submit(TOKENS[:21] + prompt(9, 1, vocabulary=16))
    engine.run()
    request = engine.submit(TOKENS)
    run_all(engine, it)
    report = it.report_of(request)
    assert (report.local_tokens, report.offered) == (21, 0)
    engine.reset_prefix_cache()
    last = engine.submit(TOKENS)
    run_all(engine, it)
    assert it.report_of(last).confirmed == 56


@pytest.mark.parametrize("dialect", ["M", "B"])
def test_a_replay_loads_again(dialect: str) -> None:
    it = bench()
    engine = stepped(it.spec(), dialect=dialect)
    engine.submit(TOKENS, max_new_tokens=4)
    engine.run()
    engine.reset_prefix_cache()
    request = engine.submit(TOKENS, max_new_tokens=4)
    engine.step()
    (replayed,) = engine.executor.requests
    engine.executor._destroy(replayed)
    engine.reset_prefix_cache()  # else its own blocks are local
    run_all(engine, it)
    assert [report.confirmed for report in it.sink.reports if report.request_id == request] == [56, 56]
    assert engine.ended[request].token_ids == engine.ended[1].token_ids


def test_an_overtaken_offer_loads_its_rest_only() -> None:
    it = bench()
    engine = stepped(it.spec(), dice=Script(overtaken_offer=[True]), dialect="B")
    engine.submit(TOKENS)
    engine.run()
    engine.reset_prefix_cache()
    engine.submit(TOKENS[:33])  # loaded, and kept on the device
    engine.run()
    loaded = it.rank.counts["loaded_blocks"]
    engine.submit(TOKENS)
    run_all(engine, it)
    assert (loaded, it.rank.counts["loaded_blocks"]) == (4, 7)
