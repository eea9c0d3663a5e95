"""Ledger: which blocks the slabs hold. The leader's only; ranks obey, so all of them hold the same blocks by construction.

Blocks form a tree per namespace: a child continues its parent by one full block. The tree is walked with the tokens themselves, so a step
is at once the lookup and the comparison of tokens that identity demands, and no hash has to be computed on the way (1,024 steps of
a 32k-token prompt take about 0.15 ms; hashing the same chain 0.8 ms). The block key is made once, when the block is entered, and names the
block to others: events, donors, plans. Two different blocks with one key are told apart and refused (`MatchEnd.TOKENS_DIFFER`).

Eviction takes the least recently used *leaf* that nobody leases, so whatever is resident can be reached from the root, and a lease on
a block protects all blocks before it. Slots are freed late: a removed block keeps its slot while it is leased or a copy into it may
still run.
"""

from __future__ import annotations

import heapq
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count

import numpy as np

from dynamo_semkv.contracts.keys import BlockKey, child_key, root_key

NO_SLOT = -1
_LONG_WALK = 64
"""Blocks: shorter walks take no longer than to remember them."""
_WALKS = 64


class BlockEntry:
    """One block, or (ordinal -1) the root of a namespace's tree. `key`, `parent`, `tokens`, `ordinal`, `digest` never change."""

    __slots__ = (
        "children",
        "damaged",
        "digest",
        "fetched",
        "in_flight",
        "key",
        "leases",
        "ordinal",
        "parent",
        "queued",
        "removed",
        "resident",
        "slot",
        "staged",
        "tick",
        "tokens",
    )

    def __init__(
        self, digest: bytes, key: BlockKey, parent: BlockEntry | None, tokens: bytes, ordinal: int, slot: int
    ) -> None:
        self.digest = digest
        """Of the CacheNamespace, request included."""
        self.key = key
        self.parent = parent
        self.tokens = tokens
        """Little-endian u32, 4 * tokens_per_block bytes."""
        self.ordinal = ordinal
        self.slot = slot
        self.children: dict[bytes, BlockEntry] = {}
        self.resident = False
        """Copied, sealed, and known to have been computed: may be offered."""
        self.in_flight = False
        """A copy into the slot may still run."""
        self.removed = False
        self.damaged = False
        """Its bytes are known not to be what was saved."""
        self.queued = False
        self.fetched = False
        """It was pulled from another worker."""
        self.staged = False
        """It came from disk, and nobody was served it since."""
        self.leases = 0
        self.tick = 0

    def chain(self) -> list[BlockEntry]:
        """This block and those before it, block 0 first."""
        path: list[BlockEntry] = []
        at: BlockEntry | None = self
        while at is not None and at.ordinal >= 0:
            path.append(at)
            at = at.parent
        path.reverse()
        return path


class MatchEnd(str, Enum):
    """Why a match went no further."""

    LIMIT = "limit"
    NOT_RESIDENT = "not_resident"
    TOKENS_DIFFER = "tokens_differ"
    """The next block's key is taken by other tokens: a collision, or a forged entry."""


@dataclass(frozen=True)
class Match:
    path: list[BlockEntry]
    end: MatchEnd
    missing: BlockKey | None = None
    """Key of the first block that nobody has entered, where that ended the match."""


@dataclass(frozen=True)
class LedgerStats:
    slots: int
    free: int
    resident: int
    pending: int
    """Entered, not yet resident."""
    leased: int
    """Blocks with at least one lease."""
    retired: int
    """Removed blocks whose slot is not free yet."""
    evicted: int
    refused: int
    """Blocks that found no slot: everything else was leased, pending, or in the middle of a chain."""
    collisions: int


