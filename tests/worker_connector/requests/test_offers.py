"""What is offered, leased, loaded and confirmed, step by step through an engine's life."""

from __future__ import annotations

import pickle

import pytest

from dynamo_semkv.contracts.report import Outcome, Reason
from tests.worker_connector.harness import MIB, settings
from tests.worker_connector.scripted import OPTIONS, SIZE, ScriptedEngine, make
from worker_connector.errors import LoadFailed
from worker_connector.leader.cache_generation import FORGET_AFTER, OFFER_PATIENCE, SWEEP_EVERY


@pytest.mark.parametrize("length", [k * SIZE + d for k in (1, 2, 5) for d in (-1, 0, 1)])
@pytest.mark.parametrize("local_blocks", [0, 1, 2])
def test_lmcache_4614_never_the_whole_prompt(length: int, local_blocks: int) -> None:
    """LMCache#4614, #3322: offered = min(match, prompt - 1) - computed in whole blocks, and the bytes moved are those
    offered."""
    engine = make()
    tokens = list(range(1, length + 1))
    engine.serve(tokens)
    computed = local_blocks * SIZE
    if computed > length:
        return
    again = engine.request(tokens)
    offered = engine.ask(again, computed)
    assert offered == max((length - 1) // SIZE * SIZE - computed, 0)
    assert computed + offered < length or offered == 0
    before = engine.rank.counts["loaded_blocks"]
    engine.allocate(again, computed, offered, length)
    engine.write(again, 0, computed)  # the engine's own prefix
    engine.iterate((again, length - computed - offered))
    assert (engine.rank.counts["loaded_blocks"] - before) * SIZE == offered
    engine.finish(again)
    engine.check_balance()


def test_only_whole_blocks_behind_whole_blocks() -> None:
    engine = make()
    tokens = list(range(40))
    engine.serve(tokens)
    again = engine.request(tokens)
    assert engine.ask(again, 6) == 0
    engine.allocate(again, 6, 0, 40)
    engine.write(again, 0, 6)
    engine.iterate((again, 34))
    assert engine.report_of(again).reason is Reason.MISALIGNED_LOCAL


def test_negative_position_is_read_as_nothing_computed() -> None:
    engine = make()
    tokens = list(range(40))
    engine.serve(tokens)
    assert engine.ask(engine.request(tokens), -3) == 36


@pytest.mark.parametrize("honoured", [0, 4, 8, 20, 30, 32])
def test_short_honour_loads_what_is_used_and_computes_the_rest(honoured: int) -> None:
    """The runtime may honour any prefix of an offer; one that ends inside a block needs that block whole."""
    engine = make()
    tokens = list(range(37))
    engine.serve(tokens)
    loaded = engine.rank.counts["loaded_blocks"]
    again = engine.request([*tokens[:33], 77, 78])
    assert engine.prefill(again, honoured=honoured, chunk=8) == 32
    assert engine.rank.counts["loaded_blocks"] - loaded == -(-honoured // SIZE)
    engine.decode(again, [5])
    engine.finish(again)
    report = engine.report_of(again)
    assert (report.offered, report.honoured, report.confirmed) == (32, honoured, honoured)
    expected = (Outcome.MATERIALIZED_EXACT, Reason.OK) if honoured else (Outcome.DECLINED, Reason.NOT_HONOURED)
    assert (report.outcome, report.reason) == expected
    engine.check_balance()


def test_batch_of_questions_before_the_first_allocation() -> None:
    """The V1 manager asks for the whole batch first: no answer may depend on "the current request"."""
    engine = make(flat=True)
    prompts = [list(range(base, base + 21)) for base in (0, 100, 200)]
    for tokens in prompts:
        engine.serve(tokens)
    requests = [engine.request([*tokens, 1, 2]) for tokens in prompts]
    offers = [engine.ask(request) for request in requests]
    assert offers == [20, 20, 20]
    for request in reversed(requests):
        engine.allocate(request, 0, 20, 23)
    engine.iterate(*((request, 3) for request in requests))
    for request in requests:
        request.tokens.append(9)
        engine.finish(request)
        assert engine.report_of(request).confirmed == 20
    engine.check_balance()


def test_question_put_again_before_it_ran_is_one_attempt() -> None:
    """V1 may fail to allocate and ask again: one lease, one report."""
    engine = make()
    tokens = list(range(21))
    engine.serve(tokens)
    again = engine.request(tokens)
    assert engine.ask(again) == engine.ask(again) == 20
    assert engine.leader.snapshot()["leases"] == 1
    engine.allocate(again, 0, 20, 21)
    engine.iterate((again, 1))
    again.tokens.append(1)
    engine.finish(again)
    report = engine.report_of(again)
    assert (report.epoch, report.confirmed) == (0, 20)
    engine.check_balance()


def test_replayed_allocation_is_another_epoch_and_loads_again() -> None:
    """A destroyed allocation comes back as a new request; the first plan may not be replayed onto the new pages."""
    engine = make()
    tokens = list(range(41))
    engine.serve(tokens)
    again = engine.request(tokens)
    engine.ask(again)
    engine.allocate(again, 0, 20, 30)
    engine.iterate((again, 10))
    engine.release(again)
    again.is_new, again.reported_tokens, again.reported_pages = True, 0, 0
    assert engine.ask(again) == 40
    engine.allocate(again, 0, 40, 41)
    engine.iterate((again, 1))
    again.tokens.append(1)
    engine.finish(again)
    reports = [report for report in engine.sink.reports if report.request_id == again.request_id]
    assert [(report.epoch, report.confirmed) for report in reports] == [(0, 20), (1, 40)]
    engine.check_balance()


def test_replay_that_is_not_asked_loads_nothing() -> None:
    engine = make()
    tokens = list(range(21))
    engine.serve(tokens)
    again = engine.request(tokens)
    engine.ask(again)
    engine.allocate(again, 0, 20, 21)
    engine.iterate((again, 1))
    loaded = engine.rank.counts["loaded_blocks"]
    engine.release(again)
    again.is_new, again.reported_tokens, again.reported_pages = True, 0, 0
    engine.allocate(again, 0, 0, 21)
    engine.iterate((again, 21))
    assert engine.rank.counts["loaded_blocks"] == loaded
    assert engine.leader.counts["unasked_replay"] == 1


def test_offer_given_up_but_used_fails_closed() -> None:
    """No forward pass may run over pages that nobody wrote."""
    engine = make()
    tokens = list(range(41))
    engine.serve(tokens)
    late = engine.request(tokens)
    engine.ask(late)
    attempt = engine.leader._life.attempts.get(late.request_id)  # type: ignore[union-attr]
    assert attempt is not None
    engine.leader._life.attempts.end(attempt, Reason.CANCELLED)  # type: ignore[union-attr]
    engine.allocate(late, 0, 40, 41)
    with pytest.raises(LoadFailed, match="given up"):
        engine.iterate((late, 1))


@pytest.mark.parametrize("restarts_failed", [False, True])
def test_offer_that_waits_long_for_its_batch_is_kept_and_then_given_up_loudly(restarts_failed: bool) -> None:
    """Decodes may take the whole token budget for hundreds of iterations. The engine has counted what it was offered,
    so forgetting that silently would be a forward pass over pages that nobody wrote."""
    for waits, kept in ((FORGET_AFTER + 4 * SWEEP_EVERY, True), (FORGET_AFTER + OFFER_PATIENCE + SWEEP_EVERY, False)):
        engine = make(restarts_failed=restarts_failed)
        engine.serve(list(range(41)))
        again = engine.request(list(range(41)))
        engine.ask(again)
        engine.allocate(again, 0, 40, 41)
        engine.idle(waits)
        assert engine.leader.snapshot()["leases"] == kept
        if kept:
            engine.iterate((again, 1))
            assert engine.report_of(again).confirmed == 40
        elif restarts_failed:
            engine.iterate((again, 1))  # leaves the batch
            assert engine.prefill(again) == 40
        else:
            with pytest.raises(LoadFailed, match="given up"):
                engine.iterate((again, 1))


def test_offer_that_was_not_taken_is_not_missed() -> None:
    engine = make()
    engine.serve(list(range(41)))
    again = engine.request(list(range(41)))
    engine.ask(again)
    engine.allocate(again, 0, 0, 41)
    engine.idle(FORGET_AFTER + SWEEP_EVERY)
    assert engine.leader.snapshot()["leases"] == 0
    engine.iterate((again, 41))
    assert engine.leader.counts["unknown_request"] == 1


def test_requests_that_were_given_up_are_remembered_within_bounds() -> None:
    engine = make()
    engine.serve(list(range(41)))
    life = engine.leader._life
    assert life is not None
    for _ in range(5000):
        again = engine.request(list(range(41)))
        engine.ask(again)
        engine.allocate(again, 0, 40, 0)
        life.sweep(OFFER_PATIENCE + 10)
    assert len(life.attempts._given_up) == 4096
    assert engine.leader.snapshot()["leases"] == 0


@pytest.mark.parametrize("restarts_failed", [False, True])
def test_vllm_42695_offer_of_before_a_weight_update_is_not_loaded_after_it(restarts_failed: bool) -> None:
    """Between the promise and its batch the weights changed: those bytes are another model's."""
    engine = make(restarts_failed=restarts_failed)
    engine.serve(list(range(41)))
    again = engine.request(list(range(41)))
    engine.ask(again)
    engine.allocate(again, 0, 40, 41)
    engine.leader.reset_cache()
    assert engine.leader.snapshot()["leases"] == 0
    assert engine.report_of(again).outcome is Outcome.STALE_DONOR
    if restarts_failed:
        engine.iterate((again, 1))
        assert engine.prefill(again) == 0
    else:
        with pytest.raises(LoadFailed, match="given up"):
            engine.iterate((again, 1))
    assert engine.rank.counts["loaded_blocks"] == 0


def test_missing_page_of_a_served_block_fails_closed() -> None:
    engine = make(flat=True)
    tokens = list(range(41))
    engine.serve(tokens)
    again = engine.request(tokens)
    engine.ask(again)
    engine.allocate(again, 0, 40, 41)
    again.pages[0][3] = -1
    with pytest.raises(LoadFailed, match="block 3"):
        engine.iterate((again, 1))
    engine.leader.finished(again)
    assert engine.leader.snapshot()["leases"] == 0
    assert engine.report_of(again).outcome is Outcome.LOAD_FAILED


def test_page_outside_the_pool_fails_closed() -> None:
    engine = make(flat=True)
    tokens = list(range(41))
    engine.serve(tokens)
    again = engine.request(tokens)
    engine.ask(again)
    engine.allocate(again, 0, 40, 41)
    again.pages[0][3] = 64
    with pytest.raises(LoadFailed, match="64"):
        engine.iterate((again, 1))
    assert engine.report_of(again).reason is Reason.COPY_FAILED
    assert engine.leader.snapshot()["leases"] == 0


@pytest.mark.parametrize(("honoured", "fails"), [(40, True), (16, True), (12, False)])
def test_damage_found_between_offer_and_load_fails_closed_if_it_is_used(honoured: int, fails: bool) -> None:
    """Donors are validated again after allocation (RFC, safety rule 6); the API leaves no way to decline any more, and
    bytes that are known to be wrong must not reach a page."""
    engine = make()
    tokens = list(range(41))
    engine.serve(tokens)
    again = engine.request(tokens)
    engine.ask(again)
    ledger = engine.leader._life.ledger  # type: ignore[union-attr]
    assert ledger is not None
    fourth = next(entry for entry in ledger.entries() if entry.ordinal == 3)
    engine.leader._life.damaged(fourth.slot, loaded=False)  # type: ignore[union-attr]
    engine.allocate(again, 0, honoured, 41)
    if fails:
        with pytest.raises(LoadFailed, match="damaged after it had been offered"):
            engine.iterate((again, 41 - honoured))
        report = engine.report_of(again)
        assert (report.outcome, report.reason) == (Outcome.LOAD_FAILED, Reason.CHECKSUM_MISMATCH)
    else:
        engine.iterate((again, 41 - honoured))
        assert engine.report_of(again).confirmed == honoured
    engine.leader.finished(again)
    engine.check_balance()


def test_metadata_survives_the_broadcast() -> None:
    """TensorRT-LLM pickles it to the other ranks."""
    engine = make()
    engine.serve(list(range(41)))
    again = engine.request([*range(41), *range(60, 100)])
    engine.prefill(again)
    assert engine.metadata.loads
    assert pickle.loads(pickle.dumps(engine.metadata)) == engine.metadata
    plan = engine.metadata.loads[0].plan
    assert (plan.first_ordinal, plan.token_count, len(plan.target_block_ids)) == (0, 40, 10)
    assert [ref.ordinal for ref in plan.donor_block_refs] == list(range(10))
    assert plan.provider_generation == engine.metadata.generation == engine.report_of(again).generation


def test_dynamo_13191_replay_does_not_close_the_route_twice() -> None:
    """The hint on the request is the same for its second allocation; its route was closed by the first one's report."""
    engine = make()
    tokens = list(range(41))
    engine.serve(tokens)
    payload = {
        "route_id": "a" * 32,
        "donor_id": "d",
        "expected_mode": "exact_equivalent",
        "generation": "g",
        "namespace": "n",
        "token_count": 40,
        "exact_prefix_tokens": 40,
        "score_bucket": "full",
    }
    action = {"action_id": "1", "action_type": "semkv.donor", "action_version": "1.0", "payload": payload}
    again = engine.request(tokens, kv_hints={"protocol_version": "0.1", "message_id": "m", "actions": [action]})
    for _ in range(2):
        offered = engine.ask(again)
        engine.allocate(again, 0, offered, 41)
        engine.iterate((again, 1))
        engine.release(again)
        again.is_new, again.reported_tokens, again.reported_pages, again.context_current_position = True, 0, 0, 0
    reports = [report for report in engine.sink.reports if report.request_id == again.request_id]
    assert [(report.epoch, report.route_id, report.donor_id) for report in reports] == [
        (0, "a" * 32, "d"),
        (1, None, "d"),
    ]


def test_metadata_is_executed_once() -> None:
    """It stays bound until the next iteration, and nothing clears it."""
    engine = make()
    engine.serve(list(range(41)))
    again = engine.request([*range(41), *range(60, 100)])
    assert engine.prefill(again) == 40
    assert engine.metadata.loads
    assert engine.metadata.saves
    loaded, saved = engine.rank.counts["loaded_blocks"], engine.rank.counts["saved_blocks"]
    engine.rank.start_load(engine.metadata, None)
    engine.rank.forward_done(engine.metadata, None)
    assert (engine.rank.counts["loaded_blocks"], engine.rank.counts["saved_blocks"]) == (loaded, saved)


def test_leased_blocks_are_not_evicted() -> None:
    engine = make()
    slots = engine.leader.snapshot()["ledger"]["slots"]
    tokens = list(range(41))
    engine.serve(tokens)
    waiting = engine.request(tokens)
    assert engine.ask(waiting) == 40
    for n in range(1, slots // 10 + 5):
        engine.serve(list(range(1000 * n, 1000 * n + 41)))
    engine.allocate(waiting, 0, 40, 41)
    engine.iterate((waiting, 1))  # checks the bytes
    waiting.tokens.append(1)
    engine.finish(waiting)
    assert engine.report_of(waiting).confirmed == 40
    engine.check_balance()


def test_leases_exhausted_is_a_decline() -> None:
    engine = ScriptedEngine(settings(MIB, **OPTIONS, max_leases=1))
    tokens = list(range(41))
    engine.serve(tokens)
    first, second = engine.request(tokens), engine.request(tokens)
    assert engine.ask(first) == 40
    assert engine.ask(second) == 0
    engine.allocate(second, 0, 0, 41)
    engine.iterate((second, 41))
    assert engine.report_of(second).reason is Reason.LEASES_EXHAUSTED


def test_below_minimum_is_a_decline() -> None:
    engine = ScriptedEngine(settings(MIB, min_offer_tokens=32))
    engine.serve(list(range(29)))
    short = engine.request(list(range(29)))
    assert engine.prefill(short) == 0
    assert engine.report_of(short).reason is Reason.BELOW_MINIMUM
