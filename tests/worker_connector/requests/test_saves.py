"""Which blocks are saved, when they may be offered, and what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from dynamo_semkv.contracts.donor_events import DonorEvicted, DonorRegistered
from dynamo_semkv.contracts.report import Outcome, Reason
from tests.worker_connector.scripted import Request, ScriptedEngine, make
from worker_connector.leader.cache_generation import FORGET_AFTER, SWEEP_EVERY
from worker_connector.link.metadata import SaveOrder
from worker_connector.memory.slab import HostSlab
from worker_connector.rank.rank import Rank


@pytest.mark.parametrize("flat", [False, True])
def test_lmcache_3640_chunked_prefill_saves_and_binds_all_chunks(flat: bool) -> None:
    """LMCache#3640: later chunks come as deltas in `cached_requests`; a prompt of three chunks is saved and served
    whole."""
    engine = make(flat=flat)
    tokens = list(range(36))
    first = engine.request(tokens)
    assert engine.prefill(first, chunk=12) == 0
    engine.decode(first, [7])
    engine.finish(first)
    assert engine.leader.snapshot()["ledger"]["resident"] == 9
    second = engine.request([*tokens, 99, 98])
    assert engine.prefill(second, chunk=12) == 36
    report = engine.report_of(second)
    assert (report.offered, report.honoured, report.copied, report.confirmed) == (36, 36, 36, 36)
    assert (report.outcome, report.reason) == (Outcome.MATERIALIZED_EXACT, Reason.OK)


def test_unhonoured_tail_is_saved_when_computed_if_it_left_meanwhile() -> None:
    """What the offer promised and the engine computed itself is a block like any other: saved if it is not there."""
    engine = make()
    tokens = list(range(25))
    first = engine.serve(tokens)
    again = engine.request(tokens)
    assert engine.ask(again) == 24
    engine.allocate(again, 0, 8, 25)
    engine.iterate((again, 17))
    ledger = engine.leader._life.ledger  # type: ignore[union-attr]
    assert ledger is not None
    path = ledger.match(engine.leader._life.attempts.get(again.request_id).digest, _raw(tokens), 6).path  # type: ignore[union-attr]
    assert len(path) == 6
    engine.leader._life.damaged(path[3].slot, loaded=False)  # type: ignore[union-attr]
    assert engine.leader.snapshot()["ledger"]["resident"] == 3
    again.tokens.append(1)
    engine.finish(again)
    third = engine.request(tokens)
    engine.prefill(third)
    third.tokens.append(1)
    engine.finish(third)
    assert engine.leader.snapshot()["ledger"]["resident"] == 6
    assert first.request_id != third.request_id
    engine.check_balance()


def _two_in_one_pass(engine: ScriptedEngine) -> list[Request]:
    """Their orders are one copy."""
    both = [engine.request([first] * 9) for first in (1, 2)]
    for request in both:
        engine.ask(request)
        engine.allocate(request, 0, 0, 9)
    metadata = engine.iterate(*((request, 9) for request in both))
    assert len(metadata.saves) == 2
    return both


def test_a_fault_of_one_order_costs_the_blocks_of_that_order_only(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    real = Rank._save

    def save(self: Rank, orders: Sequence[SaveOrder], engine_stream: Any) -> None:
        beyond = tuple(move._replace(slot=10**6) for move in orders[0].moves)
        real(self, [replace(orders[0], moves=beyond), *orders[1:]], engine_stream)

    monkeypatch.setattr(Rank, "_save", save)
    broken, whole = _two_in_one_pass(engine)
    monkeypatch.undo()
    for request in (broken, whole):
        request.tokens.append(7)
        engine.finish(request)
    assert engine.rank.counts["save_errors"] == 1
    numbers = engine.leader.snapshot()
    assert (numbers["saves"]["failed"], numbers["ledger"]["resident"]) == (2, 2)
    assert [engine.prefill(engine.request([first] * 9)) for first in (1, 2)] == [0, 8]


def test_a_fault_in_one_seal_leaves_no_order_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    real, calls = HostSlab.seal, []

    def seal(self: HostSlab, slots: Sequence[int]) -> None:
        calls.append(slots)
        if len(calls) == 1:
            raise RuntimeError("no memory for the sums")
        real(self, slots)

    monkeypatch.setattr(HostSlab, "seal", seal)
    _two_in_one_pass(engine)
    numbers = engine.leader.snapshot()
    assert (numbers["open_saves"], numbers["saves"]["failed"], len(calls)) == (0, 2, 2)
    assert engine.rank.snapshot()["sealing_failed"] == 1


def test_local_blocks_that_left_the_slab_are_saved_again() -> None:
    engine = make()
    tokens = list(range(21))
    request = engine.request(tokens)
    assert engine.ask(request, 12) == 0
    engine.allocate(request, 12, 0, 21)
    engine.write(request, 0, 12)
    engine.iterate((request, 9))
    request.tokens.append(3)
    engine.finish(request)
    assert engine.leader.snapshot()["ledger"]["resident"] == 5


def test_trtllm_12673_blocks_are_saved_only_once_computed() -> None:
    """NVIDIA/TensorRT-LLM#12673: pages exist for the whole prompt, KV only for the first chunk."""
    engine = make(flat=True)
    request = engine.request(list(range(40)))
    engine.ask(request)
    engine.allocate(request, 0, 0, 40)
    metadata = engine.iterate((request, 10))
    assert [len(order.moves) for order in metadata.saves] == [2]
    metadata = engine.iterate((request, 30))
    assert [len(order.moves) for order in metadata.saves] == [8]


