"""Many requests at once on a pool that is too small, with cancellations: every answer is the cold one, nothing
leaks."""

from __future__ import annotations

import random

import pytest

from tests.worker_connector.reference_engine.connectors import ByteStore, storing_connector
from tests.worker_connector.reference_engine.event_mirror import Mirror
from tests.worker_connector.reference_engine.running import PATIENCE_S, prompt, start, until

NEW_TOKENS = 6


@pytest.mark.parametrize("load_async", [False, True])
@pytest.mark.parametrize("manager", ["v1", "v2"])
def test_answers_under_pressure_equal_cold_answers(manager: str, load_async: bool) -> None:
    choose = random.Random(5)
    heads = [prompt(length, seed) for seed, length in enumerate((16, 40, 41, 64))]
    prompts = [choose.choice(heads) + prompt(choose.randrange(1, 20), 100 + choose.randrange(6)) for _ in range(60)]
    salts = [choose.choice([None, "a"]) for _ in prompts]
    with start(enable_block_reuse=False) as engine:
        cold = [engine.submit(tokens, max_new_tokens=NEW_TOKENS).result(PATIENCE_S).token_ids for tokens in prompts]

    store = ByteStore(load_async=load_async)
    with start(
        storing_connector(store),
        kv_cache_manager=manager,
        data_parallel_size=2,
        num_blocks=24,
        max_num_tokens=24,
        max_batch_size=6,
    ) as engine:
        handles = []
        for number, (tokens, salt) in enumerate(zip(prompts, salts, strict=True)):
            handles.append(engine.submit(tokens, max_new_tokens=NEW_TOKENS, cache_salt=salt, dp_rank=number % 2))
            if choose.random() < 0.2:
                choose.choice(handles).cancel()
        results = [handle.result(PATIENCE_S) for handle in handles]
        until(lambda: all(engine.stats(rank).active_blocks == 0 for rank in (0, 1)), "pages come back")
        events = [engine.poll_kv_events(rank) for rank in (0, 1)]
        for rank in (0, 1):
            assert engine.stats(rank).parked_requests == 0
            mirror = Mirror(block_size=8)
            mirror.apply(events[rank])
            assert len(mirror.blocks) == engine.stats(rank).cached_blocks
    finished = [(r, expected) for r, expected in zip(results, cold, strict=True) if r.finish_reason == "length"]
    assert len(finished) > 30
    for result, expected in finished:
        assert result.token_ids == expected
    assert store.loaded_blocks > 0
    assert sum(result.stats.connector_served_tokens for result, _ in finished) > 0
    assert sum(result.stats.device_reused_tokens for result, _ in finished) > 0
