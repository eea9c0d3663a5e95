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
    """Consecutive blocks of one chain became resident; `salted`: of a request with a cache salt."""

    entries: tuple[BlockEntry, ...]
    salted: bool


@dataclass(frozen=True)
class Departed:
    """Blocks are resident no more, deepest first."""

    entries: tuple[BlockEntry, ...]


@dataclass(frozen=True)
class DiskGone:
    """Blocks are on the disk no more."""

    blocks: tuple[DiskBlock, ...]


@dataclass(frozen=True)
class DonorsOnDisk:
    """Prompts whose last block was found on the disk at the start."""

    ends: tuple[tuple[CacheNamespace, DiskBlock], ...]


@dataclass(frozen=True)
class ResidentDonor:
    """A prompt whose blocks are resident up to `tip`."""

    namespace: CacheNamespace
    tip: BlockEntry


@dataclass(frozen=True)
class ComputedDonor:
    """A prompt that was computed; `tokens` are packed u32."""

    namespace: CacheNamespace
    digest: bytes
    tokens: bytes


@dataclass(frozen=True)
class Reset:
    """A new generation of the cache; `resident`: its blocks are still there."""

    generation: Generation
    resident: bool


@dataclass(frozen=True)
class AttachResidency:
    """A sink is told from now on; first of these blocks, each with whether it is salted."""

    sink: ResidencySink
    resident: tuple[tuple[BlockEntry, bool], ...]


Change = Stored | Departed | DiskGone | DonorsOnDisk | ResidentDonor | ComputedDonor | Reset | AttachResidency
