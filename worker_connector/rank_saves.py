"""RankSaves: one rank's saves, from pages to slab rows behind a forward pass, and the answers to them once the rows are sealed.

The copies are enqueued on the engine's thread; waiting for them, the checksums and the answers are the keeper's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from worker_connector.channel import SaveDone
from worker_connector.copy_stream import CopyStream, Ticket
from worker_connector.geometry import PoolGeometry
from worker_connector.keeper import SlabKeeper
from worker_connector.metadata import SaveOrder
from worker_connector.slab import HostSlab
from worker_connector.transfer import check_moves, copy_to_slab


class RankSaves:
    """Of one registered pool."""

    def __init__(
        self,
        number: int,
        geometry: PoolGeometry,
        slab: HostSlab,
        post: Callable[[SaveDone], None],
        counts: Counter[str],
    ) -> None:
        """`counts`: `saved_blocks`."""
        self._number = number
        self._geometry = geometry
        self._slab = slab
        self._post = post
        self._counts = counts

    def save(self, order: SaveOrder, stream: CopyStream, engine_stream: Any, keeper: SlabKeeper) -> None:
        """Enqueues the copies of one order on `stream`. What it raises is not answered."""
        slab = self._slab
        check_moves(self._geometry, slab, order.moves)
        slots = [move.slot for move in order.moves]
        slab.break_seals(slots)
        stream.after(engine_stream)
        copy_to_slab(stream, self._geometry, slab, order.moves)
        self._counts["saved_blocks"] += len(order.moves)
        ticket = stream.ticket()
        keeper.submit(lambda: self._seal(ticket, order.save_id, slots))

    def _seal(self, ticket: Ticket, save_id: int, slots: list[int]) -> None:
        ok = False
        try:
            ticket.wait()
            self._slab.seal(slots)
            ok = True
        finally:
            self._post(SaveDone(self._number, save_id, ok))
