"""The leader and the rank through an engine's life, step by step: what is offered, loaded, saved, confirmed and reported."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import pytest

from dynamo_semkv.contracts.donor_events import DonorEvicted, DonorRegistered, GenerationReset
from dynamo_semkv.contracts.report import Outcome, Reason
from tests.worker_connector.harness import MIB, off_settings, settings
from tests.worker_connector.scripted import ScriptedEngine, llm_args
from worker_connector.life import FORGET_AFTER, SWEEP_EVERY
from worker_connector.refusal import LoadFailed

SIZE = 4
OPTIONS = {"min_offer_tokens": 1, "min_donor_tokens": 4}
ROW = 4096
"""A block of the scripted engine takes a few bytes; a slab row is padded to this."""


def make(blocks: int = 256, **options: object) -> ScriptedEngine:
    return ScriptedEngine(settings(max(blocks * ROW, MIB), **OPTIONS), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [k * SIZE + d for k in (1, 2, 5) for d in (-1, 0, 1)])
@pytest.mark.parametrize("local_blocks", [0, 1, 2])
def test_lmcache_4614_never_the_whole_prompt(length: int, local_blocks: int) -> None:
    """LMCache#4614, #3322: offered = min(match, prompt - 1) - computed in whole blocks, and the bytes moved are those offered."""
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


@pytest.mark.parametrize("flat", [False, True])
def test_lmcache_3640_chunked_prefill_saves_and_binds_all_chunks(flat: bool) -> None:
    """LMCache#3640: later chunks come as deltas in `cached_requests`; a prompt of three chunks is saved and served whole."""
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


