"""Counterparts of TensorRT-LLM's unit tests of its connector manager under attention data parallelism, under their
names: one scheduler and one worker per owner rank. The table is in README.md."""

from __future__ import annotations

import pytest

from dynamo_semkv.contracts.report import Outcome
from tests.worker_connector.harness import MIB, Bench, engine, prompt, quiet, run, settings
from tests.worker_connector.scripted import OPTIONS, ScriptedEngine, llm_args, make
from worker_connector.connector import SemkvConnectorScheduler, SemkvConnectorWorker

PROMPT = list(range(41))


def test_adp_requires_explicit_backend_support() -> None:
    """Both classes say it, of themselves: a subclass that does not is not believed by the engine."""
    assert SemkvConnectorScheduler.supports_attention_dp is True
    assert SemkvConnectorWorker.supports_attention_dp is True


@pytest.mark.parametrize("counts", [(2, 2), (3, 0), (0, 4)])
def test_disjoint_owner_callbacks_and_metadata(counts: tuple[int, int]) -> None:
    """Each owner is asked about its own requests only, and orders pages of its own pool, also beside an owner with
    nothing to do."""
    args = llm_args(4, enable_attention_dp=True, tensor_parallel_size=2)
    owners = [ScriptedEngine(settings(MIB, **OPTIONS), args=args, dp_rank=rank) for rank in range(2)]
    for owner, count in zip(owners, counts, strict=True):
        for index in range(count):
            owner.serve([*range(40), 100 + index])
        owner.idle()
    for rank, (owner, count) in enumerate(zip(owners, counts, strict=True)):
        assert owner.leader.snapshot()["attempt_counts"].get("asked", 0) == count
        assert {report.dp_rank for report in owner.sink.reports} == ({rank} if count else set())
        assert owner.rank.counts["saved_blocks"] == (10 if count else 0)
        owner.check_balance()


def test_owner_completion_does_not_wait_for_idle_peer() -> None:
    """A load and a save of one rank end while the other rank does not even iterate."""
    args = llm_args(4, enable_attention_dp=True, tensor_parallel_size=2)
    busy, idle = (ScriptedEngine(settings(MIB, **OPTIONS), args=args, dp_rank=rank) for rank in range(2))
    busy.serve(PROMPT)
    again = busy.request(PROMPT)
    assert busy.prefill(again) == busy.report_of(again).confirmed == 40
    assert idle.leader.snapshot()["iteration"] == 0
    busy.finish(again)
    busy.check_balance()


@pytest.mark.parametrize("name", ["is_dummy", "is_dummy_request"])
def test_dummy_requests_never_reach_storage(name: str) -> None:
    """Under either name, beside a real request in the batch."""
    engine = make()
    engine.serve(PROMPT)
    dummy, real = engine.request(PROMPT), engine.request(PROMPT)
    setattr(dummy, name, True)
    assert engine.ask(dummy) == 0
    assert engine.ask(real) == 40
    engine.allocate(dummy, 0, 0, 41)
    engine.allocate(real, 0, 40, 41)
    engine.iterate((dummy, 41), (real, 1))
    engine.leader.finished(dummy)
    assert [order.key.request_id for order in engine.metadata.loads] == [real.request_id]
    assert engine.metadata.saves == ()
    assert {report.request_id for report in engine.sink.reports} == {1, real.request_id}


def test_finished_request_releases_metadata_state() -> None:
    """Of a request that ended nothing is left, and its id may come again."""
    engine = make()
    engine.serve(PROMPT)
    again = engine.request(PROMPT)
    engine.prefill(again)
    again.tokens.append(1)
    engine.finish(again)
    numbers = engine.leader.snapshot()
    assert (numbers["attempts"], numbers["tracked"], numbers["leases"], numbers["open_saves"]) == (0, 0, 0, 0)
    engine.next_id = again.request_id
    reused = engine.request(PROMPT)
    assert engine.prefill(reused) == 40
    engine.finish(reused)
    reports = [report for report in engine.sink.reports if report.request_id == again.request_id]
    assert [(report.epoch, report.outcome) for report in reports] == [(0, Outcome.MATERIALIZED_EXACT)] * 2


def test_two_owners_of_one_process_do_not_serve_each_other() -> None:
    """Slabs are per owner: what one saved is a plain miss on the other, never bytes of another pool."""
    bench, tokens = Bench(settings()), prompt(100)
    with engine(bench, data_parallel_size=2) as running:
        run(running, tokens, dp_rank=0)
        running.reset_prefix_cache()
        _, other = run(running, tokens, dp_rank=1)
        quiet(bench)
    assert other.stats.connector_served_tokens == 0
