"""Asynchronous loads on the reference engine, which parks requests as TensorRT-LLM does: real attention, and the rank's
own thread."""

from __future__ import annotations

import pytest

from dynamo_semkv.contracts.report import Outcome
from tests.worker_connector.harness import Bench, engine, prompt, run, settings, wait_for
from tests.worker_connector.test_on_engine import WITH_LOGITS, equal_logits, quiet
from worker_connector.errors import Refused


def parking(inline: bool = True, **options: float) -> Bench:
    return Bench(settings(async_load_min_tokens=64, **options), inline=inline)


def resident(bench: Bench) -> int:
    return sum(scheduler.leader.resident_blocks() for scheduler in bench.schedulers)


@pytest.mark.parametrize("length", [97, 200, 1000])
@pytest.mark.parametrize("inline", [True, False])
def test_loaded_while_parked_is_bit_identical_to_device_warm(length: int, inline: bool) -> None:
    bench, tokens = parking(inline), prompt(length)
    whole = (length - 1) // 32 * 32
    with engine(bench, kv_cache_manager="v2", idle_poll_s=0.01) as running:
        run(running, tokens, sampling=WITH_LOGITS)
        wait_for(lambda: resident(bench) >= whole // 32)
        _, warm = run(running, tokens, sampling=WITH_LOGITS)
        running.reset_prefix_cache()
        request_id, loaded = run(running, tokens, sampling=WITH_LOGITS)
        quiet(bench)
    assert loaded.stats.connector_served_tokens == whole
    assert equal_logits(warm, loaded)
    report = bench.report_of(request_id)
    assert (report.outcome, report.confirmed) == (Outcome.MATERIALIZED_EXACT, whole)
    assert bench.rank.counts["repeated_loads"] == bench.rank.counts["late_loads"] == 0


def test_many_parked_at_once_and_some_cancelled() -> None:
    bench = parking(inline=False)
    prompts = [prompt(200, seed) for seed in range(6)]
    with engine(bench, kv_cache_manager="v2", num_blocks=48, idle_poll_s=0.01) as running:
        cold = [run(running, tokens)[1].token_ids for tokens in prompts]
        wait_for(lambda: resident(bench) >= 36)
        running.reset_prefix_cache()
        handles = [running.submit(tokens, max_new_tokens=4) for tokens in prompts]
        handles[1].cancel()
        handles[4].cancel()
        results = [handle.result(60) for handle in handles]
        wait_for(lambda: bench.leader.snapshot()["leases"] == 0)
        bench.leader._life.sweep(bench.leader._iteration)  # type: ignore[union-attr]  # of the cancelled ones nobody is told
        quiet(bench)
        for number, result in enumerate(results):
            if number not in (1, 4):
                assert result.token_ids == cold[number]
        again = [run(running, tokens)[1].token_ids for tokens in prompts]
    assert again == cold
    assert bench.leader.snapshot()["counts"].get("result_errors", 0) == 0


def test_two_owners_park_their_own_requests() -> None:
    bench, tokens = parking(inline=False), prompt(200)
    with engine(bench, kv_cache_manager="v2", data_parallel_size=2, idle_poll_s=0.01) as running:
        cold = run(running, tokens, dp_rank=1)[1]
        wait_for(lambda: resident(bench) >= 6)
        running.reset_prefix_cache()
        first = run(running, tokens, dp_rank=0)[1]
        second = run(running, tokens, dp_rank=1)[1]
        quiet(bench)
    assert cold.token_ids == first.token_ids == second.token_ids
    assert (first.stats.connector_served_tokens, second.stats.connector_served_tokens) == (0, 192)


def test_v1_cache_manager_is_refused_with_the_setting_and_the_remedy() -> None:
    with pytest.raises(Refused, match=r"async_load_min_tokens.*use_kv_cache_manager_v2"):
        with engine(parking(), kv_cache_manager="v1"):
            pass
