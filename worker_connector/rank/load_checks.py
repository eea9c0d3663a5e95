"""What must hold of a load in the moment before it is copied. Raises LoadFailed, naming what does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from worker_connector.engine_api.geometry import PoolGeometry
from worker_connector.errors import LoadFailed
from worker_connector.link.metadata import ConnectorMetadata, LoadOrder
from worker_connector.memory.slab import NO_READING, OFFER_BUDGET, HostSlab
from worker_connector.memory.transfer import check_moves


def check_load(
    order: LoadOrder,
    metadata: ConnectorMetadata,
    geometry: PoolGeometry,
    slab: HostSlab,
    on_damaged: Callable[[Sequence[int], bool], None] | None,
) -> None:
    """`on_damaged`: of a rank in another process than its leader, who could only check the rows of its own rank before
    it offered; here they are checked within the same budget, and what is found is told. None: of the leader's own
    rank."""
    if order.plan.provider_generation != metadata.generation:
        raise LoadFailed(f"plan {tuple(order.key)} is of another life of the cache")
    check_moves(geometry, slab, order.moves)
    slots = [move.slot for move in order.moves]
    if on_damaged is not None:
        wrong = slab.verify(slots, OFFER_BUDGET)
        if wrong:
            on_damaged(wrong, False)
            raise LoadFailed(f"host slots {wrong[:4]} do not hold what was saved")
    unsealed = slab.verify(slots, NO_READING)
    if unsealed:
        raise LoadFailed(f"host slots {unsealed[:4]} are being written")