class Ledger:
    """Not thread-safe: the leader's lock covers it.

    Blocks that leave are queued in `departed`, deepest first, for whoever must tell others; `take_departed` empties it.
    """

    def __init__(self, slots: int, tokens_per_block: int) -> None:
        self.slots = slots
        self.tokens_per_block = tokens_per_block
        self._step = 4 * tokens_per_block
        self._roots: dict[bytes, BlockEntry] = {}
        self._by_key: dict[BlockKey, BlockEntry] = {}
        self._by_slot: dict[int, BlockEntry] = {}
        self._leased = 0
        self._free = list(range(slots - 1, -1, -1))
        self._block = struct.Struct(f"{self._step}s")
        self._walks: OrderedDict[BlockEntry, tuple[bytes, list[BlockEntry]]] = OrderedDict()
        """By first block: the tokens of the last long match and what it found. A memory only: what was removed since is left out."""
        self._queue: list[tuple[int, int, BlockEntry]] = []
        self._order = count()
        self._tick = 0
        self.departed: list[BlockEntry] = []
        """Only `take_departed` empties it."""
        self._resident = self._retired = self._evicted = self._refused = self._collisions = 0

    # lookup

    def match(self, digest: bytes, tokens: bytes, limit: int) -> Match:
        """The resident chain of a prompt's first `limit` blocks, as far as it goes. `tokens`: little-endian u32."""
        path: list[BlockEntry] = []
        node = self._roots.get(digest)
        step = self._step
        end = max(min(limit * step, len(tokens) - len(tokens) % step), 0)
        child: BlockEntry | None = None
        if node is not None and end:
            path = self._walked_before(node.children.get(tokens[:step]), tokens, end)
            children = path[-1].children if path else node.children
            for (block,) in self._block.iter_unpack(memoryview(tokens)[len(path) * step : end]):
                child = children.get(block)
                if child is None or not child.resident:
                    break
                path.append(child)
                children = child.children
            self._remember(tokens, path)
            node = path[-1] if path else node
        at = len(path) * step
        if at >= end:
            return Match(path, MatchEnd.LIMIT)
        if child is None:
            parent = node.key if node is not None else root_key(digest)
            key = child_key(parent, tokens[at : at + step])
            if key in self._by_key:
                self._collisions += 1
                return Match(path, MatchEnd.TOKENS_DIFFER)
            return Match(path, MatchEnd.NOT_RESIDENT, key)
        return Match(path, MatchEnd.NOT_RESIDENT)

    def _walked_before(self, first: BlockEntry | None, tokens: bytes, end: int) -> list[BlockEntry]:
        """As much of the last walk that began with this block as these tokens have in common with it: one comparison instead of a step a
        block. A block that is resident can be reached from the root, so all before it are."""
        walk = self._walks.get(first) if first is not None else None
        if walk is None:
            return []
        was, path = walk
        words = min(len(was), end) // 4
        differs = np.frombuffer(was, np.uint32, words) != np.frombuffer(tokens, np.uint32, words)
        at = int(differs.argmax())
        count = min((at if differs[at] else words) // self.tokens_per_block, len(path))
        while count and not path[count - 1].resident:
            count -= 1
        return path[:count]

    def _remember(self, tokens: bytes, path: list[BlockEntry]) -> None:
        if len(path) < _LONG_WALK:
            return
        self._walks[path[0]] = (tokens, path.copy())
        self._walks.move_to_end(path[0])
        if len(self._walks) > _WALKS:
            self._walks.popitem(last=False)

    def by_key(self, key: BlockKey) -> BlockEntry | None:
        return self._by_key.get(key)

    def by_slot(self, slot: int) -> BlockEntry | None:
        return self._by_slot.get(slot)

    @property
    def tick(self) -> int:
        """Of the last use of any block: whatever is used from now on is younger."""
        return self._tick

    def touch(self, path: Iterable[BlockEntry]) -> None:
        """Marks blocks as just used."""
        self._tick += 1
        tick = self._tick
        for entry in path:
            entry.tick = tick

    # entering

    def child(self, digest: bytes, parent: BlockEntry | None, tokens: bytes) -> BlockEntry | None:
        """The block that continues `parent` (None: the namespace's first one), resident or pending."""
        node = self._roots.get(digest) if parent is None else parent
        return None if node is None else node.children.get(tokens)

    def enter(
        self, digest: bytes, parent: BlockEntry | None, tokens: bytes, *, used_before: int | None = None
    ) -> BlockEntry | None:
        """A new block with a slot of its own, pending and in flight, or None where there is no slot for it. May evict; with `used_before`
        only what was not used after that tick."""
        if len(tokens) != self._step:
            raise ValueError(f"a block has {self._step} bytes of tokens, not {len(tokens)}")
        if parent is None:
            parent = self._roots.get(digest)
            if parent is None:
                parent = self._roots[digest] = BlockEntry(digest, root_key(digest), None, b"", -1, NO_SLOT)
        elif parent.removed or parent.digest != digest:
            raise ValueError("a block continues one that is there, in its own namespace")
        key = child_key(parent.key, tokens)
        if key in self._by_key:
            self._collisions += 1
            self._drop_empty_root(parent)
            return None
        parent.leases += 1  # or the search for a slot could take the parent itself, or drop it as an empty root
        slot = self._take_slot(used_before)
        parent.leases -= 1
        if slot is None:
            self._refused += 1
            self._requeue(parent)
            self._drop_empty_root(parent)
            return None
        entry = BlockEntry(parent.digest, key, parent, tokens, parent.ordinal + 1, slot)
        entry.in_flight = True
        self._tick += 1
        entry.tick = self._tick
        parent.children[tokens] = entry
        self._by_key[key] = entry
        self._by_slot[slot] = entry
        return entry

    def landed(self, entry: BlockEntry) -> None:
        """No copy into the slot can run any more."""
        entry.in_flight = False
        self._settle(entry)

    def admit(self, entry: BlockEntry) -> None:
        """The block may be offered from now on. Its parent must be resident already."""
        if (
            entry.removed
            or entry.in_flight
            or (entry.parent is not None and entry.parent.ordinal >= 0 and not entry.parent.resident)
        ):
            raise ValueError(f"block {entry.ordinal} cannot become resident before its copy and its parent")
        entry.resident = True
        self._resident += 1
        self._requeue(entry)

    # leaving

    def remove(self, entry: BlockEntry) -> None:
        """Takes a block and all that continue it out of the ledger. Slots follow when leases and copies have ended."""
        if entry.removed:
            return
        subtree = [entry]
        for node in subtree:
            subtree.extend(node.children.values())
        for node in reversed(subtree):
            self._unlink(node)

    def clear(self) -> None:
        """The KV of this engine's life is worth nothing any more."""
        for root in list(self._roots.values()):
            for entry in list(root.children.values()):
                self.remove(entry)

    def take_departed(self) -> list[BlockEntry]:
        departed, self.departed = self.departed, []
        return departed

    def _unlink(self, entry: BlockEntry) -> None:
        parent = entry.parent
        assert parent is not None
        del parent.children[entry.tokens]
        del self._by_key[entry.key]
        entry.removed = True
        self._retired += 1
        if entry.resident:
            entry.resident = False
            self._resident -= 1
            self.departed.append(entry)
        self._settle(entry)
        self._requeue(parent)
        self._drop_empty_root(parent)

    def _drop_empty_root(self, node: BlockEntry) -> None:
        if (
            node.ordinal < 0 and not node.children and node.leases == 0
        ):  # leased: a block is just being entered under it
            self._roots.pop(node.digest, None)
            node.removed = True

    def _settle(self, entry: BlockEntry) -> None:
        if entry.removed and not entry.in_flight and entry.leases == 0 and entry.slot != NO_SLOT:
            del self._by_slot[entry.slot]
            self._free.append(entry.slot)
            self._retired -= 1
            entry.slot = NO_SLOT

    # leases and eviction

    def lease(self, entries: Sequence[BlockEntry]) -> None:
        for entry in entries:
            self._leased += entry.leases == 0
            entry.leases += 1

    def release(self, entries: Sequence[BlockEntry]) -> None:
        for entry in entries:
            if entry.leases <= 0:
                raise ValueError(f"block {entry.ordinal} has no lease to give back")
            entry.leases -= 1
            if entry.leases == 0:
                self._leased -= 1
                if entry.removed:
                    self._settle(entry)
                elif not entry.children:
                    self._requeue(entry)

    @staticmethod
    def _evictable(entry: BlockEntry) -> bool:
        return entry.resident and not entry.children and entry.leases == 0 and entry.ordinal >= 0

    def _requeue(self, entry: BlockEntry) -> None:
        if not entry.queued and self._evictable(entry):
            entry.queued = True
            heapq.heappush(self._queue, (entry.tick, next(self._order), entry))

    def _take_slot(self, used_before: int | None = None) -> int | None:
        while not self._free:
            if not self._queue:
                return None
            tick, _, entry = heapq.heappop(self._queue)
            entry.queued = False
            if not self._evictable(entry):
                continue  # comes back when its lease ends or its last child goes
            if tick != entry.tick:
                self._requeue(entry)  # used since it was queued
                continue
            if used_before is not None and tick > used_before:
                self._requeue(entry)  # the oldest one that could go, and it is too young
                return None
            self._unlink(entry)
            self._evicted += 1
        return self._free.pop()

    # inspection

    def entries(self) -> Iterator[BlockEntry]:
        return iter(list(self._by_key.values()))

    def stats(self) -> LedgerStats:
        return LedgerStats(
            slots=self.slots,
            free=len(self._free),
            resident=self._resident,
            pending=len(self._by_key) - self._resident,
            leased=self._leased,
            retired=self._retired,
            evicted=self._evicted,
            refused=self._refused,
            collisions=self._collisions,
        )
