"""AttemptBook: all open attempts, their leases and their endings. Each attempt is closed once, and every lease comes
back once.

Not thread-safe: the leader's lock covers it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator

from dynamo_semkv.contracts.report import Outcome, Reason
from dynamo_semkv.telemetry.catalogue import LOAD_SECONDS
from worker_connector.ledger.ledger import Ledger
from worker_connector.ledger.plan import PlanKey, PlanState
from worker_connector.requests.attempt import Attempt
from worker_connector.requests.ending import Ending, ending_of
from worker_connector.requests.load_decision import Decline
from worker_connector.timings import Durations

_BROKEN = (Reason.COPY_FAILED, Reason.CHECKSUM_MISMATCH, Reason.LOAD_TIMEOUT)
_MAX_GIVEN_UP = 4096


class AttemptBook:
    """The newest attempt of each request, and older ones whose copies may still run."""

    def __init__(self, ledger: Ledger | None, on_closed: Callable[[Attempt, Ending | Decline], None]) -> None:
        self._ledger = ledger
        self._on_closed = on_closed
        self._newest: dict[int, Attempt] = {}
        self._copying: dict[PlanKey, Attempt] = {}
        self.copied_open: dict[PlanKey, Attempt] = {}
        """Those that were copied and not confirmed, and some that have ended since."""
        self._given_up: dict[int, None] = {}
        self._leases = 0
        self._asked = 0
        self.load_seconds = Durations(LOAD_SECONDS.buckets)
        self.counts: Counter[str] = Counter()
        """`asked`, `superseded`, `replayed`, `offered_tokens`, `confirmed_tokens`, `closed`."""

    @property
    def leases(self) -> int:
        """Attempts that hold a lease."""
        return self._leases

    def __len__(self) -> int:
        return len(self._newest)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(list(self._newest.values()))

    def get(self, request_id: int) -> Attempt | None:
        """The newest attempt of a request; None if the engine has not asked about it, or it is gone."""
        return self._newest.get(request_id)

    def load_failed(self, request_id: int) -> bool:
        """Was the last promise to this request broken? It is then not offered the same blocks again right away."""
        previous = self._newest.get(request_id)
        return previous is not None and previous.plan is not None and previous.plan.reason in _BROKEN

    def reset(self, request_id: int) -> None:
        """The engine destroyed the request's allocation and will ask again: what was promised for it is void, and the
        next question is another attempt. A report that comes without a new question finds nothing to load."""
        attempt = self._newest.get(request_id)
        if attempt is not None:
            self.end(attempt, Reason.CANCELLED)
            attempt.scheduled = True
            attempt.parked = False  # an allocation that comes next was not loaded for

    def next_epoch(self, request_id: int) -> int:
        """Ends what was open for this request. A question that is put again before the request was in a batch is the
        same attempt and replaces the first one, unreported; a request whose allocation was destroyed is another one."""
        self._asked = time.time_ns()
        self._given_up.pop(request_id, None)
        previous = self._newest.pop(request_id, None)
        if previous is None:
            return 0
        if previous.scheduled or previous.closed:
            self.counts["replayed"] += 1
            self.end(previous, Reason.CANCELLED)
            return previous.key.epoch + 1
        self.counts["superseded"] += 1
        previous.closed = True
        if previous.plan is not None:
            previous.plan.drop(Reason.NOT_SCHEDULED)
        self.settle(previous)
        return previous.key.epoch

    def add(self, attempt: Attempt) -> None:
        """Takes the lease of the blocks that its plan offers."""
        self.counts["asked"] += 1
        attempt.timings.asked, attempt.timings.answered = self._asked, time.time_ns()
        self._newest[attempt.key.request_id] = attempt
        plan = attempt.plan
        if plan is not None and self._ledger is not None:
            self._ledger.lease(plan.path[-1])
            attempt.leased = True
            self._leases += 1
            self.counts["offered_tokens"] += plan.offered

    def sent(self, attempt: Attempt) -> None:
        """Its plan went out to the ranks."""
        if attempt.plan is not None and attempt.plan.copying:
            self._copying[attempt.key] = attempt
            attempt.timings.sent = time.time_ns()

    def copied(
        self, key: PlanKey, iteration: int, ok: bool, seconds: float | None, reason: Reason | None = None
    ) -> Attempt | None:
        """The ranks' answer to what was sent in `iteration`; None where nothing was sent, or it was answered
        already."""
        attempt = self._copying.get(key)
        if attempt is None or attempt.plan is None or attempt.plan.sent_in != iteration:
            return None
        timings = attempt.timings
        timings.copied = time.time_ns()
        self.load_seconds.add((timings.copied - timings.sent) / 1e9)
        del self._copying[key]
        attempt.plan.copy_done(ok, seconds, reason or Reason.COPY_FAILED)
        if attempt.plan.state is PlanState.COPIED:
            self.copied_open[key] = attempt
        if attempt.ended_well and attempt.plan.state is PlanState.COPIED:
            self._confirm_if_run(attempt)
        self.settle(attempt)
        return attempt

    def batch_dropped(self, iteration: int) -> None:
        """There was no forward pass of that iteration. What was copied for it waits until the request is in a batch
        again, which may take the engine some iterations."""
        for attempt in (*self._copying.values(), *self.copied_open.values()):
            if attempt.plan is not None and attempt.plan.iteration == iteration and not attempt.parked:
                attempt.plan.iteration = None

    def given_up(self, key: PlanKey, iteration: int, reason: Reason) -> None:
        """A rank will not complete what was sent in `iteration`. The lease stays until its copies have landed."""
        attempt = self._copying.get(key)
        if attempt is not None and attempt.plan is not None and attempt.plan.sent_in == iteration:
            self.end(attempt, reason)

    def confirm(self, attempt: Attempt) -> None:
        """The forward pass that reads the loaded blocks has run: the plan's tokens count as confirmed, and the attempt
        is settled."""
        plan = attempt.plan
        assert plan is not None
        plan.confirm()
        self.counts["confirmed_tokens"] += plan.confirmed
        fetched = sum(block.fetched for block in plan.served)
        self.counts["fetched_tokens"] += min(fetched * plan.tokens_per_block, plan.confirmed)
        self.settle(attempt)

    def _confirm_if_run(self, attempt: Attempt) -> None:
        if attempt.plan is not None and attempt.plan.iteration is None:
            self.end(attempt, Reason.NOT_SCHEDULED)
        else:
            self.confirm(attempt)

    def end(self, attempt: Attempt, reason: Reason) -> None:
        """It comes to nothing more: cancelled, never scheduled, stale. Does nothing to an attempt that has ended."""
        plan = attempt.plan
        if plan is not None and not plan.ended:
            plan.drop(reason)
        elif plan is None and not attempt.closed:
            outcome = Outcome.CANCELLED if reason is Reason.CANCELLED else Outcome.DECLINED
            self._close(attempt, Decline(outcome, reason))
        self.settle(attempt)

    def close_declined(self, attempt: Attempt) -> None:
        """Nothing was offered, and now the request runs: say why."""
        if attempt.decline is not None:
            self._close(attempt, attempt.decline)

    def settle(self, attempt: Attempt) -> None:
        """Gives back what is due and reports what has ended."""
        plan = attempt.plan
        if plan is None:
            return
        if attempt.leased and plan.lease_ended:
            attempt.leased = False
            self._leases -= 1
            if self._ledger is not None:
                self._ledger.release(plan.path[-1])
        if plan.ended:
            self._close(attempt, ending_of(plan))
            if plan.confirmed:
                for block in plan.served:
                    block.origin = None

    def finish(self, request_id: int) -> None:
        """The request ended by itself, so its forward pass ran: what was copied for it is confirmed, also if that is
        only said later. Not where the batch was dropped behind the copy and it was in none since: then the engine
        failed it, and no pass ran."""
        attempt = self._newest.get(request_id)
        plan = attempt.plan if attempt is not None else None
        if attempt is None or plan is None or attempt.parked or plan.ended:
            self.forget(request_id)
            return
        if plan.state is PlanState.COPIED:
            self._confirm_if_run(attempt)
        elif plan.copying and attempt.key in self._copying:
            del self._newest[request_id]
            attempt.ended_well = True
            return
        self.forget(request_id)

    def forget(self, request_id: int) -> None:
        """The request is gone. An attempt whose copy may still run keeps its lease until the ranks answer."""
        self._given_up.pop(request_id, None)
        attempt = self._newest.pop(request_id, None)
        if attempt is not None and not attempt.closed:
            self.end(attempt, Reason.CANCELLED)

    def give_up(self, attempt: Attempt) -> None:
        """Nobody has spoken of the request for long. Its lease returns; if the engine took the offer and comes with it
        after all, that must be seen, for nothing will have been loaded."""
        relied_on = attempt.relied_on
        self.forget(attempt.key.request_id)
        if relied_on:
            self._given_up[attempt.key.request_id] = None
            if len(self._given_up) > _MAX_GIVEN_UP:
                del self._given_up[next(iter(self._given_up))]

    def was_given_up(self, request_id: int) -> bool:
        """Whether `give_up` ended an offer of this request that the engine relied on."""
        return request_id in self._given_up

    def close(self) -> None:
        """No rank will answer any more: what is not copied yet never will be, as far as anybody is told."""
        for attempt in list(self._copying.values()):
            self.end(attempt, Reason.CANCELLED)

    def awaiting_forward(self) -> list[Attempt]:
        """Copied, not confirmed, and not parked."""
        if not self.copied_open:
            return []
        self.copied_open = {
            key: a for key, a in self.copied_open.items() if a.plan is not None and a.plan.state is PlanState.COPIED
        }
        return [a for a in self.copied_open.values() if not a.parked and self._newest.get(a.key.request_id) is a]

    def _close(self, attempt: Attempt, ending: Ending | Decline) -> None:
        if attempt.closed:
            return
        attempt.closed = True
        attempt.timings.closed = time.time_ns()
        self.counts["closed"] += 1
        self._on_closed(attempt, ending)
