"""Counterparts of tests/unittest/_torch/test_connector.py of NVIDIA/TensorRT-LLM, under its names: the runtime's
manager between executor and connector. There the manager is the subject; here our connector, given what such a manager
reports. The table is in README.md."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dynamo_semkv.contracts.report import Outcome, Reason
from tests.worker_connector.harness import Bench, settings
from tests.worker_connector.harness import engine as poisoned_engine
from tests.worker_connector.scripted import SIZE, make

PROMPT = list(range(41))


def test_connector_manager_num_matched_tokens() -> None:
    """The question carries what the engine holds; the answer counts from there, in whole blocks."""
    engine = make()
    engine.serve(PROMPT)
    assert [engine.ask(engine.request(PROMPT), computed) for computed in (0, 32, 36, 40)] == [40, 8, 4, 0]


def test_connector_manager_query_is_side_effect_free() -> None:
    """Asked and never heard of again, or asked twice: nothing is sent, nothing changes hands, and one lease is held at
    most."""
    engine = make()
    engine.serve(PROMPT)
    before = engine.leader.snapshot()["ledger"]
    request = engine.request(PROMPT)
    assert engine.ask(request) == engine.ask(request) == 40
    assert engine.leader.snapshot()["leases"] == 1
    assert engine.leader.snapshot()["ledger"] == {**before, "leased": 10}
    engine.iterate()
    assert (engine.metadata.loads, engine.metadata.saves) == ((), ())
    assert not [report for report in engine.sink.reports if report.request_id == request.request_id]


@pytest.mark.parametrize("honoured", [0, 8, 32])
def test_connector_manager_commits_only_what_is_honoured(honoured: int) -> None:
    """What the engine did not take is neither loaded nor counted as honoured."""
    engine = make()
    engine.serve(PROMPT)
    again = engine.request(PROMPT)
    assert engine.prefill(again, honoured=honoured) == 40
    report = engine.report_of(again)
    assert (report.offered, report.honoured, report.copied, report.confirmed) == (40, honoured, honoured, honoured)
    assert report.reason is (Reason.OK if honoured else Reason.NOT_HONOURED)
    assert engine.rank.counts["loaded_blocks"] == honoured // SIZE
    engine.finish(again)
    engine.check_balance()


def test_scheduler_output_keeps_deltas_while_the_allocation_lives() -> None:
    """The batch was dropped between report and forward pass: the next report is a cached one with nothing new in it.
    Tokens and pages are not taken twice (ai-dynamo/dynamo#5620), nothing is loaded twice, and the pass that comes then
    runs on what the first one loaded."""
    engine = make()
    engine.serve(PROMPT)
    again = engine.request(PROMPT)
    engine.ask(again)
    engine.allocate(again, 0, 40, 41)
    engine.iterate((again, 1), forward=False)
    assert engine.metadata.loads
    engine.iterate((again, 1))  # checks every byte that it reads
    assert engine.metadata.loads == ()
    tracked = engine.leader._life.running.get(again.request_id)  # type: ignore[union-attr]
    assert tracked is not None
    # Of the eleven pages the last one, which the dropped batch had grown by, may be another's by now: nothing is saved
    # from it.
    assert (tracked.token_count, len(tracked.pages)) == (41, 10)
    again.tokens.append(1)
    engine.finish(again)
    engine.check_balance()


def test_scheduler_output_num_scheduled_tokens_with_mtp() -> None:
    """A decode that schedules draft tokens as well counts positions whose tokens nobody knows yet: no block is made of
    them."""
    engine = make()
    request = engine.request(list(range(10)))
    engine.prefill(request)
    request.tokens.append(77)
    engine.schedule(request, 1 + 3)  # 10 .. 13, of which 11 to 13 are drafts: the third block is full if they are right
    assert engine.build().saves == ()
    assert engine.leader.snapshot()["saves"]["ordered"] == 2


@pytest.mark.parametrize("hashes", [[], [12345], [0, -1, 2**63]])
def test_scheduler_output_block_hashes_read_through(hashes: list[int]) -> None:
    """The engine's own hashes are nobody's identity: whatever comes in them, blocks are known by their tokens
    (TensorRT-LLM#14005)."""
    engine = make()
    for served in (0, 40):
        request = engine.request(PROMPT)
        offered = engine.ask(request)
        assert offered == served
        engine.allocate(request, 0, offered, 41)
        engine.schedule(request, 41 - offered)
        engine.output.new_requests[0].block_hashes = list(hashes)
        engine.iterate()
        engine.write(request, offered, 41)
        engine.rank.forward_done(engine.metadata, None)
        request.tokens.append(1)
        engine.finish(request)
    assert engine.leader.snapshot()["ledger"]["resident"] == 10


@pytest.mark.parametrize("groups", [[], [[]], [[], []]])
def test_an_empty_group_list_reaches_the_flat_callbacks(groups: list[list[int]]) -> None:
    """A request without any page, in each spelling: no fault and nothing to do."""
    bench = Bench(settings())
    with poisoned_engine(bench):
        scheduler, request = bench.schedulers[0], SimpleNamespace(request_id=3)
        scheduler.update_state_after_alloc(request, [])
        scheduler.update_state_after_alloc_by_layer_group(request, groups)
        assert scheduler.request_finished(request, []) is False
        assert scheduler.request_finished_by_layer_group(request, groups) is False
        assert not scheduler.faults


@pytest.mark.parametrize("cuts", [[(32, 40), (24, 32)], [(32, 40), (32, 40), (24, 40)]])
def test_connector_manager_cancel_load_is_additive(cuts: list[tuple[int, int]]) -> None:
    """An offer that is cut twice ends where the deepest cut begins. Seen where a version says its position in no other
    way."""
    engine = make()
    engine.serve(PROMPT)
    again = engine.request(PROMPT)
    engine.ask(again)
    for start, end in cuts:
        engine.leader.cancelled(again, start, end)
    engine.allocate(again, 0, 24, 25)
    attempt = engine.leader._life.attempts.get(again.request_id)  # type: ignore[union-attr]
    assert attempt is not None
    assert attempt.plan is not None
    attempt.position = attempt.plan.position = None
    engine.iterate((again, 1))
    assert engine.rank.counts["loaded_blocks"] == 6
    assert engine.report_of(again).outcome is Outcome.MATERIALIZED_EXACT
