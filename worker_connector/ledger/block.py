"""Block entries of the ledger, and how a chain of them is read at once: segments, which hold tokens and slots of
consecutive blocks side by side, and chains, which are listed block by block only where somebody asks for one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple, overload

import numpy as np

from dynamo_semkv.contracts.keys import BlockKey
from dynamo_semkv.contracts.location import Tier

NO_SLOT = -1


class Origin(NamedTuple):
    """How a block came up into the slab: from disk, or from another worker (`Tier.EXTERNAL`)."""

    tier: Tier
    seconds: float
    """Its share of the time that the read, or the exchange, took which brought it."""


class BlockEntry:
    """One block, or (ordinal -1) the root of a namespace's tree. `key`, `parent`, `tokens`, `ordinal`, `digest` never
    change."""

    __slots__ = (
        "children",
        "damaged",
        "digest",
        "fetched",
        "in_flight",
        "key",
        "leases",
        "ordinal",
        "origin",
        "parent",
        "queued",
        "removed",
        "resident",
        "segment",
        "slot",
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
        self.origin: Origin | None = None
        """Where it came up into the slab from; None once somebody was served it, since from then on it is the slab that
        serves it."""
        self.leases = 0
        """Of chains that end here; and of those that end further down, where all below this block is removed."""
        self.tick = 0
        """Of the last use of a chain that ends here, or of one whose rest has gone: less than that of the blocks that
        continue it."""
        self.segment: Segment | None = None
        """None: a root, or removed."""

    def chain(self) -> list[BlockEntry]:
        """This block and those before it, block 0 first."""
        path: list[BlockEntry] = []
        at: BlockEntry | None = self
        while at is not None and at.ordinal >= 0:
            path.append(at)
            at = at.parent
        path.reverse()
        return path


class Segment:
    """Consecutive blocks of one chain, each the parent of the next. They come and go at its end only; a block that
    continues one further up begins a segment of its own."""

    __slots__ = ("blocks", "resident", "slots", "start", "tokens")

    def __init__(self, start: int) -> None:
        self.start = start
        """Ordinal of its first block."""
        self.blocks: list[BlockEntry] = []
        self.tokens = bytearray()
        """Of all its blocks."""
        self.slots = array("q")
        self.resident = 0
        """How many of its blocks are, which are its first ones: a block is admitted behind its parent, and leaves
        before it."""

    def append(self, block: BlockEntry) -> None:
        """The block must continue the last one."""
        self.blocks.append(block)
        self.tokens += block.tokens
        self.slots.append(block.slot)
        block.segment = self

    def pop(self) -> BlockEntry:
        """Its last block leaves it."""
        block = self.blocks.pop()
        del self.tokens[-len(block.tokens) :]
        self.slots.pop()
        self.resident -= block.resident
        block.segment = None
        return block

    def common(self, index: int, tokens: bytes, at: int, count: int) -> int:
        """How many of the `count` blocks from `index` on, all of them there, have the tokens that are in `tokens` from
        byte `at` on."""
        step = len(self.blocks[0].tokens)
        words = count * step // 4
        differs = np.frombuffer(self.tokens, np.uint32, words, index * step) != np.frombuffer(
            tokens, np.uint32, words, at
        )
        first = int(differs.argmax())
        return first * 4 // step if differs[first] else count


class Chain(Sequence[BlockEntry]):
    """The blocks from a prompt's first one to `tip`."""

    __slots__ = ("_blocks", "tip")

    def __init__(self, tip: BlockEntry) -> None:
        self.tip = tip
        self._blocks: tuple[BlockEntry, ...] | None = None

    def __len__(self) -> int:
        return self.tip.ordinal + 1

    @overload
    def __getitem__(self, index: int) -> BlockEntry: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[BlockEntry, ...]: ...

    def __getitem__(self, index: int | slice) -> BlockEntry | tuple[BlockEntry, ...]:
        if index == -1:
            return self.tip
        if self._blocks is None:
            self._blocks = tuple(
                self.tip.chain()
            )  # by parents, which never change: segments have lost what was removed
        return self._blocks[index]

    def slots(self, first: int) -> array[int]:
        """Of the blocks from ordinal `first` on; none of them may be removed."""
        segment = self.tip.segment
        assert segment is not None
        if segment.start <= first:
            return segment.slots[first - segment.start : self.tip.ordinal - segment.start + 1]
        found = array("q")
        at: BlockEntry | None = self.tip
        while at is not None and at.ordinal >= first:
            segment = at.segment
            assert segment is not None
            if segment.start == at.ordinal:
                found.append(at.slot)
                at = at.parent
                continue
            piece = segment.slots[max(first - segment.start, 0) : at.ordinal - segment.start + 1]
            piece.reverse()
            found += piece
            at = segment.blocks[0].parent
        found.reverse()
        return found
