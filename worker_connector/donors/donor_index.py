"""DonorIndex: donors by the last block that they have in each tier, so that a block which leaves one finds those that
it shortens.

Blocks leave every tier from the end of a chain. A donor is therefore listed once a tier, under its last block there,
and once more under the deepest of these, its end. Two donors never have one end: they would say the same.
"""

from __future__ import annotations

from collections.abc import Iterable

from dynamo_semkv.contracts.identity import DonorId
from dynamo_semkv.contracts.keys import BlockKey, root_key
from worker_connector.disk.index import DiskBlock
from worker_connector.donors.device_blocks import DeviceBlock
from worker_connector.donors.donor import Donor
from worker_connector.ledger.block import BlockEntry

_ByKey = dict[BlockKey, dict[DonorId, Donor]]


class DonorIndex:
    """Not thread-safe: the registry's lock covers it."""

    def __init__(self) -> None:
        self._by_end: dict[BlockKey, Donor] = {}
        self._by_tip: _ByKey = {}
        """Under its namespace's root, where none of its blocks is in the slab."""
        self._by_below: _ByKey = {}
        self._by_device: _ByKey = {}

    def at_end(self, key: BlockKey) -> Donor | None:
        """The donor that ends in this block; None where there is none."""
        return self._by_end.get(key)

    def ends_in(self, chain: Iterable[BlockKey]) -> list[Donor]:
        """Donors that end in one of these blocks."""
        return [found for key in chain if (found := self._by_end.get(key)) is not None]

    def with_tip(self, key: BlockKey) -> list[Donor]:
        """Donors whose last block in the slab this is; for the root of a namespace, those that have none there."""
        return list(self._by_tip.get(key, {}).values())

    def with_below(self, key: BlockKey) -> list[Donor]:
        """Donors whose last block on disk this is, where that is beyond the slab."""
        return list(self._by_below.get(key, {}).values())

    def with_device(self, key: BlockKey) -> list[Donor]:
        """Donors whose last block in the engine's own cache this is; of `materialization: off`, also before the events
        have spoken."""
        found = list(self._by_device.get(key, {}).values())
        donor = self._by_end.get(key)
        if donor is not None and donor.by_engine and donor.device is None:
            found.append(donor)
        return found

    def enter(self, donor: Donor) -> None:
        """Adds a donor, which takes the place of another one that ends in the same block."""
        self._by_end[donor.end_key] = donor
        for places, key in self._places(donor):
            places.setdefault(key, {})[donor.donor_id] = donor

    def leave(self, donor: Donor) -> None:
        """Takes a donor out; no effect if it is not here."""
        if self._by_end.get(donor.end_key) is donor:
            del self._by_end[donor.end_key]
        self._leave_tiers(donor)

    def clear(self) -> None:
        """Takes all donors out."""
        for places in (self._by_end, self._by_tip, self._by_below, self._by_device):
            places.clear()

    def move(self, donor: Donor, tip: BlockEntry | None, below: DiskBlock | None, device: DeviceBlock | None) -> None:
        """These are its last blocks now. `donor.blocks` turns 0 where nothing is left, or another donor says the
        same."""
        self._leave_tiers(donor)
        if below is not None and tip is not None and tip.ordinal >= below.ordinal:
            below = None
        donor.tip, donor.below, donor.device = tip, below, device
        end = donor.end
        if end is None or end.key != donor.end_key:
            if self._by_end.get(donor.end_key) is donor:
                del self._by_end[donor.end_key]
            if end is None or end.key in self._by_end:
                donor.blocks = 0
            else:
                donor.blocks, donor.end_key = end.ordinal + 1, end.key
                self._by_end[end.key] = donor
        for places, key in self._places(donor):
            places.setdefault(key, {})[donor.donor_id] = donor

    def _places(self, donor: Donor) -> list[tuple[_ByKey, BlockKey]]:
        found = []
        if not donor.by_engine:
            found.append((self._by_tip, root_key(donor.digest) if donor.tip is None else donor.tip.key))
        if donor.below is not None:
            found.append((self._by_below, donor.below.key))
        if donor.device is not None:
            found.append((self._by_device, donor.device.key))
        return found

    def _leave_tiers(self, donor: Donor) -> None:
        for places, key in self._places(donor):
            there = places.get(key)
            if there is not None:
                there.pop(donor.donor_id, None)
                if not there:
                    del places[key]
