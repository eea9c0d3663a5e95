"""The connector on the reference engine: real attention over real pages, TensorRT-LLM's call order, both cache
managers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch

from dynamo_semkv.contracts.donor_events import DonorEvicted, DonorRegistered
from dynamo_semkv.contracts.report import Outcome, Reason
from tests.worker_connector.harness import MIB, Bench, engine, off_settings, prompt, quiet, run, settings, wait_for
from worker_connector.engine_api.engine import SchedulerOutput
from worker_connector.reference_engine.engine.engine import EngineDeadError
from worker_connector.reference_engine.models.sampling import SamplingParams
from worker_connector.scheduler import SemkvConnectorScheduler
from worker_connector.worker import SemkvConnectorWorker

WITH_LOGITS = SamplingParams(return_generation_logits=True)
BOTH = pytest.mark.parametrize("manager", ["v1", "v2"])


def equal_logits(left: Any, right: Any) -> bool:
    pairs = zip(left.stats.generation_logits, right.stats.generation_logits, strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@BOTH
@pytest.mark.parametrize("length", [33, 200, 1000])
def test_loaded_is_bit_identical_to_device_warm_and_greedy_equal_to_cold(manager: str, length: int) -> None:
    bench, tokens = Bench(settings()), prompt(length)
    with engine(bench, kv_cache_manager=manager) as running:
        _, cold = run(running, tokens, sampling=WITH_LOGITS)
        _, warm = run(running, tokens, sampling=WITH_LOGITS)
        running.reset_prefix_cache()
        request_id, loaded = run(running, tokens, sampling=WITH_LOGITS)
        quiet(bench)
    whole = (length - 1) // 32 * 32
    assert (warm.stats.device_reused_tokens, loaded.stats.connector_served_tokens) == (whole, whole)
    assert equal_logits(warm, loaded)
    assert cold.token_ids == warm.token_ids == loaded.token_ids
    report = bench.report_of(request_id)
    assert (report.offered, report.honoured, report.copied, report.confirmed) == (whole,) * 4
    assert (report.outcome, report.reason) == (Outcome.MATERIALIZED_EXACT, Reason.OK)
    assert report.load_seconds is not None


@BOTH
def test_device_prefix_first_then_slab_then_compute(manager: str) -> None:
    """| exact local prefix | exact-equivalent blocks from the slab | tokens to compute |"""
    bench, head, tail = Bench(settings()), prompt(128), prompt(200, 1)
    with engine(bench, kv_cache_manager=manager) as running:
        run(running, head + tail)
        running.reset_prefix_cache()
        run(running, [*head, 1])  # loads and keeps the head on the device
        request_id, both = run(running, head + tail, sampling=WITH_LOGITS)
        _, warm = run(running, head + tail, sampling=WITH_LOGITS)
        quiet(bench)
    assert (both.stats.device_reused_tokens, both.stats.connector_served_tokens) == (128, 192)
    assert both.token_ids == warm.token_ids
    assert equal_logits(both, warm)
    report = bench.report_of(request_id)
    assert (report.local_tokens, report.offered, report.confirmed) == (128, 192, 192)


@BOTH
def test_chunked_prefill_with_a_tail_of_several_chunks(manager: str) -> None:
    bench, head, tail = Bench(settings()), prompt(320), prompt(300, 1)
    with engine(bench, kv_cache_manager=manager, max_num_tokens=64) as running:
        run(running, head)
        _, warm = run(running, head + tail, sampling=WITH_LOGITS)
    other = Bench(settings())
    with engine(other, kv_cache_manager=manager, max_num_tokens=64) as running:
        run(running, head)
        running.reset_prefix_cache()
        request_id, loaded = run(running, head + tail, sampling=WITH_LOGITS)
        quiet(other)
    assert (warm.stats.device_reused_tokens, loaded.stats.connector_served_tokens) == (320, 320)
    assert equal_logits(warm, loaded)
    assert other.report_of(request_id).confirmed == 320


def test_short_honour_by_the_engine_is_accounted_as_such() -> None:
    """A runtime whose allocation does not grow serves a prefix of the offer; the rest is computed and stays in the
    slab."""

    class Short(SemkvConnectorScheduler):
        """Keeps back the end of every offer, as a runtime does that finds no pages for it."""

        def update_state_after_alloc_by_layer_group(self, request: Any, groups: list[list[int]]) -> None:
            if request.py_num_connector_matched_tokens > 64:
                request.prepopulated_prompt_len = request.context_current_position = request.device_reused_tokens + 64
                request.context_chunk_size = 96
                request.py_num_connector_matched_tokens = 64
            super().update_state_after_alloc_by_layer_group(request, groups)

        def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
            for data in scheduler_output.new_requests:
                data.computed_position = max(data.computed_position, 0)
            return super().build_connector_meta(scheduler_output)

    bench, tokens = Bench(settings()), prompt(300)
    with engine(bench, spec=bench.spec(scheduler=Short)) as running:
        _, cold = run(running, tokens)
        running.reset_prefix_cache()
        request_id, short = run(running, tokens)
        quiet(bench)
    report = bench.report_of(request_id)
    assert (report.offered, report.honoured, report.confirmed) == (288, 64, 64)
    assert cold.token_ids == short.token_ids


@BOTH
def test_many_requests_at_once_with_a_slab_under_pressure(manager: str) -> None:
    """Shared heads, more working set than slab and device hold, cancellations in between: every output is the cold
    one."""
    heads = [prompt(160, seed) for seed in range(4)]
    prompts = [heads[n % 4] + prompt(40 + 17 * n, 100 + n) for n in range(12)]
    with engine(None, num_blocks=200) as running:
        expected = [run(running, tokens)[1].token_ids for tokens in prompts]
    bench = Bench(settings(slab_bytes=MIB // 2 * 2))
    with engine(bench, kv_cache_manager=manager, num_blocks=48, max_batch_size=4) as running:
        for _ in range(2):
            handles = [running.submit(tokens, max_new_tokens=4) for tokens in prompts]
            cancelled = [running.submit(tokens, max_new_tokens=400) for tokens in prompts[:3]]
            for handle in cancelled:
                handle.cancel()
            assert [handle.result(60).token_ids for handle in handles] == expected
        for handle in cancelled:
            handle.result(60)
        numbers = bench.leader.snapshot()
        bench.leader._last_batch -= 100.0
        bench.leader.sweep_idle()
        quiet(bench)
    assert numbers["ledger"]["evicted"] > 0
    assert numbers["attempt_counts"]["confirmed_tokens"] > 0
    for report in bench.sink.reports:
        assert report.confirmed <= report.copied <= report.honoured <= report.offered
    registered = [event.donor_id for event in bench.sink.events(DonorRegistered)]
    evicted = [event.donor_id for event in bench.sink.events(DonorEvicted)]
    assert evicted
    assert len(evicted) == len(set(evicted))
    assert set(evicted) <= set(registered)


def test_cancelled_request_neither_donates_nor_keeps_anything() -> None:
    bench = Bench(settings())
    first_token = threading.Event()
    with engine(bench) as running:
        handle = running.submit(prompt(300), max_new_tokens=500, on_output=lambda *_: first_token.set())
        assert first_token.wait(60)
        handle.cancel()
        assert handle.result(60).finish_reason == "cancelled"
        wait_for(lambda: running.stats(0).running_requests == 0)
        bench.leader._last_batch -= 100.0
        bench.leader.sweep_idle()
        quiet(bench)
    assert not bench.sink.events(DonorRegistered)


@pytest.mark.parametrize("hooks", [True, False])
def test_dynamo_3297_nothing_depends_on_layer_hooks(hooks: bool) -> None:
    """ai-dynamo/dynamo#3297: CUDA graph replay skips the Python hooks of decodes."""
    bench, tokens = Bench(settings()), prompt(40)
    with engine(bench, layer_hooks_in_decode=hooks) as running:
        _, first = run(running, tokens, max_new_tokens=60)
        running.reset_prefix_cache()
        turn = [*tokens, *first.token_ids, 5, 6]
        request_id, second = run(running, turn)
        quiet(bench)
    assert bench.report_of(request_id).confirmed == (len(tokens) + len(first.token_ids) - 1) // 32 * 32
    with engine(None) as running:
        assert run(running, turn)[1].token_ids == second.token_ids


