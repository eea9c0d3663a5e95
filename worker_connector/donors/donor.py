"""One donor as its registry keeps it: which blocks of which tier it ends in, and what was said of it last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dynamo_semkv.contracts.donor_events import DonorRegistered
from dynamo_semkv.contracts.identity import DonorId, Generation
from dynamo_semkv.contracts.keys import BlockKey
from dynamo_semkv.contracts.location import Tier
from dynamo_semkv.contracts.namespace import CacheNamespace
from worker_connector.disk.index import DiskBlock
from worker_connector.donors.device_blocks import DeviceBlock
from worker_connector.ledger.block import BlockEntry

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


def _nowhere(key: BlockKey) -> None:
    return None


@dataclass(frozen=True)
class Tiers:
    """What the tiers hold now, asked by block key, without a lock, on the background thread."""

    on_disk: Callable[[BlockKey], DiskBlock | None] = _nowhere
    in_slab: Callable[[BlockKey], BlockEntry | None] = _nowhere
    on_device: Callable[[BlockKey], DeviceBlock | None] = _nowhere


NO_TIERS = Tiers()


@dataclass
class Donor:
    """A prompt whose KV is here in some tier, as others are told of it."""

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
    """Its last block in the engine's own cache as the engine's events know it, if they do."""
    by_engine: bool
    """It is in the engine's own cache and in no tier of ours: materialization is off."""
    event: DonorRegistered
    """As registered last."""
    registered_blocks: int
    said_in: Generation | None = None
    """Of the stream, under which consumers were told of it last."""

    @property
    def in_slab(self) -> int:
        """How many of its blocks, from block 0 on, the slab holds."""
        return 0 if self.tip is None else self.tip.ordinal + 1

    @property
    def tier(self) -> Tier:
        """The tier that its location names."""
        return tier_of(self.blocks, self.tip, self.device, by_engine=self.by_engine)

    @property
    def end(self) -> BlockEntry | DiskBlock | DeviceBlock | None:
        """The deepest of its last blocks; None where no tier can name one."""
        ends = (end for end in (self.tip, self.below, self.device) if end is not None)
        return max(ends, key=lambda end: end.ordinal, default=None)

    def chain(self) -> Sequence[BlockEntry | DiskBlock | DeviceBlock]:
        """What is here, block 0 first; empty where no tier can name the blocks."""
        end = self.end
        return end.chain() if end is not None else ()


def tier_of(blocks: int, tip: BlockEntry | None, device: DeviceBlock | None, *, by_engine: bool) -> Tier:
    """Where a donor of that many blocks is: in the nearest tier that misses no more than an eighth of it. A chain whose
    end the engine offloaded to a tier of its own counts as that, since chains go from their end."""
    if by_engine:
        return Tier.HOST_PINNED if device is not None and device.level > 0 else Tier.DEVICE
    if device is not None and device.level == 0 and _is_most(device.ordinal + 1, blocks):
        return Tier.DEVICE
    return Tier.HOST_PINNED if tip is not None and _is_most(tip.ordinal + 1, blocks) else Tier.DISK


def _is_most(there: int, blocks: int) -> bool:
    return there >= blocks * (1 - TOLERATED_LOSS)


def last_of(end: BlockEntry | DiskBlock | DeviceBlock | None, entries: Sequence[BlockEntry]) -> BlockEntry | None:
    """The last of these consecutive blocks that the chain which ends in `end` has too; None if it goes on with
    others."""
    by_ordinal = {entry.ordinal: entry for entry in entries}
    at, found = end, None
    while at is not None and at.ordinal >= entries[0].ordinal:
        entry = by_ordinal.get(at.ordinal)
        if entry is not None:
            if entry.key != at.key:
                found = None  # the paths part before here
            elif found is None:
                found = entry
        at = at.parent
    return found
