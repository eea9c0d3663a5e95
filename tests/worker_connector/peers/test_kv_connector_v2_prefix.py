"""Counterparts of TensorRT-LLM's unit tests of the prefix path of KVCacheManagerV2 (NVIDIA/TensorRT-LLM#18762), under
their names: when that manager asks, and how much of an offer it takes. There the manager is the subject; here what our
connector makes of each of its decisions. Every forward pass checks the bytes that it reads. The table is in
README.md."""

from __future__ import annotations

import pytest

from dynamo_semkv.contracts.report import Outcome, Reason
from tests.worker_connector.harness import MIB, settings
from tests.worker_connector.scripted import OPTIONS, SIZE, Request, ScriptedEngine, make
from worker_connector.leader.cache_generation import FORGET_AFTER, SWEEP_EVERY

PROMPT = list(range(41))


def asked(tokens: list[int] | None = None, **options: object) -> tuple[ScriptedEngine, Request]:
    """A second request of a served prompt, asked about, with 40 tokens offered."""
    engine = make(**options)
    engine.serve(PROMPT)
    again = engine.request(tokens if tokens is not None else PROMPT)
    assert engine.ask(again) == 40
    return engine, again


# when it is asked


def test_the_scheduling_pass_does_not_ask() -> None:
    """A version that did ask there could ask for what is then never scheduled: the lease comes back by itself,
    unreported as a success."""
    engine, again = asked()
    assert engine.leader.snapshot()["leases"] == 1
    engine.idle(FORGET_AFTER + SWEEP_EVERY)
    assert engine.leader.snapshot()["leases"] == 0
    assert engine.report_of(again).outcome is Outcome.CANCELLED
    engine.check_balance()


def test_the_connector_is_asked_once_per_allocation() -> None:
    """And if it is asked twice all the same, the second question is the same attempt: one report, one lease, one
    load."""
    engine, again = asked()
    assert engine.ask(again) == 40
    engine.allocate(again, 0, 40, 41)
    engine.iterate((again, 1))
    assert engine.rank.counts["loaded_blocks"] == 10
    assert engine.report_of(again).confirmed == 40


def test_a_second_pass_reports_one_allocation() -> None:
    """A batch that is dropped and built again may report an allocation twice before it runs; the last word counts."""
    engine, again = asked()
    engine.allocate(again, 0, 40, 41)
    again.context_current_position, again.external = 16, 16
    engine.leader.allocated(again)
    engine.leader.allocated(again)
    engine.iterate((again, 25))
    report = engine.report_of(again)
    assert (report.honoured, report.confirmed, engine.rank.counts["loaded_blocks"]) == (16, 16, 4)


def test_an_excluded_request_is_still_reported_once() -> None:
    """Kinds that are never asked about (dummies, generation-only, disaggregated generation) have allocations and
    reports: nothing is known of their KV, so nothing is loaded, saved or donated."""
    engine = make()
    engine.serve(PROMPT)
    stranger = engine.request(PROMPT)
    engine.allocate(stranger, 0, 0, 41)
    engine.iterate((stranger, 41))
    stranger.tokens.append(1)
    engine.iterate((stranger, 1))
    engine.finish(stranger)
    assert engine.leader.counts["unknown_request"] == 1
    assert engine.rank.counts["saved_blocks"] == 10
    assert [report.request_id for report in engine.sink.reports] == [1]
    engine.check_balance()


# how much of it is taken


@pytest.mark.parametrize("length", [4, 5, 8, 9, 39, 40, 41])
def test_the_last_prompt_token_stays_local(length: int) -> None:
    """The engine cuts an offer at the last token of the prompt, in the middle of a block; ours never gets that far."""
    engine = make()
    engine.serve(PROMPT)
    again = engine.request(PROMPT[:length])
    offered = engine.prefill(again)
    assert offered == (length - 1) // SIZE * SIZE
    assert engine.report_of(again).confirmed == offered


def test_the_query_is_anchored_at_the_local_match() -> None:
    """Past what the engine holds, counted from there; a match that ends inside a block cannot be continued by whole
    blocks."""
    engine = make()
    engine.serve(PROMPT)
    again = engine.request(PROMPT)
    assert engine.ask(again, 16) == 24
    engine.allocate(again, 16, 24, 41)
    engine.write(again, 0, 16)
    engine.iterate((again, 1))
    assert engine.rank.counts["loaded_blocks"] == 6
    assert engine.report_of(again).local_tokens == 16
    partial = engine.request(PROMPT)
    assert engine.ask(partial, 18) == 0
    engine.allocate(partial, 18, 0, 41)
    engine.write(partial, 0, 18)
    engine.iterate((partial, 23))
    assert engine.report_of(partial).reason is Reason.MISALIGNED_LOCAL


def test_an_empty_offer_touches_nothing() -> None:
    engine = make()
    engine.serve(PROMPT)
    other = engine.request(range(500, 541))
    assert engine.ask(other) == 0
    assert engine.leader.snapshot()["leases"] == 0
    engine.allocate(other, 0, 0, 41)
    engine.iterate((other, 41))
    assert engine.metadata.loads == ()
    assert engine.report_of(other).outcome is Outcome.NO_DONOR


