"""CatalogLimits: how much the catalog keeps, and for how long."""

from __future__ import annotations

import math
from dataclasses import dataclass

BYTES_PER_DONOR = 4_096
"""Room for sketches, for each donor that may be kept, where `max_bytes` is not given."""


@dataclass(frozen=True)
class CatalogLimits:
    """Bounds of a DonorCatalog. When one is reached, the worker that holds most gives up its own."""

    max_donors: int = 100_000
    max_donors_per_namespace: int = 100_000
    max_bytes: int | None = None
    """Of all sketches; None: BYTES_PER_DONOR for each of `max_donors`."""
    max_streams: int = 4_096
    max_held: int = 4_096
    """Events of all streams that wait for an earlier one."""
    max_held_per_stream: int = 512
    absent_seconds: float = 300.0
    """How long the donors of a worker are kept that is gone from discovery."""
    max_age_seconds: float = math.inf
    """How long a donor is kept that is not registered again; its own `ttl` may shorten that."""

    @property
    def sketch_bytes(self) -> int:
        """`max_bytes`, or what stands in for it."""
        return self.max_donors * BYTES_PER_DONOR if self.max_bytes is None else self.max_bytes
