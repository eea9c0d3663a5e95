"""Requests through the public face: batching, reuse, limits, cancellation, ranks, statistics."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tests.worker_connector.reference_engine.connectors import Recorder, recording_connector
from tests.worker_connector.reference_engine.running import PATIENCE_S, WITH_LOGITS, prompt, start, until
from worker_connector.reference_engine import (
    ConnectorSpec,
    Engine,
    EngineConfig,
    EngineDeadError,
    ModelSource,
    RequestStats,
    SamplingParams,
)


def test_reuse_gives_the_tokens_of_a_cold_run() -> None:
    tokens = prompt(60)
    with start() as engine:
        cold = engine.submit(tokens, max_new_tokens=12).result(PATIENCE_S)
        warm = engine.submit(tokens, max_new_tokens=12).result(PATIENCE_S)
        # A second turn reuses generated blocks as well: 60 + 12 tokens, of which the last one has no KV.
        longer = engine.submit(tokens + cold.token_ids + prompt(9, 1), max_new_tokens=1).result(PATIENCE_S)
    assert (cold.stats.cached_tokens, warm.stats.cached_tokens) == (0, 56)
    assert warm.token_ids == cold.token_ids
    assert longer.stats.cached_tokens == 64


def test_the_whole_prompt_is_never_reused() -> None:
    with start() as engine:
        engine.submit(prompt(64), max_new_tokens=1).result(PATIENCE_S)
        again = engine.submit(prompt(64), max_new_tokens=1).result(PATIENCE_S)
    assert again.stats.cached_tokens == 56


def test_a_partial_last_block_is_never_shared() -> None:
    with start() as engine:
        engine.submit(prompt(31), max_new_tokens=1).result(PATIENCE_S)
        longer = engine.submit(prompt(31) + prompt(20, 1), max_new_tokens=1).result(PATIENCE_S)
    assert longer.stats.cached_tokens == 24


def test_reuse_can_be_off() -> None:
    with start(enable_block_reuse=False) as engine:
        for _ in range(2):
            assert engine.submit(prompt(60), max_new_tokens=1).result(PATIENCE_S).stats.cached_tokens == 0
        assert engine.stats(0).cached_blocks == 0


@pytest.mark.parametrize("invariant", [True, False])
def test_requests_in_a_batch_do_not_mix(invariant: bool) -> None:
    """Mixed lengths, salts and adapters together, against each alone; chunked prefill beside decodes."""
    jobs: list[dict[str, Any]] = [
        {"tokens": prompt(length, seed), "max_new_tokens": 6, "cache_salt": salt, "lora_task_id": lora}
        for seed, (length, salt, lora) in enumerate([(5, None, None), (100, "a", 1), (33, None, None), (64, "b", 1)])
    ]
    settings: dict[str, Any] = {"lora_seeds": {1: 5}, "max_num_tokens": 24, "batch_invariant_decode": invariant}
    with start(**settings) as engine:
        handles = [engine.submit(**job, sampling=WITH_LOGITS) for job in jobs]
        together = [handle.result(PATIENCE_S) for handle in handles]
    for job, batched in zip(jobs, together, strict=True):
        with start(**settings) as engine:
            alone = engine.submit(**job, sampling=WITH_LOGITS).result(PATIENCE_S)
        assert alone.token_ids == batched.token_ids
        pairs = list(zip(alone.stats.generation_logits, batched.stats.generation_logits, strict=True))
        for left, right in pairs:
            torch.testing.assert_close(left, right, rtol=0, atol=1e-4)
        if invariant and len(job["tokens"]) < 24:  # else the chunk boundaries depend on the budget left
            assert all(torch.equal(left, right) for left, right in pairs)


def test_more_work_than_pages_waits_its_turn() -> None:
    """GUARANTEED_NO_EVICT: 12 requests of 6 pages on a pool of 16."""
    with start(num_blocks=16) as engine:
        handles = [engine.submit(prompt(40, seed), max_new_tokens=8) for seed in range(12)]
        assert [handle.result(PATIENCE_S).finish_reason for handle in handles] == ["length"] * 12
        until(lambda: engine.stats(0).active_blocks == 0, "pages come back")


def test_eos_stops_and_is_part_of_the_output() -> None:
    with start() as engine:
        free = engine.submit(prompt(20), max_new_tokens=5).result(PATIENCE_S)
        stopped = engine.submit(prompt(20), max_new_tokens=5, eos_token_ids=[free.token_ids[2]]).result(PATIENCE_S)
    end = free.token_ids.index(free.token_ids[2])
    assert (stopped.token_ids, stopped.finish_reason) == (free.token_ids[: end + 1], "stop")


def test_output_is_streamed_and_the_last_call_has_the_reason() -> None:
    calls: list[tuple[list[int], str | None, int]] = []
    names: set[str] = set()

    def take(tokens: list[int], reason: str | None, stats: RequestStats) -> None:
        calls.append((tokens, reason, stats.generated_tokens))
        names.add(threading.current_thread().name)

    with start() as engine:
        done = engine.submit(prompt(20), max_new_tokens=3, on_output=take).result(PATIENCE_S)
    assert calls == [([done.token_ids[0]], None, 1), ([done.token_ids[1]], None, 2), ([done.token_ids[2]], "length", 3)]
    assert names == {"reference-engine-rank-0"}


def test_seeded_sampling_repeats_and_unseeded_differs() -> None:
    with start() as engine:

        def sample(seed: int | None) -> list[int]:
            sampling = SamplingParams(temperature=2.0, top_k=200, top_p=0.99, seed=seed)
            return engine.submit(prompt(20), max_new_tokens=16, sampling=sampling).result(PATIENCE_S).token_ids

        assert sample(1) == sample(1)
        assert len({tuple(sample(seed)) for seed in (1, 2, None, None)}) == 4


def test_cancellation_frees_pages_and_ends_the_stream_once() -> None:
    reasons: list[str | None] = []
    started = threading.Event()

    def take(tokens: list[int], reason: str | None, stats: RequestStats) -> None:
        reasons.append(reason)
        started.set()

    with start() as engine:
        handle = engine.submit(prompt(20), max_new_tokens=400, on_output=take)
        assert started.wait(PATIENCE_S)
        handle.cancel()
        handle.cancel()
        assert handle.result(PATIENCE_S).finish_reason == "cancelled"
        until(lambda: engine.stats(0).active_blocks == 0, "pages come back")
        handle.cancel()  # after the end: no effect
        assert engine.submit(prompt(20), max_new_tokens=1).result(PATIENCE_S).finish_reason == "length"
    assert reasons.count("cancelled") == 1
    assert reasons[-1] == "cancelled"


def test_a_failing_callback_ends_its_own_request_only() -> None:
    seen: list[str | None] = []

    def fail(tokens: list[int], reason: str | None, stats: RequestStats) -> None:
        seen.append(reason)
        raise LookupError("client went away")

    with start() as engine:
        bad = engine.submit(prompt(20), max_new_tokens=5, on_output=fail)
        good = engine.submit(prompt(20, 1), max_new_tokens=5)
        assert bad.result(PATIENCE_S).finish_reason == "cancelled"
        assert good.result(PATIENCE_S).finish_reason == "length"
        until(lambda: engine.stats(0).output_errors == 2, "both faults are counted")
    assert seen == [None, "cancelled"]


def test_ranks_are_separate() -> None:
    tokens = prompt(40)
    with start(data_parallel_size=2) as engine:
        first = engine.submit(tokens, max_new_tokens=4, dp_rank=0).result(PATIENCE_S)
        other = engine.submit(tokens, max_new_tokens=4, dp_rank=1).result(PATIENCE_S)
        again = engine.submit(tokens, max_new_tokens=4, dp_rank=1).result(PATIENCE_S)
        until(lambda: engine.stats(1).active_blocks == 0, "rank 1 is idle")
        events = [engine.poll_kv_events(rank) for rank in (0, 1)]
    assert [g.stats.cached_tokens for g in (first, other, again)] == [0, 0, 32]
    assert first.token_ids == other.token_ids
    for rank, found in enumerate(events):
        assert {event["attention_dp_rank"] for event in found} == {rank}
        assert [event["event_id"] for event in found] == list(range(len(found)))
        assert len(found) > 1


def test_requests_without_a_rank_are_spread() -> None:
    gate = threading.Event()
    with start(data_parallel_size=2) as engine:
        handles = [
            engine.submit(prompt(9, n), max_new_tokens=1, on_output=lambda *output: gate.wait(PATIENCE_S) and None)
            for n in range(4)
        ]
        gate.set()
        for handle in handles:
            handle.result(PATIENCE_S)
    assert sorted(handle.dp_rank for handle in handles) == [0, 0, 1, 1]


def test_reset_prefix_cache_empties_the_tree() -> None:
    with start() as engine:
        engine.submit(prompt(40), max_new_tokens=1).result(PATIENCE_S)
        until(lambda: engine.stats(0).cached_blocks == 5, "blocks are cached")
        engine.reset_prefix_cache()
        until(lambda: engine.stats(0).cached_blocks == 0, "blocks are dropped")
        removed = [event["data"] for event in engine.poll_kv_events(0) if event["data"]["type"] == "removed"]
    assert sum(len(data["block_hashes"]) for data in removed) == 5


def test_shutdown_cancels_and_refuses() -> None:
    engine = start()
    handle = engine.submit(prompt(20), max_new_tokens=450)
    engine.shutdown()
    assert handle.result(PATIENCE_S).finish_reason in ("cancelled", "length")
    with pytest.raises(EngineDeadError):
        engine.submit(prompt(20), max_new_tokens=1)


def test_one_dead_rank_ends_the_others(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(offer=lambda request, computed: (0, request.prompt_len == 13))
    with start(recording_connector(recorder), data_parallel_size=2) as engine, caplog.at_level("CRITICAL"):
        engine.submit(prompt(13), max_new_tokens=1, dp_rank=0).result(PATIENCE_S)
        until(lambda: engine.fatal_error is not None, "the engine ended")
        with pytest.raises(EngineDeadError):
            engine.submit(prompt(9), max_new_tokens=1, dp_rank=1)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"tokens": []}, "tokens is empty"),
        ({"tokens": [512]}, "512.*vocabulary"),
        ({"tokens": [-1]}, "-1.*vocabulary"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 510}, "max_new_tokens 510 is 514.*512"),
        ({"dp_rank": 1}, "rank is 1.*0 to 0"),
        ({"lora_task_id": 3}, "lora_task_id is 3"),
    ],
)
def test_bad_requests_name_the_argument(arguments: dict[str, Any], names: str) -> None:
    with start() as engine, pytest.raises(ValueError, match=names):
        engine.submit(**{"tokens": [1, 2, 3, 4], "max_new_tokens": 1} | arguments)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"tokens_per_block": 0}, "tokens_per_block is 0"),
        ({"num_threads": 0}, "num_threads is 0"),
        ({"max_num_tokens": 16}, "max_num_tokens is 16.*tokens_per_block"),
        ({"kv_cache_manager": "v3"}, "kv_cache_manager is 'v3'.*v1"),
        ({"event_buffer_max_size": -1}, "event_buffer_max_size is -1"),
        ({"idle_poll_s": 0.0}, "idle_poll_s is 0.0"),
        ({"max_seq_len": 1}, "max_seq_len is 1"),
        ({"device": "gpu0"}, "device is 'gpu0'.*cuda:N"),
        ({"device": "meta"}, "device is 'meta'.*cuda:N"),
    ],
)
def test_bad_settings_name_the_field(settings: dict[str, Any], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        EngineConfig(**settings)


def test_max_seq_len_beyond_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="max_seq_len is 100000"):
        Engine(EngineConfig(max_seq_len=100_000))


@pytest.mark.parametrize("source", [{"name": "gpt"}, {"name": "SmolLM2-135M-Instruct", "seed": 1}])
def test_bad_model_sources_are_refused(source: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="model"):
        ModelSource(**source)


def test_connector_classes_resolve_by_name() -> None:
    module = "worker_connector.engine_api.engine"
    with pytest.raises(TypeError, match="RequestData is not a subclass"):
        ConnectorSpec.resolve(module, "RequestData", "KvCacheConnectorWorker")
    spec = ConnectorSpec.resolve(module, "KvCacheConnectorScheduler", "KvCacheConnectorWorker", "nats://x")
    assert (spec.scheduler.__name__, spec.server_url) == ("KvCacheConnectorScheduler", "nats://x")


def test_llm_args_of_a_rank() -> None:
    recorder = Recorder()
    spec = recording_connector(recorder)
    with start(spec, data_parallel_size=2, lora_seeds={4: 9}, num_blocks=64) as engine:
        ranks = [engine._ranks[rank].connector for rank in (0, 1)]
        args = [part._llm_args for rank in ranks if rank for part in (rank.scheduler, rank.worker)]
    assert [a.attention_dp_rank for a in args] == [0, 0, 1, 1]
    assert {(a.model, a.revision, a.dtype) for a in args} == {("tiny", "seed-0", "float32")}
    assert {a.kv_cache_config.tokens_per_block for a in args} == {8}
    assert {(a.enable_attention_dp, a.tensor_parallel_size, a.pipeline_parallel_size) for a in args} == {(True, 2, 1)}
    assert args[0].lora_revisions == {4: "seed-9"}
    assert args[0].kv_connector_config.connector_worker_class == "Worker"
