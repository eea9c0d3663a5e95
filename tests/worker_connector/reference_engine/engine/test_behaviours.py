"""TensorRT-LLM's less common paths, each switched on alone: what the connector sees then, and that the pages stay
right.

Each test says which public text the order of calls is taken from.
"""

from __future__ import annotations

import random

import pytest

from tests.worker_connector.reference_engine.connectors import (
    Recorder,
    flat,
    recording_connector,
)
from tests.worker_connector.reference_engine.running import Script, stepped
from tests.worker_connector.reference_engine.told import data_of, new_in, tokens
from worker_connector.reference_engine import SHADOW_TINY, Behaviours, SeededDice

LAYERS = SHADOW_TINY.num_layers


# token-budget trim: NVIDIA/TensorRT-LLM#13318; resource_manager.py, `fit_token_budget`


@pytest.mark.parametrize(("before", "told"), [(False, 16), (True, 40)])
def test_a_shrunk_chunk_is_told_after_the_trim_or_overstated(before: bool, told: int) -> None:
    recorder = Recorder()
    engine = stepped(
        recording_connector(recorder),
        dice=Script(below=16, trim=[True]),
        token_budget_trim="shrink",
        report_before_trim=before,
    )
    request = engine.submit(tokens(40), max_new_tokens=1)
    engine.run()
    assert [(data.computed_position, data.num_scheduled_tokens) for data in data_of(recorder, request)] == [
        (0, told),
        (16, 24),
    ]
    assert engine.faults == []


@pytest.mark.parametrize("before", [False, True])
def test_a_deferred_request_is_asked_once_and_reported_behind_what_it_was_served(before: bool) -> None:
    """It has left the batch after its allocation. Served tokens are subtracted in one iteration's reports only
    (kv_cache_connector.py, `build_scheduler_output`), so a first report that comes later starts at the served end."""
    recorder = Recorder(offer=lambda request, computed: (8 if request.prompt_len == 20 else 0, False))
    script = Script()
    engine = stepped(recording_connector(recorder), dice=script, token_budget_trim="defer", report_before_trim=before)
    engine.submit(tokens(10, 1), max_new_tokens=8)
    engine.step()
    deferred = engine.submit(tokens(20), max_new_tokens=1)
    script.on["trim"] = [True]
    engine.step()
    (request,) = [request for request in engine.executor.requests if request.request_id == deferred]
    assert (request.context_current_position, request.py_connector_allocation_reported) == (8, True)
    engine.step()
    assert recorder.count("query") == recorder.count("alloc") == 2
    assert deferred in engine.ended
    reports = data_of(recorder, deferred)
    if before:
        assert new_in(recorder)[1:] == [[deferred], []]
        assert [(data.computed_position, data.num_scheduled_tokens) for data in reports] == [(0, 12), (8, 12)]
    else:
        assert new_in(recorder)[1:] == [[], [deferred]]
        assert [(data.computed_position, data.num_scheduled_tokens) for data in reports] == [(8, 12)]


# the second `_can_queue` in py_executor.py


def test_a_dropped_batch_is_reported_again_but_not_as_new() -> None:
    recorder = Recorder(offer=lambda request, computed: (8, False))
    engine = stepped(recording_connector(recorder), dice=Script(dropped_batch=[True]), dropped_batch_rate=1.0)
    request = engine.submit(tokens(20), max_new_tokens=1)
    assert not engine.step()
    assert recorder.names()[-2:] == ["start_load", "get_finished"]
    engine.step()
    assert recorder.count("query") == recorder.count("alloc") == 1
    assert new_in(recorder) == [[request], []]
    reports = data_of(recorder, request)
    assert [(data.computed_position, len(data.new_tokens), len(data.new_block_ids)) for data in reports] == [
        (0, 20, 3),
        (8, 0, 0),
    ]


def test_a_dropped_batch_gives_back_pages_that_were_reported() -> None:
    """`_revert_gen_alloc` behind the second `_can_queue`: the request grows again, into other pages, and no report says
    so."""
    recorder = Recorder()
    engine = stepped(recording_connector(recorder), dice=Script(dropped_batch=[True]), dropped_batch_reverts=True)
    first = engine.submit(tokens(20))
    engine.step()
    assert engine.stats().active_blocks == 0
    engine.submit(tokens(20, 1))
    engine.run()
    (told,) = (data.new_block_ids for data in data_of(recorder, first) if data.new_block_ids)
    finished = {request_id: slots for _, request_id, slots in flat(recorder.calls, "request_finished")}
    assert set(finished[first]).isdisjoint(told)
    assert recorder.count("query") == 2
    assert engine.faults == []


