"""What a leader asks of its ranks' disk stores, and what they answer. Plain picklable data. Each rank works on the orders in the order in
which they came, but for `Stage`, which goes before `Spill`: somebody may be about to ask for those blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dynamo_semkv.contracts.keys import BlockKey
from worker_connector.block_file import BlockRecord


class Placed(NamedTuple):
    """A block and its slot in every rank's slab."""

    block: BlockRecord
    slot: int


@dataclass(frozen=True)
class Stage:
    """Read these consecutive blocks from disk into their slots, and seal them there."""

    order_id: int
    blocks: tuple[Placed, ...]


@dataclass(frozen=True)
class Spill:
    """Write these sealed slots to disk."""

    order_id: int
    blocks: tuple[Placed, ...]


@dataclass(frozen=True)
class Clear:
    """Forget everything that was written so far: weights or cache were reset."""

    order_id: int


DiskOrder = Stage | Spill | Clear


@dataclass(frozen=True)
class DiskFound:
    """Blocks of an earlier life that this rank has, parents before children. `last`: these are all."""

    rank: int
    blocks: tuple[BlockRecord, ...]
    last: bool


@dataclass(frozen=True)
class DiskGone:
    """Blocks that left this rank's store, children before parents."""

    rank: int
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True)
class StageDone:
    """`blocks`: how many of the order's blocks, counted from its first, are in their slots, verified and sealed."""

    rank: int
    order_id: int
    blocks: int


@dataclass(frozen=True)
class SpillDone:
    """Is it on this rank's disk now? By block of the order."""

    rank: int
    order_id: int
    written: tuple[bool, ...]


@dataclass(frozen=True)
class DiskCleared:
    rank: int
    order_id: int


DiskResult = DiskFound | DiskGone | StageDone | SpillDone | DiskCleared
DISK_RESULTS = (DiskFound, DiskGone, StageDone, SpillDone, DiskCleared)
