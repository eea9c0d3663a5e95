"""Page allocation of one rank: free pages, sequences, and their tie to the reuse tree.

Admission reserves every page that a sequence can ever need (TensorRT-LLM's GUARANTEED_NO_EVICT), so `grow` cannot fail:
the invariant is `reserved <= free + evictable`. A page slot that a sequence has got stays the same until it closes,
because a connector is told slots once and holds them.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from worker_connector.reference_engine.events import DEFAULT_PRIORITY, KvEventBuffer
from worker_connector.reference_engine.kv_pool import KvPool
from worker_connector.reference_engine.reuse import CachedBlock, ReuseScope, ReuseTree


@dataclass(eq=False)
class BlockSequence:
    """The pages of one request, block 0 first."""

    scope: ReuseScope
    priority: int
    slots: list[int] = field(default_factory=list)
    #: The shared node behind a slot, or None where the page is this sequence's own.
    nodes: list[CachedBlock | None] = field(default_factory=list)
    #: Pages that the sequence may still claim.
    reserved: int = 0
    #: Blocks offered to the tree so far, and the node of the last one (None: chain at its start).
    committed_blocks: int = 0
    chain_tip: CachedBlock | None = None
    #: False once a block could not be chained: later ones must not be either.
    can_commit: bool = True


class BlockManager:
    """Allocates the pages of one pool. Not thread-safe: the engine thread owns it."""

    def __init__(self, pool: KvPool, events: KvEventBuffer, *, enable_block_reuse: bool = True) -> None:
        self._pool = pool
        self._reuse_enabled = enable_block_reuse
        self._tree = ReuseTree(pool.tokens_per_block, events)
        self._free = list(range(pool.num_blocks - 1, -1, -1))
        self._reserved = 0
        events.created(pool.num_blocks)

    @property
    def tree(self) -> ReuseTree:
        return self._tree

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_referenced(self) -> int:
        """Pages that some sequence holds."""
        return self._pool.num_blocks - len(self._free) - self._tree.num_evictable

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.tokens_per_block)

    def open(
        self, tokens: SequenceOf[int], scope: ReuseScope, max_tokens: int, priority: int | None = None
    ) -> BlockSequence | None:
        """Start a sequence on the cached prefix of `tokens`, never all of it, reserving up to `max_tokens` tokens.

        Returns None if the pages cannot be guaranteed now. The reused blocks are `sequence.slots`.
        """
        reusable = (len(tokens) - 1) // self._pool.tokens_per_block
        matched = self._tree.match(scope, tokens, reusable) if self._reuse_enabled else []
        claim = self.blocks_for(max_tokens) - len(matched)
        revived = sum(node.references == 0 for node in matched)
        if claim + revived > len(self._free) + self._tree.num_evictable - self._reserved:
            return None
        for node in matched:
            self._tree.reference(node, priority)
        self._reserved += claim
        return BlockSequence(
            scope=scope,
            priority=DEFAULT_PRIORITY if priority is None else priority,
            slots=[node.slot for node in matched],
            nodes=list(matched),
            reserved=claim,
            committed_blocks=len(matched),
            chain_tip=matched[-1] if matched else None,
        )

    def grow(self, sequence: BlockSequence, num_tokens: int) -> None:
        """Give the sequence pages for its first `num_tokens` tokens, out of its reservation."""
        missing = self.blocks_for(num_tokens) - len(sequence.slots)
        if missing <= 0:
            return
        assert missing <= sequence.reserved, f"{missing} pages wanted, {sequence.reserved} reserved"
        sequence.reserved -= missing
        self._reserved -= missing
        claimed = [self._claim() for _ in range(missing)]
        self._pool.poison(claimed)
        sequence.slots.extend(claimed)
        sequence.nodes.extend([None] * missing)

    def commit(self, sequence: BlockSequence, tokens: SequenceOf[int], valid_tokens: int) -> None:
        """Make the sequence's full blocks below `valid_tokens` (KV is in the pages) reusable by others."""
        size = self._pool.tokens_per_block
        first, end = sequence.committed_blocks, valid_tokens // size
        if not self._reuse_enabled or not sequence.can_commit or end <= first:
            return
        blocks = [(tuple(tokens[i * size : (i + 1) * size]), sequence.slots[i]) for i in range(first, end)]
        nodes = self._tree.insert(sequence.chain_tip, sequence.scope, blocks, sequence.priority)
        for index, node in enumerate(nodes, start=first):
            if node.slot == sequence.slots[index]:
                sequence.nodes[index] = node
        sequence.committed_blocks = first + len(nodes)
        sequence.can_commit = sequence.committed_blocks == end
        if nodes:
            sequence.chain_tip = nodes[-1]

    def close(self, sequence: BlockSequence) -> None:
        """Give all pages back: shared ones stay cached, last block first in eviction order; own ones become free."""
        self._reserved -= sequence.reserved
        sequence.reserved = 0
        for slot, node in zip(reversed(sequence.slots), reversed(sequence.nodes), strict=True):
            freed = slot if node is None else self._tree.release(node)
            if freed is not None:
                self._free.append(freed)
        sequence.slots, sequence.nodes = [], []
        sequence.can_commit = False

    def drop_cached(self) -> None:
        """Forget every block that no sequence holds."""
        self._free.extend(self._tree.evict_all())

    def _claim(self) -> int:
        if not self._free:
            self._free.extend(self._tree.evict())
        return self._free.pop()
