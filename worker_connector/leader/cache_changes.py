"""What happens to the blocks of one leader's tiers, as the event_publisher is told it, in order."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_semkv.contracts.identity import Generation
from dynamo_semkv.contracts.namespace import CacheNamespace
from worker_connector.disk.index import DiskBlock
from worker_connector.donors.sink import ResidencySink
from worker_connector.ledger.block import BlockEntry


@dataclass(frozen=True)
class Stored:
    entries: tuple[BlockEntry, ...]
    salted: bool


@dataclass(frozen=True)
class Departed:
    entries: tuple[BlockEntry, ...]


@dataclass(frozen=True)
class DiskGone:
    blocks: tuple[DiskBlock, ...]


@dataclass(frozen=True)
class DonorsOnDisk:
    ends: tuple[tuple[CacheNamespace, DiskBlock], ...]


@dataclass(frozen=True)
class ResidentDonor:
    namespace: CacheNamespace
    tip: BlockEntry


@dataclass(frozen=True)
class ComputedDonor:
    namespace: CacheNamespace
    digest: bytes
    tokens: bytes


@dataclass(frozen=True)
class Reset:
    generation: Generation
    resident: bool


@dataclass(frozen=True)
class AttachResidency:
    sink: ResidencySink
    resident: tuple[tuple[BlockEntry, bool], ...]


Change = Stored | Departed | DiskGone | DonorsOnDisk | ResidentDonor | ComputedDonor | Reset | AttachResidency
