"""Who is told what the tier below the slab does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dynamo_semkv.contracts.namespace import CacheNamespace
from worker_connector.disk.index import DiskBlock
from worker_connector.ledger.block import BlockEntry


@dataclass(frozen=True)
class TierListeners:
    """Who is told what the tier does."""

    staged: Callable[[Sequence[BlockEntry]], None]
    """Consecutive blocks of one chain became resident in the slab."""
    gone: Callable[[Sequence[DiskBlock]], None]
    """Blocks left some rank's disk, children first."""
    found: Callable[[Sequence[tuple[CacheNamespace, DiskBlock]]], None]
    """The ends of the chains that an earlier process left."""
    flush: Callable[[], None] = lambda: None
    """Publishes what had to leave the slab."""