def test_no_connector_and_connector_with_nothing_to_load_give_the_same() -> None:
    """NVIDIA/TensorRT-LLM#13320: generation longer than a block, with a connector attached, must not change."""
    tokens = prompt(50)
    with engine(None) as running:
        _, expected = run(running, tokens, max_new_tokens=100, sampling=WITH_LOGITS)
    for it in (settings(), off_settings()):
        bench = Bench(it)
        with engine(bench) as running:
            _, found = run(running, tokens, max_new_tokens=100, sampling=WITH_LOGITS)
            quiet(bench)
        assert found.token_ids == expected.token_ids
        assert equal_logits(found, expected)


def test_two_ranks_own_their_slabs_donors_and_reports() -> None:
    bench, tokens = Bench(settings()), prompt(200)
    with engine(bench, data_parallel_size=2) as running:
        run(running, tokens, dp_rank=0)
        running.reset_prefix_cache()
        _, other = run(running, tokens, dp_rank=1)
        _, same = run(running, tokens, dp_rank=0)
        quiet(bench)
    assert (other.stats.connector_served_tokens, same.stats.connector_served_tokens) == (0, 192)
    by_rank = {sink.reports[0].dp_rank: sink for sink in bench.sinks}
    assert set(by_rank) == {0, 1}
    assert len(by_rank[0].reports) == 2
    assert len(by_rank[1].reports) == 1
    assert {event.dp_rank for event in by_rank[1].donor_events} == {1}


