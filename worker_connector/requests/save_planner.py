"""SavePlanner: which blocks go into the slab, and when one of them may be offered.

Rules, each against a public fault:
* only full blocks whose last token is known, and only below `computed_position + num_scheduled_tokens`
  (NVIDIA/TensorRT-LLM#12673);
* copied behind the forward pass that computes them, offered only after the copy is sealed *and* a later report, or the
  request's end, says that they really were computed: older builds overstate `num_scheduled_tokens` (#13318);
* a request that vanishes without `request_finished` was cancelled or failed: what is not proven by then is thrown away
  (#15018);
* a block that is there already, or that another request is just saving, is not saved twice;
* a block without a page in every layer group is not saved, and nothing that continues it;
* nor is a block that the smallest window has passed, or is about to: its page may be another request's by then, and no
  report says so (KV Cache Connector doc, "Blocks with no page"). So a save that had to be put off is made under full
  attention only.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count

from dynamo_semkv.telemetry.catalogue import SAVE_SECONDS
from worker_connector.engine_api.pages import NO_PAGE
from worker_connector.ledger.block import BlockEntry
from worker_connector.ledger.ledger import Ledger
from worker_connector.link.metadata import SaveOrder
from worker_connector.memory.transfer import Move
from worker_connector.requests.request_state import PendingSave, RequestState
from worker_connector.timings import Durations

_SAVE_IDS = count(1)
"""Over all planners: a late answer to an order of an earlier life must not be taken for another order."""


class SavePlanner:
    """Not thread-safe: the leader's lock covers it."""

    def __init__(self, ledger: Ledger, windows: Sequence[int | None] = ()) -> None:
        """`windows`: attention window of each layer group in tokens; None for full attention."""
        self._ledger = ledger
        self._window = min((window for window in windows if window is not None), default=None)
        self._orders: dict[int, tuple[RequestState, list[PendingSave]]] = {}
        self._ordered_at: dict[int, float] = {}
        self.admitted: list[tuple[RequestState, BlockEntry]] = []
        """Blocks that became resident and were not taken yet (`take_admitted`)."""
        self.seconds = Durations(SAVE_SECONDS.buckets)
        """From an order to the seals of its blocks."""
        self.counts: Counter[str] = Counter()
        """Blocks: `ordered`, `already_there`, `no_slot`, `admitted`, `withdrawn`, `failed`, `overstated`; requests:
        `no_page`, `window_passed`, `chain_evicted`."""

    @property
    def open_orders(self) -> int:
        """Orders that the ranks have not answered."""
        return len(self._orders)

    def plan(self, request: RequestState) -> SaveOrder | None:
        """The blocks that the coming forward pass completes, and earlier ones that could not be saved before."""
        ledger, size = self._ledger, self._ledger.tokens_per_block
        limit = min(request.scheduled, request.token_count) // size
        before = len(request.chain)
        if before >= limit or not request.saving:
            return None
        fresh: list[PendingSave] = []
        moves: list[Move] = []
        chain, digest, step = request.chain, request.digest, 4 * size
        raw = bytes(request.tokens[before * step : limit * step])
        slots = request.pages.span(before, limit)
        parent = chain[-1] if chain else None
        for ordinal in range(before, limit):
            if parent is not None and parent.removed:
                # The slab is under such pressure that it drops what is in use: do not fight for the slots.
                self.counts["chain_evicted"] += 1
                request.saving = False
                break
            at = (ordinal - before) * step
            tokens = raw[at : at + step]
            # What was entered just now has no child.
            entry = None if fresh and parent is fresh[-1].entry else ledger.child(digest, parent, tokens)
            if entry is not None:
                if not entry.resident:
                    break  # another request is saving it: looked at again with the next report
                self.counts["already_there"] += 1
                chain.append(entry)
                parent = entry
                continue
            pages = self._lasting_pages(request, slots[ordinal - before : ordinal - before + 1], (ordinal + 1) * size)
            if pages is None:
                request.saving = False
                break
            entry = ledger.enter(digest, parent, tokens)
            if entry is None:
                self.counts["no_slot"] += 1
                break
            chain.append(entry)
            parent = entry
            fresh.append(PendingSave(entry, (ordinal + 1) * size))
            moves.append(Move(entry.slot, pages))
        if len(chain) > before:
            ledger.touch(chain[-1])
        return self._order(request, fresh, moves) if fresh else None

    def _order(self, request: RequestState, fresh: list[PendingSave], moves: list[Move]) -> SaveOrder:
        request.pending.extend(fresh)
        self.counts["ordered"] += len(fresh)
        save_id = next(_SAVE_IDS)
        self._orders[save_id] = (request, fresh)
        self._ordered_at[save_id] = time.perf_counter()
        return SaveOrder(save_id, tuple(moves), request.request_id)

    def _lasting_pages(
        self, request: RequestState, reported: Sequence[tuple[int, ...]], end: int
    ) -> tuple[int, ...] | None:
        """The pages of the block that ends at token `end`, `reported` as one entry or none; None where it has none, or
        will have none at the time of the copy."""
        if self._window is not None and self._passed(request, end):
            self.counts["window_passed"] += 1
            return None
        if not reported or NO_PAGE in reported[0]:
            self.counts["no_page"] += 1
            return None
        return reported[0]

    def _passed(self, request: RequestState, end: int) -> bool:
        """Would a page of the block that ends here be free by the time of the copy? With a block to spare: with overlap
        scheduling the engine is a token ahead of its report."""
        size = self._ledger.tokens_per_block
        return (
            self._window is not None and end <= request.computed - self._window + 1 + size and end <= request.computed
        )

    def progressed(self, request: RequestState, *, repeated: bool = False) -> None:
        """A later report: what lies below its `computed_position` was computed. What an earlier report had scheduled
        but was not computed is withdrawn, and saved again when it is; during decoding the report may lag one token
        behind, and that is waited for, unless the report starts where the one before did (`repeated`): that pass may
        not have run at all."""
        if not request.pending:
            return
        for index, pending in enumerate(request.pending):
            if pending.end <= request.computed:
                pending.computed = True
            elif repeated or request.computed < request.prompt_tokens - 1:
                overstated = list(request.pending)[index:]
                self.counts["overstated"] += len(overstated)
                self._withdraw(request, overstated)
                break
        self._admit(request)

    def finished(self, request: RequestState) -> None:
        """`request_finished`: everything that was scheduled has been computed."""
        for pending in request.pending:
            pending.computed = True
        self._admit(request)

    def landed(self, save_id: int, ok: bool) -> RequestState | None:
        """A rank's answer. Returns the request, None for an unknown order."""
        order = self._orders.pop(save_id, None)
        if order is None:
            return None
        self.seconds.add(time.perf_counter() - self._ordered_at.pop(save_id))
        request, blocks = order
        for pending in blocks:
            pending.landed = True
            self._ledger.landed(pending.entry)
        if not ok:
            self.counts["failed"] += len(blocks)
            self._withdraw(request, [pending for pending in blocks if not pending.entry.removed])
            request.saving = False
        self._admit(request)
        return request

    def withdraw(self, request: RequestState) -> None:
        """The request was cancelled, failed or replayed: nothing of it that is not resident yet ever will be."""
        request.saving = False
        self._withdraw(request, list(request.pending))

    def take_admitted(self) -> list[tuple[RequestState, BlockEntry]]:
        """Blocks that became resident since the last call, in order."""
        admitted, self.admitted = self.admitted, []
        return admitted

    def _admit(self, request: RequestState) -> None:
        while request.pending and request.pending[0].landed and request.pending[0].computed:
            entry = request.pending.popleft().entry
            if entry.removed or (entry.parent is not None and entry.parent.removed):
                self._withdraw(request, list(request.pending))
                self._ledger.remove(entry)
                break
            self._ledger.admit(entry)
            self.admitted.append((request, entry))
            self.counts["admitted"] += 1

    def _withdraw(self, request: RequestState, blocks: Iterable[PendingSave]) -> None:
        gone = list(blocks)
        if not gone:
            return
        self.counts["withdrawn"] += len(gone)
        first = min(pending.entry.ordinal for pending in gone)
        for pending in gone:
            self._ledger.remove(pending.entry)
        doomed = {id(pending) for pending in gone}
        # What continues a withdrawn block left the ledger with it.
        request.pending = type(request.pending)(
            pending for pending in request.pending if id(pending) not in doomed and not pending.entry.removed
        )
        del request.chain[first:]
