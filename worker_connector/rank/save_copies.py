"""RankSaves: one rank's saves, from pages to slab rows behind a forward pass, and the answers to them once the rows are
sealed.

The copies are enqueued on the engine's thread; waiting for them, the checksums and the answers are the keeper's. All
orders of one forward pass are one copy and one job: between two passes each further step costs what reading its code
into cold caches does.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from dynamo_semkv.telemetry.throttled import Throttled
from worker_connector.link.channel import SaveDone
from worker_connector.link.metadata import SaveOrder
from worker_connector.memory.copy_stream import CopyStream, Ticket
from worker_connector.memory.slab_scrubber import SlabScrubber
from worker_connector.memory.transfer import check_moves, copy_to_slab
from worker_connector.rank.options import CopyPlace

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)


class RankSaves:
    """Of one registered pool."""

    def __init__(self, place: CopyPlace) -> None:
        """Counts `saved_blocks` and `save_errors`."""
        self._number = place.number
        self._geometry = place.geometry
        self._slab = place.slab
        self._post = place.post
        self._counts = place.counts

    def save(self, orders: Sequence[SaveOrder], stream: CopyStream, engine_stream: Any, keeper: SlabScrubber) -> None:
        """Enqueues the copies of one forward pass on `stream`. What cannot be enqueued is answered as not saved; never
        raises."""
        try:
            ticket = self._copy(orders, stream, engine_stream)
        except Exception:  # noqa: BLE001 - behind a forward pass an exception fails every running request; these lose blocks
            if len(orders) > 1:  # the fault may be of one of them
                for order in orders:
                    self.save([order], stream, engine_stream, keeper)
                return
            self._counts["save_errors"] += 1
            _throttled.exception("semkv connector: %d blocks could not be saved", len(orders[0].moves))
            self._post(SaveDone(self._number, orders[0].save_id, False))
            return
        keeper.submit(lambda: self._seal(ticket, orders))

    def _copy(self, orders: Sequence[SaveOrder], stream: CopyStream, engine_stream: Any) -> Ticket:
        slab = self._slab
        moves = orders[0].moves if len(orders) == 1 else [move for order in orders for move in order.moves]
        check_moves(self._geometry, slab, moves)
        slab.break_seals([move.slot for move in moves])
        stream.after(engine_stream)
        copy_to_slab(stream, self._geometry, slab, moves)
        self._counts["saved_blocks"] += len(moves)
        return stream.ticket()

    def _seal(self, ticket: Ticket, orders: Sequence[SaveOrder]) -> None:
        """Raises the last fault, once all orders are answered."""
        fault: Exception | None = None
        for order in orders:
            ok = False
            try:
                ticket.wait()
                self._slab.seal([move.slot for move in order.moves])
                ok = True
            except Exception as error:  # noqa: BLE001 - the others are answered first; the keeper counts and logs it
                fault = error
            self._post(SaveDone(self._number, order.save_id, ok))
        if fault is not None:
            raise fault
