"""Batches of TensorRT-LLM's streaming KV event publisher (`kv_cache_config.kv_events_config`) as events of the
serializer's shape. Pure.

A message has three frames: topic, sequence number (8 bytes, big endian), payload. The payload is msgpack: `[seconds,
events, data-parallel rank]`, each event a map with its name under `type`: `BlockStored`, `BlockRemoved`,
`AllBlocksCleared` (`tensorrt_llm/_torch/pyexecutor/kv_cache_events.py`). A number that is missing is a batch that was
lost; the publisher keeps the last ones for whoever asks its replay endpoint. Events name neither the salt nor, as of
now, the adapter of a block, so blocks of such requests look like those of plain ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

_LEVELS = {None: 0, "GPU": 0, "CPU": 1, "CPU_PINNED": 1, "DISK": 2}
"""Of `medium`."""
_RAISED = (msgspec.MsgspecError, KeyError, TypeError, ValueError, AttributeError, RecursionError)


class EventBatches:
    """Numbers the events of one publisher, so that a lost batch is a gap in their ids. The first id is 0 only if
    nothing came before."""

    def __init__(self) -> None:
        self._next_batch: int | None = None
        self._next_event = 0

    @property
    def expected(self) -> int:
        """Number of the next batch; 0 before the first one."""
        return self._next_batch or 0

    def restarted(self) -> list[dict[str, Any]]:
        """Another publisher speaks, from its own beginning: what the one before stored counts for nothing."""
        self._next_batch = None
        return [self._event({"type": "cleared"}, {}, None)]

    def read(self, number: int, payload: bytes) -> list[dict[str, Any]]:
        """Of one batch; empty for one that was read before. Of a payload that cannot be read, an event that cannot: a
        loss."""
        if number < self.expected:
            return []
        if number > self.expected:
            self._next_event += 1
        self._next_batch = number + 1
        try:
            _, events, *rank = msgspec.msgpack.decode(payload)
            return [self._event(_data(event), event, rank[0] if rank else None) for event in events]
        except _RAISED:
            return [self._event(None, {}, None)]

    def _event(self, data: dict[str, Any] | None, event: Mapping[str, Any], rank: int | None) -> dict[str, Any]:
        number, self._next_event = self._next_event, self._next_event + 1
        return {
            "event_id": number,
            "data": data,
            "window_size": None,  # only the group that attends furthest is published
            "layer_group_id": event.get("group_idx"),
            "attention_dp_rank": rank,
        }


def _data(event: Mapping[str, Any]) -> dict[str, Any]:
    kind = event["type"]
    if kind == "AllBlocksCleared":
        return {"type": "cleared"}
    if kind == "BlockRemoved":
        return {"type": "removed", "block_hashes": event["block_hashes"]}
    if kind != "BlockStored":
        return {"type": kind}
    hashes, tokens, size = event["block_hashes"], event["token_ids"], event["block_size"]
    if not isinstance(size, int) or size < 1 or len(tokens) != len(hashes) * size:
        raise ValueError(f"{len(hashes)} blocks of {size} tokens have {len(tokens)} tokens")
    media = _each(event.get("mm_keys"), len(hashes))
    extra = _each(event.get("extra_keys"), len(hashes))
    return {
        "type": "stored",
        "parent_hash": event.get("parent_block_hash"),
        "blocks": [
            {
                "block_hash": name,
                "tokens": tokens[index * size : (index + 1) * size],
                "cache_level": _LEVELS.get(event.get("medium"), 1),
                "lora_id": event.get("lora_id"),
                "mm_keys": media[index] or extra[index],
            }
            for index, name in enumerate(hashes)
        ],
    }


def _each(values: Sequence[Any] | None, blocks: int) -> Sequence[Any]:
    if values is None:
        return [None] * blocks
    if len(values) != blocks:
        raise ValueError(f"keys of {len(values)} blocks for {blocks}")
    return values
