"""What one rank is made with, and what its loads and saves share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from worker_connector.engine_api.geometry import PoolGeometry
from worker_connector.memory.slab import HostSlab
from worker_connector.rank.disk import DiskPlace


@dataclass(frozen=True)
class RankOptions:
    """What the settings and the engine decide about a rank."""

    slab_bytes: int | None
    """Host memory for blocks; None: materialization is off, and there is no slab."""
    inline: bool = False
    """No threads: everything is done by the caller (tests)."""
    restarts_failed: bool = False
    """The engine asks `take_failed` before the forward pass, and takes those requests out of the batch."""
    restarts_failed_parked: bool = False
    """The engine asks `take_failed_parked` after `get_finished`, and starts those over that wait for a load."""
    async_loads: bool = False
    async_deadline_seconds: float = 2.0
    disk: DiskPlace | None = None
    """The tier below the slab."""
    trust_layer_hooks: bool = False
    """See rank/layer_hooks.py."""
    apart: bool = False
    """The leader is in another process (tensor parallelism)."""


@dataclass(frozen=True)
class CopyPlace:
    """The pool and the slab that copies go between, and who hears of them."""

    number: int
    """Of the rank."""
    geometry: PoolGeometry
    slab: HostSlab
    post: Callable[[Any], None]
    """Takes the results for the leader."""
    on_damaged: Callable[[Sequence[int], bool], None]
    """Takes slots whose bytes do not have their checksum, and whether a load has read them."""
    counts: Counter[str]
    """The rank's own."""