def _raw(tokens: Sequence[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


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
    """NVIDIA/TensorRT-LLM#13318: more was reported as scheduled than the trimmed batch computed; the blocks copied too early are thrown
    away and saved again when they really are there."""
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
    """NVIDIA/TensorRT-LLM#15018: nobody says that a request was cancelled. What is not proven by then is thrown away."""
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
    """Donors are validated again after allocation (RFC, safety rule 6); the API leaves no way to decline any more, and bytes that are
    known to be wrong must not reach a page."""
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


def test_load_without_forward_pass_is_not_confirmed() -> None:
    """Copied is not confirmed: the forward pass has to start from there."""
    engine = make()
    tokens = list(range(41))
    engine.serve(tokens)
    again = engine.request(tokens)
    engine.ask(again)
    engine.allocate(again, 0, 40, 41)
    engine.iterate((again, 1), forward=False)
    engine.idle(2)
    report = engine.report_of(again)
    assert (report.copied, report.confirmed, report.reason) == (40, 0, Reason.NOT_SCHEDULED)


@pytest.mark.parametrize(("progress", "confirmed"), [(1, 40), (0, 0)])
def test_later_report_settles_a_load_whose_pass_was_not_seen(progress: int, confirmed: int) -> None:
    """Without `wait_for_save` the next report says whether the position moved past what was loaded."""
    engine = make()
    engine.serve(list(range(41)))
    again = engine.request([*range(41), *range(60, 80)])
    engine.ask(again)
    engine.allocate(again, 0, 40, 61)
    engine.iterate((again, 1), forward=False)
    again.context_current_position += progress
    engine.iterate((again, 5), forward=False)
    report = engine.report_of(again)
    assert (report.copied, report.confirmed) == (40, confirmed)
    assert report.reason is (Reason.OK if confirmed else Reason.NOT_SCHEDULED)


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


def test_kthena_1428_restart_is_a_new_generation() -> None:
    """volcano-sh/kthena#1428: same replica name, empty cache. Its events start at 0 with a reset, and nothing old is offered."""
    first, second = make(), make()
    tokens = list(range(41))
    first.serve(tokens)
    assert second.prefill(second.request(tokens)) == 0
    generations = [engine.sink.donor_events[0].data.generation for engine in (first, second)]  # type: ignore[union-attr]
    assert generations[0] != generations[1]
    assert [engine.sink.donor_events[0].event_id for engine in (first, second)] == [0, 0]
    assert first.sink.reports[0].generation == generations[0]
    assert first.sink.announcements[0].generation == generations[0]


def test_vllm_42695_weight_update_drops_what_was_saved() -> None:
    """vllm-project/vllm#42695: the engine's cache was reset, the connector's store must be too, under a new generation."""
    engine = make()
    tokens = list(range(41))
    engine.serve(tokens)
    before = engine.leader.snapshot()["generation"]
    engine.leader.reset_cache()
    assert engine.prefill(engine.request(tokens)) == 0
    assert engine.leader.snapshot()["generation"] != before
    assert len(engine.sink.events(GenerationReset)) == 2
    assert engine.leader.snapshot()["donors"] == 0


def test_lost_donor_events_are_answered_by_a_reset_and_all_donors_again() -> None:
    engine = make()
    engine.serve(list(range(41)))
    engine.serve(list(range(100, 141)))
    assert engine.sink.on_loss is not None
    engine.sink.on_loss("semantic-kv-events.engine-a.0")
    after = [event.data for event in engine.sink.donor_events][-3:]
    assert isinstance(after[0], GenerationReset)
    assert [type(event) for event in after[1:]] == [DonorRegistered, DonorRegistered]
    assert {event.provider_generation for event in after[1:]} == {after[0].generation}  # type: ignore[union-attr]
    assert engine.ask(engine.request(list(range(41)))) == 40
    engine.sink.on_loss("semkv.reports.engine-a.0")
    assert len(engine.sink.events(GenerationReset)) == 2


@pytest.mark.parametrize("windows", [(None, 12), (12, None), (None, 6, 12)])
def test_groups_are_saved_and_served_together(windows: tuple[int | None, ...]) -> None:
    """A block is served only when every group holds it; blocks that a window has passed have no page and are left out of the copy."""
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


def test_dummies_touch_nothing() -> None:
    engine = make()
    dummy = engine.request(list(range(41)), is_dummy=True)
    assert engine.ask(dummy) == 0
    engine.allocate(dummy, 0, 0, 41)
    engine.iterate((dummy, 41))
    assert engine.rank.counts["saved_blocks"] == 0
    assert not engine.sink.reports


def test_materialization_off_registers_donors_of_the_device_tier_and_moves_nothing() -> None:
    engine = ScriptedEngine(off_settings())
    tokens = list(range(141))
    engine.serve(tokens)
    again = engine.request(tokens)
    assert engine.prefill(again) == 0
    engine.finish(again)
    (event,) = engine.sink.events(DonorRegistered)
    assert event.location.tier.value == "device"
    assert event.token_count == 140
    assert not engine.rank.counts
    assert {(r.outcome, r.reason) for r in engine.sink.reports} == {(Outcome.NO_DONOR, Reason.MATERIALIZATION_OFF)}
    assert engine.sink.announcements[0].materialization == "off"
    engine.check_balance()


def test_two_ranks_in_one_process_share_nothing() -> None:
    """llm-d-kv-cache#357: each data-parallel rank has its own cache, its own stream of events and its own reports."""
    ranks = [
        ScriptedEngine(
            settings(MIB, **OPTIONS),
            args=llm_args(SIZE, enable_attention_dp=True, tensor_parallel_size=2, attention_dp_rank=rank),
            dp_rank=rank,
        )
        for rank in (0, 1)
    ]
    tokens = list(range(41))
    ranks[0].serve(tokens)
    assert ranks[1].prefill(ranks[1].request(tokens)) == 0
    assert ranks[0].prefill(ranks[0].request(tokens)) == 40
    assert [engine.sink.reports[0].dp_rank for engine in ranks] == [0, 1]
    assert [engine.sink.donor_events[0].dp_rank for engine in ranks] == [0, 1]
    assert {subject for subject, _, _ in ranks[1].sink.messages if "reports" in subject} == {"semkv.reports.engine-a.1"}


def test_rank_that_only_the_scheduler_output_tells_is_waited_for() -> None:
    """TensorRT-LLM gives the rank to the scheduler output only; nothing may be published under a wrong one before."""
    engine = ScriptedEngine(
        settings(MIB, **OPTIONS), args=llm_args(SIZE, enable_attention_dp=True, tensor_parallel_size=4), dp_rank=3
    )
    assert not engine.sink.messages
    engine.serve(list(range(41)))
    assert {event.dp_rank for event in engine.sink.donor_events} == {3}
    assert {report.dp_rank for report in engine.sink.reports} == {3}
