"""KV cache events of one rank, in the dict shape of TensorRT-LLM's `KVCacheEventSerializer`.

    {event_id, data, window_size, attention_dp_rank, layer_group_id?}
    data: created | stored | removed | updated

Ids count up from 0 per rank and are given before a full buffer drops its oldest events, so a gap shows the loss.
Removals are batched: they are emitted as one event a group before the next event of another kind, or at `flush`. With
several layer groups a block is stored and removed once in each, and the event says in which.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: TensorRT-LLM's default retention priority.
DEFAULT_PRIORITY = 35

_DEVICE_LEVEL = 0


@dataclass(frozen=True)
class StoredBlock:
    """A block as a stored event reports it. Unset salt and LoRA are absent from the event."""

    block_hash: int
    tokens: tuple[int, ...]
    priority: int
    cache_salt: str | None
    lora_task_id: int | None


class KvEventBuffer:
    """Bounded event queue: the engine thread appends, any thread drains. A size of 0 records nothing."""

    def __init__(self, rank: int, window_size: int | Sequence[int], max_size: int) -> None:
        """`window_size` is that of the only layer group, or one a group; for full attention the longest sequence."""
        self._rank = rank
        self._windows = [window_size] if isinstance(window_size, int) else list(window_size)
        self._max_size = max_size
        self._lock = threading.Lock()
        self._events: deque[dict[str, Any]] = deque()
        self._removed: list[list[int]] = [[] for _ in self._windows]
        self._next_id = 0
        self._dropped = 0

    @property
    def dropped_event_count(self) -> int:
        """Events that a full buffer has dropped."""
        return self._dropped

    def created(self, num_blocks: int) -> None:
        """The pool was made with so many blocks in each group."""
        for group in range(len(self._windows)):
            self._append({"type": "created", "num_blocks_per_cache_level": [num_blocks]}, group)

    def stored(self, parent_hash: int | None, blocks: Sequence[StoredBlock], group: int = 0) -> None:
        """A run of consecutive blocks became reusable below `parent_hash` (None: at the start of a sequence)."""
        self._append(
            {"type": "stored", "parent_hash": parent_hash, "blocks": [_stored_block(b) for b in blocks]}, group
        )

    def removed(self, block_hashes: Sequence[int], group: int = 0) -> None:
        """Blocks lost their page in a group; emitted later, with others."""
        with self._lock:
            self._removed[group].extend(block_hashes)

    def priority_updated(self, block_hash: int, old: int, new: int) -> None:
        """A block's retention priority changed."""
        difference = {"type": "event_diff", "new_value": new, "old_value": old}
        self._append({"type": "updated", "block_hash": block_hash, "cache_level": None, "priority": difference})

    def flush(self) -> None:
        """Emit the removals that are still batched."""
        with self._lock:
            self._flush_removed()

    def drain(self) -> list[dict[str, Any]]:
        """All events since the last call, oldest first."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
            return events

    def _append(self, data: dict[str, Any], group: int = 0) -> None:
        with self._lock:
            self._flush_removed()
            self._push(data, group)

    def _flush_removed(self) -> None:
        for group, hashes in enumerate(self._removed):
            if hashes:
                self._push({"type": "removed", "block_hashes": hashes}, group)
                self._removed[group] = []

    def _push(self, data: dict[str, Any], group: int) -> None:
        if self._max_size == 0:
            return
        if len(self._events) == self._max_size:
            self._events.popleft()
            self._dropped += 1
        event: dict[str, Any] = {
            "event_id": self._next_id,
            "data": data,
            "window_size": self._windows[group],
            "attention_dp_rank": self._rank,
        }
        if len(self._windows) > 1:
            event["layer_group_id"] = group
        self._events.append(event)
        self._next_id += 1


def _stored_block(block: StoredBlock) -> dict[str, Any]:
    event: dict[str, Any] = {
        "type": "stored_block",
        "block_hash": block.block_hash,
        "tokens": [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in block.tokens],
        "cache_level": _DEVICE_LEVEL,
        "priority": block.priority,
        "mm_keys": [],
        "cache_salt": block.cache_salt,
    }
    if block.lora_task_id is not None:
        # TensorRT-LLM drops it (NVIDIA/TensorRT-LLM#18156), which makes adapter blocks look like base model blocks.
        event["lora_id"] = block.lora_task_id
    return event
