"""SchedulerOutputReader: from one iteration's reports of the engine to the orders that the ranks get.

A fault of one request's report is that request's: the others' loads go out. Where something had been promised for it,
the forward pass may not run on its unwritten pages, so it becomes an `Unloadable`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from dynamo_semkv.contracts.identity import Generation
from dynamo_semkv.contracts.report import Reason
from dynamo_semkv.telemetry.throttled import Throttled
from worker_connector.engine_api.pages import block_size_fault, names_pages, page_slots
from worker_connector.errors import LoadFailed
from worker_connector.leader.active_requests import ActiveRequests
from worker_connector.ledger.plan import PlanState
from worker_connector.link.channel import RankReady
from worker_connector.link.metadata import Orders, Unloadable
from worker_connector.requests.async_loads import AsyncLoads
from worker_connector.requests.attempt import Attempt
from worker_connector.requests.attempts import AttemptBook
from worker_connector.requests.load_order import load_order
from worker_connector.requests.request_state import RequestState, begin
from worker_connector.requests.save_planner import SavePlanner

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)


class SchedulerOutputReader:
    """Not thread-safe: the leader's lock covers it."""

    def __init__(
        self,
        pool: RankReady,
        attempts: AttemptBook,
        running: ActiveRequests,
        saves: SavePlanner | None,
        parked: AsyncLoads,
        generation: Callable[[], Generation],
        counts: Counter[str],
        refuse: Callable[[str], None],
    ) -> None:
        """`refuse`: told when a report shows that blocks have another size than was registered; nothing is materialized
        from then on."""
        self._pool = pool
        self._attempts = attempts
        self._running = running
        self._saves = saves
        self._async_loads = parked
        self._generation = generation
        self._counts = counts
        self._refuse = refuse
        self._saving = True

    def read(self, output: Any, iteration: int, content: int, *, saving: bool) -> Orders | None:
        """None: there is nothing to do. `content`: number of the cache's content now (`Attempt.content`). `saving`:
        blocks may be saved now; else they are later."""
        cached = self._reports_to_read(output.cached_requests, iteration)
        if not cached and not output.new_requests and not self._async_loads.to_order:
            return None
        self._saving = saving
        orders = Orders()
        for data in (*output.new_requests, *cached) if self._async_loads.waiting else ():
            try:
                self._async_loads.seen(data)
            except Exception as error:  # noqa: BLE001 - its own reader below says what follows from it
                self._misread("whole", data, error)
        for data in output.new_requests:
            try:
                self._first(data, iteration, content, orders)
            except Exception as error:  # noqa: BLE001 - one request's fault may not take the others' loads with it
                self._misread("first", data, error)
                if isinstance(error, LoadFailed) or self._owes(data):
                    orders.unloadable.append(self._broken(int(data.request_id), error))
        for data in cached:
            try:
                self._note_new_pages(data)
            except Exception as error:  # noqa: BLE001 - its own reader below breaks its page table, and nothing of it is saved
                self._misread("growth", data, error)
        for data in cached:
            try:
                self._later(data, iteration, orders)
            except Exception as error:  # noqa: BLE001 - as above; nothing was promised for what comes later
                self._misread("later", data, error)
                self._stop_saving(data)
        self._async_loads.order(iteration, orders)
        return orders

    def _reports_to_read(self, reports: Sequence[Any], iteration: int) -> list[Any]:
        """Takes the reports that change nothing but numbers (`RequestState.quiet_until`) and name no page: those of
        almost all decoded tokens. Returns the others. What it touches is cold after a forward pass, so it is one loop
        that calls nothing."""
        tracked_of = self._running.tracked
        loud: list[Any] = []
        for data in reports:
            try:
                tracked = tracked_of[data.request_id]
                start = data.computed_position
                end = start + data.num_scheduled_tokens
                groups = getattr(data, "new_block_ids_by_layer_group", None)
                if (
                    end >= tracked.quiet_until
                    or start <= tracked.started
                    or type(start) is not int
                    or type(end) is not int
                    or len(data.new_block_ids)
                    or (groups and any(groups if type(groups) is list else groups.values()))
                ):
                    loud.append(data)
                    continue
                (token,) = data.new_tokens
                tracked.tokens += token.to_bytes(4, "little")
                tracked.computed = tracked.started = start
                tracked.scheduled = end
                tracked.seen = iteration
                tracked.pages_before = tracked.pages_since
            except Exception:  # noqa: BLE001 - nothing was taken yet; whoever reads it whole says what is wrong with it
                loud.append(data)
        return loud

    def _stop_saving(self, data: Any) -> None:
        """What the report said may be missing: later tokens would be taken for those of earlier positions, and KV be
        saved under them."""
        request_id = getattr(data, "request_id", None)
        tracked = self._running.get(request_id) if isinstance(request_id, int) else None
        if tracked is not None:
            tracked.saving = tracked.donates = False
            tracked.quiet_until = 0

    def _misread(self, which: str, data: Any, error: Exception) -> None:
        self._counts["misread_reports"] += 1
        _throttled.error(
            "semkv connector: the %s report of request %s: %s", which, getattr(data, "request_id", "?"), error
        )

    def _broken(self, request_id: int, error: Exception) -> Unloadable:
        self._counts["unloadable"] += 1
        attempt = self._attempts.get(request_id)
        if attempt is not None:
            self._attempts.end(attempt, Reason.COPY_FAILED)
        return Unloadable(request_id, str(error) or type(error).__name__)

    def _owes(self, data: Any) -> bool:
        """Was something promised for this request that did not go out?"""
        attempt = self._attempts.get(int(getattr(data, "request_id", -1)))
        return attempt is not None and attempt.plan is not None and not attempt.plan.ended and not attempt.plan.copying

    def _first(self, data: Any, iteration: int, content: int, orders: Orders) -> None:
        """The first report since the request's pages were allocated."""
        request_id = int(data.request_id)
        self._running.retire(request_id)
        attempt = self._attempts.get(request_id)
        if attempt is None:
            self._counts["unknown_request"] += 1
            if self._attempts.was_given_up(request_id):
                raise LoadFailed(f"request {request_id}: the engine uses an offer that was given up")
            return
        tracked = begin(data, attempt, self._pool.group_ids, iteration, saves=self._saves is not None)
        if bytes(tracked.tokens) != attempt.tokens:
            self._counts["tokens_differ"] += 1
            tracked.saving = tracked.donates = False
        if attempt.content != content:
            tracked.saving = tracked.donates = False  # asked about before a reset: whose KV it will be is not known
        self._running.add(tracked)
        self._check_block_size(tracked, data)
        if self._saves is not None:
            # What is behind the engine's own prefix is shared with nobody. Where its cache has caught up since, that
            # costs saves only.
            own = tracked.pages.fresh(-(-attempt.question.local_tokens // self._pool.tokens_per_block))
            self._counts["pages_reassigned"] += self._running.given(request_id, own)
        start = tracked.computed
        if attempt.parked:
            start = self._async_loads.resume(attempt, tracked, iteration, stale=attempt.content != content)
        elif attempt.scheduled:
            self._counts["unasked_replay"] += 1  # its plan was consumed: nothing is loaded twice
        elif attempt.plan is not None:
            attempt.scheduled = True
            start = self._send(attempt, tracked, data, iteration, orders)
        else:
            attempt.scheduled = True
            self._attempts.close_declined(attempt)
        tracked.started, tracked.scheduled = start, start + int(data.num_scheduled_tokens)
        self._save(tracked, orders)
        self._note_quiet(tracked, attempt)

    def _check_block_size(self, tracked: RequestState, data: Any) -> None:
        """Before anything of the request is loaded or saved."""
        fault = block_size_fault(
            len(tracked.pages),
            tracked.token_count,
            tracked.computed + int(data.num_scheduled_tokens),
            self._pool.tokens_per_block,
            whole_prompt=self._pool.block_size_configured,
        )
        if fault is not None:
            self._saving = tracked.saving = tracked.donates = False
            self._refuse(f"request {tracked.request_id}: {fault}")

    def _send(self, attempt: Attempt, tracked: RequestState, data: Any, iteration: int, orders: Orders) -> int:
        """Where the forward pass starts. Raises LoadFailed when pages would stay unwritten that the engine relies
        on."""
        plan = attempt.plan
        assert plan is not None
        if attempt.position is None:
            # Not said by this version. In one chunk what is not scheduled is served; in several the offer is taken for
            # honoured.
            self._counts["position_unknown"] += 1
            limit = plan.end if attempt.cancelled_from is None else max(attempt.cancelled_from, plan.held)
            rest = max(attempt.question.prompt_tokens - int(data.num_scheduled_tokens), 0)
            attempt.position = min(plan.end, limit, rest)
        if plan.ended:
            if attempt.position > plan.held:
                raise LoadFailed(f"request {attempt.key.request_id}: the engine uses an offer that was given up")
            return tracked.computed
        if plan.state is PlanState.OFFERED:
            plan.bind(attempt.position)
        used = plan.path[: -(-attempt.position // plan.tokens_per_block)][tracked.computed // plan.tokens_per_block :]
        if any(block.damaged for block in used):
            self._attempts.end(attempt, Reason.CHECKSUM_MISMATCH)
            raise LoadFailed(f"request {attempt.key.request_id}: a block was damaged after it had been offered")
        try:
            order = load_order(
                attempt,
                tracked.pages,
                self._pool.windows,
                tracked.computed,
                attempt.position,
                iteration,
                self._generation(),
            )
        except LoadFailed:
            if plan.copying:
                plan.copy_done(False)
            self._attempts.settle(attempt)
            raise
        if order is not None:
            orders.loads.append(order)
            self._attempts.sent(attempt)
            if tracked.saving:
                tracked.chain = list(plan.path)  # what it is served, and what comes before, is there already
        self._attempts.settle(attempt)
        return max(plan.position or 0, tracked.computed)

    def _note_new_pages(self, data: Any) -> None:
        """Before anything is saved in this batch: a dropped batch gives pages back in silence, and another is reported
        to have them."""
        groups = getattr(data, "new_block_ids_by_layer_group", None)
        if self._saves is not None and names_pages(data.new_block_ids or (), groups):
            pages = page_slots(self._pool.group_ids, data.new_block_ids, groups)
            self._counts["pages_reassigned"] += self._running.given(int(data.request_id), pages)

    def _later(self, data: Any, iteration: int, orders: Orders) -> None:
        tracked = self._running.get(int(data.request_id))
        if tracked is None:
            return
        repeated = int(data.computed_position) <= tracked.started
        if repeated:
            # The batch of the last report was dropped: what it grew by is given back, and pages that come instead are
            # not reported (py_executor.py, `_revert_gen_alloc`). A pass of one token looks the same under overlap
            # scheduling; that costs saves only.
            tracked.doubt_last_pages(self._pool.tokens_per_block)
        tracked.take(data, iteration)
        tracked.started, tracked.scheduled = tracked.computed, tracked.computed + int(data.num_scheduled_tokens)
        attempt = self._attempts.get(tracked.request_id)
        if attempt is not None:
            self._judge_progress(attempt, tracked.computed, iteration)
        if self._saves is not None:
            self._saves.progressed(tracked, repeated=repeated)
        self._save(tracked, orders)
        self._note_quiet(tracked, attempt)

    def _note_quiet(self, tracked: RequestState, attempt: Attempt | None) -> None:
        plan = attempt.plan if attempt is not None else None
        tracked.note_quiet(self._pool.tokens_per_block, waits=plan is not None and not plan.ended)

    def _judge_progress(self, attempt: Attempt, computed: int, iteration: int) -> None:
        """A later report says how far its request has come, and so whether a pass has run from where it was served
        to."""
        plan = attempt.plan
        if plan is None or plan.ended:
            return
        position = plan.position or 0
        if plan.state is not PlanState.COPIED:
            if plan.copying and plan.iteration is None and computed >= position:
                plan.iteration = iteration  # its batch was dropped, and its copy has not landed yet
        elif computed > position:
            self._attempts.confirm(attempt)
        elif computed == position:
            plan.iteration = iteration  # its batch was dropped behind the copy: the pass from there comes now
        else:
            self._attempts.end(attempt, Reason.NOT_SCHEDULED)

    def _save(self, tracked: RequestState, orders: Orders) -> None:
        if self._saves is None or not self._saving or not tracked.saving:
            return
        order = self._saves.plan(tracked)
        if order is not None:
            orders.saves.append(order)
