"""Block entries of the ledger, and how a chain of them is read at once: a segment holds tokens and slots of consecutive
blocks side by side, and a chain lists its blocks only when somebody asks for one."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple, overload

import numpy as np

from dynamo_semkv.contracts.keys import BlockKey
from dynamo_semkv.contracts.location import Tier

NO_SLOT = -1


class Origin(NamedTuple):
    """Where a block in the slab came from: disk, or another worker (`Tier.EXTERNAL`)."""

    tier: Tier
    seconds: float
    """The block's share of the time that its read from disk, or its exchange with the worker, took."""


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
        """Digest of the CacheNamespace, the request's fields included."""
        self.key = key
        self.parent = parent
        self.tokens = tokens
        """Little-endian u32, 4 * tokens_per_block bytes."""
        self.ordinal = ordinal
        self.slot = slot
        self.children: dict[bytes, BlockEntry] = {}
        self.resident = False
        """Copied, with a checksum, and known to have been computed: may be offered."""
        self.in_flight = False
        """A copy into the slot may still run."""
        self.removed = False
        self.damaged = False
        """Its bytes are known not to be what was saved."""
        self.queued = False
        self.fetched = False
        """It was pulled from another worker."""
        self.origin: Origin | None = None
        """Where the block came from; None once a request was served with it, since from then on the slab serves it."""
        self.leases = 0
        """Leases of chains that end here, and of chains that ended further down in blocks that are removed by now."""
        self.tick = 0
        """The ledger's tick at the last use of a chain that ends here, or of one whose later blocks are removed. Uses
        of the blocks that continue this one are not noted here."""
        self.segment: Segment | None = None
        """None for a root and for a removed block."""

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
    """Consecutive blocks of one chain, each the parent of the next. They are added and removed at its end only; a block
    that continues an earlier one begins a segment of its own."""

    __slots__ = ("blocks", "resident", "slots", "start", "tokens")

    def __init__(self, start: int) -> None:
        self.start = start
        """Ordinal of its first block."""
        self.blocks: list[BlockEntry] = []
        self.tokens = bytearray()
        """Tokens of all its blocks, as in `BlockEntry.tokens`."""
        self.slots = array("q")
        self.resident = 0
        """How many of its blocks are resident. They are its first ones: a block is admitted after its parent, and
        leaves before it."""

    def append(self, block: BlockEntry) -> None:
        """The block must continue the last one."""
        self.blocks.append(block)
        self.tokens += block.tokens
        self.slots.append(block.slot)
        block.segment = self

    def pop(self) -> BlockEntry:
        """Takes the last block out."""
        block = self.blocks.pop()
        del self.tokens[-len(block.tokens) :]
        self.slots.pop()
        self.resident -= block.resident
        block.segment = None
        return block

    def common(self, index: int, tokens: bytes, at: int, count: int) -> int:
        """How many of the `count` blocks from `index` on have the tokens that `tokens` has from byte `at` on. The
        segment must have all of them."""
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
        """Slots of the blocks from ordinal `first` on; none of them may be removed."""
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
