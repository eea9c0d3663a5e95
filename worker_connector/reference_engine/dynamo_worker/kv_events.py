"""Sends the KV events of one rank to Dynamo: the engine's device blocks, and what the connector's host slab holds.

Both go through one ordered relay a rank. Dynamo counts announcements, so a block of one tier is announced once, however
often it is written there, and removed once. A salted device block carries its salt under Dynamo's name for it. A block
that cannot carry its scope (an adapter, media, a salted host block whose salt the connector does not keep) is not
announced at all: named by its tokens alone it would be offered to everybody (ai-dynamo/dynamo#8197,
NVIDIA/TensorRT-LLM#18156).
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from dynamo_semkv.contracts.keys import BlockKey
from dynamo_semkv.contracts.location import KV_EVENT_MEDIUM, Tier
from worker_connector.reference_engine.engine.reuse import ReuseScope, chain_hash

U64 = 2**64 - 1
_HEARTBEAT_HASH = 0x5E3D_BEA7_0000_0001
_HEARTBEAT_SALT = "semkv-heartbeat-" + secrets.token_hex(16)


class EventOut(Protocol):
    """Takes the raw KV events of one rank."""

    def send(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Must keep the order, be callable from any thread, and never block for long."""
        ...


class DeviceEvents:
    """Translates one rank's TensorRT-LLM event dicts into Dynamo's. A partial block, the removal of an unknown block
    and an update are left out, since a router learns nothing from them."""

    def __init__(self, out: EventOut, tokens_per_block: int) -> None:
        self._out = out
        self._size = tokens_per_block
        self._announced: set[int] = set()
        self.skipped: Counter[str] = Counter()
        """Blocks not announced, by reason: `partial`, `scoped` (adapter or media), `unknown_parent`. `lost_events` are
        those that the engine's full buffer dropped: blocks whose removal was among them may stay in Dynamo's index, and
        a placement on them turns out cold."""
        self._next_id = 0

    @property
    def announced(self) -> int:
        """Blocks whose storing Dynamo was told of, and whose removal it was not."""
        return len(self._announced)

    def apply(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Takes the engine's events in order; a gap in their ids counts as lost events."""
        found: list[dict[str, Any]] = []
        for event in events:
            self.skipped["lost_events"] += event["event_id"] - self._next_id
            self._next_id = event["event_id"] + 1
            data = event["data"]
            if data["type"] == "stored":
                found += self._stored(data)
            elif data["type"] == "removed":
                gone = [h & U64 for h in data["block_hashes"] if h & U64 in self._announced]
                self._announced.difference_update(gone)
                if gone:
                    found.append(removed(gone, Tier.DEVICE))
        if found:
            self._out.send(found)

    def _stored(self, data: Mapping[str, Any]) -> list[dict[str, Any]]:
        """One event a block. A block that may not be announced ends the run: nothing below it is announced either."""
        parent = None if data["parent_hash"] is None else data["parent_hash"] & U64
        events: list[dict[str, Any]] = []
        for block in data["blocks"]:
            key = block["block_hash"] & U64
            tokens = [token["token_id"] for token in block["tokens"]]
            if len(tokens) != self._size:
                self.skipped["partial"] += 1
                break
            if block.get("lora_id") is not None or block.get("mm_keys"):
                self.skipped["scoped"] += 1
                break
            if parent is not None and parent not in self._announced:
                self.skipped["unknown_parent"] += 1
                break
            if key not in self._announced:
                self._announced.add(key)
                events.append(stored(parent, [key], tokens, self._size, Tier.DEVICE, block.get("cache_salt")))
            parent = key
        return events


class HostResidency:
    """The connector's ResidencySink for one rank: announces the host slab as Dynamo's host tier. Called on the
    connector's thread.

    A block is announced under the engine's own hash of it, which is why the tokens are hashed again here: Dynamo
    continues a device prefix on the host tier only where the hashes of both are the same.
    """

    def __init__(self, out: EventOut, tokens_per_block: int) -> None:
        self._out = out
        self._size = tokens_per_block
        self._hashes: dict[BlockKey, int] = {}
        """Engine hashes of the blocks that were announced and not removed since; bounded by the slab."""
        self.skipped: Counter[str] = Counter()
        """Blocks not announced, by reason: `salted`, `unknown_parent`."""

    @property
    def announced(self) -> int:
        """Blocks whose storing Dynamo was told of, and whose removal it was not."""
        return len(self._hashes)

    def stored(self, parent: BlockKey | None, blocks: Sequence[tuple[BlockKey, bytes]], *, salted: bool) -> None:
        """Announces a run of blocks below `parent` (None: at the start), unless they are salted or `parent` was not
        announced."""
        if salted:
            self.skipped["salted"] += len(blocks)
            return
        if parent is not None and parent not in self._hashes:
            self.skipped["unknown_parent"] += len(blocks)
            return
        above = None if parent is None else self._hashes[parent]
        events = []
        for key, raw in blocks:
            tokens = np.frombuffer(raw, "<u4").tolist()
            name = chain_hash(ReuseScope().seed() if above is None else above.to_bytes(8, "little"), tokens)
            if key not in self._hashes:
                self._hashes[key] = name
                events.append(stored(above, [name], tokens, self._size, Tier.HOST_PINNED, None))
            above = name
        if events:
            self._out.send(events)

    def removed(self, blocks: Sequence[BlockKey]) -> None:
        """Blocks that were never announced are ignored."""
        self._remove([self._hashes.pop(key) for key in blocks if key in self._hashes])

    def cleared(self) -> None:
        """Announces the removal of every block."""
        names = list(self._hashes.values())
        self._hashes.clear()
        self._remove(names)

    def _remove(self, names: Sequence[int]) -> None:
        if names:
            self._out.send([removed(list(names), Tier.HOST_PINNED)])


def stored(
    parent: int | None, hashes: list[int], tokens: list[int], block_size: int, tier: Tier, salt: str | None
) -> dict[str, Any]:
    """Dynamo's event for a run of blocks that `tier` now holds; hashes are unsigned 64-bit, None as parent is the
    start."""
    event: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": block_size,
        "medium": KV_EVENT_MEDIUM[tier],
    }
    if salt is not None:
        event["cache_salt"] = salt
    return event


def removed(hashes: list[int], tier: Tier) -> dict[str, Any]:
    """Dynamo's event for blocks that `tier` no longer holds."""
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": KV_EVENT_MEDIUM[tier]}


def heartbeat(block_size: int) -> list[dict[str, Any]]:
    """Events that change nothing: a block under a salt that no request has is stored and removed again.

    Dynamo's router asks for events that it missed while the broker was away only when a later one of the same rank
    arrives, so without these the blocks of an engine that falls quiet would stay unknown.
    """
    tokens = [0] * block_size
    return [
        stored(None, [_HEARTBEAT_HASH], tokens, block_size, Tier.DEVICE, _HEARTBEAT_SALT),
        removed([_HEARTBEAT_HASH], Tier.DEVICE),
    ]
