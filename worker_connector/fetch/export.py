"""SlabExport: what this worker's slab shows to others of the fleet. Only what it would offer to a request of its own:
resident, in the asked namespace, and still what was sealed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np

from dynamo_semkv.contracts.keys import BlockKey
from worker_connector.fetch.transport import Rows, Sent, Wanted
from worker_connector.ledger.ledger import Ledger
from worker_connector.link.channel import RankReady
from worker_connector.memory.checksum import seals
from worker_connector.memory.slab import HostSlab

SHARD = "0/1"
"""Every block is whole: under tensor parallelism nothing is pulled (engine_api/settings.py)."""


class Held(NamedTuple):
    """One life of the cache."""

    pool: RankReady
    ledger: Ledger
    slab: HostSlab
    content: int
    """Raised when what the blocks hold is declared worthless."""
    weights: str = ""
    """Fingerprint of the weights that they were computed with, before any that were named
    (fetch/weights_fingerprint.py)."""

    @property
    def name(self) -> str:
        """Names the cache: another name means that what was promised before is gone."""
        return f"{self.slab.incarnation}.{self.content}"


class SlabExport:
    """Any thread; the leader's lock is held for as long as a look takes, never while bytes are copied."""

    def __init__(self, lock: AbstractContextManager[object], held: Callable[[], Held | None]) -> None:
        """`held`: what there is now; called under `lock`."""
        self._lock = lock
        self._held = held
        self.counts: Counter[str] = Counter()
        """`damaged`: blocks that did not hold what was sealed."""

    def life(self) -> str:
        """The name of the cache that is there now; empty without one."""
        with self._lock:
            held = self._held()
            return held.name if held is not None else ""

    def foreign(self, wanted: Wanted) -> str | None:
        """What keeps the asker's KV apart from ours, in words; None where blocks may go."""
        with self._lock:
            held = self._held()
        if held is None:
            return "no cache"
        ours = {
            "layout": held.pool.kv_layout,
            "shard": SHARD,
            "tokens_per_block": held.pool.tokens_per_block,
            "bytes_per_block": held.pool.bytes_per_block,
            "weights": held.weights,
        }
        return next((name for name, value in ours.items() if getattr(wanted, name) != value), None)

    def read(self, wanted: Wanted, key: BlockKey, into: Rows) -> Sent | None:
        """Copies one block's bytes into `into`, u8 of shape [rows, bytes of a row]; None where it is not here, or not
        the asker's."""
        with self._lock:
            held = self._held()
            if held is None or into.shape[1] != held.slab.row_bytes:
                return None
            entry = held.ledger.by_key(key)
            if entry is None or not entry.resident or entry.damaged or entry.digest != wanted.namespace:
                return None
            held.ledger.touch(entry)
            held.ledger.lease(entry)  # its slot keeps it while it is copied
            slot = entry.slot
        try:
            whole = held.slab.copy_sealed(slot, into)
        finally:
            with self._lock:
                held.ledger.release(entry)
        if not whole:
            self.counts["damaged"] += 1
            return None
        into[0, held.slab.bytes_per_block :] = np.uint8(0)  # what lies behind a block is nobody's business
        return Sent(entry.tokens, int(seals(into)[0]))