def test_trtllm_13318_overstated_chunk_is_not_believed() -> None:
    """NVIDIA/TensorRT-LLM#13318: more was reported as scheduled than the trimmed batch computed; the blocks copied too
    early are thrown away and saved again when they really are there."""
    engine = make()
    tokens = list(range(40))
    request = engine.request(tokens)
    engine.ask(request)
    engine.allocate(request, 0, 0, 40)
    engine.iterate((request, 32), computes=12)
    assert engine.leader.snapshot()["ledger"]["resident"] == 0
    engine.iterate((request, 28))
    assert engine.leader.snapshot()["saves"]["overstated"] == 5
    request.tokens.append(1)
    engine.finish(request)
    again = engine.request([*tokens, 50])
    assert engine.prefill(again) == 40
    engine.finish(again)
    engine.check_balance()


def test_trtllm_13318_a_last_token_that_was_left_out_is_not_taken_for_computed() -> None:
    """NVIDIA/TensorRT-LLM#13318, for a chunk of one token that ends prompt and block: a report under overlap scheduling
    may lag so far behind, but this one starts where the one before did. What was copied behind the pass without it is
    not what comes to be there."""
    engine = make()
    request = engine.request(list(range(8)))
    engine.ask(request)
    engine.allocate(request, 0, 0, 8)
    engine.iterate((request, 7))
    engine.iterate((request, 1), computes=0)
    engine.iterate((request, 1))
    request.tokens.append(1)
    engine.finish(request)
    assert engine.leader.snapshot()["saves"]["overstated"] == 1
    again = engine.request(list(range(12)))
    assert engine.prefill(again) == 8
    engine.finish(again)
    engine.check_balance()


def test_generated_blocks_are_saved_for_the_next_turn() -> None:
    engine = make()
    first = engine.request(list(range(10)))
    engine.prefill(first)
    engine.decode(first, [50, 51, 52, 53, 54, 55])
    engine.finish(first)
    turn = engine.request([*first.tokens, 60, 61])
    assert engine.prefill(turn) == 16
    engine.finish(turn)
    engine.check_balance()


def test_decode_that_reports_late_is_waited_for() -> None:
    """Under overlap scheduling the first decode report has no new token yet, so its position lags one behind."""
    engine = make()
    request = engine.request(list(range(8)))
    engine.prefill(request)
    request.context_current_position = 7
    engine.schedule(request, 1)
    engine.build()
    engine.rank.start_load(engine.metadata, None)
    engine.rank.forward_done(engine.metadata, None)
    assert engine.leader.snapshot()["ledger"] | {"resident": 1, "pending": 1} == engine.leader.snapshot()["ledger"]
    request.tokens.append(5)
    engine.finish(request)
    assert engine.leader.snapshot()["ledger"]["resident"] == 2
    engine.check_balance()


def test_trtllm_15018_cancelled_requests_never_donate() -> None:
    """NVIDIA/TensorRT-LLM#15018: nobody says that a request was cancelled. What is not proven by then is thrown
    away."""
    engine = make()
    request = engine.request(list(range(41)))
    engine.prefill(request)
    engine.release(request)
    assert engine.leader.snapshot()["tracked"] == 1
    engine.idle(FORGET_AFTER + SWEEP_EVERY)
    numbers = engine.leader.snapshot()
    assert numbers["ledger"]["resident"] == 0
    assert numbers["counts"]["vanished"] == 1
    assert not engine.sink.events(DonorRegistered)
    engine.check_balance()


def test_request_that_ends_as_cancelled_does_not_donate() -> None:
    engine = make()
    request = engine.request(list(range(41)), is_finished_due_to_cancellation=True)
    engine.prefill(request)
    engine.finish(request)
    assert engine.leader.snapshot()["ledger"]["resident"] == 0
    assert not engine.sink.events(DonorRegistered)
    engine.check_balance()


def test_cancelled_between_question_and_batch_gives_its_lease_back() -> None:
    engine = make()
    tokens = list(range(41))
    engine.serve(tokens)
    lost = engine.request(tokens)
    engine.ask(lost)
    assert engine.leader.snapshot()["leases"] == 1
    engine.idle(FORGET_AFTER + 2 * SWEEP_EVERY)
    assert engine.report_of(lost).outcome is Outcome.CANCELLED
    engine.check_balance()


