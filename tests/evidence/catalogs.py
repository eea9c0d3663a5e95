"""A catalog with a listener that keeps what it is told, and tapes to feed it."""

from __future__ import annotations

from typing import Any

from dynamo_semkv.evidence.catalog import DonorCatalog
from dynamo_semkv.evidence.donor import CatalogDonor
from dynamo_semkv.evidence.limits import CatalogLimits
from dynamo_semkv.evidence.stream import Verdict
from dynamo_semkv.testing import EventTape, ManualClock
from tests.evidence.documents import document, namespace

TEXT = document(1, 600)
NS = namespace()


class Index:
    """A listener that keeps what it was told."""

    def __init__(self) -> None:
        self.donors: dict[str, CatalogDonor] = {}
        self.told: list[tuple[str, str]] = []

    def donor_added(self, donor: CatalogDonor) -> None:
        self.told.append(("added", donor.donor_id))
        self.donors[donor.donor_id] = donor

    def donor_removed(self, donor_id: str) -> None:
        self.told.append(("removed", donor_id))
        del self.donors[donor_id]

    def creditable(self) -> set[str]:
        return {donor_id for donor_id, donor in self.donors.items() if donor.creditable}


def catalog(*listeners: Any, **limits: Any) -> tuple[DonorCatalog, Index, ManualClock]:
    index, clock = Index(), ManualClock()
    return DonorCatalog([index, *listeners], clock=clock, limits=CatalogLimits(**limits)), index, clock


def feed(target: DonorCatalog, events: Any) -> list[Verdict]:
    return [target.apply(event) for event in events]


def tape_of(*donors: str, worker_id: int = 1, dp_rank: int = 0, generation: int | str = "g1") -> EventTape:
    tape = EventTape(worker_id, dp_rank, generation)
    tape.reset()
    for donor in donors:
        tape.register(donor, TEXT, NS)
    return tape


def creditable(target: DonorCatalog, worker_id: int = 1, dp_rank: int = 0) -> set[str]:
    return {d.donor_id for d in target.donors_of(worker_id, dp_rank) if d.creditable}