def test_restart_is_a_new_generation_with_an_empty_slab() -> None:
    tokens, generations = prompt(200), []
    for _ in range(2):
        bench = Bench(settings())
        with engine(bench) as running:
            _, found = run(running, tokens)
            quiet(bench)
        assert found.stats.connector_served_tokens == 0
        generations.append(bench.sink.reports[0].generation)
    assert generations[0] != generations[1]


# isolation and damage


def serve_twice(first: dict[str, Any], second: dict[str, Any], **config: Any) -> tuple[Bench, Any, Any]:
    """The same tokens for two submitters: (bench, report of the second, its generation)."""
    bench, tokens = Bench(settings()), prompt(200)
    with engine(bench, **config) as running:
        run(running, tokens, **first)
        running.reset_prefix_cache()
        request_id, found = run(running, tokens, **second)
        quiet(bench)
    return bench, bench.report_of(request_id), found


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"cache_salt": "tenant a"}, {"cache_salt": "tenant b"}),
        ({"cache_salt": "tenant a"}, {}),
        ({}, {"cache_salt": "tenant a"}),
        ({"lora_task_id": 1}, {"lora_task_id": 2}),
        ({"lora_task_id": 1}, {}),
        ({}, {"lora_task_id": 1}),
        ({"multimodal_hashes": [[1] * 8]}, {"multimodal_hashes": [[2] * 8]}),
    ],
)
def test_other_salt_adapter_or_media_gets_nothing(first: dict[str, Any], second: dict[str, Any]) -> None:
    """sglang#24568, vllm#44250, LMCache#4086: token-identical prompts of others are strangers."""
    bench, report, found = serve_twice(first, second, lora_seeds={1: 11, 2: 22})
    assert found.stats.connector_served_tokens == 0
    assert (report.offered, report.outcome, report.reason) == (0, Outcome.NO_DONOR, Reason.NOT_RESIDENT)
    namespaces = {event.namespace.extra["semkv_namespace"] for event in bench.sink.events(DonorRegistered)}
    assert len(namespaces) == 2


@pytest.mark.parametrize("same", [{"cache_salt": "tenant a"}, {"lora_task_id": 1}, {"multimodal_hashes": [[1] * 8]}])
def test_same_salt_adapter_or_media_is_served(same: dict[str, Any]) -> None:
    _, report, found = serve_twice(same, same, lora_seeds={1: 11, 2: 22})
    assert found.stats.connector_served_tokens == report.confirmed == 192


def test_empty_salt_is_nobody_s() -> None:
    _, report, found = serve_twice({"cache_salt": ""}, {"cache_salt": ""})
    assert found.stats.connector_served_tokens == 0
    assert report.reason is Reason.SALT_UNKNOWN


@pytest.mark.parametrize("block", [0, 3, 5])
def test_corrupted_slab_block_is_declined_and_so_is_what_continues_it(block: int) -> None:
    bench, tokens = Bench(settings()), prompt(200)
    with engine(bench) as running:
        _, cold = run(running, tokens)
        running.reset_prefix_cache()
        wait_for(lambda: bench.leader.snapshot()["tracked"] == 0)
        slab = bench.rank.slab
        ledger = bench.leader._life.ledger  # type: ignore[union-attr]
        assert slab is not None
        assert ledger is not None
        entry = next(e for e in ledger.entries() if e.ordinal == block)
        slab.rows[entry.slot, 1000] ^= 4
        request_id, found = run(running, tokens)
        quiet(bench)
    report = bench.report_of(request_id)
    assert found.token_ids == cold.token_ids
    assert found.stats.connector_served_tokens == report.confirmed == block * 32
    if block == 0:
        assert (report.outcome, report.reason) == (Outcome.DECLINED, Reason.CHECKSUM_MISMATCH)
    assert bench.leader.counts["damaged_blocks"] == 1
    # The request computed the rest itself, and saved it anew.
    assert bench.leader.snapshot()["ledger"]["resident"] == 6


