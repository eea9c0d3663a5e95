"""KV events for Dynamo: one hash a block in both tiers, salts carried or the block left out, everything announced
once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dynamo_semkv.contracts.keys import BlockKey, block_keys
from tests.worker_connector.reference_engine.running import prompt, start
from worker_connector.reference_engine.dynamo_worker.kv_events import DeviceEvents, HostResidency, heartbeat
from worker_connector.reference_engine.engine.events import KvEventBuffer, StoredBlock
from worker_connector.reference_engine.engine.reuse import ReuseScope, chain_hash

SIZE = 4


class Sent:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def send(self, events: Sequence[Mapping[str, Any]]) -> None:
        self.events += [dict(event) for event in events]

    def take(self) -> list[dict[str, Any]]:
        taken, self.events = self.events, []
        return taken

    @property
    def kinds(self) -> list[tuple[str, str, list[int]]]:
        return [(event["type"], event["medium"], event["block_hashes"]) for event in self.events]


def blocks(tokens: list[int]) -> list[tuple[BlockKey, bytes]]:
    """What the connector says of these blocks; its keys are its own."""
    raw = np.asarray(tokens, "<u4").tobytes()
    keys = block_keys(b"n" * 32, tokens, SIZE)
    return [(key, raw[i * SIZE * 4 : (i + 1) * SIZE * 4]) for i, key in enumerate(keys)]


def engine_hashes(tokens: list[int]) -> list[int]:
    chain, hashes = ReuseScope().seed(), []
    for at in range(0, len(tokens), SIZE):
        hashes.append(chain_hash(chain, tokens[at : at + SIZE]))
        chain = hashes[-1].to_bytes(8, "little")
    return hashes


def test_device_events_of_a_real_engine_carry_tokens_and_salt() -> None:
    with start(tokens_per_block=SIZE, num_blocks=8) as engine:
        sent = Sent()
        device = DeviceEvents(sent, SIZE)
        tokens = prompt(8)
        engine.submit(tokens, max_new_tokens=1).result(60.0)
        engine.submit(tokens, max_new_tokens=1, cache_salt="t1").result(60.0)
        device.apply(engine.poll_kv_events(0))
        plain = [event for event in sent.events if "cache_salt" not in event]
        salted = [event for event in sent.events if event.get("cache_salt") == "t1"]
        assert len(plain) + len(salted) == len(sent.take())
        for events in (plain, salted):
            assert [token for event in events for token in event["token_ids"]] == tokens
        hashes = [h for event in plain for h in event["block_hashes"]]
        assert hashes == engine_hashes(tokens)
        assert plain[0]["parent_block_hash"] is None
        assert plain[-1]["parent_block_hash"] in (None, hashes[0])
        # Enough other prompts push both out of the pool.
        for seed in range(1, 6):
            engine.submit(prompt(16, seed), max_new_tokens=1).result(60.0)
        device.apply(engine.poll_kv_events(0))
        gone = {h for kind, medium, hashes in sent.kinds if kind == "BlockRemoved" for h in hashes}
        assert set(hashes) <= gone


def test_host_blocks_have_the_engines_hashes() -> None:
    sent = Sent()
    host = HostResidency(sent, SIZE)
    tokens = prompt(12)
    host.stored(None, blocks(tokens)[:1], salted=False)
    host.stored(blocks(tokens)[0][0], blocks(tokens)[1:], salted=False)
    assert [h for _, _, hashes in sent.kinds for h in hashes] == engine_hashes(tokens)
    assert [event["parent_block_hash"] for event in sent.events] == [None, *engine_hashes(tokens)[:2]]
    assert {event["medium"] for event in sent.events} == {"CPU_PINNED"}
    assert [token for event in sent.take() for token in event["token_ids"]] == tokens


def test_host_blocks_are_announced_and_removed_once() -> None:
    sent = Sent()
    host = HostResidency(sent, SIZE)
    tokens = prompt(12)
    host.stored(None, blocks(tokens), salted=False)
    sent.take()
    host.stored(None, blocks(tokens), salted=False)  # attached again, or written again
    assert not sent.events
    keys = [key for key, _ in blocks(tokens)]
    host.removed(keys[2:])
    host.removed(keys[2:])
    assert sent.kinds == [("BlockRemoved", "CPU_PINNED", engine_hashes(tokens)[2:])]
    sent.take()
    host.cleared()
    host.cleared()
    assert sent.kinds == [("BlockRemoved", "CPU_PINNED", engine_hashes(tokens)[:2])]


def test_scoped_host_blocks_are_never_announced() -> None:
    """Nor what continues one, and their removal says nothing."""
    sent = Sent()
    host = HostResidency(sent, SIZE)
    tokens = prompt(12)
    host.stored(None, blocks(tokens)[:2], salted=True)
    host.stored(blocks(tokens)[1][0], blocks(tokens)[2:], salted=False)
    host.removed([key for key, _ in blocks(tokens)])
    host.cleared()
    assert not sent.events
    assert host.skipped == {"salted": 2, "unknown_parent": 1}


def stored_block(block_hash: int, size: int = SIZE, lora: int | None = None) -> StoredBlock:
    return StoredBlock(block_hash, tuple(range(size)), 35, None, lora)


def test_device_blocks_that_cannot_carry_their_scope_are_left_out() -> None:
    sent = Sent()
    device = DeviceEvents(sent, SIZE)
    buffer = KvEventBuffer(0, 1024, 100)
    buffer.stored(None, [stored_block(1, lora=1)])
    buffer.stored(None, [stored_block(2, size=SIZE - 1)])
    buffer.stored(1, [stored_block(3)])
    buffer.removed([1, 2, 3])
    buffer.flush()
    device.apply(buffer.drain())
    assert not sent.events
    assert device.skipped == {"scoped": 1, "partial": 1, "unknown_parent": 1, "lost_events": 0}


def test_events_that_the_engine_lost_are_counted() -> None:
    device = DeviceEvents(Sent(), SIZE)
    buffer = KvEventBuffer(0, 1024, 2)
    for block_hash in range(5):
        buffer.stored(None, [stored_block(block_hash)])
    device.apply(buffer.drain())
    assert device.skipped["lost_events"] == 3


def test_a_heartbeat_leaves_nothing_behind_and_is_seen_by_nobody() -> None:
    stored_event, removed_event = heartbeat(SIZE)
    assert stored_event["block_hashes"] == removed_event["block_hashes"]
    assert stored_event["medium"] == removed_event["medium"]
    assert len(stored_event["token_ids"]) == SIZE
    assert stored_event["cache_salt"].startswith("semkv-heartbeat-")
    assert len(stored_event["cache_salt"]) > 32
