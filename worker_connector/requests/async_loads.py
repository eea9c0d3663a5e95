"""AsyncLoads: the leader's side of asynchronous loads, from the allocation to the engine's next report of the request.

The engine parks a request whose offer was asynchronous, also if it honours nothing of it, and reports it in no batch
until `get_finished` has named it. So the pages come from `update_state_after_alloc`, and the order goes out with the
next metadata (NVIDIA/TensorRT-LLM#18762). While the copies run the engine may drop the request without a word, and give
its pages to another one: every page that is reported is therefore held against those that are being filled.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dynamo_semkv.contracts.identity import Generation
from dynamo_semkv.contracts.report import Reason
from dynamo_semkv.telemetry.throttled import Throttled
from worker_connector.engine_api.pages import PageTable, page_slots
from worker_connector.errors import LoadFailed
from worker_connector.ledger.plan import PlanKey, PlanState
from worker_connector.link.channel import RankReady
from worker_connector.link.metadata import LoadOrder, Orders, Unloadable
from worker_connector.requests.attempt import Attempt
from worker_connector.requests.attempts import AttemptBook
from worker_connector.requests.load_order import load_order
from worker_connector.requests.request_state import RequestState

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)

Grouped = Sequence[Sequence[int]] | Mapping[int, Sequence[int]] | None


class AsyncLoads:
    """Not thread-safe: the leader's lock covers it."""

    def __init__(
        self, pool: RankReady, attempts: AttemptBook, generation: Callable[[], Generation], counts: Counter[str]
    ) -> None:
        self._pool = pool
        self._attempts = attempts
        self._generation = generation
        self._counts = counts
        self._due: list[tuple[Attempt, PageTable]] = []
        self._filling: dict[PlanKey, tuple[Attempt, frozenset[tuple[int, int]]]] = {}
        self._abandoned: list[PlanKey] = []

    def __len__(self) -> int:
        """Loads that are ordered or about to be, and not answered."""
        return len(self._due) + len(self._filling)

    def allocated(self, attempt: Attempt, flat: Iterable[int], grouped: Grouped) -> None:
        """The pages of a request that the engine is about to park."""
        flat = list(flat)
        self.reassigned(page_slots(self._pool.group_ids, flat, grouped), attempt.key.request_id)
        pages = PageTable(self._pool.group_ids)
        pages.extend(flat, grouped)
        self._due = [(other, table) for other, table in self._due if other.key != attempt.key]
        self._due.append((attempt, pages))

    def order(self, iteration: int, orders: Orders) -> None:
        """Sends what was allocated since the last iteration."""
        due, self._due = self._due, []
        for attempt, pages in due:
            attempt.scheduled = attempt.parked = True
            try:
                order = self._order(attempt, pages, iteration)
            except Exception as error:  # noqa: BLE001 - one request's fault may not take the others' loads with it
                self._counts["unloadable"] += 1
                _throttled.error("semkv connector: the parked load of request %d: %s", attempt.key.request_id, error)
                self._attempts.end(attempt, Reason.COPY_FAILED)
                orders.unloadable.append(Unloadable(attempt.key.request_id, str(error), async_load=True))
                continue
            if order is None:
                orders.nothing_to_load.append(attempt.key.request_id)
            else:
                orders.async_loads.append(order)
                self._attempts.sent(attempt)
                self._filling[attempt.key] = (attempt, _pages_of(order))
            self._attempts.settle(attempt)
        orders.abandoned.extend(self._abandoned)
        self._abandoned.clear()

    def _order(self, attempt: Attempt, pages: PageTable, iteration: int) -> LoadOrder | None:
        plan = attempt.plan
        assert plan is not None
        if plan.ended:
            if plan.reason is not Reason.CANCELLED and (attempt.position is None or attempt.position > plan.held):
                raise LoadFailed("the engine uses an offer that was given up")
            return None  # the allocation is gone already; the engine waits for its end all the same
        position = attempt.position
        if position is None:
            # Not said by this version: fill what there are pages for. The engine overwrites what it does not honour.
            limit = plan.end if attempt.cancelled_from is None else max(attempt.cancelled_from, plan.held)
            position = min(limit, len(pages) * plan.tokens_per_block)
        start = plan.held if attempt.load_start is None else min(attempt.load_start, plan.held)
        used = plan.path[start // plan.tokens_per_block : -(-position // plan.tokens_per_block)]
        if any(block.damaged for block in used):
            self._attempts.end(attempt, Reason.CHECKSUM_MISMATCH)
            raise LoadFailed("a block was damaged after it had been offered")
        try:
            return load_order(attempt, pages, self._pool.windows, start, position, iteration, self._generation())
        except LoadFailed:
            if plan.copying:
                plan.copy_done(False)
            raise

    def answered(self, key: PlanKey) -> None:
        """The ranks' copies have ended."""
        self._filling.pop(key, None)

    def left(self, request_id: int) -> None:
        """The request is gone, or its allocation is: nothing more may be written for it."""
        for attempt, _ in [entry for entry in self._filling.values() if entry[0].key.request_id == request_id]:
            self._abandon(attempt)

    def reassigned(self, pages: Iterable[tuple[int, int]], owner: int) -> None:
        """`owner` was given these pages."""
        given = set(pages)
        for attempt, table in self._due:
            assert attempt.plan is not None
            # Pages before it are shared with whoever has the same prefix.
            first = _own_tokens(attempt) // attempt.plan.tokens_per_block
            mine = {(group, page) for at in table.span(first, len(table)) for group, page in enumerate(at)}
            if attempt.key.request_id != owner and not given.isdisjoint(mine):
                self._counts["pages_reassigned"] += 1
                self._attempts.end(attempt, Reason.CANCELLED)
        for attempt, filling in list(self._filling.values()):
            if attempt.key.request_id != owner and not given.isdisjoint(filling):
                self._counts["pages_reassigned"] += 1
                _throttled.error(
                    "semkv connector: request %d lost its pages while they were being filled; nothing more is written",
                    attempt.key.request_id,
                )
                self._abandon(attempt)

    @property
    def waiting(self) -> bool:
        """Is there a parked request whose pages could be given to another?"""
        return bool(self._filling or self._due)

    @property
    def to_order(self) -> bool:
        """Has `order` anything to say?"""
        return bool(self._due or self._abandoned)

    def seen(self, data: Any) -> None:
        """One report of the engine."""
        grouped = getattr(data, "new_block_ids_by_layer_group", None)
        self.reassigned(page_slots(self._pool.group_ids, data.new_block_ids, grouped), int(data.request_id))

    def _abandon(self, attempt: Attempt) -> None:
        if self._filling.pop(attempt.key, None) is not None:
            self._abandoned.append(attempt.key)
            attempt.parked = False
            self._attempts.end(attempt, Reason.CANCELLED)

    def resume(self, attempt: Attempt, tracked: RequestState, iteration: int, *, stale: bool) -> int:
        """The first report of a request that was parked: only where it says that the forward pass starts is what was
        materialized.

        Raises LoadFailed where the engine relies on pages that are not filled. `stale`: the cache was reset while it
        was parked.
        """
        plan, at = attempt.plan, tracked.computed
        assert plan is not None
        attempt.parked = False
        if plan.copying:
            self._abandon(attempt)
        if plan.state is not PlanState.COPIED:
            if at > plan.held and plan.reason is not Reason.NOT_HONOURED:  # else all of it is the engine's own
                raise LoadFailed(
                    f"request {attempt.key.request_id}: the engine uses a parked load that was not completed"
                )
            self._attempts.end(attempt, Reason.CANCELLED)
            return at
        if at <= plan.held:
            self._attempts.end(attempt, Reason.NOT_SCHEDULED)
        elif stale:
            # The engine computes on from KV of the old weights, as with every request that it was running then.
            self._counts["stale_resumed"] += 1
            tracked.saving = tracked.donates = False
            self._attempts.end(attempt, Reason.GENERATION_STALE)
        else:
            plan.resume(at, iteration)
            if tracked.saving:
                held = plan.path[: at // plan.tokens_per_block]
                gone = next((index for index, block in enumerate(held) if block.removed), len(held))
                tracked.chain = list(held[:gone])
        return at


def _own_tokens(attempt: Attempt) -> int:
    """What the engine held itself when it allocated. Its own cache may have come to reach beyond the whole offer, which
    `cancel_load` of that offer cannot say."""
    plan = attempt.plan
    assert plan is not None
    if attempt.load_start is not None:
        return max(attempt.load_start, plan.held)
    return attempt.position if attempt.position is not None and attempt.position > plan.end else plan.held


def _pages_of(order: LoadOrder) -> frozenset[tuple[int, int]]:
    return frozenset((group, page) for move in order.moves for group, page in enumerate(move.pages) if page >= 0)
