"""One iteration of one rank, in the order of TensorRT-LLM's executor loops.

    schedule -> pages and connector queries -> token-budget trim -> scheduler output -> park async loads -> metadata ->
    start_load_kv -> forward (layer hooks, wait_for_save) -> sample -> request_finished -> cancellations -> responses ->
    commit to the reuse tree, KV events -> get_finished -> terminate

With overlap scheduling everything from request_finished to the commit concerns the batch before: the pass that has just
been started was put together without that batch's tokens. `engine/behaviours.py` lists what else can be switched on.

An exception in a layer hook, in the model or in wait_for_save fails every request of the rank and the rank goes on. An
exception in any other connector callback leaves `iterate` and ends the rank, as it ends TensorRT-LLM's executor.
Cancelled and failed requests never see request_finished.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from dynamo_semkv.telemetry.throttled import Throttled
from worker_connector.reference_engine.engine.behaviours import Dice, SeededDice
from worker_connector.reference_engine.engine.block_manager import BlockManager
from worker_connector.reference_engine.engine.clients import Clients
from worker_connector.reference_engine.engine.config import EngineConfig
from worker_connector.reference_engine.engine.connector_manager import Batch, ConnectorManager
from worker_connector.reference_engine.engine.dummy import close_dummy, open_dummy
from worker_connector.reference_engine.engine.events import KvEventBuffer
from worker_connector.reference_engine.engine.forward_pass import Computed, Device, ForwardPass
from worker_connector.reference_engine.engine.outcome import CANCELLED, ERROR, LENGTH, STOP, OnOutput, RankStats
from worker_connector.reference_engine.engine.prefix import PagePreparation
from worker_connector.reference_engine.engine.request import LlmRequest, RequestState
from worker_connector.reference_engine.engine.scheduler import BatchScheduler

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)

#: `probe(stage, batch)`, called on the executor's thread between the steps of an iteration: "scheduled" (the batch as
#: planned), "allocated" (asked, honoured and given pages), "loaded" (after start_load_kv), "computed" (after
#: wait_for_save) or "failed", "updated" (before get_finished), "polled" (after it). For tests that look at pages in
#: between or put faults there.
Probe = Callable[[str, Batch], None]

_REPLAYABLE = (RequestState.CONTEXT_INIT, RequestState.GENERATION_IN_PROGRESS)


def _no_probe(stage: str, batch: Batch) -> None:
    return None


@dataclass
class _Counters:
    iterations: int = 0
    computed_prompt_tokens: int = 0
    generated_tokens: int = 0


class Executor:
    """Requests, pages and connector of one rank. Single-threaded: `engine/rank.py` runs it and feeds it."""

    def __init__(
        self,
        rank: int,
        config: EngineConfig,
        device: Device,
        events: KvEventBuffer,
        connector: ConnectorManager | None,
        probe: Probe | None = None,
        dice: Dice | None = None,
    ) -> None:
        self._rank = rank
        self._config = config
        self._behaviours = config.behaviours
        self._dice: Dice = dice or SeededDice(config.behaviours.seed + rank)
        self._pool = device.pool
        self._events = events
        self._connector = connector
        self._probe: Probe = probe or _no_probe
        self._blocks = BlockManager(
            device.pool,
            events,
            enable_block_reuse=config.enable_block_reuse,
            enable_partial_reuse=config.enable_partial_reuse,
        )
        self._scheduler = BatchScheduler(config, self._blocks)
        self._pages = PagePreparation(self._blocks, connector, config, self._dice)
        self._clients = Clients(rank)
        #: Requests that have ended for their submitters, whose pages a transfer still uses.
        self._held: dict[int, LlmRequest] = {}
        #: What the last pass computed and the host does not know yet; always empty without overlap scheduling.
        self._unknown: list[Computed] = []
        self._cancelled: set[int] = set()
        self._counters = _Counters()
        self._stream = _engine_stream(device.pool.device)
        self._timer = device.timer
        self._ran = False
        self._forward = ForwardPass(config, device, connector, self._stream)

    @property
    def has_runnable(self) -> bool:
        """False when every request, if any, waits for a transfer."""
        parked = RequestState.DISAGG_GENERATION_TRANS_IN_PROGRESS
        return bool(self._unknown) or any(request.state is not parked for request in self._scheduler.requests)

    @property
    def has_transfers(self) -> bool:
        """True while the connector loads or saves asynchronously."""
        return self._connector is not None and self._connector.has_pending_transfers()

    @property
    def requests(self) -> list[LlmRequest]:
        """Everything that has not ended, and ended requests whose pages a transfer still uses."""
        return self._scheduler.requests + list(self._held.values())

    @property
    def blocks(self) -> BlockManager:
        """The rank's pages; other threads may call only what says so."""
        return self._blocks

    def add(self, request: LlmRequest, on_output: OnOutput, on_end: Callable[[], None]) -> None:
        """Take a new request in; for the callbacks see `Clients.add`."""
        self._clients.add(request, on_output, on_end)
        self._scheduler.add(request)

    def take_ended(self) -> list[Callable[[], None]]:
        """`on_end` of the requests that ended since the last call."""
        return self._clients.take_ended()

    def drop_cached(self) -> None:
        """Forget all KV that no request holds."""
        self._blocks.drop_cached()
        self._events.flush()

    def iterate(self, cancelled: set[int]) -> bool:
        """Run one iteration; `cancelled` are ids to end in it, with overlap scheduling in the next one if a forward
        pass is all that this one has to start. Returns whether a forward pass ran."""
        with _current(self._stream):
            return self._iterate(cancelled)

    def _iterate(self, cancelled: set[int]) -> bool:
        self._counters.iterations += 1
        if self._timer is not None:
            self._timer.iterate(goes_on=self._ran and self.has_runnable)
        self._cancelled |= cancelled
        self._destroy_some()
        batch = self._scheduler.schedule()
        self._pad(batch)
        self._probe("scheduled", batch)
        if batch:
            self._prepare(batch)
        launched = self._launch(batch) if batch else []
        due = launched
        if self._behaviours.overlap_scheduling:
            due, self._unknown = self._unknown, launched
        self._take_over([part for part in due if part.is_current], launched)
        self._events.flush()
        self._probe("updated", batch)
        if self._connector is not None:
            saved, loaded = self._connector.get_finished()
            for request in saved + loaded:
                if request.request_id in self._held:
                    self._terminate(request)
            for request in self._connector.take_failed_parked_loads(loaded):
                self._destroy(request)
        self._probe("polled", batch)
        self._ran = bool(launched)
        return self._ran

    def fail_all(self, error: str, reason: str = ERROR) -> None:
        """End every request; pages that a transfer may use are kept."""
        self._unknown = []
        message = error if reason == ERROR else None
        for request in self._scheduler.requests:
            self._end_early(request, reason, message)
        # A connector callback that raised may have come between a request's last token and its response.
        for request in self._clients.open:
            self._clients.deliver(request, [], reason, message)

    def stats(self) -> RankStats:
        """Numbers of this rank as they are now."""
        running = self._scheduler.running
        parked = sum(request.state is RequestState.DISAGG_GENERATION_TRANS_IN_PROGRESS for request in running)
        return RankStats(
            rank=self._rank,
            total_blocks=self._blocks.num_pages,
            active_blocks=self._blocks.num_referenced,
            cached_blocks=self._blocks.tree.num_evictable,
            waiting_requests=self._scheduler.num_waiting,
            running_requests=len(running),
            parked_requests=parked + len(self._held),
            iterations=self._counters.iterations,
            computed_prompt_tokens=self._counters.computed_prompt_tokens,
            generated_tokens=self._counters.generated_tokens,
            output_errors=self._clients.errors,
            dropped_events=self._events.dropped_event_count,
        )

    # Steps up to the forward pass.

    def _destroy_some(self) -> None:
        """Take the pages of some running requests, which start over."""
        for request in list(self._scheduler.running):
            if request.state in _REPLAYABLE and self._dice.hits(
                "destroyed_allocation", self._behaviours.destroyed_allocation_rate
            ):
                self._destroy(request)

    def _destroy(self, request: LlmRequest) -> None:
        if request.blocks is None:  # ended while it was loaded
            return
        if self._connector is not None:
            self._connector.reset_request(request)
        self._blocks.close(request.blocks)
        request.restart()
        self._scheduler.put_back(request)

    def _prepare(self, batch: Batch) -> None:
        """Pages, queries, trim, report and loads; the batch may be empty afterwards."""
        self._pages.prepare(batch)
        self._probe("allocated", batch)
        if self._behaviours.report_before_trim and self._connector is not None:
            self._connector.build_scheduler_output(batch)
            self._pages.trim(batch)
        else:
            self._pages.trim(batch)
            if self._connector is not None:
                self._connector.build_scheduler_output(batch)
        if self._connector is not None:
            self._connector.park_loading(batch)
            self._connector.handle_metadata()
            self._connector.worker.start_load_kv(self._stream)
            failed = self._connector.take_failed_loads()
            batch.context = [request for request in batch.context if request.request_id not in failed]
            for request in [request for request in self._scheduler.running if request.request_id in failed]:
                self._destroy(request)
            self._pad(batch)
        self._probe("loaded", batch)
        if batch and self._dice.hits("dropped_batch", self._behaviours.dropped_batch_rate):
            if self._behaviours.dropped_batch_reverts and self._config.kv_cache_manager == "v2":
                self._revert(batch)
            self._drop(batch)

    def _revert(self, batch: Batch) -> None:
        """Undo what the batch made its requests grow by."""
        size = self._config.tokens_per_block
        for request in batch.context:
            if request.context_current_position > request.blocks_before * size:
                self._destroy(request)
        for request in batch.requests:
            if request.blocks is not None:
                self._blocks.shrink(request.blocks, request.blocks_before)

    def _pad(self, batch: Batch) -> None:
        if not batch and self._dice.hits("dummy", self._behaviours.dummy_rate):
            dummy = open_dummy(self._blocks)
            if dummy is not None:
                batch.generation.append(dummy)

    def _drop(self, batch: Batch) -> None:
        """Empties the batch; its requests stay as they are."""
        for request in batch.generation:
            if request.is_dummy_request:
                close_dummy(request, self._blocks)
        batch.clear()

    def _launch(self, batch: Batch) -> list[Computed]:
        """Run the forward pass and advance the batch's requests by it, tokens excepted; [] if it failed."""
        try:
            launched = self._forward.run(batch)
        except Exception as error:  # noqa: BLE001 - hooks and model: the rank outlives it, its requests do not
            _throttled.exception("rank %d: forward pass failed; failing its requests", self._rank)
            self._probe("failed", batch)
            self._drop(batch)
            self.fail_all(f"{type(error).__name__}: {error}")
            return []
        self._probe("computed", batch)
        for request in batch.generation:
            if request.is_dummy_request:
                close_dummy(request, self._blocks)
        for request in batch.context:
            request.note_cached()
            request.context_current_position += request.context_chunk_size
            self._counters.computed_prompt_tokens += request.context_chunk_size
            if request.context_remaining_length == 0:
                request.state = RequestState.GENERATION_IN_PROGRESS
        return [part for part in launched if not part.request.is_dummy_request]

    # Steps behind the forward pass.

    def _take_over(self, due: Sequence[Computed], launched: Sequence[Computed]) -> None:
        """Makes known what `due` has computed: tokens, ends, reusable blocks. `launched` is the pass that runs."""
        finished = [part.request for part in due if self._append(part)]
        to_terminate = [request for request in finished if not self._finish(request)]
        if due or not launched:
            self._end_cancelled()
        for part in due:
            if part.token is not None and not self._clients.deliver(
                part.request, [part.token], _finish_reason(part.request)
            ):
                self._end_early(part.request, CANCELLED)
        for part in due:
            if part.request.blocks is not None:
                self._blocks.commit(part.request.blocks, part.request.tokens, part.end)
                self._blocks.pass_window(part.request.blocks, part.end)
        for request in to_terminate:
            self._terminate(request)
        for part in launched if self._behaviours.overlap_scheduling else ():
            if part.is_current and part.token is not None:
                part.request.inflight_token = part.token
                self._expect_end(part.request)

    def _append(self, part: Computed) -> bool:
        """The host learns a token; True if the token ends its request."""
        request = part.request
        if part.token is None:
            return False
        if part.logits is not None:
            self._clients.keep_logits(request, part.logits)
        request.inflight_token = None
        request.append(part.token)
        self._counters.generated_tokens += 1
        return _finish_reason(request) is not None

    @staticmethod
    def _expect_end(request: LlmRequest) -> None:
        """A request whose token under way is its last by count is not scheduled again; an end token cannot be
        foreseen."""
        if request.num_generated_tokens + 1 >= request.max_new_tokens:
            request.state = RequestState.GENERATION_TO_COMPLETE

    def _finish(self, request: LlmRequest) -> bool:
        """Report a finished request to the connector; True if its pages stay for a save."""
        self._scheduler.remove(request)
        request.state = RequestState.GENERATION_COMPLETE
        request.allocation += 1  # results of a pass that is under way are dropped
        assert request.blocks is not None
        if self._connector is None or self._dice.hits("lost_finish", self._behaviours.lost_finish_rate):
            return False
        if not self._connector.request_finished(request, request.blocks.by_group):
            return False
        self._held[request.request_id] = request
        return True

    def _end_cancelled(self) -> None:
        cancelled, self._cancelled = self._cancelled, set()
        for request in self._scheduler.requests:
            if request.request_id in cancelled:
                self._end_early(request, CANCELLED)

    def _end_early(self, request: LlmRequest, reason: str, error: str | None = None) -> None:
        self._scheduler.remove(request)
        request.allocation += 1
        self._clients.deliver(request, [], reason, error)
        transferring = self._connector is not None and self._connector.has_pending_transfers(request)
        if transferring and self._config.hold_pages_during_transfers:
            self._held[request.request_id] = request
        else:
            self._terminate(request)

    def _terminate(self, request: LlmRequest) -> None:
        self._held.pop(request.request_id, None)
        if self._connector is not None:
            self._connector.forget(request)
        if request.blocks is not None:
            self._blocks.close(request.blocks)
            request.blocks = None


def _finish_reason(request: LlmRequest) -> str | None:
    if request.tokens[-1] in request.options.eos_token_ids:
        return STOP
    return LENGTH if request.num_generated_tokens >= request.max_new_tokens else None


def _engine_stream(device: torch.device) -> Any:
    """The stream that forward passes run on, which hooks are given. On a GPU it is one of our own, as in TensorRT-LLM,
    so that nothing is ordered by the default stream. On the CPU work is complete when a call returns."""
    if device.type == "cpu":
        return torch.cpu.current_stream()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # which filled the pages
    return stream


def _current(stream: Any) -> AbstractContextManager[Any]:
    return torch.cuda.stream(stream) if isinstance(stream, torch.cuda.Stream) else nullcontext()
