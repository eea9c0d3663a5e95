"""Orders of a leader to its ranks' disk stores, and their answers. Orders are plain picklable data, which the engine
broadcasts where ranks are processes of their own; answers fit the wire format in which those answer (link/wire.py).
Each rank works on its orders as they came, but for `Stage`, which goes first: somebody may be about to ask for those
blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from dynamo_semkv.contracts.keys import BlockKey
from worker_connector.disk.block_file import BlockRecord
from worker_connector.ledger.block import BlockEntry


class Placed(NamedTuple):
    """A block and its slot in every rank's slab."""

    block: BlockRecord
    slot: int


@dataclass(frozen=True)
class Tell:
    """Look through the directory and report every block: a leader begins a new index. The order's id names this
    generation of it, and `Stage` and `Spill` carry that as `life`. What was ordered in an earlier generation is not
    done any more, since its slots belong to other blocks by now."""

    order_id: int


@dataclass(frozen=True)
class Stage:
    """Read these consecutive blocks from disk into their slots, and seal them there."""

    order_id: int
    life: int
    blocks: tuple[Placed, ...]


@dataclass(frozen=True)
class Spill:
    """Write these sealed slots to disk."""

    order_id: int
    life: int
    blocks: tuple[Placed, ...]


@dataclass(frozen=True)
class Clear:
    """Forget everything that was written so far: weights or cache were reset."""

    order_id: int


DiskOrder = Tell | Stage | Spill | Clear


class DiskFound(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Tell`: blocks that this rank has, parents before children. `last`: no more follow. `words` of a
    namespace are sent once."""

    rank: int
    order_id: int
    blocks: tuple[BlockRecord, ...]
    last: bool


class DiskGone(msgspec.Struct, frozen=True, tag=True):
    """Blocks that left this rank's store, children before parents."""

    rank: int
    keys: tuple[BlockKey, ...]


class StageDone(msgspec.Struct, frozen=True, tag=True):
    """`blocks`: how many of the order's blocks, counted from its first, are in their slots, verified and sealed."""

    rank: int
    order_id: int
    blocks: int


class SpillDone(msgspec.Struct, frozen=True, tag=True):
    """`written[i]`: block i of the order is on this rank's disk now."""

    rank: int
    order_id: int
    written: tuple[bool, ...]


class DiskCleared(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Clear`: nothing that this rank wrote before it is used any more."""

    rank: int
    order_id: int


DiskResult = DiskFound | DiskGone | StageDone | SpillDone | DiskCleared
DISK_RESULTS = (DiskFound, DiskGone, StageDone, SpillDone, DiskCleared)


@dataclass(eq=False)
class OpenOrder:
    """An order that not every rank has answered yet. The leader's own; it is never sent."""

    entries: list[BlockEntry]
    records: list[BlockRecord]
    good: list[bool]
    waiting: set[int] = field(default_factory=set)
    void: bool = False
    """A reset came after it: what it wrote or read may not be used."""
    sent: float = 0.0