def test_a_dropped_batch_destroys_what_was_served_beyond_its_pages() -> None:
    """`revert_allocate_context`: the cache cannot shrink below its history."""
    recorder = Recorder(offer=lambda request, computed: (8, False))
    engine = stepped(recording_connector(recorder), dice=Script(dropped_batch=[True]), dropped_batch_reverts=True)
    request = engine.submit(tokens(20))
    engine.step()
    recorder.offer = lambda request, computed: (0, False)
    engine.run()
    assert new_in(recorder) == [[request], [request]]
    assert recorder.count("query") == recorder.count("alloc") == 2
    assert engine.faults == []


# kv_cache_manager_v2.py, `_apply_connector_matched_prefix`; TensorRT-LLM's test_kv_connector_v2_prefix.py


@pytest.mark.parametrize(
    ("offer", "honoured", "scheduled"),
    [
        (8, 8, 8),  # inside the chunk: nothing has to grow
        (32, 8, 8),  # whole blocks in the chunk's pages that leave it something to compute
        (16, 8, 8),  # reaches the chunk's end exactly
    ],
)
def test_a_failed_grow_falls_back_to_the_pages_that_exist(offer: int, honoured: int, scheduled: int) -> None:
    recorder = Recorder(offer=lambda request, computed: (offer, False))
    engine = stepped(
        recording_connector(recorder), dice=Script(failed_grow=[True]), failed_grow_rate=1.0, max_num_tokens=16
    )
    engine.submit(tokens(72))
    engine.step()
    (request,) = engine.executor.requests
    assert request.py_num_connector_matched_tokens == honoured
    (data,) = recorder.outputs[0].new_requests
    assert (data.computed_position, data.num_scheduled_tokens, len(data.new_block_ids)) == (0, scheduled, 2)


def test_a_grow_moves_the_chunk_behind_the_offer_and_ends_at_a_block() -> None:
    """An offer of 100 with a chunk of 48 ends at 128 with blocks of 32; here 25, 16 and 40 with blocks of 8."""
    recorder = Recorder(offer=lambda request, computed: (25, False))
    engine = stepped(recording_connector(recorder), max_num_tokens=16)
    engine.submit(tokens(72))
    engine.step()
    (data,) = recorder.outputs[0].new_requests
    assert (data.computed_position, data.num_scheduled_tokens, len(data.new_block_ids)) == (0, 15, 5)


def test_an_async_load_of_which_nothing_is_honoured_is_awaited_and_discarded() -> None:
    """The flag survives an honour of 0: the request is parked, then computes from its local end
    (`commit_new_matched_tokens`)."""
    recorder = Recorder(offer=lambda request, computed: (32, True), release=set())
    engine = stepped(
        recording_connector(recorder), dice=Script(failed_grow=[True]), failed_grow_rate=1.0, max_num_tokens=8
    )
    request = engine.submit(tokens(36))
    engine.step()
    assert engine.stats().parked_requests == 1
    assert recorder.count("alloc") == 1
    assert recorder.count("wait_for_save") == 0
    recorder.release = None
    engine.run()
    assert [data.computed_position for data in data_of(recorder, request)] == [0, 8, 16, 24, 32]
    assert recorder.count("query") == recorder.count("alloc") == 1
    assert engine.faults == []


# destroyed allocations: kv_cache_connector.py, `reset_request_state`; KV Cache Connector doc, "at most once per KV
# allocation"


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_destroyed_allocation_is_asked_about_and_reported_as_new_again(steps: int, overlap: bool) -> None:
    recorder, script = Recorder(), Script()
    engine = stepped(
        recording_connector(recorder), dice=script, destroyed_allocation_rate=1.0, overlap_scheduling=overlap
    )
    request = engine.submit(tokens(20), max_new_tokens=5)
    plain = stepped(None)
    plain.submit(tokens(20), max_new_tokens=5)
    plain.run()
    for _ in range(steps):
        engine.step()
    known = 20 + steps - overlap
    engine.reset_prefix_cache()
    script.on["destroyed_allocation"] = [True]
    engine.step()
    assert recorder.count("query") == recorder.count("alloc") == 2
    assert recorder.count("request_finished") == 0
    (data,) = recorder.outputs[-1].new_requests
    assert (len(data.new_tokens), len(data.new_block_ids), data.num_scheduled_tokens) == (
        known,
        3,
        known - data.computed_position,
    )
    engine.run()
    assert engine.ended[request].token_ids == plain.ended[1].token_ids
    assert engine.ended[request].stats == plain.ended[1].stats
    assert recorder.count("request_finished") == 1


