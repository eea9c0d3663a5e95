"""KV that a connector saved and loaded is as good as KV on the device, to the last bit."""

from __future__ import annotations

import pytest
import torch

from tests.worker_connector.reference_engine.connectors import ByteStore, storing_connector
from tests.worker_connector.reference_engine.running import PATIENCE_S, WITH_LOGITS, prompt, start
from worker_connector.reference_engine import Engine, Generation


def generate(engine: Engine, tokens: list[int], salt: str | None = None, lora: int | None = None) -> Generation:
    return engine.submit(tokens, max_new_tokens=6, sampling=WITH_LOGITS, cache_salt=salt, lora_task_id=lora).result(
        PATIENCE_S
    )


def same_logits(left: Generation, right: Generation) -> bool:
    pairs = zip(left.stats.generation_logits, right.stats.generation_logits, strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("manager", ["v1", "v2"])
@pytest.mark.parametrize("load_async", [False, True])
def test_loaded_equals_device_warm_and_cold(manager: str, load_async: bool) -> None:
    store = ByteStore(load_async=load_async)
    tokens = prompt(61)
    with start(storing_connector(store), kv_cache_manager=manager) as engine:
        cold = generate(engine, tokens)
        warm = generate(engine, tokens)
        engine.reset_prefix_cache()
        loaded = generate(engine, tokens)
        again = generate(engine, tokens)
    assert cold.stats.cached_tokens == 0
    assert (warm.stats.device_reused_tokens, warm.stats.connector_served_tokens) == (56, 0)
    assert (loaded.stats.device_reused_tokens, loaded.stats.connector_served_tokens) == (0, 56)
    assert store.loaded_blocks == 7
    assert same_logits(warm, loaded)
    assert cold.token_ids == warm.token_ids == loaded.token_ids
    # The served blocks were committed to the reuse tree with the computed ones.
    assert again.stats.device_reused_tokens == 56
    assert same_logits(warm, again)


def test_loaded_equals_device_warm_with_chunked_prefill() -> None:
    """The offer ends before the tail, which is computed in several chunks from the same boundaries."""
    head, tail = prompt(40), prompt(50, 1)
    with start(max_num_tokens=16) as engine:
        generate(engine, head)
        warm = generate(engine, head + tail)
    store = ByteStore()
    with start(storing_connector(store), max_num_tokens=16) as engine:
        generate(engine, head)
        engine.reset_prefix_cache()
        loaded = generate(engine, head + tail)
    assert warm.stats.cached_tokens == loaded.stats.cached_tokens == loaded.stats.connector_served_tokens == 40
    assert same_logits(warm, loaded)


def test_device_prefix_then_loaded_prefix() -> None:
    """Chunks of 24 tokens, so that the short prompt computes its blocks as the long one did."""
    store = ByteStore()
    tokens = prompt(61)
    with start(storing_connector(store), max_num_tokens=24) as engine:
        cold = generate(engine, tokens)
        warm = generate(engine, tokens)
        engine.reset_prefix_cache()
        store.offer_limit = 0
        generate(engine, tokens[:25])
        store.offer_limit = None
        both = generate(engine, tokens)
    assert (both.stats.device_reused_tokens, both.stats.connector_served_tokens) == (24, 32)
    assert same_logits(warm, both)
    assert both.token_ids == cold.token_ids


def test_wrong_bytes_are_seen() -> None:
    """The negative control of this file: one flipped element of one page changes the logits."""
    store = ByteStore()
    tokens = prompt(61)
    with start(storing_connector(store)) as engine:
        generate(engine, tokens)
        warm = generate(engine, tokens)
        engine.reset_prefix_cache()
        page = next(iter(store.pages.values()))
        page[1, 0, 5] += 0.5
        loaded = generate(engine, tokens)
    assert loaded.stats.connector_served_tokens == 56
    assert not same_logits(warm, loaded)


def test_adapters_have_their_own_kv() -> None:
    store = ByteStore()
    tokens = prompt(61)
    with start(storing_connector(store), lora_seeds={1: 11, 2: 12}) as engine:
        base, one, two = (generate(engine, tokens, lora=task) for task in (None, 1, 2))
        engine.reset_prefix_cache()
        reloaded = generate(engine, tokens, lora=1)
    assert [g.stats.cached_tokens for g in (base, one, two)] == [0, 0, 0]
    assert reloaded.stats.connector_served_tokens == 56
    assert reloaded.token_ids == one.token_ids
    assert not same_logits(base, one)
    assert not same_logits(one, two)


def test_salted_prompts_never_meet() -> None:
    store = ByteStore()
    tokens = prompt(61)
    with start(storing_connector(store)) as engine:
        salts = (None, "", "a", "b")
        assert [generate(engine, tokens, salt).stats.cached_tokens for salt in salts] == [0] * 4
        engine.reset_prefix_cache()
        assert [generate(engine, tokens, salt).stats.connector_served_tokens for salt in salts] == [56] * 4
