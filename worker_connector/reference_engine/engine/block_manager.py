"""Page allocation of one rank: free pages of each layer group, sequences, and their tie to the reuse tree.

Admission reserves every page that a sequence can ever need (TensorRT-LLM's GUARANTEED_NO_EVICT), so `grow` cannot fail:
the invariant is, for each group, `reserved <= free + evictable`. A page slot that a sequence has got stays the same
until it closes, because a connector is told slots once and holds them. Only a window that passes a block takes its page
away; the block's slot reads `BAD_PAGE_INDEX` from then on.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from worker_connector.engine_api.engine import BAD_PAGE_INDEX
from worker_connector.reference_engine.engine.events import DEFAULT_PRIORITY, KvEventBuffer
from worker_connector.reference_engine.engine.reuse import CachedBlock, ReuseScope, ReuseTree
from worker_connector.reference_engine.models.kv_pool import KvPool


@dataclass(eq=False)
class GroupSequence:
    """A sequence's pages in one layer group, block 0 first."""

    slots: list[int] = field(default_factory=list)
    #: The shared node behind a slot; None where the page is this sequence's own, and where there is no page.
    nodes: list[CachedBlock | None] = field(default_factory=list)
    #: Pages that the sequence may still claim.
    reserved: int = 0


@dataclass(eq=False)
class BlockSequence:
    """The pages of one request. Every group has an entry for the same blocks."""

    scope: ReuseScope
    priority: int
    groups: list[GroupSequence]
    #: Tokens whose KV was in the pages when the sequence was opened.
    reused_tokens: int = 0
    #: Blocks offered to the tree so far, and the node of the last one (None: chain at its start).
    committed_blocks: int = 0
    chain_tip: CachedBlock | None = None
    #: False once a block could not be chained: later blocks must not be chained either.
    can_commit: bool = True

    @property
    def slots(self) -> list[int]:
        """The first group's slots; all there are where there is one group."""
        return self.groups[0].slots

    @property
    def by_group(self) -> list[list[int]]:
        """The slots of each layer group."""
        return [group.slots for group in self.groups]

    @property
    def num_blocks(self) -> int:
        """Blocks that have a slot, in every group the same number."""
        return len(self.groups[0].slots)


