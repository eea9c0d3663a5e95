"""One donor as its registry keeps it: which blocks of which tier it ends in, and what was said of it last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_semkv.contracts.donor_events import DonorRegistered
from dynamo_semkv.contracts.identity import DonorId, Generation
from dynamo_semkv.contracts.keys import BlockKey, root_key
from dynamo_semkv.contracts.location import Tier
from dynamo_semkv.contracts.namespace import CacheNamespace
from worker_connector.block import BlockEntry
from worker_connector.device_blocks import DeviceBlock
from worker_connector.disk_index import DiskBlock

TOLERATED_LOSS = 1 / 8
KEPT_SHARE = 1 / 2


@dataclass(frozen=True)
class KnownDonor:
    """What a verdict may ask about a donor of this replica."""

    donor_id: DonorId
    namespace: CacheNamespace
    tokens: int
    tip: BlockEntry | None
    """Its last block in the slab; None if none is there, or with materialization off."""
    below: DiskBlock | None = None
    """Its last block on disk, where that is beyond `tip`."""


@dataclass
class Donor:
    donor_id: DonorId
    namespace: CacheNamespace
    digest: bytes
    end_key: BlockKey
    """Of the last block that is here in any tier."""
    blocks: int
    """Here, in any tier."""
    tip: BlockEntry | None
    below: DiskBlock | None
    device: DeviceBlock | None
    """Its last block as the engine's events know it, if they do."""
    by_engine: bool
    """It is in the engine's own cache, not in ours: materialization is off."""
    event: DonorRegistered
    """As registered last."""
    registered_blocks: int
    said_in: Generation | None = None
    """Of the stream, under which consumers were told of it last."""

    @property
    def in_slab(self) -> int:
        return 0 if self.tip is None else self.tip.ordinal + 1

    @property
    def tier(self) -> Tier:
        if self.by_engine:
            return Tier.HOST_PINNED if self.device is not None and self.device.level > 0 else Tier.DEVICE
        return Tier.DISK if self.in_slab < self.blocks * (1 - TOLERATED_LOSS) else Tier.HOST_PINNED

    def chain(self) -> Sequence[BlockEntry | DiskBlock | DeviceBlock]:
        """What is here, block 0 first; empty where no tier can name the blocks."""
        end = self.below or self.tip or self.device
        return end.chain() if end is not None else ()


def tip_key(donor: Donor) -> BlockKey:
    return root_key(donor.digest) if donor.tip is None else donor.tip.key


def last_of(below: DiskBlock | None, entries: Sequence[BlockEntry]) -> BlockEntry | None:
    """The last of these consecutive blocks that the chain which ends in `below` has too; None if it goes on with others."""
    by_ordinal = {entry.ordinal: entry for entry in entries}
    at, found = below, None
    while at is not None and at.ordinal >= entries[0].ordinal:
        entry = by_ordinal.get(at.ordinal)
        if entry is not None:
            if entry.key != at.key:
                found = None  # the paths part before here
            elif found is None:
                found = entry
        at = at.parent
    return found