def test_corrupted_block_is_found_by_the_scrub_before_anybody_asks() -> None:
    bench, tokens = Bench(settings()), prompt(200)
    with engine(bench) as running:
        run(running, tokens)
        wait_for(lambda: bench.leader.snapshot()["tracked"] == 0)
        assert bench.rank.slab is not None
        assert bench.rank.scrubber is not None
        bench.rank.slab.rows[2, 5] ^= 255
        bench.rank.scrubber.step()
        assert bench.leader.counts["damaged_blocks"] == 1
        assert len(bench.sink.events(DonorEvicted)) == 1
        quiet(bench)


def test_forged_entry_with_an_equal_key_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token mismatch with equal key: whatever the keys say, other tokens get nothing, and the reason says why."""
    import worker_connector.ledger.ledger as module

    real = module.child_key
    monkeypatch.setattr(module, "child_key", lambda parent, tokens: real(parent, b""))
    bench = Bench(settings())
    with engine(bench) as running:
        run(running, prompt(40, 1))
        running.reset_prefix_cache()
        request_id, found = run(running, prompt(40, 2))
        quiet(bench)
    assert found.stats.connector_served_tokens == 0
    report = bench.report_of(request_id)
    assert (report.outcome, report.reason) == (Outcome.DECLINED, Reason.TOKEN_MISMATCH)


# faults of ours


def test_fault_in_a_scheduler_callback_costs_reuse_only() -> None:
    class Broken(SemkvConnectorScheduler):
        @property
        def leader(self) -> Any:
            raise RuntimeError("a fault of ours")

        @leader.setter
        def leader(self, leader: Any) -> None:
            pass

        def snapshot(self) -> dict[str, Any]:
            return {"tracked": 0}

    bench, tokens = Bench(settings()), prompt(200)
    with engine(None) as running:
        _, expected = run(running, tokens)
    with engine(bench, spec=bench.spec(scheduler=Broken)) as running:
        _, found = run(running, tokens)
        assert found.token_ids == expected.token_ids
        assert set(bench.schedulers[0].faults) == {
            "get_num_new_matched_tokens",
            "update_state_after_alloc",
            "build_connector_meta",
            "request_finished",
        }


def test_fault_while_saving_costs_the_blocks_only() -> None:
    class NoSave(SemkvConnectorWorker):
        def wait_for_save(self, stream: Any) -> None:
            metadata = self.get_connector_meta()
            if metadata is not None and metadata.saves:  # type: ignore[attr-defined]
                moves = [order.moves[0]._replace(slot=10**6) for order in metadata.saves]  # type: ignore[attr-defined]
                order = metadata.saves[0]  # type: ignore[attr-defined]
                bad = type(order)(order.save_id, tuple(moves), order.request_id)
                metadata = msgspec.structs.replace(metadata, saves=(bad,))  # type: ignore[type-var]
                self._metadata = metadata
            super().wait_for_save(stream)

    bench, tokens = Bench(settings()), prompt(200)
    with engine(bench, spec=bench.spec(worker=NoSave)) as running:
        _, first = run(running, tokens)
        running.reset_prefix_cache()
        _, second = run(running, tokens)
        quiet(bench)
    assert first.token_ids == second.token_ids
    assert second.stats.connector_served_tokens == 0
    assert bench.rank.counts["save_errors"] > 0
    assert bench.leader.snapshot()["ledger"]["resident"] == 0


def test_fault_in_a_copy_fails_closed_and_tells_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    """A promise that cannot be kept must not become a forward pass over unwritten pages. The API knows no other way
    than to stop."""
    import worker_connector.rank.rank as module

    bench, tokens = Bench(settings()), prompt(200)
    with engine(bench) as running:
        run(running, tokens)
        running.reset_prefix_cache()
        wait_for(lambda: bench.leader.snapshot()["tracked"] == 0)

        def fail(*arguments: Sequence[Any]) -> None:
            raise RuntimeError("the copy failed")

        monkeypatch.setattr(module, "copy_to_pages", fail)
        handle = running.submit(tokens, max_new_tokens=2)
        assert handle.result(60).finish_reason == "error"
        with pytest.raises(EngineDeadError):
            running.submit(tokens, max_new_tokens=2)
        report = bench.report_of(handle.request_id)
    assert (report.offered, report.honoured, report.copied, report.confirmed) == (192, 192, 0, 0)
    assert (report.outcome, report.reason) == (Outcome.LOAD_FAILED, Reason.COPY_FAILED)
    assert bench.leader.snapshot()["leases"] == 0