def test_a_replay_between_question_and_report() -> None:
    recorder = Recorder(offer=lambda request, computed: (8, False) if request.prompt_len == 20 else (0, False))
    script = Script()
    engine = stepped(
        recording_connector(recorder), dice=script, token_budget_trim="defer", destroyed_allocation_rate=1.0
    )
    engine.submit(tokens(10, 1), max_new_tokens=8)
    engine.step()
    replayed = engine.submit(tokens(20))
    script.on["trim"] = [True]
    engine.step()
    script.on["destroyed_allocation"] = [False, True]
    engine.step()
    assert [call[1] for call in flat(recorder.calls, "query")] == [1, replayed, replayed]
    assert [(data.computed_position, data.num_scheduled_tokens) for data in data_of(recorder, replayed)] == [(0, 12)]


def test_a_replay_of_a_finished_async_load_is_reported_but_not_asked_about() -> None:
    """`reset_request_state` drops the deltas and leaves the list of finished loads, which `should_add_sequence`
    reads."""
    recorder, script = Recorder(offer=lambda request, computed: (8, True)), Script()
    engine = stepped(recording_connector(recorder), dice=script, destroyed_allocation_rate=1.0)
    request = engine.submit(tokens(20))
    engine.step()
    script.on["destroyed_allocation"] = [True]
    engine.step()
    assert recorder.count("query") == recorder.count("alloc") == 1
    (data,) = recorder.outputs[-1].new_requests
    assert (data.request_id, data.computed_position, data.num_scheduled_tokens) == (request, 0, 20)


# attention data parallelism: py_executor.py, `_pad_attention_dp_dummy_request` and `_pad_empty_attention_dp_batch`


def test_an_idle_rank_runs_a_dummy_of_which_nobody_is_told() -> None:
    recorder = Recorder()
    engine = stepped(recording_connector(recorder), dice=Script(dummy=[True]), data_parallel_size=2)
    engine.step()
    (output,) = recorder.outputs
    assert (output.new_requests, output.cached_requests) == ([], [])
    hooks = ["wait_layer", "save_layer"] * LAYERS
    assert recorder.names()[2:] == ["meta", "start_load", *hooks, "wait_for_save", "get_finished"]
    assert (engine.faults, engine.stats().active_blocks, engine.stats().generated_tokens) == ([], 0, 0)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_batch_of_nothing_but_parked_requests_is_padded(overlap: bool) -> None:
    """After the report was made, which stays as it is (test_connector.py, async_padding_preserves_connector_plan)."""
    recorder = Recorder(offer=lambda request, computed: (16, True), release=set())
    engine = stepped(
        recording_connector(recorder), dice=Script(dummy=[True]), data_parallel_size=2, overlap_scheduling=overlap
    )
    request = engine.submit(tokens(20))
    engine.step()
    assert recorder.count("wait_for_save") == recorder.count("meta") == 1
    assert engine.stats().parked_requests == 1
    recorder.release = None
    engine.run()
    assert engine.ended[request].finish_reason == "length"
    assert recorder.count("request_finished") == recorder.count("query") == 1


# partial reuse: kv_cache_manager_v2.py, `num_committed_tokens` is token granular; KV Cache Connector doc


def test_the_query_is_anchored_at_the_local_match_in_the_middle_of_a_block() -> None:
    """A served prefix of token granularity begins there too (test_kv_connector_v2_prefix.py)."""
    recorder = Recorder()
    engine = stepped(recording_connector(recorder), enable_partial_reuse=True)
    engine.submit(tokens(40))
    engine.run()
    recorder.offer = lambda request, computed: (10, False)
    request = engine.submit(tokens(21) + tokens(20, 1))
    engine.step()
    (_, _, computed) = flat(recorder.calls, "query")[-1]
    assert computed == 21
    (data,) = data_of(recorder, request)
    assert (data.computed_position, data.num_scheduled_tokens, len(data.new_block_ids)) == (21, 10, 6)


def test_part_of_a_block_is_copied_and_the_rest_computed() -> None:
    engine = stepped(None, enable_partial_reuse=True)
    cold = stepped(None)
    for part in (tokens(40), tokens(21) + tokens(9, 1), tokens(21) + tokens(3, 1) + tokens(9, 2), tokens(5)):
        ids = [it.submit(part, max_new_tokens=4) for it in (engine, cold)]
        engine.run()
        cold.run()
        outcomes = [it.ended[request] for it, request in zip((engine, cold), ids, strict=True)]
        assert outcomes[0].token_ids == outcomes[1].token_ids
    assert engine.faults == []
    reused = [outcome.stats.cached_tokens for outcome in engine.ended.values() if outcome.stats]
    assert reused == [0, 21, 24, 4]
    assert engine.stats().active_blocks == 0


