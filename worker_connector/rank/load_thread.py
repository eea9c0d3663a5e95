"""LoadThread: one rank's loads of requests that the engine has parked, copied beside its forward passes.

The engine names in `get_finished` the ids that it parked, and waits until it is told each of them once. Then it runs on
those pages: the base API has no way to say that a load failed (NVIDIA/TensorRT-LLM#18762). So a load that failed or is
late is done again at once, in front of the next forward pass and from the same host rows; only where even that fails is
there nothing left but to raise. A runtime that takes failed parked loads back (`take_failed_async_load_requests`) is
told instead, and computes the request.

Two orders hold: a copy begins when what the engine has enqueued before is done, since the pages may still be read; and
after a load was stopped, no forward pass runs before what is already on the way has landed (`fence`), since the engine
may have given the pages away.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from dynamo_semkv.contracts.report import Reason
from dynamo_semkv.telemetry.throttled import Throttled
from worker_connector.errors import LoadFailed
from worker_connector.ledger.plan import PlanKey
from worker_connector.link.channel import LoadDone, LoadGivenUp
from worker_connector.link.metadata import LoadOrder
from worker_connector.memory.copy_stream import CopyStream, Ticket
from worker_connector.memory.transfer import check_moves, copy_to_pages
from worker_connector.rank.options import CopyPlace

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)

STEP_BYTES = 8 * 1024 * 1024
"""Copied between two looks at whether the load was stopped: stopping waits for one step at most."""
_RESULTS = 10_000
"""Results that the engine has not asked for are kept up to this many: of requests that it forgot."""

Job = Callable[[], None]


class _Load:
    """One order on its way."""

    def __init__(self, order: LoadOrder, iteration: int, started: float) -> None:
        self.key = order.key
        self.moves = order.moves
        self.slots = [move.slot for move in order.moves]
        self.iteration = iteration
        self.started = started
        self.lock = threading.Lock()
        self.stopped = False
        """Set under the lock: from then on the thread copies nothing more for it."""
        self.ended = False
        """Set by the thread: its copies have landed."""
        self.last: Ticket | None = None
        """Of what the thread had copied for it when it was stopped. The thread itself may come to it much later, or be
        stuck in another load."""
        self.wrong: Reason | None = None
        self.error = ""
        self.seconds: float | None = None
        """Of its first copies, by the clock of the stream that made them."""
        self.decided = False
        """What the engine is told is known."""
        self.again: Ticket | None = None
        """Of the second copy, in front of the forward pass."""

    @property
    def landed(self) -> bool:
        """No copy of it can run any more: its host rows may be written."""
        first = self.ended or (self.last is not None and self.last.done())
        return first and (self.again is None or self.again.done())


class LoadThread:
    """All but the copying itself is called on the engine's thread."""

    def __init__(
        self,
        place: CopyPlace,
        side: CopyStream,
        ahead: CopyStream,
        *,
        deadline_seconds: float,
        restarts_failed: bool,
        clock: Callable[[], float] = time.monotonic,
        run: Callable[[Job], None] | None = None,
    ) -> None:
        """`side`: a stream of this thread's own. `ahead`: that of the loads in front of a forward pass. `run`: in place
        of a thread (tests)."""
        self._number = place.number
        self._geometry = place.geometry
        self._slab = place.slab
        self._side = side
        self._ahead = ahead
        self._post = place.post
        self._on_damaged = place.on_damaged
        self._counts = place.counts
        self._deadline = deadline_seconds
        self._restarts_failed = restarts_failed
        self._clock = clock
        self._run = run or self._enqueue
        self._step = max(1, STEP_BYTES // place.slab.row_bytes)
        self._loads: dict[PlanKey, _Load] = {}
        self._results: OrderedDict[int, str | None] = OrderedDict()
        self._waiting: dict[int, None] = {}
        self._failed: set[int] = set()
        self.busy = False
        """A load is on its way, the engine waits for one, or its next forward pass is to be fenced."""
        self._fence = False
        self._wake = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._closing = False
        self._thread: threading.Thread | None = None

    # the engine's calls

    def begin(self, orders: Sequence[LoadOrder], iteration: int, engine_stream: Any) -> None:
        """Starts these loads, behind what the engine has enqueued so far."""
        if not orders:
            return
        self._side.after(engine_stream)
        self.busy = True
        for order in orders:
            load = _Load(order, iteration, self._clock())
            self._loads[order.key] = load
            self._run(lambda load=load: self._copy(load))  # type: ignore[misc]

    def nothing_to_load(self, request_ids: Collection[int]) -> None:
        """The engine parks these requests although it honours nothing of their offers."""
        for request_id in request_ids:
            self._conclude(request_id, None)

    def cannot_load(self, request_id: int, why: str) -> None:
        """What was promised to this parked request cannot be loaded at all."""
        self._conclude(request_id, why)

    def stop(self, keys: Collection[PlanKey]) -> None:
        """The engine needs these loads no more, and their pages may be somebody else's: see `fence`. An engine that
        still waits for such a request is told that it is over."""
        for key in keys:
            load = self._loads.get(key)
            if load is not None and not load.decided:
                self._stop(load)
                load.wrong = Reason.CANCELLED
                load.decided = True
                self._conclude(key.request_id, None)

    def fence(self, engine_stream: Any) -> None:
        """Before a forward pass: copies of stopped loads that are on their way land first, and so do those that were
        repeated."""
        if self._fence:
            self._fence = False
            self._side.before(engine_stream)
            self._ahead.before(engine_stream)

    def finished(self, parked: Collection[int]) -> list[int]:
        """`get_finished`: ids whose loads have ended, out of those that the engine has named, each once. `parked`:
        newly named.

        Raises LoadFailed where one cannot be loaded and the engine has no way to be told.
        """
        if not parked and not self.busy:
            return []
        self.busy = True
        self._waiting.update(dict.fromkeys(parked))
        try:
            for load in list(self._loads.values()):
                if not load.decided:
                    self._decide(load)
        finally:
            self._answer()
        named = self._name()
        self.busy = bool(self._loads or self._waiting or self._fence)
        return named

    def take_failed(self) -> set[int]:
        """Requests that `finished` named although their pages are not filled. Once."""
        failed, self._failed = self._failed, set()
        return failed

    def close(self, timeout: float = 5.0) -> None:
        """Stops what is on its way. The engine runs no more forward pass on this pool."""
        for load in self._loads.values():
            self._stop(load)
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)

    # what the engine is told

    def _decide(self, load: _Load) -> None:
        if load.ended and load.wrong is None:
            load.decided = True
            self._conclude(load.key.request_id, None)
        elif load.ended:
            self._repeat(load, load.wrong or Reason.COPY_FAILED, load.error)
        elif self._clock() - load.started > self._deadline:
            self._counts["late_loads"] += 1
            self._stop(load)
            self._repeat(load, Reason.LOAD_TIMEOUT, f"not done after {self._deadline:g} s")

    def _repeat(self, load: _Load, reason: Reason, why: str) -> None:
        """The last chance of a load that did not go well."""
        request_id = load.key.request_id
        load.decided, load.wrong = True, reason
        if self._restarts_failed:
            self._post(LoadGivenUp(self._number, load.iteration, load.key, reason))
            self._conclude(request_id, why)
            return
        try:
            if self._slab.verify(load.slots):
                load.wrong = Reason.CHECKSUM_MISMATCH
                raise LoadFailed("the host rows do not hold what was saved")
            check_moves(self._geometry, self._slab, load.moves)
            self._ahead.after(None)
            copy_to_pages(self._ahead, self._geometry, self._slab, load.moves)
            load.again = self._ahead.ticket()
            self._fence = True
        except Exception as error:
            self._counts["load_errors"] += 1
            raise LoadFailed(f"a promised load failed: request {request_id}: {why}; once more: {error}") from error
        _throttled.warning("semkv connector: the parked load of request %d was repeated: %s", request_id, why)
        self._counts["repeated_loads"] += 1
        load.wrong = None
        self._conclude(request_id, None)

    def _conclude(self, request_id: int, failure: str | None) -> None:
        self._results[request_id] = failure
        self._results.move_to_end(request_id)
        if len(self._results) > _RESULTS:
            self._results.popitem(last=False)

    def _answer(self) -> None:
        """Tells the leader of loads whose copies have landed: only then may their host rows be written."""
        for load in [load for load in self._loads.values() if load.decided and load.landed]:
            del self._loads[load.key]
            ok = load.wrong is None
            self._counts["loaded_blocks"] += len(load.moves) if ok else 0
            took = load.seconds if load.again is None else self._clock() - load.started
            self._post(LoadDone(self._number, load.iteration, load.key, ok, took if ok else None, load.wrong))

    def _name(self) -> list[int]:
        # Of a load that was repeated the leader must have heard before the engine reports its request again.
        undecided = {load.key.request_id for load in self._loads.values() if not load.decided or load.wrong is None}
        named: list[int] = []
        for request_id in [request_id for request_id in self._waiting if request_id not in undecided]:
            failure = self._results.pop(request_id, "it was parked for a load that was never ordered")
            if failure is not None:
                if not self._restarts_failed:
                    raise LoadFailed(f"a promised load failed: request {request_id}: {failure}")
                _throttled.error("semkv connector: parked request %d is restarted: %s", request_id, failure)
                self._counts["restarted"] += 1
                self._failed.add(request_id)
            del self._waiting[request_id]
            named.append(request_id)
        return named

    # copying

    def _stop(self, load: _Load) -> None:
        with load.lock:
            load.stopped = True
        load.last = self._side.ticket()
        self._fence = True

    def _copy(self, load: _Load) -> None:
        try:
            began = self._side.mark()
            check_moves(self._geometry, self._slab, load.moves)
            for first in range(0, len(load.moves), self._step):
                with load.lock:
                    if load.stopped:
                        break
                    copy_to_pages(self._side, self._geometry, self._slab, load.moves[first : first + self._step])
            ended = self._side.mark()
            ended.wait()
            load.seconds = ended.seconds_since(began)
            if not load.stopped:
                self._prove(load)
        except Exception as error:  # noqa: BLE001 - decided on the engine's thread, which repeats it or fails
            _throttled.exception("semkv connector: the parked load of request %d failed", load.key.request_id)
            self._fail(load, Reason.COPY_FAILED, str(error) or type(error).__name__)
        finally:
            load.ended = True

    def _prove(self, load: _Load) -> None:
        """The rows still hold what was saved: checked behind the copy, so it holds for the bytes that went."""
        wrong = self._slab.verify(load.slots)
        if wrong:
            self._fail(load, Reason.CHECKSUM_MISMATCH, f"{len(wrong)} host rows do not hold what was saved")
            self._on_damaged(wrong, True)

    @staticmethod
    def _fail(load: _Load, reason: Reason, why: str) -> None:
        with load.lock:
            if not load.stopped:
                load.wrong, load.error = reason, why

    # the thread

    def _enqueue(self, job: Job) -> None:
        with self._wake:
            self._jobs.append(job)
            self._wake.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"semkv-load-{self._number}", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._jobs or self._closing)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            job()
