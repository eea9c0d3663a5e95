"""CacheGeneration: the leader's books for one registered pool: attempts, running requests, ledger, saves.

It is what a `Generation` names. It knows the engine's reports and the ranks' results, and neither threads nor who
speaks to whom.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any, NamedTuple

from dynamo_semkv.contracts.identity import Generation
from dynamo_semkv.contracts.report import Reason
from dynamo_semkv.telemetry.throttled import Throttled
from worker_connector.disk.listeners import TierListeners
from worker_connector.disk.messages import DiskOrder
from worker_connector.disk.tier import DiskTier
from worker_connector.engine_api.request_view import is_cancelled, matched_tokens, served_position
from worker_connector.engine_api.settings import Settings
from worker_connector.leader.active_requests import ActiveRequests
from worker_connector.leader.event_publisher import EventPublisher
from worker_connector.leader.scheduler_output import SchedulerOutputReader
from worker_connector.ledger.block import BlockEntry
from worker_connector.ledger.ledger import Ledger
from worker_connector.ledger.plan import PlanState
from worker_connector.link.channel import (
    ForwardDone,
    LoadDone,
    LoadGivenUp,
    RankReady,
    RankResult,
    SaveDone,
    SlotsDamaged,
)
from worker_connector.link.metadata import Orders
from worker_connector.requests.async_loads import AsyncLoads, Grouped
from worker_connector.requests.attempt import Attempt, ClosedAttempt
from worker_connector.requests.attempts import AttemptBook
from worker_connector.requests.ending import Ending
from worker_connector.requests.engine_namespace import RequestNamespaces
from worker_connector.requests.load_decision import Decline
from worker_connector.requests.prefix_lookup import LookupLimits, PrefixLookup, Verify
from worker_connector.requests.save_planner import SavePlanner

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)

SWEEP_EVERY = 16
"""Iterations between two looks for requests that vanished."""
FORGET_AFTER = 256
"""Iterations without a report after which a request is taken for cancelled: the engine need not say so
(NVIDIA/TensorRT-LLM#15018)."""
OFFER_PATIENCE = 16 * FORGET_AFTER
"""... and how many more an allocated offer is kept: the engine counts on it, and its request may wait that long for a
place in a batch."""
_FORWARDS = 256


class Offer(NamedTuple):
    """What `get_num_new_matched_tokens` answers. Never asynchronous without tokens."""

    tokens: int
    is_async: bool


class CacheGeneration:
    """Not thread-safe: the leader's lock covers it."""

    def __init__(
        self,
        pool: RankReady,
        settings: Settings,
        namespaces: RequestNamespaces,
        event_publisher: EventPublisher,
        verify: Verify,
        generation: Callable[[], Generation],
        counts: Counter[str],
        *,
        patience: int = 1,
    ) -> None:
        """`patience`: iterations that a forward pass's end may take to be heard of."""
        self._patience = patience
        self.pool = pool
        self.ledger = Ledger(pool.slots, pool.tokens_per_block, event_publisher.on_device) if settings.exact else None
        self.saves = SavePlanner(self.ledger, pool.windows) if self.ledger is not None else None
        self.attempts = AttemptBook(self.ledger, self._closed)
        self.running = ActiveRequests(self.ledger, self.saves, event_publisher, namespaces.open_digest)
        self.parked = AsyncLoads(pool, self.attempts, generation, counts)
        self.counts = counts
        self.iteration = 0
        self.content = 0
        """Raised when what the blocks hold was declared worthless: older offers are not fulfilled from what comes
        after."""
        self.disk: DiskTier | None = None
        self._event_publisher = event_publisher
        self._generation = generation
        self.contradiction: str | None = None
        """Why nothing is offered or saved any more: the engine's reports contradict what was registered."""
        self._reader = SchedulerOutputReader(
            pool, self.attempts, self.running, self.saves, self.parked, generation, counts, self._contradicted
        )
        self._forwards: deque[int] = deque(maxlen=_FORWARDS)
        self._prefix_lookup = PrefixLookup(
            self.ledger,
            namespaces,
            event_publisher.hints,
            LookupLimits(
                pool.tokens_per_block,
                settings.connector.min_offer_tokens,
                settings.connector.async_load_min_tokens,
                settings.connector.max_leases,
            ),
            verify=verify,
            on_damaged=self._damaged_entry,
        )

    def attach_disk(
        self,
        send: Callable[[DiskOrder], None],
        lock: AbstractContextManager[object],
        *,
        ranks: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """There is a tier below the slab: `send` reaches the stores of all `ranks`; `lock` is the leader's."""
        if self.ledger is None:
            return
        self.disk = DiskTier(
            self.ledger,
            self.pool.bytes_per_block,
            TierListeners(
                staged=self.running.staged,
                gone=self._event_publisher.disk_gone,
                found=self._event_publisher.donors_on_disk,
                flush=self.running.flush,
            ),
            send=send,
            submit=self._event_publisher.submit,
            lock=lock,
            ranks=ranks,
            clock=clock,
        )
        self.running.disk = self.disk
        self._prefix_lookup.on_miss = self.disk.missed
        self._event_publisher.below(self.disk.index, self.ledger)
        self.disk.begin()

    def take(self, result: RankResult) -> None:
        """What a rank did, or all of them; a pool that was registered is not of this life."""
        if isinstance(result, ForwardDone):
            self.forwarded(result.iteration)
        elif isinstance(result, LoadDone):
            self.copied(result)
        elif isinstance(result, LoadGivenUp):
            self.attempts.given_up(result.key, result.iteration, result.reason)
        elif isinstance(result, SaveDone):
            self.landed(result.save_id, result.ok)
        elif isinstance(result, SlotsDamaged):
            for slot in result.slots:
                self.damaged(slot, result.loaded)
        elif not isinstance(result, RankReady) and self.disk is not None:
            self.disk.on_result(result)
            self.running.flush()

    # the engine's callbacks

    def ask(self, request: Any, computed: int, *, all_ranks: bool = True) -> Offer:
        """`all_ranks`: every rank of this leader is there, and can load."""
        request_id = int(request.request_id)
        self.running.retire(request_id)
        self.parked.left(request_id)
        refused = Reason.COPY_FAILED if self.attempts.load_failed(request_id) else None
        if not all_ranks:
            refused = Reason.WORKER_LOST
        if self.contradiction is not None:
            refused = Reason.UNSUPPORTED_LAYOUT
        epoch = self.attempts.next_epoch(request_id)
        attempt = self._prefix_lookup.attempt(request, computed, epoch, self.iteration, self.attempts.leases, refused)
        attempt.content = self.content
        self.attempts.add(attempt)
        plan = attempt.plan
        return Offer(plan.offered, plan.is_async) if plan is not None else Offer(0, False)

    def allocated(self, request: Any, flat: Iterable[int], grouped: Grouped) -> None:
        """The engine has pages for a request: binds them to what was offered. `flat`: page slots of one group,
        `grouped`: of each layer group."""
        attempt = self.attempts.get(int(request.request_id))
        if attempt is None or attempt.scheduled:
            return
        attempt.position = served_position(request)
        plan = attempt.plan
        if plan is None or plan.state is not PlanState.OFFERED:
            return
        plan.bind(attempt.position)
        if plan.is_async:
            matched = matched_tokens(request)
            if matched is not None and attempt.position is not None:
                attempt.load_start = max(attempt.position - matched, 0)
            self.parked.allocated(attempt, flat, grouped)

    def cancelled(self, request_id: int, start: int, end: int) -> None:
        """The engine will not take the tokens [start, end) of its offer (optional hook). A cut tail counts where a
        version does not say where its forward pass starts; of a cut head the engine holds the tokens itself."""
        attempt = self.attempts.get(request_id)
        if attempt is None or attempt.plan is None or attempt.scheduled:
            return
        if start <= attempt.plan.held < end:
            attempt.plan.overtaken(end)
        left = attempt.plan.end if attempt.cancelled_from is None else attempt.cancelled_from
        if end >= left > start:
            attempt.cancelled_from = start

    def reset(self, request_id: int) -> None:
        """The request's allocation was destroyed, says the engine (optional hook; others report the request as new)."""
        self.running.retire(request_id)
        self.parked.left(request_id)
        self.attempts.reset(request_id)

    def batch(self, output: Any, iteration: int, *, all_ranks: bool = True, forwarded: int = 0) -> Orders | None:
        """None: nothing is ordered. `all_ranks`: what is saved now can become resident. `forwarded`: the last iteration
        without orders whose forward pass is known to have run."""
        before = self.iteration
        if before != forwarded and not self._ran(before, forwarded):
            # Under overlap scheduling positions do not show it: they lag one token behind.
            self.running.batch_dropped(before, self.pool.tokens_per_block)
            self.attempts.batch_dropped(before)
        self.iteration = iteration
        orders = self._reader.read(output, iteration, self.content, saving=all_ranks and self.contradiction is None)
        saves, ledger = self.saves, self.ledger
        if (
            orders is None
            and iteration % SWEEP_EVERY
            and not self.attempts.copied_open
            and not (saves is not None and saves.admitted)
            and not (ledger is not None and ledger.departed)
        ):
            return None  # nothing is in the books that an iteration without orders could change
        try:
            self._keep_house(iteration)
        except Exception:  # noqa: BLE001 - the orders are made: lost here, the engine would run on pages that nobody wrote
            self.counts["upkeep_errors"] += 1
            _throttled.exception("semkv connector: the books of iteration %d could not be closed", iteration)
        return orders

    def _contradicted(self, what: str) -> None:
        self.counts["block_size_differs"] += 1
        self.contradiction = self.contradiction or what

    def _ran(self, iteration: int, forwarded: int) -> bool:
        """False: there was no forward pass of that iteration, or it would be heard of by now."""
        return self._patience > 1 or iteration == forwarded or iteration in self._forwards

    def _keep_house(self, iteration: int) -> None:
        for attempt in self.attempts.awaiting_forward():
            due = attempt.plan.iteration if attempt.plan is not None else None
            if due is not None and due < iteration - self._patience:
                self.attempts.end(attempt, Reason.NOT_SCHEDULED)  # copied, and no forward pass came behind it
        if iteration % SWEEP_EVERY == 0:
            self.sweep(iteration - FORGET_AFTER)
        self.running.flush()

    def break_promises(self) -> bool:
        """Ends every offer that the engine has allocated pages for and that was not sent; whether there was one."""
        owed = [attempt for attempt in self.attempts if attempt.unanswered and attempt.relied_on]
        for attempt in owed:
            self.attempts.end(attempt, Reason.COPY_FAILED)
        return bool(owed)

    def finished(self, request: Any, *, forwarded: int = 0) -> None:
        """`forwarded`: as for `batch`."""
        request_id = int(request.request_id)
        cancelled = is_cancelled(request)
        self.parked.left(request_id)
        if cancelled:
            self.attempts.forget(request_id)
        else:
            if not self._ran(self.iteration, forwarded):
                self.attempts.batch_dropped(self.iteration)
            self.attempts.finish(request_id)
        self.running.finish(request_id, cancelled=cancelled)

    # what ranks did

    def copied(self, done: LoadDone) -> None:
        """All ranks have answered a load order, well or not."""
        self.parked.answered(done.key)
        attempt = self.attempts.copied(done.key, done.iteration, done.ok, done.seconds, done.reason)
        if attempt is None or attempt.plan is None:
            return
        if attempt.parked:
            attempt.asked = self.iteration  # from now on the engine may take its time
        elif attempt.plan.iteration in self._forwards:
            self._confirm(attempt)

    def forwarded(self, iteration: int) -> None:
        """The forward pass of an iteration has run on all ranks: what it loaded is confirmed."""
        self._forwards.append(iteration)
        for attempt in self.attempts.awaiting_forward():
            if attempt.plan is not None and attempt.plan.iteration == iteration:
                self._confirm(attempt)

    def landed(self, save_id: int, ok: bool) -> None:
        """All ranks have answered a save; `ok`: the block is resident now."""
        if self.saves is None:
            return
        self.saves.landed(save_id, ok)
        self.running.landed()
        self.running.flush()

    def damaged(self, slot: int, loaded: bool) -> None:
        """A rank found that the bytes of a slot do not have their checksum; `loaded`: after a load had read them."""
        entry = self.ledger.by_slot(slot) if self.ledger is not None else None
        if entry is None or entry.removed or not entry.resident:
            return
        self._damaged_entry(entry)
        if loaded:
            self.counts["damaged_loaded"] += 1
            _throttled.error("semkv connector: host slot %d was damaged, and it was loaded just before", slot)

    def _damaged_entry(self, entry: BlockEntry) -> None:
        assert self.ledger is not None
        self.counts["damaged_blocks"] += 1
        _throttled.error(
            "semkv connector: host slot %d does not hold what was saved; its block is not offered again", entry.slot
        )
        entry.damaged = True
        self.ledger.remove(entry)
        self.running.flush()

    # ends

    def _confirm(self, attempt: Attempt) -> None:
        if attempt.plan is not None and attempt.plan.state is PlanState.COPIED:
            self.attempts.confirm(attempt)

    def _closed(self, attempt: Attempt, ending: Ending | Decline) -> None:
        self._event_publisher.attempt_closed(
            ClosedAttempt(
                attempt.key,
                attempt.tokens,
                attempt.namespace,
                attempt.digest,
                attempt.question,
                ending,
                attempt.hints,
                self._generation(),
                attempt.timings.as_now(),  # a copy may still land
            )
        )

    def sweep(self, seen_before: int, *, keep_offers: bool = False) -> None:
        """Requests that nobody has heard of since that iteration are gone: no donor, leases back. `keep_offers`: an
        offer that was not answered yet stays, because the engine might still take it."""
        for request_id in self.running.vanished(seen_before):
            self.counts["vanished"] += 1
            self.attempts.forget(request_id)
        for attempt in self.attempts:
            if attempt.asked > seen_before or attempt.key.request_id in self.running:
                continue
            if attempt.parked and attempt.plan is not None and attempt.plan.copying:
                continue  # its ranks answer within a deadline of their own
            if not attempt.unanswered:
                self.attempts.forget(attempt.key.request_id)
            elif not keep_offers and (not attempt.relied_on or attempt.asked <= seen_before - OFFER_PATIENCE):
                self.attempts.give_up(attempt)
        self.running.flush()

    def close(self) -> None:
        """The pool is gone: every open attempt ends, and nothing of it is told any more but its report."""
        self.running.close()
        self.attempts.close()
        if self.disk is not None:
            self.disk.close()
        for attempt in self.attempts:
            self.attempts.forget(attempt.key.request_id)

    def forget_blocks(self) -> None:
        """The bytes are there and worth nothing: weights or cache were reset. Requests that run go on, and save nothing
        more; what was promised and not sent yet is not sent."""
        for attempt in self.attempts:
            if attempt.unanswered:
                self.attempts.end(attempt, Reason.GENERATION_STALE)
        self.content += 1
        self.running.forget_blocks()
        if self.disk is not None:
            self.disk.clear()

    def resident(self) -> list[tuple[BlockEntry, bool]]:
        """Blocks that may be offered, parents before children, and whether each is of a request with a salt, an adapter
        or media."""
        if self.ledger is None:
            return []
        self.running.flush()
        found = sorted((entry for entry in self.ledger.entries() if entry.resident), key=lambda entry: entry.ordinal)
        return [(entry, self.running.scoped(entry)) for entry in found]

    def numbers(self) -> dict[str, Any]:
        """For the leader's snapshot."""
        return {
            "parked": len(self.parked),
            "tracked": len(self.running),
            "finishing": self.running.finishing,
            "attempts": len(self.attempts),
            "leases": self.attempts.leases,
            "attempt_counts": dict(self.attempts.counts),
            "saves": dict(self.saves.counts) if self.saves is not None else {},
            "load_seconds": self.attempts.load_seconds.snapshot(),
            "save_seconds": self.saves.seconds.snapshot() if self.saves is not None else None,
            "open_saves": self.saves.open_orders if self.saves is not None else 0,
            "ledger": asdict(self.ledger.stats()) if self.ledger is not None else None,
            "disk": self.disk.snapshot() if self.disk is not None else None,
        }