class BlockManager:
    """Allocates the pages of one pool. Not thread-safe: the engine thread owns it."""

    def __init__(
        self,
        pool: KvPool,
        events: KvEventBuffer,
        *,
        enable_block_reuse: bool = True,
        enable_partial_reuse: bool = False,
    ) -> None:
        self._pool = pool
        self._reuse_enabled = enable_block_reuse
        self._partial_reuse = enable_block_reuse and enable_partial_reuse
        self._groups = tuple(pages.group for pages in pool.groups)
        self._tree = ReuseTree(pool.tokens_per_block, events, self._groups)
        self._free = [list(range(pool.num_blocks - 1, -1, -1)) for _ in self._groups]
        self._reserved = [0 for _ in self._groups]
        events.created(pool.num_blocks)

    @property
    def tree(self) -> ReuseTree:
        """The reuse tree that shares its pages."""
        return self._tree

    @property
    def num_pages(self) -> int:
        """Pages of all groups together."""
        return self._pool.num_blocks * len(self._groups)

    @property
    def num_free(self) -> int:
        """Pages of all groups that nothing holds; cached ones are not among them."""
        return sum(len(free) for free in self._free)

    @property
    def num_referenced(self) -> int:
        """Pages that some sequence holds."""
        return self.num_pages - self.num_free - self._tree.num_evictable

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens take, the last one perhaps in part."""
        return -(-num_tokens // self._pool.tokens_per_block)

    def cached_tokens(self, tokens: SequenceOf[int], scope: ReuseScope) -> int:
        """How many of these tokens a request would find cached now. Only reads, so any thread may ask; for other
        threads it is an estimate, as the rank goes on meanwhile."""
        if not self._reuse_enabled:
            return 0
        size = self._pool.tokens_per_block
        return len(self._tree.match(scope, tokens, (len(tokens) - 1) // size)) * size

    def open(
        self, tokens: SequenceOf[int], scope: ReuseScope, max_tokens: int, priority: int | None = None
    ) -> BlockSequence | None:
        """Start a sequence on the cached prefix of `tokens`, never all of it, reserving up to `max_tokens` tokens.

        Returns None if the pages cannot be guaranteed now. The reused blocks are the ones that the sequence then has.
        With partial reuse the last one may be a copy of a block of which only the first tokens are the same.
        """
        size = self._pool.tokens_per_block
        reusable = (len(tokens) - 1) // size
        matched = self._tree.match(scope, tokens, reusable) if self._reuse_enabled else []
        claim = self.blocks_for(max_tokens) - len(matched)
        live: list[list[bool]] = []
        for group in self._groups:
            stale = group.stale_blocks(len(matched) * size, size)
            live.append([block not in stale for block in range(len(matched))])
            revived = sum(
                node.is_evictable(group.group_id) for node, read in zip(matched, live[-1], strict=True) if read
            )
            if claim + revived > self._unreserved(group.group_id):
                return None
        groups = []
        for group in self._groups:
            nodes: list[CachedBlock | None] = []
            for node, read in zip(matched, live[group.group_id], strict=True):
                if read:
                    self._tree.reference(node, group.group_id, priority)
                nodes.append(node if read else None)
            slots = [BAD_PAGE_INDEX if node is None else node.pages[group.group_id] for node in nodes]
            groups.append(GroupSequence(slots, nodes, claim))
            self._reserved[group.group_id] += claim
        sequence = BlockSequence(
            scope=scope,
            priority=DEFAULT_PRIORITY if priority is None else priority,
            groups=groups,
            reused_tokens=len(matched) * size,
            committed_blocks=len(matched),
            chain_tip=matched[-1] if matched else None,
        )
        if self._partial_reuse:
            self._copy_partly(sequence, tokens)
        return sequence

    def _copy_partly(self, sequence: BlockSequence, tokens: SequenceOf[int]) -> None:
        """Begin the first block that is not cached with the tokens that it shares with a cached one, never all of
        `tokens`."""
        found = self._tree.match_partly(sequence.scope, sequence.chain_tip, tokens[sequence.reused_tokens : -1])
        if found is None:
            return
        node, shared = found
        held = range(len(self._groups))
        if any(node.is_evictable(group) and self._unreserved(group) < 1 for group in held):
            return  # while the block is held for the copy, sequences with a reservation would lack its page
        sources = list(node.pages)
        for group in held:
            self._tree.reference(node, group)
        self.grow(sequence, sequence.reused_tokens + shared, sequence.reused_tokens)
        for group, source in enumerate(sources):
            self._pool.copy_page(group, source, sequence.groups[group].slots[-1])
            self._let_go(group, source, node)
        sequence.reused_tokens += shared

    def grow(self, sequence: BlockSequence, num_tokens: int, history: int = 0) -> None:
        """Give the sequence pages for its first `num_tokens` tokens, out of its reservation.

        Positions below `history` are computed or served already: blocks that no later position reads get no page.
        """
        missing = self.blocks_for(num_tokens) - sequence.num_blocks
        self.pass_window(sequence, history)
        if missing <= 0:
            return
        first = sequence.num_blocks
        for group, held in zip(self._groups, sequence.groups, strict=True):
            assert missing <= held.reserved, f"{missing} pages wanted, {held.reserved} reserved"
            held.reserved -= missing
            self._reserved[group.group_id] -= missing
            stale = group.stale_blocks(history, self._pool.tokens_per_block)
            claimed = [
                BAD_PAGE_INDEX if block in stale else self._claim(group.group_id)
                for block in range(first, first + missing)
            ]
            self._pool.poison(group.group_id, [slot for slot in claimed if slot != BAD_PAGE_INDEX])
            held.slots.extend(claimed)
            held.nodes.extend([None] * missing)

    def shrink(self, sequence: BlockSequence, num_blocks: int) -> None:
        """Take the pages back that the sequence grew by since it had `num_blocks`; they are reserved for it again."""
        given_back = sequence.num_blocks - num_blocks
        if given_back <= 0:
            return
        for group, held in enumerate(sequence.groups):
            for slot, node in zip(reversed(held.slots[num_blocks:]), reversed(held.nodes[num_blocks:]), strict=True):
                if slot != BAD_PAGE_INDEX:
                    self._let_go(group, slot, node)
            del held.slots[num_blocks:], held.nodes[num_blocks:]
            held.reserved += given_back
            self._reserved[group] += given_back

    def pass_window(self, sequence: BlockSequence, history: int) -> None:
        """Take the pages away that no position from `history` on reads."""
        for group, held in zip(self._groups, sequence.groups, strict=True):
            for block in group.stale_blocks(history, self._pool.tokens_per_block):
                if block < len(held.slots) and held.slots[block] != BAD_PAGE_INDEX:
                    self._let_go(group.group_id, held.slots[block], held.nodes[block])
                    held.slots[block], held.nodes[block] = BAD_PAGE_INDEX, None

    def commit(self, sequence: BlockSequence, tokens: SequenceOf[int], valid_tokens: int) -> None:
        """Make the sequence's full blocks below `valid_tokens` (KV is in the pages) reusable by others."""
        size = self._pool.tokens_per_block
        first, end = sequence.committed_blocks, valid_tokens // size
        if not self._reuse_enabled or not sequence.can_commit or end <= first:
            return
        blocks = [
            (tuple(tokens[i * size : (i + 1) * size]), [held.slots[i] for held in sequence.groups])
            for i in range(first, end)
        ]
        nodes = self._tree.insert(sequence.chain_tip, sequence.scope, blocks, sequence.priority)
        for index, node in enumerate(nodes, start=first):
            for group, held in enumerate(sequence.groups):
                if held.slots[index] != BAD_PAGE_INDEX and node.pages[group] == held.slots[index]:
                    held.nodes[index] = node
        sequence.committed_blocks = first + len(nodes)
        sequence.can_commit = sequence.committed_blocks == end
        if nodes:
            sequence.chain_tip = nodes[-1]

    def close(self, sequence: BlockSequence) -> None:
        """Give all pages back: shared ones stay cached, last block first in eviction order; own ones become free."""
        for group, held in enumerate(sequence.groups):
            self._reserved[group] -= held.reserved
            held.reserved = 0
            for slot, node in zip(reversed(held.slots), reversed(held.nodes), strict=True):
                if slot != BAD_PAGE_INDEX:
                    self._let_go(group, slot, node)
            held.slots, held.nodes = [], []
        sequence.can_commit = False

    def drop_cached(self) -> None:
        """Forget every block that no sequence holds."""
        self._take_back(self._tree.evict_all())

    def _unreserved(self, group: int) -> int:
        return len(self._free[group]) + self._tree.evictable(group) - self._reserved[group]

    def _let_go(self, group: int, slot: int, node: CachedBlock | None) -> None:
        freed = slot if node is None else self._tree.release(node, group)
        if freed is not None:
            self._free[group].append(freed)

    def _take_back(self, freed: SequenceOf[tuple[int, int]]) -> None:
        for group, slot in freed:
            self._free[group].append(slot)

    def _claim(self, group: int) -> int:
        if not self._free[group]:
            self._take_back(self._tree.evict(group))
        return self._free[group].pop()