def test_a_block_is_not_copied_when_its_page_is_promised() -> None:
    engine = stepped(None, enable_partial_reuse=True, num_blocks=6)
    engine.submit(tokens(16))
    engine.run()
    holder = engine.submit(tokens(24, 1), max_new_tokens=8)
    engine.step()
    other = engine.submit(tokens(12) + tokens(4, 1))
    engine.run()
    assert engine.faults == []
    assert {engine.ended[request].finish_reason for request in (holder, other)} == {"length"}


# py_executor.py, `_save_kv_to_connector_async`


def test_request_finished_is_not_called_when_the_block_ids_cannot_be_read() -> None:
    recorder = Recorder(saves_async=True)
    engine = stepped(recording_connector(recorder), dice=Script(lost_finish=[True]), lost_finish_rate=1.0)
    request = engine.submit(tokens(20))
    engine.run()
    assert engine.ended[request].finish_reason == "length"
    assert recorder.count("request_finished") == 0
    assert engine.stats().active_blocks == 0


# bring-up: py_executor.py, `_maybe_init_kv_connector_manager`


def test_warm_up_passes_come_before_the_connector() -> None:
    recorder = Recorder()
    engine = stepped(recording_connector(recorder), warmup_forwards=2)
    assert recorder.names() == ["register", "wait_for_initialization"]
    assert not engine.pool.tensor[0].isnan().any()
    engine.submit(tokens(20))
    engine.run()
    assert engine.faults == []


# the dice


def test_a_schedule_is_repeated_by_its_seed() -> None:
    def calls(seed: int) -> list[tuple[object, ...]]:
        recorder = Recorder()
        engine = stepped(
            recording_connector(recorder),
            seed=seed,
            destroyed_allocation_rate=0.2,
            dropped_batch_rate=0.3,
            max_num_tokens=16,
        )
        for length in (20, 30, 40):
            engine.submit(tokens(length), max_new_tokens=4)
        engine.run()
        return recorder.calls

    assert calls(1) == calls(1)
    assert calls(1) != calls(2)


def test_dice_fall_at_their_rate_and_not_at_all_at_zero() -> None:
    dice = SeededDice(3)
    assert 250 < sum(dice.hits("anything", 0.3) for _ in range(1000)) < 350
    assert not any(dice.hits("anything", 0.0) for _ in range(100))
    assert {dice.below("anything", 3) for _ in range(100)} == {0, 1, 2}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("token_budget_trim", "often", "token_budget_trim is 'often'.*shrink"),
        ("trim_rate", 1.5, r"trim_rate is 1.5.*\[0, 1\]"),
        ("warmup_forwards", -1, "warmup_forwards is -1"),
        ("dialect", "R", "dialect is 'R'.*B"),
        ("overtaken_offer_rate", 0.5, "overtaken_offer_rate is 0.5; only dialect 'B'"),
    ],
)
def test_bad_behaviours_name_the_field(name: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Behaviours(**{name: value})  # type: ignore[arg-type]


def test_dummies_need_several_ranks() -> None:
    with pytest.raises(ValueError, match=r"dummy_rate is 0.5.*data_parallel_size"):
        stepped(None, dummy_rate=0.5)


@pytest.mark.parametrize("manager", ["v1", "v2"])
def test_everything_at_once_reads_only_right_pages(manager: str) -> None:
    """With a connector that reads its requests' positions and nothing else; the property test on the real one is
    elsewhere."""
    for seed in range(20):
        engine = stepped(
            None,
            kv_cache_manager=manager,
            seed=seed,
            overlap_scheduling=seed % 2 == 1,
            token_budget_trim="defer",
            trim_rate=0.3,
            dropped_batch_rate=0.2,
            destroyed_allocation_rate=0.1,
            lost_finish_rate=0.5,
            warmup_forwards=1,
            max_num_tokens=16,
            num_blocks=20,
        )
        source = random.Random(seed)
        for _ in range(10):
            engine.submit(tokens(source.randrange(1, 60), source.randrange(3)), max_new_tokens=source.randrange(1, 9))
            engine.step()
        engine.run()
        assert engine.faults == []
        assert engine.stats().active_blocks == 0
        assert len(engine.ended) == 10
