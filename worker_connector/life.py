"""CacheLife: the leader's books for one registered pool: attempts, running requests, ledger, saves.

It is what a `Generation` names. It knows the engine's reports and the ranks' results, and neither threads nor who speaks to whom.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from dynamo_semkv.contracts.identity import Generation
from dynamo_semkv.contracts.report import Reason
from worker_connector.attempt import Attempt, ClosedAttempt
from worker_connector.attempts import AttemptBook
from worker_connector.channel import RankReady
from worker_connector.engine_namespace import RequestNamespaces
from worker_connector.ledger import BlockEntry, Ledger
from worker_connector.metadata import LoadOrder, SaveOrder, Unloadable
from worker_connector.offering import Offering, Verify
from worker_connector.outlet import Outlet
from worker_connector.plan import PlanKey, PlanState
from worker_connector.refusal import LoadFailed
from worker_connector.report import Ending
from worker_connector.request_view import is_cancelled, served_position
from worker_connector.saves import SavePlanner
from worker_connector.sending import load_order
from worker_connector.settings import Settings
from worker_connector.tracked import TrackedRequest, begin
from worker_connector.verdict import Decline

_log = logging.getLogger(__name__)

SWEEP_EVERY = 16
"""Iterations between two looks for requests that vanished."""
FORGET_AFTER = 256
"""Iterations without a report after which a request is taken for cancelled: the engine need not say so (NVIDIA/TensorRT-LLM#15018)."""
_FORWARDS = 64


class CacheLife:
    """Not thread-safe: the leader's lock covers it."""

    def __init__(
        self,
        pool: RankReady,
        settings: Settings,
        namespaces: RequestNamespaces,
        outlet: Outlet,
        verify: Verify,
        generation: Callable[[], Generation],
        counts: Counter[str],
    ) -> None:
        self.pool = pool
        self.ledger = Ledger(pool.slots, pool.tokens_per_block) if settings.exact else None
        self.saves = SavePlanner(self.ledger) if self.ledger is not None else None
        self.attempts = AttemptBook(self.ledger, self._closed)
        self.counts = counts
        self.iteration = 0
        self._outlet = outlet
        self._generation = generation
        self._open_digest = namespaces.open_digest
        self._tracked: dict[int, TrackedRequest] = {}
        self._finishing: list[TrackedRequest] = []
        self._forwards: deque[int] = deque(maxlen=_FORWARDS)
        self._offering = Offering(
            self.ledger,
            namespaces,
            outlet.hints,
            tokens_per_block=pool.tokens_per_block,
            min_offer_tokens=settings.connector.min_offer_tokens,
            max_leases=settings.connector.max_leases,
            verify=verify,
            on_damaged=self._damaged_entry,
        )

    # the engine's callbacks

    def ask(self, request: Any, computed: int) -> int:
        request_id = int(request.request_id)
        self._retire(request_id)
        refused = Reason.COPY_FAILED if self.attempts.load_failed(request_id) else None
        epoch = self.attempts.next_epoch(request_id)
        attempt = self._offering.attempt(request, computed, epoch, self.iteration, self.attempts.leases, refused)
        self.attempts.add(attempt)
        return attempt.plan.offered if attempt.plan is not None else 0

    def allocated(self, request: Any) -> None:
        attempt = self.attempts.get(int(request.request_id))
        if attempt is None or attempt.scheduled:
            return
        attempt.position = served_position(request)
        if attempt.plan is not None and attempt.plan.state is PlanState.OFFERED:
            attempt.plan.bind(attempt.position)

    def cancelled(self, request_id: int, start: int, end: int) -> None:
        """The engine will not take the tokens [start, end) of its offer (optional hook). A cut tail counts where a version does not say
        where its forward pass starts; a cut head is what the first report's `computed_position` says."""
        attempt = self.attempts.get(request_id)
        if (
            attempt is not None
            and attempt.plan is not None
            and not attempt.scheduled
            and end >= attempt.plan.end > start
        ):
            attempt.cancelled_from = min(
                start, attempt.plan.end if attempt.cancelled_from is None else attempt.cancelled_from
            )

    def reset(self, request_id: int) -> None:
        """The request's allocation was destroyed, says the engine (optional hook; others report the request as new)."""
        self._retire(request_id)
        self.attempts.reset(request_id)

    def batch(self, output: Any, iteration: int) -> tuple[list[LoadOrder], list[SaveOrder], list[Unloadable]]:
        """Loads, saves, and what cannot be loaded although it was promised."""
        self.iteration = iteration
        loads: list[LoadOrder] = []
        saves: list[SaveOrder] = []
        unloadable: list[Unloadable] = []
        for data in output.new_requests:
            try:
                self._first_report(data, loads, saves)
            except Exception as error:  # noqa: BLE001 - one request's fault may not take the others' loads with it
                self._misread("first", data, error)
                if isinstance(error, LoadFailed) or self._owes(data):
                    unloadable.append(self._broken(int(data.request_id), error))
        for data in output.cached_requests:
            try:
                self._later_report(data, saves)
            except Exception as error:  # noqa: BLE001 - as above; nothing was promised for what comes later
                self._misread("later", data, error)
        for attempt in self.attempts.awaiting_forward():
            if attempt.plan is not None and (attempt.plan.iteration or 0) < iteration - 1:
                self.attempts.end(attempt, Reason.NOT_SCHEDULED)  # copied, and no forward pass came behind it
        if iteration % SWEEP_EVERY == 0:
            self.sweep(iteration - FORGET_AFTER)
        self.flush()
        return loads, saves, unloadable

    def _misread(self, which: str, data: Any, error: Exception) -> None:
        self.counts["misread_reports"] += 1
        _log.error("semkv connector: the %s report of request %s: %s", which, getattr(data, "request_id", "?"), error)

    def _broken(self, request_id: int, error: Exception) -> Unloadable:
        self.counts["unloadable"] += 1
        attempt = self.attempts.get(request_id)
        if attempt is not None:
            self.attempts.end(attempt, Reason.COPY_FAILED)
        return Unloadable(request_id, str(error) or type(error).__name__)

    def _owes(self, data: Any) -> bool:
        """Was something promised for this request that did not go out?"""
        attempt = self.attempts.get(int(getattr(data, "request_id", -1)))
        return attempt is not None and attempt.plan is not None and not attempt.plan.ended and not attempt.plan.copying

    def finished(self, request: Any) -> None:
        request_id = int(request.request_id)
        attempt = self.attempts.get(request_id)
        if attempt is not None:
            self._confirm(attempt)  # it could not have ended without its forward pass
        self.attempts.forget(request_id)
        tracked = self._tracked.pop(request_id, None)
        if tracked is None:
            return
        if is_cancelled(request):
            self._withdraw(tracked)
        else:
            self._complete(tracked)
        self.flush()

    # what ranks did

    def copied(self, key: PlanKey, ok: bool, seconds: float | None) -> None:
        attempt = self.attempts.copied(key, ok, seconds)
        if attempt is not None and attempt.plan is not None and attempt.plan.iteration in self._forwards:
            self._confirm(attempt)

    def forwarded(self, iteration: int) -> None:
        self._forwards.append(iteration)
        for attempt in self.attempts.awaiting_forward():
            if attempt.plan is not None and attempt.plan.iteration == iteration:
                self._confirm(attempt)

    def landed(self, save_id: int, ok: bool) -> None:
        if self.saves is None:
            return
        self.saves.landed(save_id, ok)
        waiting, self._finishing = self._finishing, []
        for tracked in waiting:
            self._donate_when_saved(tracked)
        self.flush()

    def damaged(self, slot: int, loaded: bool) -> None:
        entry = self.ledger.by_slot(slot) if self.ledger is not None else None
        if entry is None or entry.removed or not entry.resident:
            return
        self._damaged_entry(entry)
        if loaded:
            self.counts["damaged_loaded"] += 1
            _log.error("semkv connector: host slot %d was damaged, and it was loaded just before", slot)

    def _damaged_entry(self, entry: BlockEntry) -> None:
        assert self.ledger is not None
        self.counts["damaged_blocks"] += 1
        _log.error(
            "semkv connector: host slot %d does not hold what was saved; its block is not offered again", entry.slot
        )
        entry.damaged = True
        self.ledger.remove(entry)
        self.flush()

    # reports of the engine

    def _first_report(self, data: Any, loads: list[LoadOrder], saves: list[SaveOrder]) -> None:
        """The first one since the request's pages were allocated."""
        request_id = int(data.request_id)
        self._retire(request_id)
        attempt = self.attempts.get(request_id)
        if attempt is None:
            self.counts["unknown_request"] += 1
            return
        tracked = begin(data, attempt, self.pool.group_ids, self.iteration, saves=self.saves is not None)
        if bytes(tracked.tokens) != attempt.tokens:
            self.counts["tokens_differ"] += 1
            tracked.saving = tracked.donates = False
        self._tracked[request_id] = tracked
        start = tracked.computed
        if attempt.scheduled:
            self.counts["unasked_replay"] += 1  # its plan was consumed: nothing is loaded twice
        elif attempt.plan is not None:
            attempt.scheduled = True
            start = self._send(attempt, tracked, data, loads)
        else:
            attempt.scheduled = True
            self.attempts.close_declined(attempt)
        tracked.scheduled = start + int(data.num_scheduled_tokens)
        self._save(tracked, saves)

    def _send(self, attempt: Attempt, tracked: TrackedRequest, data: Any, loads: list[LoadOrder]) -> int:
        """Where the forward pass starts. Raises LoadFailed when pages would stay unwritten that the engine relies on."""
        plan = attempt.plan
        assert plan is not None
        if attempt.position is None:
            # Not said by this version. In one chunk what is not scheduled is served; in several the offer is taken for honoured.
            self.counts["position_unknown"] += 1
            limit = plan.end if attempt.cancelled_from is None else max(attempt.cancelled_from, plan.local_tokens)
            rest = max(attempt.question.prompt_tokens - int(data.num_scheduled_tokens), 0)
            attempt.position = min(plan.end, limit, rest)
        if plan.ended:
            if attempt.position > plan.local_tokens:
                raise LoadFailed(f"request {attempt.key.request_id}: the engine uses an offer that was given up")
            return tracked.computed
        if plan.state is PlanState.OFFERED:
            plan.bind(attempt.position)
        used = plan.path[: -(-attempt.position // plan.tokens_per_block)][tracked.computed // plan.tokens_per_block :]
        if any(block.damaged for block in used):
            self.attempts.end(attempt, Reason.CHECKSUM_MISMATCH)
            raise LoadFailed(f"request {attempt.key.request_id}: a block was damaged after it had been offered")
        try:
            order = load_order(
                attempt,
                tracked.pages,
                self.pool.windows,
                tracked.computed,
                attempt.position,
                self.iteration,
                self._generation(),
            )
        except LoadFailed:
            if plan.copying:
                plan.copy_done(False)
            self.attempts.settle(attempt)
            raise
        if order is not None:
            loads.append(order)
            self.attempts.sent(attempt)
            if tracked.saving:
                tracked.chain = list(plan.path)  # what it is served, and what comes before, is there already
        self.attempts.settle(attempt)
        return max(plan.position or 0, tracked.computed)

    def _later_report(self, data: Any, saves: list[SaveOrder]) -> None:
        tracked = self._tracked.get(int(data.request_id))
        if tracked is None:
            return
        tracked.take(data, self.iteration)
        tracked.scheduled = tracked.computed + int(data.num_scheduled_tokens)
        attempt = self.attempts.get(tracked.request_id)
        if attempt is not None and attempt.plan is not None and attempt.plan.state is PlanState.COPIED:
            if tracked.computed > (attempt.plan.position or 0):
                self.attempts.confirm(attempt)
            else:
                self.attempts.end(attempt, Reason.NOT_SCHEDULED)
        if self.saves is not None:
            self.saves.progressed(tracked)
        self._save(tracked, saves)

    def _save(self, tracked: TrackedRequest, saves: list[SaveOrder]) -> None:
        if self.saves is None or not tracked.saving:
            return
        order = self.saves.plan(tracked)
        if order is not None:
            saves.append(order)

    # ends

    def _confirm(self, attempt: Attempt) -> None:
        if attempt.plan is not None and attempt.plan.state is PlanState.COPIED:
            self.attempts.confirm(attempt)

    def _closed(self, attempt: Attempt, ending: Ending | Decline) -> None:
        self._outlet.attempt_closed(
            ClosedAttempt(
                attempt.key,
                attempt.tokens,
                attempt.namespace,
                attempt.digest,
                attempt.question,
                ending,
                attempt.hints,
                self._generation(),
            )
        )

    def _complete(self, tracked: TrackedRequest) -> None:
        if self.saves is None:
            if tracked.donates:
                computed = min(tracked.scheduled, tracked.token_count)
                self._outlet.donor_computed(tracked.namespace, tracked.digest, bytes(tracked.tokens[: computed * 4]))
            return
        self.saves.finished(tracked)
        self._donate_when_saved(tracked)

    def _donate_when_saved(self, tracked: TrackedRequest) -> None:
        """What a request computed or was served becomes a donor, as far as it is resident once its last copy has landed."""
        if tracked.pending:
            self._finishing.append(tracked)
            return
        self._note_admitted()
        tip = next((entry for entry in reversed(tracked.chain) if entry.resident), None)
        if tip is not None and tracked.donates:
            self._outlet.donor_resident(tracked.namespace, tip)

    def _retire(self, request_id: int) -> None:
        """The request's allocation was destroyed: what is not proven of it never will be."""
        tracked = self._tracked.pop(request_id, None)
        if tracked is not None:
            self._withdraw(tracked)

    def _withdraw(self, tracked: TrackedRequest) -> None:
        if self.saves is not None:
            self.saves.withdraw(tracked)

    def sweep(self, seen_before: int, *, keep_offers: bool = False) -> None:
        """Requests that nobody has heard of since that iteration are gone: no donor, leases back. `keep_offers`: an offer that was not
        answered yet stays, because the engine might still take it."""
        for tracked in [t for t in self._tracked.values() if t.seen <= seen_before]:
            self.counts["vanished"] += 1
            del self._tracked[tracked.request_id]
            self._withdraw(tracked)
            self.attempts.forget(tracked.request_id)
        for attempt in self.attempts:
            old = attempt.asked <= seen_before and attempt.key.request_id not in self._tracked
            unanswered = attempt.plan is not None and not attempt.scheduled
            if old and not (keep_offers and unanswered):
                self.attempts.forget(attempt.key.request_id)
        self.flush()

    def close(self) -> None:
        """The pool is gone: every open attempt ends, and nothing of it is told any more but its report."""
        for tracked in list(self._tracked.values()):
            self._withdraw(tracked)
        self._tracked.clear()
        for attempt in self.attempts:
            self.attempts.forget(attempt.key.request_id)

    def forget_blocks(self) -> None:
        """The bytes are there and worth nothing: weights or cache were reset. Requests that run go on, and save nothing more."""
        for tracked in self._tracked.values():
            self._withdraw(tracked)
        self._finishing.clear()
        if self.ledger is not None:
            self.ledger.clear()
            self.ledger.take_departed()
        if self.saves is not None:
            self.saves.take_admitted()

    # residency

    def scoped(self, entry: BlockEntry) -> bool:
        return entry.digest != self._open_digest

    def _note_admitted(self) -> None:
        """Tells the outlet of blocks that became resident, runs of one chain together."""
        if self.saves is None or not self.saves.has_admitted:
            return
        run: list[BlockEntry] = []
        for _, entry in self.saves.take_admitted():
            if run and entry.parent is not run[-1]:
                self._outlet.stored(run, salted=self.scoped(run[0]))
                run = []
            run.append(entry)
        if run:
            self._outlet.stored(run, salted=self.scoped(run[0]))

    def flush(self) -> None:
        """Hands on what became resident and what left, in this order."""
        self._note_admitted()
        if self.ledger is not None and self.ledger.has_departed:
            self._outlet.departed(self.ledger.take_departed())

    @property
    def tracked(self) -> int:
        return len(self._tracked)

    @property
    def finishing(self) -> int:
        return len(self._finishing)