@pytest.mark.parametrize("scheduled", [1, 13, 21])
def test_the_chunk_end_does_not_move(scheduled: int) -> None:
    """Inside the chunk: its start moves behind the offer, its end stays. The blocks that it completes are saved in the
    same pass."""
    engine, again = asked([*PROMPT[:40], *range(200, 221)])
    engine.allocate(again, 0, 40, 40 + scheduled)
    engine.iterate((again, scheduled))
    assert sum(len(order.moves) for order in engine.metadata.saves) == scheduled // SIZE
    while again.context_current_position < 61:
        engine.iterate((again, min(8, 61 - again.context_current_position)))
    again.tokens.append(1)
    engine.finish(again)
    assert engine.leader.snapshot()["ledger"]["resident"] == 15


def test_the_window_shifts_and_the_allocation_grows() -> None:
    """An offer beyond the first chunk: pages up to its end and a chunk behind it, and no chunk inside what is
    served."""
    engine, again = asked([*PROMPT[:40], *range(200, 221)])
    engine.allocate(again, 0, 40, 40 + 8)
    assert len(again.pages[0]) == 12
    engine.iterate((again, 8))
    assert engine.rank.counts["loaded_blocks"] == 10
    assert engine.report_of(again).confirmed == 40


@pytest.mark.parametrize("chunk_end", [8, 16, 30])
def test_a_failed_grow_falls_back_to_the_pages_that_exist(chunk_end: int) -> None:
    """The largest whole block inside the first chunk that leaves a token to compute: so much is loaded, and counted as
    honoured."""
    engine, again = asked()
    honoured = (chunk_end - 1) // SIZE * SIZE
    engine.allocate(again, 0, honoured, chunk_end)
    engine.iterate((again, chunk_end - honoured))
    assert engine.rank.counts["loaded_blocks"] == honoured // SIZE
    while again.context_current_position < 41:
        engine.iterate((again, min(8, 41 - again.context_current_position)))
    report = engine.report_of(again)
    assert (report.offered, report.honoured, report.copied, report.confirmed) == (40, honoured, honoured, honoured)
    again.tokens.append(1)
    engine.finish(again)
    engine.check_balance()


def test_a_fallback_that_cannot_advance_honours_nothing() -> None:
    engine, again = asked()
    engine.allocate(again, 0, 0, SIZE)
    engine.iterate((again, SIZE))
    assert engine.leader.snapshot()["leases"] == 0
    assert (engine.report_of(again).honoured, engine.report_of(again).reason) == (0, Reason.NOT_HONOURED)
    assert engine.rank.counts["loaded_blocks"] == 0


def test_a_non_final_chunk_end_stays_block_aligned() -> None:
    """And if it did not: a chunk that ends inside a block completes none, and the next one completes it."""
    engine, again = asked([*PROMPT[:40], *range(200, 221)])
    engine.allocate(again, 0, 40, 43)
    engine.iterate((again, 3))
    assert engine.metadata.saves == ()
    engine.iterate((again, 18))
    assert sum(len(order.moves) for order in engine.metadata.saves) == 5


# a served request that comes back before it runs


def test_the_same_holds_for_a_synchronous_serve() -> None:
    """The engine forgets that it was served and computes all of it: what was loaded is not called materialized, and
    nothing leaks."""
    engine, again = asked()
    engine.allocate(again, 0, 40, 41)
    engine.iterate((again, 1), forward=False)
    assert engine.rank.counts["loaded_blocks"] == 10
    again.context_current_position = 0
    engine.iterate((again, 41))
    report = engine.report_of(again)
    assert (report.copied, report.confirmed, report.reason) == (40, 0, Reason.NOT_SCHEDULED)
    again.tokens.append(1)
    engine.finish(again)
    engine.check_balance()


def test_a_served_request_that_runs_one_iteration_later_is_confirmed() -> None:
    """Its batch was dropped behind the copy, as when another data-parallel rank has nothing to run; then the pass
    starts from there."""
    engine, again = asked()
    engine.allocate(again, 0, 40, 41)
    engine.iterate((again, 1), forward=False)
    engine.iterate((again, 1))
    report = engine.report_of(again)
    assert (report.copied, report.confirmed, report.reason) == (40, 40, Reason.OK)


def test_token_budget_rejection_releases_a_reservation() -> None:
    """Asked, allocated, then dropped from the batch by the budget, and its pages taken back: the replay is asked and
    served as new."""
    engine, again = asked()
    engine.allocate(again, 0, 40, 41)
    engine.idle()
    engine.release(again)
    again.context_current_position = again.external = 0
    assert engine.prefill(again) == 40
    assert engine.leader.snapshot()["leases"] == 0
    (report,) = [report for report in engine.sink.reports if report.request_id == again.request_id]
    assert report.confirmed == 40


def test_history_is_raised_to_the_served_position() -> None:
    """A window group has no page for what the window of the served end has passed, and the load asks for none."""
    engine = ScriptedEngine(settings(MIB, **OPTIONS), windows=(None, 8))
    first = engine.request(PROMPT)
    engine.prefill(first, chunk=SIZE)
    first.tokens.append(1)
    engine.finish(first)
    again = engine.request(PROMPT)
    assert engine.prefill(again) == 40
    assert again.pages[1][:8] == [-1] * 8
    assert -1 not in again.pages[1][9:]
    assert engine.report_of(again).confirmed == 40
