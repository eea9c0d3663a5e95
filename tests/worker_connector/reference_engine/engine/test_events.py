"""KV events have TensorRT-LLM's dict shape, order and loss marks."""

from __future__ import annotations

from typing import Any

from tests.worker_connector.reference_engine.running import PATIENCE_S, prompt, start
from worker_connector.reference_engine.engine.events import KvEventBuffer, StoredBlock


def block(block_hash: int) -> StoredBlock:
    return StoredBlock(block_hash, (1, 2), 35, None, None)


def test_shapes() -> None:
    with start(lora_seeds={3: 1}) as engine:
        engine.submit(prompt(17), max_new_tokens=1, cache_salt="tenant", lora_task_id=3).result(PATIENCE_S)
        created, stored = engine.poll_kv_events(0)
        assert engine.poll_kv_events(0) == []
    assert created == {
        "event_id": 0,
        "data": {"type": "created", "num_blocks_per_cache_level": [64]},
        "window_size": 40_960,
        "attention_dp_rank": 0,
    }
    data = stored["data"]
    assert (stored["event_id"], data["type"], data["parent_hash"], len(data["blocks"])) == (1, "stored", None, 2)
    first, second = data["blocks"]
    assert first["block_hash"] != second["block_hash"]
    assert all(0 <= b["block_hash"] < 2**64 for b in data["blocks"])
    assert first | {"block_hash": 0} == {
        "type": "stored_block",
        "block_hash": 0,
        "tokens": [{"type": "unique_token", "token_id": t, "token_extra_id": 0} for t in prompt(17)[:8]],
        "cache_level": 0,
        "priority": 35,
        "mm_keys": [],
        "cache_salt": "tenant",
        "lora_id": 3,
    }


def test_equal_prefixes_hash_equally_in_every_engine() -> None:
    def hashes(**changes: Any) -> list[int]:
        with start() as engine:
            engine.submit(prompt(33), max_new_tokens=1, **changes).result(PATIENCE_S)
            return [b["block_hash"] for e in engine.poll_kv_events(0)[1:] for b in e["data"]["blocks"]]

    assert hashes() == hashes()
    assert set(hashes()).isdisjoint(hashes(cache_salt="tenant"))


def test_generated_blocks_follow_their_parent() -> None:
    with start() as engine:
        engine.submit(prompt(20), max_new_tokens=14).result(PATIENCE_S)
        events = [event["data"] for event in engine.poll_kv_events(0)[1:]]
    hashes = [[b["block_hash"] for b in data["blocks"]] for data in events]
    assert [len(found) for found in hashes] == [2, 1, 1]  # 33 tokens have KV
    assert [data["parent_hash"] for data in events] == [None, hashes[0][1], hashes[1][0]]


def test_a_new_retention_priority_is_an_update() -> None:
    with start() as engine:
        engine.submit(prompt(9), max_new_tokens=1).result(PATIENCE_S)
        engine.submit(prompt(9), max_new_tokens=1, retention_priority=80).result(PATIENCE_S)
        _, stored, updated = (event["data"] for event in engine.poll_kv_events(0))
    assert updated == {
        "type": "updated",
        "block_hash": stored["blocks"][0]["block_hash"],
        "cache_level": None,
        "priority": {"type": "event_diff", "new_value": 80, "old_value": 35},
    }


def test_removals_are_batched_before_the_next_event() -> None:
    buffer = KvEventBuffer(rank=2, window_size=10, max_size=100)
    buffer.removed([1])
    buffer.removed([2, 3])
    buffer.stored(None, [block(4)])
    buffer.removed([4])
    assert [event["data"]["type"] for event in buffer.drain()] == ["removed", "stored"]
    buffer.flush()
    (event,) = buffer.drain()
    assert (event["event_id"], event["data"]) == (2, {"type": "removed", "block_hashes": [4]})
    assert (event["window_size"], event["attention_dp_rank"]) == (10, 2)
    buffer.flush()
    assert buffer.drain() == []


def test_overflow_drops_the_oldest_and_leaves_a_gap() -> None:
    buffer = KvEventBuffer(rank=0, window_size=10, max_size=2)
    for block_hash in range(5):
        buffer.stored(None, [block(block_hash)])
    assert [event["event_id"] for event in buffer.drain()] == [3, 4]
    assert buffer.dropped_event_count == 3


def test_size_zero_records_nothing() -> None:
    buffer = KvEventBuffer(rank=0, window_size=10, max_size=0)
    buffer.stored(None, [block(1)])
    assert buffer.drain() == []