def test_idle_engine_forgets_by_time_but_keeps_unanswered_offers() -> None:
    engine = make()
    tokens = list(range(41))
    engine.serve(tokens)
    running = engine.request([*tokens, 1])
    engine.prefill(running)
    asked = engine.request(tokens)
    engine.ask(asked)
    engine.leader.sweep_idle()
    assert engine.leader.snapshot()["tracked"] == 1
    engine.now += 31.0
    engine.leader.sweep_idle()
    numbers = engine.leader.snapshot()
    assert (numbers["tracked"], numbers["leases"]) == (0, 1)
    engine.release(running)
    engine.allocate(asked, 0, 40, 41)
    engine.iterate((asked, 1))
    asked.tokens.append(1)
    engine.finish(asked)
    assert engine.report_of(asked).confirmed == 40
    engine.check_balance()


def test_equal_prompts_in_one_batch_are_saved_once() -> None:
    engine = make()
    tokens = list(range(21))
    first, second = engine.request(tokens), engine.request(tokens)
    for request in (first, second):
        engine.ask(request)
        engine.allocate(request, 0, 0, 21)
    metadata = engine.iterate((first, 21), (second, 21))
    assert sum(len(order.moves) for order in metadata.saves) == 5
    for request in (first, second):
        request.tokens.append(2)
        engine.finish(request)
    assert engine.leader.snapshot()["ledger"]["resident"] == 5
    engine.check_balance()


def test_second_request_saves_what_the_first_one_lost() -> None:
    """While another request saves a block it is waited for; when that one is cancelled, the second saves it itself."""
    engine = make()
    tokens = list(range(21))
    first, second = engine.request(tokens), engine.request(tokens)
    for request in (first, second):
        engine.ask(request)
        engine.allocate(request, 0, 0, 21)
    engine.iterate((first, 21), (second, 21))
    first.is_finished_due_to_cancellation = True
    engine.finish(first)
    engine.decode(second, [7])
    engine.finish(second)
    assert engine.leader.snapshot()["ledger"]["resident"] == 5
    engine.check_balance()


def test_full_slab_evicts_least_recently_used_and_tells_donors() -> None:
    engine = make()
    slots = engine.leader.snapshot()["ledger"]["slots"]
    prompts = [list(range(1000 * n, 1000 * n + 41)) for n in range(slots // 10 + 5)]
    for tokens in prompts:
        engine.serve(tokens)
    numbers = engine.leader.snapshot()
    assert numbers["ledger"]["evicted"] == 10 * len(prompts) - slots
    assert engine.ask(engine.request(prompts[0])) == 0
    assert engine.ask(engine.request(prompts[-1])) == 40
    registered = {event.donor_id for event in engine.sink.events(DonorRegistered)}
    evicted = {event.donor_id for event in engine.sink.events(DonorEvicted)}
    assert len(registered) == len(prompts)
    assert len(registered) - len(evicted) == engine.leader.snapshot()["donors"]
    assert len(evicted) >= 4


@pytest.mark.parametrize("windows", [(None, 12), (12, None), (None, 6, 12)])
def test_groups_are_saved_and_served_together(windows: tuple[int | None, ...]) -> None:
    """A block is served only when every group holds it; blocks that a window has passed have no page and are left out
    of the copy."""
    engine = make(windows=windows)
    tokens = list(range(41))
    first = engine.request(tokens)
    engine.prefill(first, chunk=4)
    first.tokens.append(1)
    engine.finish(first)
    assert engine.leader.snapshot()["ledger"]["resident"] == 10
    again = engine.request(tokens)
    assert engine.prefill(again) == 40
    assert -1 in again.pages[windows.index(12)]
    assert engine.report_of(again).confirmed == 40


def test_block_without_a_page_in_one_group_ends_the_saved_chain() -> None:
    engine = make(windows=(None, None))
    request = engine.request(list(range(41)))
    engine.ask(request)
    engine.allocate(request, 0, 0, 41)
    request.pages[1][4] = -1
    request.context_current_position = 0
    engine.schedule(request, 41)
    metadata = engine.build()
    assert [len(order.moves) for order in metadata.saves] == [4]


def test_token_that_cannot_be_read_ends_the_saves_of_its_request() -> None:
    """Later ones would be taken for the tokens of the positions before them, and their KV be served to a prompt that
    has them there."""
    engine = make()
    request = engine.request(range(9))
    engine.prefill(request)
    engine.decode(request, [-1, 11, 12, 13, 14, 15, 16, 17])
    saved = engine.leader.resident_blocks()
    engine.finish(request)
    other = engine.request([*range(9), 11, 12, 13, 14, 15])
    assert engine.ask(other) == 8
    assert saved == 2
    assert engine.leader.counts["misread_reports"] == 1


def test_dummies_touch_nothing() -> None:
    engine = make()
    dummy = engine.request(list(range(41)), is_dummy=True)
    assert engine.ask(dummy) == 0
    engine.allocate(dummy, 0, 0, 41)
    engine.iterate((dummy, 41))
    assert engine.rank.counts["saved_blocks"] == 0
    assert not engine.sink.reports


def _raw(tokens: Sequence[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)
