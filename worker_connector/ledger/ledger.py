"""Ledger: which blocks the slabs hold. Only the leader has one; ranks obey it, so all of them hold the same blocks by
construction.

Blocks form a tree per namespace: a child continues its parent by one full block. The tree is walked with the tokens
themselves, so a step is at once the lookup and the comparison of tokens that identity demands, and no hash has to be
computed on the way (0.8 ms for a 32k-token prompt). Blocks that follow each other without a branch are one step
(ledger/block.py, `Segment`): one comparison for a whole prompt. The block key is made once, when the block is entered,
and names the block to others: events, donors, plans. Two different blocks with one key are told apart and refused
(`MatchEnd.TOKENS_DIFFER`).

Eviction takes the least recently used *leaf* that nobody leases, so whatever is resident can be reached from the root.
Of the oldest leaves one that the device holds too goes first: the device evicts in the same order of use, so such a
block would leave the slab before it leaves the device, and the slab's copy would never be used. A lease and a use are
noted at the last block of a chain, whatever its length: the blocks before it cannot go while it is there, and inherit
both when it is taken out. Slots are freed late: a removed block keeps its slot while a lease covers it or a copy into
it may still run."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import NamedTuple

from dynamo_semkv.contracts.keys import BlockKey, child_key, root_key
from worker_connector.ledger.block import NO_SLOT, BlockEntry, Segment

LOOKED_AHEAD = 8
"""How many of the oldest leaves are searched for one that the device holds too."""
_LONG = 16
"""Blocks. Stepping through fewer takes less time than comparing them at once."""


class MatchEnd(str, Enum):
    """Why a match went no further."""

    LIMIT = "limit"
    NOT_RESIDENT = "not_resident"
    TOKENS_DIFFER = "tokens_differ"
    """The next block's key is taken by other tokens: a collision, or a forged entry."""


class Match(NamedTuple):
    """The result of one lookup; `tip` is None where no block matched."""

    tip: BlockEntry | None
    """The last block that matched."""
    end: MatchEnd
    missing: BlockKey | None = None
    """Key of the first block that nobody has entered, where that ended the match."""

    @property
    def blocks(self) -> int:
        """How many blocks matched."""
        return 0 if self.tip is None else self.tip.ordinal + 1

    @property
    def path(self) -> list[BlockEntry]:
        """All blocks that matched, block 0 first; takes a step for each."""
        return [] if self.tip is None else self.tip.chain()


@dataclass(frozen=True)
class LedgerStats:
    """One reading of the ledger, in blocks. `evicted`, `on_device`, `refused` and `collisions` count since it was
    made."""

    slots: int
    free: int
    resident: int
    pending: int
    """Entered, not yet resident."""
    leased: int
    """Blocks that a lease covers: the last ones of leased chains, and all before them."""
    retired: int
    """Removed blocks whose slot is not free yet."""
    evicted: int
    on_device: int
    """Evicted before older blocks, since the device held them too."""
    refused: int
    """Blocks that found no slot: everything else was leased, pending, or in the middle of a chain."""
    collisions: int


