"""DiskIndex: which blocks the ranks' disks hold, as the leader knows it without touching a disk.

A block counts only where *every* rank has reported it: one shard of a block is worth nothing. Ranks keep whole chains
(disk/store.py), so a block that counts can be reached from its prompt's start. Whether a file really holds what it
should is known only by reading it.
"""

from __future__ import annotations

from collections.abc import Iterator

from dynamo_semkv.contracts.keys import BlockKey, child_key
from worker_connector.disk.block_file import BlockRecord


class DiskBlock:
    """`key`, `digest`, `parent`, `ordinal`, `tokens` never change. `parent` None: block 0."""

    __slots__ = ("children", "digest", "holders", "key", "ordinal", "parent", "tokens", "usable", "used")

    def __init__(self, record: BlockRecord, parent: DiskBlock | None) -> None:
        self.key = record.key
        self.digest = record.namespace
        self.parent = parent
        self.ordinal = record.ordinal
        self.tokens = record.tokens
        self.used = record.used
        self.children = 0
        self.holders = 0
        """Bit r: rank r has it."""
        self.usable = False
        """Every rank has it."""

    def chain(self) -> list[DiskBlock]:
        """This block and those before it, block 0 first."""
        path: list[DiskBlock] = []
        at: DiskBlock | None = self
        while at is not None:
            path.append(at)
            at = at.parent
        path.reverse()
        return path


class DiskIndex:
    """Changed under the leader's lock. `get` and `path` may be called from any thread without it: they see each block
    whole or not."""

    def __init__(self, ranks: int = 1) -> None:
        self._all = (1 << ranks) - 1
        self._blocks: dict[BlockKey, DiskBlock] = {}
        self.usable = 0
        self.strays = 0
        """Blocks reported by a rank without the one that they continue: never entered."""

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, key: BlockKey) -> DiskBlock | None:
        """The block, if every rank has it; else None."""
        block = self._blocks.get(key)
        return block if block is not None and block.usable else None

    def path(self, parent: BlockKey, tokens: bytes, step: int) -> list[DiskBlock]:
        """The blocks on disk that continue `parent` with these tokens (packed, `step` bytes a block). Hashes every
        block."""
        found: list[DiskBlock] = []
        for at in range(0, len(tokens) - len(tokens) % step, step):
            piece = tokens[at : at + step]
            parent = child_key(parent, piece)
            block = self.get(parent)
            if block is None or block.tokens != piece:
                break
            found.append(block)
        return found

    def add(self, rank: int, record: BlockRecord) -> DiskBlock | None:
        """Notes that one rank has it. Returns the block if that made it usable."""
        block = self._blocks.get(record.key)
        if block is None:
            above = self._blocks.get(record.parent) if record.ordinal else None
            if record.ordinal and above is None:
                self.strays += 1
                return None
            block = DiskBlock(record, above)
            if above is not None:
                above.children += 1
            self._blocks[record.key] = block
        block.holders |= 1 << rank
        if block.usable or block.holders != self._all:
            return None
        block.usable = True
        self.usable += 1
        return block

    def remove(self, rank: int, key: BlockKey) -> DiskBlock | None:
        """Notes that one rank has it no more. Returns the block if it was usable."""
        block = self._blocks.get(key)
        if block is None:
            return None
        was, block.usable = block.usable, False
        self.usable -= was
        block.holders &= ~(1 << rank)
        if not block.holders and not block.children:
            self._forget(block)
        return block if was else None

    def ends(self) -> Iterator[DiskBlock]:
        """Usable blocks that no usable block continues, used longest ago first (by the file times of the rank that
        reported the block first)."""
        continued = {block.parent.key for block in self._blocks.values() if block.usable and block.parent is not None}
        ends = [block for block in self._blocks.values() if block.usable and block.key not in continued]
        return iter(sorted(ends, key=lambda block: block.used))

    def clear(self) -> list[DiskBlock]:
        """Forgets all blocks. Returns those that were usable, children before parents."""
        gone = [block for block in self._blocks.values() if block.usable]
        for block in gone:
            block.usable = False
        self._blocks.clear()
        self.usable = 0
        return gone[::-1]

    def _forget(self, block: DiskBlock) -> None:
        at: DiskBlock | None = block
        while at is not None and not at.holders and not at.children:
            del self._blocks[at.key]
            if at.parent is not None:
                at.parent.children -= 1
            at = at.parent
