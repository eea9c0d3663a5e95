"""The block reuse tree of one rank: which full blocks hold the KV of which token prefix.

A node stands for one full block after its parent's tokens, under one `ReuseScope`. Its 64-bit hash chains scope, parent
and tokens and is only a hint: a match compares the tokens themselves, and the parent by identity.

A node has a page in each layer group, or none: a group with a window drops the pages that the window has passed, and
evicts pages one by one. So a prefix matches as far as every group has the pages that its continuation reads. A page
with no reference is evictable. Nothing here allocates: whoever evicts gets the page slots that became free.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from worker_connector.engine_api.engine import BAD_PAGE_INDEX
from worker_connector.reference_engine.engine.events import DEFAULT_PRIORITY, KvEventBuffer, StoredBlock
from worker_connector.reference_engine.models.layer_groups import LayerGroup


@dataclass(frozen=True)
class ReuseScope:
    """What must be equal, besides tokens, for two requests to share KV. None and "" are different salts."""

    cache_salt: str | None = None
    lora_task_id: int | None = None
    #: Digest of the multimodal content, b"" for text.
    multimodal: bytes = b""

    def seed(self) -> bytes:
        """A fixed-size digest for the root of the hash chain; fields are framed, so that none can run into the next."""
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
    """A node of the tree: one full block. `pages[g]` is its page in group g, or `BAD_PAGE_INDEX`; where there is a
    page, its KV is valid."""

    block_hash: int
    parent: CachedBlock | None
    scope: ReuseScope
    tokens: tuple[int, ...]
    pages: list[int]
    priority: int
    #: Per group: sequences that hold the page.
    references: list[int]
    #: Per group: when the page was last given back.
    last_used: list[int]
    children: set[CachedBlock] = field(default_factory=set)
    #: False once evicted from the tree; its pages then live on only as long as they are referenced.
    attached: bool = True

    def chain_key(self) -> bytes:
        """The hash as the parent key of `chain_hash`, 8 bytes."""
        return self.block_hash.to_bytes(8, "little")

    def is_evictable(self, group: int) -> bool:
        """True if the node has a page in the group that no sequence holds."""
        return self.attached and self.references[group] == 0 and self.pages[group] != BAD_PAGE_INDEX


#: A page that became free: layer group and slot.
Freed = tuple[int, int]


class ReuseTree:
    """Nodes by hash, with priority-LRU order over the evictable pages of each group."""

    def __init__(self, tokens_per_block: int, events: KvEventBuffer, groups: Sequence[LayerGroup]) -> None:
        self._tokens_per_block = tokens_per_block
        self._events = events
        self._groups = tuple(groups)
        self._nodes: dict[int, CachedBlock] = {}
        self._roots: dict[ReuseScope, set[CachedBlock]] = {}
        self._clock = itertools.count(1)
        #: Per group a heap of (priority, last_used, tie break, node); entries that no longer hold are skipped.
        self._idle: list[list[tuple[int, int, int, CachedBlock]]] = [[] for _ in groups]
        self._evictable = [0 for _ in groups]

    @property
    def num_evictable(self) -> int:
        """Pages that eviction could free now, in all groups."""
        return sum(self._evictable)

    def evictable(self, group: int) -> int:
        """Pages that eviction could free now in one group."""
        return self._evictable[group]

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, scope: ReuseScope, tokens: Sequence[int], max_blocks: int) -> list[CachedBlock]:
        """The longest cached prefix of `tokens`, at most `max_blocks` full blocks, in which every page is there that
        the position behind it reads. Takes no reference."""
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
        while not self._is_complete(found):
            found.pop()
        return found

    def match_partly(
        self, scope: ReuseScope, parent: CachedBlock | None, tokens: Sequence[int]
    ) -> tuple[CachedBlock, int] | None:
        """The block after `parent` that shares the longest beginning with `tokens`, and that length in tokens; it has a
        page in every group. None if no block shares any."""
        best: tuple[CachedBlock, int] | None = None
        for node in parent.children if parent is not None else self._roots.get(scope, ()):
            same = 0
            while same < min(len(tokens), len(node.tokens)) and node.tokens[same] == tokens[same]:
                same += 1
            if same > (best[1] if best else 0) and BAD_PAGE_INDEX not in node.pages:
                best = node, same
        return best

    def _is_complete(self, nodes: Sequence[CachedBlock]) -> bool:
        history = len(nodes) * self._tokens_per_block
        for group in self._groups:
            stale = group.stale_blocks(history, self._tokens_per_block)
            for block, node in enumerate(nodes):
                if node.pages[group.group_id] == BAD_PAGE_INDEX and block not in stale:
                    return False
        return True

    def insert(
        self,
        parent: CachedBlock | None,
        scope: ReuseScope,
        blocks: Sequence[tuple[tuple[int, ...], Sequence[int]]],
        priority: int = DEFAULT_PRIORITY,
    ) -> list[CachedBlock]:
        """Make consecutive `(tokens, page per group)` blocks reusable after `parent` (None: at the start); emits stored
        events.

        Returns the node per block. Where the node took over a page it is referenced once for it. An equal node that is
        there already keeps its own pages, and takes the given ones only in groups where it has none: the caller's other
        pages stay private. Stops, returning fewer nodes, at a hash collision or below an evicted parent.
        """
        nodes: list[CachedBlock] = []
        new: list[CachedBlock] = []
        for tokens, pages in blocks:
            if parent is not None and not parent.attached:
                break
            block_hash = chain_hash(parent.chain_key() if parent else scope.seed(), tokens)
            node = self._nodes.get(block_hash)
            if node is None:
                held = [int(page != BAD_PAGE_INDEX) for page in pages]
                now = next(self._clock)
                node = CachedBlock(
                    block_hash, parent, scope, tokens, list(pages), priority, held, [now for _ in self._groups]
                )
                self._nodes[block_hash] = node
                self._siblings(node).add(node)
                new.append(node)
            elif _same_block(node, parent, scope, tokens):
                self._announce(new)
                new = []
                self._complete(node, pages)
            else:
                break
            nodes.append(node)
            parent = node
        self._announce(new)
        return nodes

    def _complete(self, node: CachedBlock, pages: Sequence[int]) -> None:
        for group, page in enumerate(pages):
            if node.pages[group] == BAD_PAGE_INDEX and page != BAD_PAGE_INDEX:
                node.pages[group] = page
                node.references[group] = 1
                self._announce([node], group)

    def reference(self, node: CachedBlock, group: int, priority: int | None = None) -> None:
        """Hold the node's page in a group for one more sequence, optionally with a new retention priority of the
        node."""
        if node.is_evictable(group):
            self._evictable[group] -= 1
        node.references[group] += 1
        if priority is not None and priority != node.priority:
            self._events.priority_updated(node.block_hash, node.priority, priority)
            node.priority = priority

    def release(self, node: CachedBlock, group: int) -> int | None:
        """Give one reference back. Returns the page slot if that freed it, because the node was evicted before."""
        assert node.references[group] > 0, f"block {node.block_hash:#x} was released more often than referenced"
        node.references[group] -= 1
        if node.references[group]:
            return None
        if not node.attached:
            return node.pages[group]
        node.last_used[group] = next(self._clock)
        self._evictable[group] += 1
        if len(self._idle[group]) > 2 * len(self._nodes) + 64:
            self._drop_stale_entries(group)
        heapq.heappush(self._idle[group], (node.priority, node.last_used[group], id(node), node))
        return None

    def evict(self, group: int) -> list[Freed]:
        """Evict the page of `group` that is worth least and return what became free, at least that page.

        Lowest priority goes first, then least recently used. A group with a window loses the page, and the node stays
        for its other groups. In a group of full attention a whole node goes, a leaf before its ancestors. A node below
        which a sequence still holds pages takes its whole subtree out of the tree: those pages stay with their holders
        but cannot be matched any more, because their prefix is gone. IndexError if nothing is evictable.
        """
        while True:
            if not _is_current(self._idle[group][0], group):
                heapq.heappop(self._idle[group])
                continue
            node = self._idle[group][0][3]
            if self._groups[group].window is not None:
                return self._drop_page(node, group)
            while idle_children := [child for child in node.children if child.is_evictable(group)]:
                node = min(idle_children, key=lambda child: (child.priority, child.last_used[group]))
            return self._detach(node)

    def evict_all(self) -> list[Freed]:
        """Evict everything that can be; returns what became free."""
        freed: list[Freed] = []
        for group in range(len(self._groups)):
            while self._evictable[group]:
                freed.extend(self.evict(group))
        return freed

    def _drop_stale_entries(self, group: int) -> None:
        """Blocks that are hit again and again leave one entry each time; without this the heap grows without bound."""
        self._idle[group] = [entry for entry in self._idle[group] if _is_current(entry, group)]
        heapq.heapify(self._idle[group])

    def _drop_page(self, node: CachedBlock, group: int) -> list[Freed]:
        freed = [(group, node.pages[group])]
        node.pages[group] = BAD_PAGE_INDEX
        self._evictable[group] -= 1
        self._events.removed([node.block_hash], group)
        # Nothing is left of a leaf without pages; an inner node still leads to its children.
        while node.attached and not node.children and all(page == BAD_PAGE_INDEX for page in node.pages):
            parent = node.parent
            self._detach(node)
            if parent is None:
                break
            node = parent
        return freed

    def _detach(self, root: CachedBlock) -> list[Freed]:
        self._siblings(root).discard(root)
        if not self._roots.get(root.scope, True):
            del self._roots[root.scope]
        freed: list[Freed] = []
        hashes: list[list[int]] = [[] for _ in self._groups]
        pending = [root]
        while pending:
            node = pending.pop()
            del self._nodes[node.block_hash]
            for group, page in enumerate(node.pages):
                if page == BAD_PAGE_INDEX:
                    continue
                hashes[group].append(node.block_hash)
                if node.is_evictable(group):
                    self._evictable[group] -= 1
                    freed.append((group, page))
            node.attached = False
            pending.extend(node.children)
            node.children.clear()
        for group, gone in enumerate(hashes):
            self._events.removed(gone, group)
        return freed

    def _siblings(self, node: CachedBlock) -> set[CachedBlock]:
        return node.parent.children if node.parent is not None else self._roots.setdefault(node.scope, set())

    def _announce(self, nodes: list[CachedBlock], only: int | None = None) -> None:
        """Emits stored events, one for each group and run of nodes that have a page in it."""
        for group in range(len(self._groups)) if only is None else (only,):
            run: list[CachedBlock] = []
            for node in [*nodes, None]:
                if node is not None and node.pages[group] != BAD_PAGE_INDEX:
                    run.append(node)
                elif run:
                    parent = run[0].parent
                    self._events.stored(None if parent is None else parent.block_hash, [_stored(n) for n in run], group)
                    run = []


def _stored(node: CachedBlock) -> StoredBlock:
    return StoredBlock(node.block_hash, node.tokens, node.priority, node.scope.cache_salt, node.scope.lora_task_id)


def _is_current(entry: tuple[int, int, int, CachedBlock], group: int) -> bool:
    _, last_used, _, node = entry
    return node.is_evictable(group) and node.last_used[group] == last_used


def _same_block(node: CachedBlock, parent: CachedBlock | None, scope: ReuseScope, tokens: tuple[int, ...]) -> bool:
    return node.parent is parent and node.scope == scope and node.tokens == tokens
