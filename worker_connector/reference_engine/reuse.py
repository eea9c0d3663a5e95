"""The block reuse tree of one rank: which full blocks hold the KV of which token prefix.

A node stands for one full block after its parent's tokens, under one `ReuseScope`. Its 64-bit hash chains scope, parent
and tokens and is only a hint: a match compares the tokens themselves, and the parent by identity. A node whose
`references` is 0 is evictable. Nothing here allocates: whoever evicts gets the page slots that became free.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from worker_connector.reference_engine.events import DEFAULT_PRIORITY, KvEventBuffer, StoredBlock


@dataclass(frozen=True)
class ReuseScope:
    """What must be equal, besides tokens, for two requests to share KV. None and "" are different salts."""

    cache_salt: str | None = None
    lora_task_id: int | None = None
    #: Digest of the multimodal content, b"" for text.
    multimodal: bytes = b""

    def seed(self) -> bytes:
        """A fixed-size digest for the root of the hash chain; fields are framed, so they cannot run into another."""
        digest = hashlib.blake2b(digest_size=8)
        salt = b"-" if self.cache_salt is None else b"+" + self.cache_salt.encode("utf-8", "surrogatepass")
        lora = b"-" if self.lora_task_id is None else b"+%d" % self.lora_task_id
        for part in (salt, lora, self.multimodal):
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.digest()


def chain_hash(parent: bytes, tokens: Sequence[int]) -> int:
    """Hash of a block after `parent` (the scope's seed, or the parent's hash as 8 bytes). Unsigned 64-bit."""
    digest = hashlib.blake2b(array("q", tokens).tobytes(), digest_size=8, key=parent)
    return int.from_bytes(digest.digest(), "little")


@dataclass(eq=False)
class CachedBlock:
    """A node: a full block whose KV is valid in page `slot`."""

    block_hash: int
    parent: CachedBlock | None
    scope: ReuseScope
    tokens: tuple[int, ...]
    slot: int
    priority: int
    children: set[CachedBlock] = field(default_factory=set)
    #: Sequences that hold the page.
    references: int = 0
    #: False once evicted from the tree; the page then lives on only as long as it is referenced.
    attached: bool = True
    last_used: int = 0

    def chain_key(self) -> bytes:
        return self.block_hash.to_bytes(8, "little")


class ReuseTree:
    """Nodes by hash, with priority-LRU order over the evictable ones."""

    def __init__(self, tokens_per_block: int, events: KvEventBuffer) -> None:
        self._tokens_per_block = tokens_per_block
        self._events = events
        self._nodes: dict[int, CachedBlock] = {}
        self._clock = itertools.count(1)
        #: (priority, last_used, tie break, node); entries whose last_used is stale are skipped.
        self._idle: list[tuple[int, int, int, CachedBlock]] = []
        self._num_evictable = 0

    @property
    def num_evictable(self) -> int:
        """Pages that eviction could free now."""
        return self._num_evictable

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, scope: ReuseScope, tokens: Sequence[int], max_blocks: int) -> list[CachedBlock]:
        """The longest cached prefix of `tokens`, at most `max_blocks` full blocks. Takes no reference."""
        found: list[CachedBlock] = []
        size = self._tokens_per_block
        parent: CachedBlock | None = None
        for index in range(min(max_blocks, len(tokens) // size)):
            block_tokens = tuple(tokens[index * size : (index + 1) * size])
            node = self._nodes.get(chain_hash(parent.chain_key() if parent else scope.seed(), block_tokens))
            if node is None or not _same_block(node, parent, scope, block_tokens):
                break
            found.append(node)
            parent = node
        return found

    def insert(
        self,
        parent: CachedBlock | None,
        scope: ReuseScope,
        blocks: Sequence[tuple[tuple[int, ...], int]],
        priority: int = DEFAULT_PRIORITY,
    ) -> list[CachedBlock]:
        """Make consecutive `(tokens, slot)` blocks reusable after `parent` (None: at the start); emits stored events.

        Returns the node per block, each referenced once where it took over the given slot. Where an equal node exists
        already it is returned as it is and keeps its own slot: the caller's page stays private. Stops, returning fewer
        nodes, at a hash collision or below an evicted parent.
        """
        nodes: list[CachedBlock] = []
        new: list[CachedBlock] = []
        for tokens, slot in blocks:
            if parent is not None and not parent.attached:
                break
            block_hash = chain_hash(parent.chain_key() if parent else scope.seed(), tokens)
            node = self._nodes.get(block_hash)
            if node is None:
                node = CachedBlock(block_hash, parent, scope, tokens, slot, priority, references=1)
                node.last_used = next(self._clock)
                self._nodes[block_hash] = node
                if parent is not None:
                    parent.children.add(node)
                new.append(node)
            elif _same_block(node, parent, scope, tokens):
                self._announce(new)
                new = []
            else:
                break
            nodes.append(node)
            parent = node
        self._announce(new)
        return nodes

    def reference(self, node: CachedBlock, priority: int | None = None) -> None:
        """Hold the node's page for one more sequence, optionally with a new retention priority."""
        if node.attached and node.references == 0:
            self._num_evictable -= 1
        node.references += 1
        if priority is not None and priority != node.priority:
            self._events.priority_updated(node.block_hash, node.priority, priority)
            node.priority = priority

    def release(self, node: CachedBlock) -> int | None:
        """Give one reference back. Returns the page slot if that freed it: the node was evicted before."""
        assert node.references > 0, f"block {node.block_hash:#x} was released more often than referenced"
        node.references -= 1
        if node.references:
            return None
        if not node.attached:
            return node.slot
        node.last_used = next(self._clock)
        self._num_evictable += 1
        if len(self._idle) > 2 * len(self._nodes) + 64:
            self._drop_stale_entries()
        heapq.heappush(self._idle, (node.priority, node.last_used, id(node), node))
        return None

    def evict(self) -> list[int]:
        """Evict the block that is worth least and return the page slots that became free, at least one.

        Lowest priority first, then least recently used, and a leaf before its ancestors. An evictable node below which
        a sequence still holds pages takes its whole subtree out of the tree: those pages stay with their holders but
        cannot be matched any more, because their prefix is gone. IndexError if nothing is evictable.
        """
        while True:
            if not _is_current(self._idle[0]):
                heapq.heappop(self._idle)
                continue
            node = self._idle[0][3]
            while idle_children := [child for child in node.children if child.references == 0]:
                node = min(idle_children, key=lambda child: (child.priority, child.last_used))
            return self._detach(node)

    def evict_all(self) -> list[int]:
        """Evict everything that can be; returns the freed page slots."""
        slots: list[int] = []
        while self._num_evictable:
            slots.extend(self.evict())
        return slots

    def _drop_stale_entries(self) -> None:
        """Blocks that are hit again and again leave one entry a time; without this the heap grows without bound."""
        self._idle = [entry for entry in self._idle if _is_current(entry)]
        heapq.heapify(self._idle)

    def _detach(self, root: CachedBlock) -> list[int]:
        if root.parent is not None:
            root.parent.children.discard(root)
        slots: list[int] = []
        hashes: list[int] = []
        pending = [root]
        while pending:
            node = pending.pop()
            node.attached = False
            del self._nodes[node.block_hash]
            hashes.append(node.block_hash)
            if node.references == 0:
                self._num_evictable -= 1
                slots.append(node.slot)
            pending.extend(node.children)
            node.children.clear()
        self._events.removed(hashes)
        return slots

    def _announce(self, nodes: list[CachedBlock]) -> None:
        if not nodes:
            return
        parent = nodes[0].parent
        blocks = [
            StoredBlock(node.block_hash, node.tokens, node.priority, node.scope.cache_salt, node.scope.lora_task_id)
            for node in nodes
        ]
        self._events.stored(None if parent is None else parent.block_hash, blocks)


def _is_current(entry: tuple[int, int, int, CachedBlock]) -> bool:
    _, last_used, _, node = entry
    return node.attached and node.references == 0 and node.last_used == last_used


def _same_block(node: CachedBlock, parent: CachedBlock | None, scope: ReuseScope, tokens: tuple[int, ...]) -> bool:
    return node.parent is parent and node.scope == scope and node.tokens == tokens
