"""Overlap scheduling: what ends a request comes one iteration late (TensorRT-LLM's py_executor.py,
`_executor_loop_overlap`)."""

from __future__ import annotations

import pytest
import torch

from tests.worker_connector.reference_engine.connectors import (
    ByteStore,
    Recorder,
    flat,
    recording_connector,
    storing_connector,
)
from tests.worker_connector.reference_engine.running import PATIENCE_S, WITH_LOGITS, prompt, start, stepped
from tests.worker_connector.reference_engine.told import data_of, tokens
from worker_connector.reference_engine import SHADOW_TINY, Behaviours, SamplingParams

LAYERS = SHADOW_TINY.num_layers


def test_connector_simple_with_overlap() -> None:
    """TensorRT-LLM's test_llm_api_connector.py, connector_simple: one get_finished more, and iteration 1 has no new
    tokens."""
    recorder = Recorder()
    engine = stepped(recording_connector(recorder), overlap_scheduling=True)
    request = engine.submit(tokens(20), max_new_tokens=8)
    assert engine.run() == 9
    assert recorder.count("get_finished") == 9
    for name in ("meta", "start_load", "wait_for_save"):
        assert recorder.count(name) == 8, name
    for name in ("query", "alloc", "request_finished"):
        assert recorder.count(name) == 1, name
    assert recorder.names()[-2:] == ["request_finished", "get_finished"]
    reports = data_of(recorder, request)
    assert [len(data.new_tokens) for data in reports] == [20, 0, 1, 1, 1, 1, 1, 1]
    assert [data.computed_position for data in reports] == [0, 19, 20, 21, 22, 23, 24, 25]
    expected_layers = [(hook, layer) for layer in range(LAYERS) for hook in ("wait_layer", "save_layer")] * 8
    assert flat(recorder.calls, "wait_layer", "save_layer") == expected_layers


def test_overlap_gives_the_tokens_and_pages_of_the_plain_loop() -> None:
    outcomes = []
    for overlap in (False, True):
        engine = stepped(storing_connector(ByteStore()), overlap_scheduling=overlap, max_num_tokens=24, num_blocks=24)
        ids = [engine.submit(tokens(9 * seed, seed % 3), max_new_tokens=seed) for seed in range(1, 8)]
        engine.run()
        assert engine.faults == []
        outcomes.append([engine.ended[request_id].token_ids for request_id in ids])
    assert outcomes[0] == outcomes[1]


def test_an_end_token_is_learnt_one_pass_too_late() -> None:
    """The pass that runs when the end token becomes known is for nobody: its report is made, its token dropped."""
    plain = stepped(None)
    plain.submit(tokens(20), max_new_tokens=5)
    plain.run()
    end = plain.ended[1].token_ids[2]
    recorder = Recorder()
    engine = stepped(recording_connector(recorder), overlap_scheduling=True)
    request = engine.submit(tokens(20), max_new_tokens=5, eos_token_ids=[end])
    engine.run()
    generated = engine.ended[request].token_ids
    assert generated == plain.ended[1].token_ids[: len(generated)]
    assert engine.ended[request].finish_reason == "stop"
    assert recorder.count("wait_for_save") == len(generated) + 1
    assert recorder.names()[-3:] == ["wait_for_save", "request_finished", "get_finished"]
    assert engine.stats().active_blocks == 0


def test_a_cancellation_takes_effect_one_iteration_late() -> None:
    recorder = Recorder()
    engine = stepped(recording_connector(recorder), overlap_scheduling=True)
    request = engine.submit(tokens(40), max_new_tokens=50)
    engine.cancel(request)
    engine.step()
    assert request in engine.running
    engine.step()
    assert engine.ended[request].finish_reason == "cancelled"
    assert recorder.count("request_finished") == 0
    engine.run()
    assert engine.stats().active_blocks == 0


def test_blocks_become_reusable_one_iteration_late() -> None:
    engine = stepped(None, overlap_scheduling=True)
    engine.submit(tokens(17), max_new_tokens=4)
    engine.step()
    assert len(engine.executor.blocks.tree) == 0
    engine.step()
    assert len(engine.executor.blocks.tree) == 2


def test_a_failed_pass_under_overlap_fails_what_is_not_known_yet() -> None:
    recorder = Recorder()
    engine = stepped(recording_connector(recorder), overlap_scheduling=True)
    request = engine.submit(tokens(20), max_new_tokens=4)
    engine.step()
    recorder.failures["wait_for_save"] = OSError("copy failed")
    engine.step()
    assert engine.ended[request].finish_reason == "error"
    assert engine.ended[request].token_ids == []
    recorder.failures.clear()
    assert engine.ended[request].stats is not None
    again = engine.submit(tokens(20), max_new_tokens=2)
    engine.run()
    assert engine.ended[again].finish_reason == "length"


def test_real_attention_gives_the_same_tokens_and_logits_with_overlap() -> None:
    """Also where some requests are replayed, and one samples by its seed. Each prompt is computed in one chunk, however
    many come together: other chunks, other last bits."""
    plans = [Behaviours(), Behaviours(overlap_scheduling=True)]
    outcomes = []
    for behaviours in plans:
        connector = storing_connector(ByteStore())
        with start(connector, behaviours=behaviours, batch_invariant_decode=True, max_num_tokens=256) as engine:
            done = [engine.submit(prompt(40, seed), max_new_tokens=6, sampling=WITH_LOGITS) for seed in range(3)]
            drawn = engine.submit(prompt(9), max_new_tokens=6, sampling=SamplingParams(temperature=1.0, seed=3))
            outcomes.append([handle.result(PATIENCE_S) for handle in [*done, drawn]])
    for plain, overlapped in zip(*outcomes, strict=True):
        assert plain.token_ids == overlapped.token_ids
        pairs = zip(plain.stats.generation_logits, overlapped.stats.generation_logits, strict=True)
        assert all(torch.equal(left, right) for left, right in pairs)


def test_replays_under_overlap_generate_what_was_asked_for() -> None:
    behaviours = Behaviours(overlap_scheduling=True, destroyed_allocation_rate=0.2)
    with start(None) as plain, start(None, behaviours=behaviours) as engine:
        for seed in range(4):
            expected = plain.submit(prompt(40, seed), max_new_tokens=8).result(PATIENCE_S)
            found = engine.submit(prompt(40, seed), max_new_tokens=8).result(PATIENCE_S)
            assert found.token_ids == expected.token_ids
            assert found.stats.prompt_tokens == 40


@pytest.mark.parametrize("name", ["query", "alloc", "meta", "start_load", "request_finished", "get_finished"])
def test_a_fault_in_a_callback_ends_the_rank_and_every_request_under_overlap(name: str) -> None:
    """As in the plain loop: only layer hooks and wait_for_save fail requests and spare the rank."""
    recorder = Recorder()
    engine = stepped(recording_connector(recorder), overlap_scheduling=True)
    first = engine.submit(tokens(20), max_new_tokens=3)
    engine.step()
    second = engine.submit(tokens(20, 1), max_new_tokens=3)
    recorder.failures[name] = KeyError("lost")
    with pytest.raises(KeyError, match="lost"):
        engine.run()
    reasons = [engine.ended[request].finish_reason for request in (first, second)]
    assert set(reasons) <= {"error", "length"}
    assert "error" in reasons
    assert engine.running == {}