class Ledger:
    """Not thread-safe: the leader's lock covers it.

    Blocks that leave are queued in `departed`, deepest first, for whoever publishes that; `take_departed` empties it.
    """

    def __init__(
        self, slots: int, tokens_per_block: int, on_device: Callable[[BlockKey], bool] = lambda key: False
    ) -> None:
        """`on_device`: whether the engine's own cache holds a block, as far as is known; asked for every eviction."""
        self.slots = slots
        self._on_device = on_device
        self.tokens_per_block = tokens_per_block
        self._step = 4 * tokens_per_block
        self._roots: dict[bytes, BlockEntry] = {}
        self._by_key: dict[BlockKey, BlockEntry] = {}
        self._by_slot: dict[int, BlockEntry] = {}
        self._leased: set[BlockEntry] = set()
        """Blocks whose `leases` is not 0."""
        self._free = list(range(slots - 1, -1, -1))
        self._queue: list[tuple[int, int, BlockEntry]] = []
        self._order = count()
        self._tick = 0
        self.departed: list[BlockEntry] = []
        """Only `take_departed` empties it."""
        self._resident = self._retired = self._evicted = self._spared = self._refused = self._collisions = 0
        self._twin: BlockEntry | None = None
        """Parent of the block evicted last because the device holds it too: the next one to go, if the device holds it
        as well."""
        self._looked_up_to = 0
        """No leaf used up to this tick was on the device when they were last searched."""

    # lookup

    def match(self, digest: bytes, tokens: bytes, limit: int) -> Match:
        """The resident chain of a prompt's first `limit` blocks, as far as it goes. `tokens`: little-endian u32."""
        node = self._roots.get(digest)
        step = self._step
        end = max(min(limit * step, len(tokens) - len(tokens) % step), 0)
        at = 0
        tip: BlockEntry | None = None
        child: BlockEntry | None = None
        while node is not None and at < end:
            child = node.children.get(tokens[at : at + step])
            if child is None or not child.resident:
                break
            node = tip = child
            at += step
            segment = child.segment
            assert segment is not None
            if segment.resident > _LONG:
                index = child.ordinal - segment.start + 1
                ahead = min(segment.resident - index, (end - at) // step)
                if ahead >= _LONG:
                    ahead = segment.common(index, tokens, at, ahead)
                    node = tip = segment.blocks[index + ahead - 1]
                    at += ahead * step
        if at >= end:
            return Match(tip, MatchEnd.LIMIT)
        if child is None:
            parent = node.key if node is not None else root_key(digest)
            key = child_key(parent, tokens[at : at + step])
            if key in self._by_key:
                self._collisions += 1
                return Match(tip, MatchEnd.TOKENS_DIFFER)
            return Match(tip, MatchEnd.NOT_RESIDENT, key)
        return Match(tip, MatchEnd.NOT_RESIDENT)

    def by_key(self, key: BlockKey) -> BlockEntry | None:
        """The block with this key, resident or pending; None for any other."""
        return self._by_key.get(key)

    def by_slot(self, slot: int) -> BlockEntry | None:
        """The block that has this slot, which may be removed; None for a free slot."""
        return self._by_slot.get(slot)

    @property
    def tick(self) -> int:
        """Tick of the last use of any block: whatever is used from now on has a higher one."""
        return self._tick

    def touch(self, tip: BlockEntry | None) -> None:
        """Marks the chain that ends here as just used."""
        self._tick += 1
        if tip is not None:
            tip.tick = self._tick

    # entering

    def child(self, digest: bytes, parent: BlockEntry | None, tokens: bytes) -> BlockEntry | None:
        """The block that continues `parent` (None: the namespace's first one), resident or pending."""
        node = self._roots.get(digest) if parent is None else parent
        return None if node is None else node.children.get(tokens)

    def enter(
        self, digest: bytes, parent: BlockEntry | None, tokens: bytes, *, used_before: int | None = None
    ) -> BlockEntry | None:
        """A new block with a slot of its own, pending and in flight; None where there is no slot for it or its key is
        taken. May evict; with `used_before` only what was not used after that tick. ValueError for a wrong length or
        parent."""
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
        slot: int | None
        if self._free:
            slot = self._free.pop()
        else:
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
        segment = parent.segment
        if segment is None or segment.blocks[-1] is not parent:
            segment = Segment(entry.ordinal)
        segment.append(entry)
        parent.children[tokens] = entry
        self._by_key[key] = entry
        self._by_slot[slot] = entry
        return entry

    def landed(self, entry: BlockEntry) -> None:
        """Notes that no copy into the slot can run any more."""
        entry.in_flight = False
        self._settle(entry)

    def admit(self, entry: BlockEntry) -> None:
        """The block may be offered from now on. ValueError before its copy has ended and its parent is resident."""
        if (
            entry.removed
            or entry.in_flight
            or (entry.parent is not None and entry.parent.ordinal >= 0 and not entry.parent.resident)
        ):
            raise ValueError(f"block {entry.ordinal} cannot become resident before its copy and its parent")
        assert entry.segment is not None
        entry.resident = True
        entry.segment.resident += 1
        self._resident += 1
        if not entry.children:
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
        """Removes all blocks: the engine's weights or cache were reset."""
        for root in list(self._roots.values()):
            for entry in list(root.children.values()):
                self.remove(entry)

    def take_departed(self) -> list[BlockEntry]:
        """Resident blocks that left since the last call, deepest first."""
        departed, self.departed = self.departed, []
        return departed

    def _unlink(self, entry: BlockEntry) -> None:
        parent = entry.parent
        assert parent is not None
        assert entry.segment is not None
        entry.segment.pop()  # it has no children, so nothing follows it there
        del parent.children[entry.tokens]
        del self._by_key[entry.key]
        entry.removed = True
        parent.tick = max(parent.tick, entry.tick)
        if entry.leases:
            parent.leases += entry.leases
            self._leased.add(parent)
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

    def lease(self, *tips: BlockEntry) -> None:
        """Until `release`, no slot of the chains that end here is given to another block. ValueError for a removed
        block."""
        for tip in tips:
            if tip.removed:
                raise ValueError(f"block {tip.ordinal} is removed and cannot be leased")
            tip.leases += 1
            self._leased.add(tip)

    def release(self, *tips: BlockEntry) -> None:
        """Gives leases back, also of chains that were removed since, in part or whole: a lease counts at each removed
        block and at the one before them."""
        for tip in tips:
            self._release(tip)

    def _release(self, tip: BlockEntry) -> None:
        if tip.leases <= 0:
            raise ValueError(f"block {tip.ordinal} has no lease to give back")
        at: BlockEntry | None = tip
        while at is not None:
            further = at.parent if at.removed else None
            at.leases -= 1
            if at.leases == 0:
                self._leased.discard(at)
                if at.removed:
                    self._settle(at)
                elif at.ordinal < 0:
                    self._drop_empty_root(at)
                elif not at.children:
                    self._requeue(at)
            at = further

    def _covered(self) -> int:
        removed, covered = 0, dict[Segment, int]()
        for tip in self._leased:
            removed += tip.removed
            at: BlockEntry | None = tip
            while at is not None and (segment := at.segment) is not None:
                blocks = at.ordinal - segment.start + 1
                if covered.get(segment, 0) >= blocks:
                    break
                covered[segment] = blocks
                at = segment.blocks[0].parent
        return removed + sum(covered.values())

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
            self._evict(self._twin_of(entry, used_before))
        return self._free.pop()

    def _evict(self, entry: BlockEntry) -> None:
        self._twin = entry.parent if self._on_device(entry.key) else None
        self._unlink(entry)
        self._evicted += 1

    def _twin_of(self, oldest: BlockEntry, used_before: int | None) -> BlockEntry:
        """What is evicted in place of the oldest leaf, which is queued again then: the parent of the last block that
        went because the device holds it, else one of the next leaves that the device holds too; else the oldest
        itself."""
        if self._on_device(oldest.key):
            return oldest
        found, twin = None, self._twin
        if twin is not None and self._evictable(twin) and self._on_device(twin.key):
            found = twin
        elif oldest.tick > self._looked_up_to:
            found = self._next_twin()
        if found is None or (used_before is not None and found.tick > used_before):
            if found is not None:
                self._requeue(found)
            return oldest
        self._requeue(oldest)
        self._spared += 1
        return found

    def _next_twin(self) -> BlockEntry | None:
        """The next leaf that the device holds too, taken out of the queue. A search that found none is not repeated
        before the leaves that it saw are gone."""
        ahead: list[BlockEntry] = []
        found: BlockEntry | None = None
        while self._queue and len(ahead) < LOOKED_AHEAD and found is None:
            tick, _, entry = heapq.heappop(self._queue)
            entry.queued = False
            if tick != entry.tick:
                self._requeue(entry)  # used since it was queued, if it can go at all
            elif self._evictable(entry):
                if self._on_device(entry.key):
                    found = entry
                else:
                    ahead.append(entry)
        if found is None:
            self._looked_up_to = max((entry.tick for entry in ahead), default=0)
        for entry in ahead:
            self._requeue(entry)
        return found

    # inspection

    def entries(self) -> Iterator[BlockEntry]:
        """All blocks, resident and pending, at the time of the call."""
        return iter(list(self._by_key.values()))

    def stats(self) -> LedgerStats:
        """Walks the leased chains to count `leased`."""
        return LedgerStats(
            slots=self.slots,
            free=len(self._free),
            resident=self._resident,
            pending=len(self._by_key) - self._resident,
            leased=self._covered(),
            retired=self._retired,
            evicted=self._evicted,
            on_device=self._spared,
            refused=self._refused,
            collisions=self._collisions,
        )
