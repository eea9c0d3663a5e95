"""What the engine's own KV cache events say is resident: a freshness state per (rank, layer group or window, block
hash).

Events are freshness, never authority: nothing is offered, confirmed or identified because of them. Their hashes have 64
bits, leave out model, layout and (as serialized) adapters, and are not recomputed here (NVIDIA/TensorRT-LLM#18156,
#18160). Whoever wants to follow what is stored and removed gives a `Listener`: it is told of what passed all checks,
and nothing else (donors/device_blocks.py).

Shapes: `KVCacheEventSerializer` of TensorRT-LLM, `{event_id, data, window_size, attention_dp_rank?, layer_group_id?}`
with data of type created, stored, removed or updated. The streaming publisher's events, which also say cleared, are
brought into this shape by donors/event_batches.py. Pure: no thread, no clock, no I/O. Whoever drains the engine polls
with a timeout, on a thread of its own (`get_latest_events` without one blocks until there is an event,
NVIDIA/TensorRT-LLM#3857), and hands over what came, in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

_MASK = 2**64 - 1
_HEX_DIGITS_OF_64_BITS = 16
MAX_RANKS = 1_024
MAX_SCOPES = 256
"""Of one rank. Engines have a handful of windows, and at most a group a layer."""


class Scope(NamedTuple):
    """The blocks that one event talks about. Newer versions name the layer group, older ones only its window."""

    layer_group: int | None
    window: int | None


class Listener(Protocol):
    """Told of one rank's blocks, in order, by the names that `block_hash` gives."""

    def stored(self, scope: Scope, parent: str | None, blocks: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Whole blocks, each of which continues the one before; the first continues `parent`, or begins a prompt."""

    def removed(self, scope: Scope, names: Sequence[str]) -> None:
        """Of blocks that were stored."""

    def moved(self, scope: Scope, name: str, level: int) -> None:
        """To another cache level; 0 is the device."""

    def cleared(self) -> None:
        """Nothing of what was stored counts any more."""


class Standing(str, Enum):
    """Whether the events of a rank can be believed."""

    FRESH = "fresh"
    QUARANTINED = "quarantined"
    """Events of this rank were lost: what it holds is unknown until `resync`."""


@dataclass
class _Block:
    level: int | None
    priority: int | None


@dataclass
class _Rank:
    last_id: int | None = None
    standing: Standing = Standing.FRESH
    blocks: dict[Scope, dict[str, _Block]] = field(default_factory=dict)
    capacity: dict[Scope, tuple[int, ...]] = field(default_factory=dict)
    size: int = 0


def block_hash(value: object) -> str:
    """One name for one hash. Signed and unsigned 64-bit integers are the same bits (ai-dynamo/dynamo#4533,
    NVIDIA/TensorRT-LLM#17023), a hex string of 64 bits too; a longer one is a name of its own. ValueError for anything
    else."""
    if isinstance(value, bool):
        raise ValueError("block_hash: bool; expected a 64-bit integer or a hex string")
    if isinstance(value, int):
        if not -(2**63) <= value <= _MASK:
            raise ValueError(f"block_hash: an integer of {value.bit_length()} bits; expected 64")
        return f"{value & _MASK:016x}"
    if isinstance(value, (bytes, bytearray)):
        value = value.hex()
    if isinstance(value, str):
        digits = value.lower().removeprefix("0x")
        if digits and not set(digits) - set("0123456789abcdef"):
            return digits.zfill(_HEX_DIGITS_OF_64_BITS)
    raise ValueError(f"block_hash: {type(value).__name__}; expected a 64-bit integer or a hex string")


class KvFreshness:
    """Sets, not reference counts: storing twice is storing, removing twice is removing (llm-d/llm-d-kv-cache#680).
    Bounded by `max_blocks` and `MAX_SCOPES` over a rank, beyond which the rank is quarantined rather than wrong, and by
    `MAX_RANKS`: of any more, nothing is known. Not thread-safe.
    """

    def __init__(
        self, tokens_per_block: int, *, max_blocks: int = 1_000_000, listeners: Mapping[int, Listener] | None = None
    ) -> None:
        """`listeners`: by rank."""
        if tokens_per_block < 1:
            raise ValueError(f"tokens_per_block = {tokens_per_block}: expected at least 1")
        self._tokens_per_block = tokens_per_block
        self._max_blocks = max_blocks
        self._listeners = dict(listeners or {})
        self._ranks: dict[int, _Rank] = {}
        self.counts: Counter[str] = Counter()
        """Events: `created`, `stored`, `removed`, `updated`, `cleared`, `gap`, `repeated`, `restarted`, `malformed`,
        `unknown_type`, `ignored_quarantined`, `resync`, `overflow`, `too_many_ranks`; blocks: `partial` (not of
        `tokens_per_block` tokens), `unknown_parent`, `already_stored`, `unknown_removed`, `unknown_updated`."""

    def apply(self, events: Iterable[Mapping[str, Any]]) -> None:
        """In the order in which the engine gave them, of any ranks mixed. Never raises for what an event says."""
        for event in events:
            try:
                self._apply(event)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                # Its effect is unknown, so the rank's state is.
                self.counts["malformed"] += 1
                self._quarantine_source(event)

    def resync(self, rank: int = 0, *, after: int | None = None) -> None:
        """Begin again from nothing: the rank's cache was emptied or rebuilt, or is told anew. `after`: ids up to this
        one are of before, and passed over; None: the next event is the first, whatever its id."""
        self.counts["resync"] += 1
        if rank in self._ranks or len(self._ranks) < MAX_RANKS:
            self._ranks[rank] = _Rank(last_id=after)

    def lost(self, rank: int = 0) -> None:
        """The engine says that it dropped events (`dropped_event_count` went up), or the stream broke."""
        self.counts["gap"] += 1
        _quarantine(self._rank(rank))

    def standing(self, rank: int = 0) -> Standing:
        """Whether the events of this rank can be believed."""
        return self._rank(rank).standing

    def resident(
        self, value: object, *, rank: int = 0, layer_group: int | None = None, window: int | None = None
    ) -> bool | None:
        """Does this rank's device cache hold the block, as far as events say? False: not reported as stored since the
        first event that was seen; None: unknown, events were lost. With neither group nor window: in every scope that
        this rank has spoken of. ValueError for what is no hash."""
        name = block_hash(value)
        state = self._rank(rank)
        if state.standing is Standing.QUARANTINED:
            return None
        wanted = [
            blocks
            for scope, blocks in state.blocks.items()
            if layer_group in (None, scope.layer_group) and window in (None, scope.window)
        ]
        return bool(wanted) and all(name in blocks and not blocks[name].level for blocks in wanted)

    def level(self, value: object, *, rank: int = 0, scope: Scope) -> int | None:
        """Cache level of a block (0: device), None where it is not resident or its level is not known."""
        block = self._rank(rank).blocks.get(scope, {}).get(block_hash(value))
        return None if block is None else block.level

    def priority(self, value: object, *, rank: int = 0, scope: Scope) -> int | None:
        """Retention priority, None as in `level`."""
        block = self._rank(rank).blocks.get(scope, {}).get(block_hash(value))
        return None if block is None else block.priority

    def capacity(self, rank: int = 0) -> dict[Scope, tuple[int, ...]]:
        """Blocks of each cache level, by `created`."""
        return dict(self._rank(rank).capacity)

    def blocks(self, rank: int = 0) -> dict[Scope, frozenset[str]]:
        """Names of what is resident; empty for a quarantined rank."""
        return {scope: frozenset(blocks) for scope, blocks in self._rank(rank).blocks.items() if blocks}

    # inside

    def _rank(self, rank: int) -> _Rank:
        state = self._ranks.get(rank)
        if state is None:
            if len(self._ranks) >= MAX_RANKS:
                return _Rank(standing=Standing.QUARANTINED)  # not kept: whatever it says, it is unknown
            state = self._ranks[rank] = _Rank()
        return state

    def _quarantine_source(self, event: object) -> None:
        if isinstance(event, Mapping):
            rank, number = event.get("attention_dp_rank"), event.get("event_id")
            state = self._rank(rank if isinstance(rank, int) else 0)
            if isinstance(number, int):
                state.last_id = number
            _quarantine(state)

    def _apply(self, event: Mapping[str, Any]) -> None:
        rank = int(event.get("attention_dp_rank") or 0)
        if rank not in self._ranks and len(self._ranks) >= MAX_RANKS:
            self.counts["too_many_ranks"] += 1
            return
        state = self._rank(rank)
        number = int(event["event_id"])
        if state.last_id is not None and number <= state.last_id:
            self.counts["repeated"] += 1
            if number < state.last_id and event["data"]["type"] == "created":
                self.counts["restarted"] += 1  # a new engine counts from 0 again, and what the old one held is gone
                _quarantine(state)
            return
        if state.standing is Standing.QUARANTINED:
            state.last_id = number
            self.counts["ignored_quarantined"] += 1
            return
        # Ids are given before a full buffer drops its oldest events: a jump is a loss (ai-dynamo/dynamo#711). Removals
        # may be among what was lost, so everything known is in doubt. Before the first event nothing is known, and
        # nothing can be in doubt.
        expected = number if state.last_id is None else state.last_id + 1
        state.last_id = number
        if number != expected:
            self.counts["gap"] += 1
            _quarantine(state)
            return
        data = event["data"]
        scope = Scope(event.get("layer_group_id"), event.get("window_size"))
        listener = self._listeners.get(rank)
        handler = _HANDLERS.get(data["type"])
        if handler is None:
            self.counts["unknown_type"] += 1
            return
        if scope not in state.blocks and len(state.blocks) >= MAX_SCOPES:
            self.counts["overflow"] += 1
            _quarantine(state)
            return
        self.counts[data["type"]] += 1
        handler(self, state, scope, data, listener)
        if state.size > self._max_blocks:
            self.counts["overflow"] += 1
            _quarantine(state)

    def _created(self, state: _Rank, scope: Scope, data: Mapping[str, Any], listener: Listener | None) -> None:
        state.capacity[scope] = tuple(int(count) for count in data["num_blocks_per_cache_level"])
        state.blocks.setdefault(scope, {})

    def _stored(self, state: _Rank, scope: Scope, data: Mapping[str, Any], listener: Listener | None) -> None:
        resident = state.blocks.setdefault(scope, {})
        parent = data.get("parent_hash")
        if parent is not None and block_hash(parent) not in resident:
            # A chain whose beginning nobody reported (NVIDIA/TensorRT-LLM#3543): its blocks are never reachable from a
            # prompt's start.
            self.counts["unknown_parent"] += len(data["blocks"])
            return
        whole: list[tuple[str, Mapping[str, Any]]] = []
        for block in data["blocks"]:
            name = block_hash(block["block_hash"])
            if len(block.get("tokens") or ()) != self._tokens_per_block:
                self.counts["partial"] += 1  # not addressable by a whole block, and what follows it is none
                break
            if name in resident:
                self.counts["already_stored"] += 1
            else:
                state.size += 1
            resident[name] = _Block(_optional(block.get("cache_level")), _optional(block.get("priority")))
            whole.append((name, block))
        if listener is not None and whole:
            listener.stored(scope, None if parent is None else block_hash(parent), whole)

    def _removed(self, state: _Rank, scope: Scope, data: Mapping[str, Any], listener: Listener | None) -> None:
        resident = state.blocks.setdefault(scope, {})
        names: list[str] = []
        for value in data["block_hashes"]:
            name = block_hash(value)
            if resident.pop(name, None) is None:
                self.counts["unknown_removed"] += 1
            else:
                state.size -= 1
                names.append(name)
        if listener is not None and names:
            listener.removed(scope, names)

    def _cleared(self, state: _Rank, scope: Scope, data: Mapping[str, Any], listener: Listener | None) -> None:
        """Of all scopes. Said after a reset of the cache, and by a publisher that lost events."""
        for blocks in state.blocks.values():
            blocks.clear()
        state.size = 0
        if listener is not None:
            listener.cleared()

    def _updated(self, state: _Rank, scope: Scope, data: Mapping[str, Any], listener: Listener | None) -> None:
        name_of_block = block_hash(data["block_hash"])
        block = state.blocks.setdefault(scope, {}).get(name_of_block)
        if block is None:
            self.counts["unknown_updated"] += 1
            return
        for name in ("cache_level", "priority"):
            difference = data.get(name)
            if difference is not None:  # either may be absent (NVIDIA/TensorRT-LLM#4666)
                setattr(block, "level" if name == "cache_level" else name, int(difference["new_value"]))
        if listener is not None and data.get("cache_level") is not None:
            listener.moved(scope, name_of_block, block.level or 0)


def _optional(value: Any) -> int | None:
    return None if value is None else int(value)


def _quarantine(state: _Rank) -> None:
    state.standing = Standing.QUARANTINED
    state.blocks.clear()
    state.size = 0


_HANDLERS = {
    "created": KvFreshness._created,
    "stored": KvFreshness._stored,
    "removed": KvFreshness._removed,
    "updated": KvFreshness._updated,
    "cleared": KvFreshness._cleared,
}
