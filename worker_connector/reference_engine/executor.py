"""One iteration of one rank, in the order of TensorRT-LLM's non-overlapped executor loop.

    schedule -> pages and connector queries -> scheduler output -> metadata -> park async loads -> start_load_kv ->
    forward (layer hooks, wait_for_save) -> sample -> request_finished -> cancellations -> responses -> commit to the
    reuse tree, KV events -> get_finished -> terminate

An exception in a layer hook, in the model or in wait_for_save fails every request of the rank and the rank goes on. One
in any other connector callback leaves `iterate` and ends the rank, as it ends TensorRT-LLM's executor. Cancelled and
failed requests never see request_finished.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from worker_connector.reference_engine.block_manager import BlockManager
from worker_connector.reference_engine.config import EngineConfig
from worker_connector.reference_engine.connector_manager import Batch, ConnectorManager
from worker_connector.reference_engine.events import KvEventBuffer
from worker_connector.reference_engine.fair_lock import FairLock
from worker_connector.reference_engine.kv_pool import KvPool
from worker_connector.reference_engine.model import ForwardModel, RowGroup, Segment
from worker_connector.reference_engine.outcome import (
    CANCELLED,
    ERROR,
    LENGTH,
    STOP,
    OnOutput,
    RankStats,
    RequestStats,
)
from worker_connector.reference_engine.prefix import prepare_pages
from worker_connector.reference_engine.request import LlmRequest, RequestState
from worker_connector.reference_engine.scheduler import BatchScheduler

_log = logging.getLogger(__name__)


#: `probe(stage, batch)`, called on the executor's thread between the steps of an iteration: "scheduled" (the batch as
#: planned), "allocated" (asked, honoured and given pages), "loaded" (behind start_load_kv), "computed" (behind
#: wait_for_save) or "failed", "updated" (in front of get_finished), "polled" (behind it). For tests that look at pages in
#: between or put faults there.
Probe = Callable[[str, Batch], None]


def _no_probe(stage: str, batch: Batch) -> None:
    return None


@dataclass
class _Client:
    """The submitter's side of a request that has not ended for it."""

    request: LlmRequest
    on_output: OnOutput
    on_end: Callable[[], None]
    logits: list[torch.Tensor] = field(default_factory=list)


@dataclass
class _Counters:
    iterations: int = 0
    computed_prompt_tokens: int = 0
    generated_tokens: int = 0
    output_errors: int = 0


class Executor:
    """Requests, pages and connector of one rank. Single-threaded: `rank.py` runs it and feeds it."""

    def __init__(
        self,
        rank: int,
        config: EngineConfig,
        model: ForwardModel,
        pool: KvPool,
        events: KvEventBuffer,
        connector: ConnectorManager | None,
        forward_lock: FairLock,
        probe: Probe | None = None,
    ) -> None:
        self._rank = rank
        self._config = config
        self._model = model
        self._pool = pool
        self._events = events
        self._connector = connector
        self._forward_lock = forward_lock
        self._probe: Probe = probe or _no_probe
        self._blocks = BlockManager(pool, events, enable_block_reuse=config.enable_block_reuse)
        self._scheduler = BatchScheduler(config, self._blocks)
        self._clients: dict[int, _Client] = {}
        self._ended: list[Callable[[], None]] = []
        #: Requests without a client whose pages a transfer still uses.
        self._held: dict[int, LlmRequest] = {}
        self._counters = _Counters()
        self._stream = _engine_stream(pool.device)
        after_forward = connector.worker.register_forward_pass_callable() if connector else None
        self._after_forward = after_forward

    @property
    def has_runnable(self) -> bool:
        """False when every request, if any, waits for a transfer."""
        parked = RequestState.DISAGG_GENERATION_TRANS_IN_PROGRESS
        return any(request.state is not parked for request in self._scheduler.requests)

    @property
    def has_transfers(self) -> bool:
        return self._connector is not None and self._connector.has_pending_transfers()

    def add(self, request: LlmRequest, on_output: OnOutput, on_end: Callable[[], None]) -> None:
        self._clients[request.request_id] = _Client(request, on_output, on_end)
        self._scheduler.add(request)

    def take_ended(self) -> list[Callable[[], None]]:
        """`on_end` of the requests that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def drop_cached(self) -> None:
        """Forget all KV that no request holds."""
        self._blocks.drop_cached()
        self._events.flush()

    def iterate(self, cancelled: set[int]) -> bool:
        """Run one iteration; `cancelled` are ids to end in it. Returns whether a forward pass ran."""
        with _current(self._stream):
            return self._iterate(cancelled)

    def _iterate(self, cancelled: set[int]) -> bool:
        self._counters.iterations += 1
        batch = self._scheduler.schedule()
        responses: list[tuple[LlmRequest, int]] = []
        finished: list[LlmRequest] = []
        ran = False
        self._probe("scheduled", batch)
        if batch:
            prepare_pages(batch, self._blocks, self._connector, self._config)
            self._probe("allocated", batch)
            if self._connector is not None:
                self._connector.report(batch)
                self._connector.park_loading(batch)
                self._connector.worker.start_load_kv(self._stream)
            self._probe("loaded", batch)
            if batch:
                try:
                    logits = self._forward(batch)
                except Exception as error:  # noqa: BLE001 - hooks and model: the rank outlives it, its requests do not
                    _log.exception("rank %d: forward pass failed; failing its requests", self._rank)
                    self._probe("failed", batch)
                    self.fail_all(f"{type(error).__name__}: {error}")
                    batch = Batch()
                else:
                    ran = True
                    self._probe("computed", batch)
                    responses, finished = self._update(batch, logits)
        to_terminate = [request for request in finished if not self._finish(request)]
        self._end_cancelled(cancelled, {request.request_id for request in finished})
        for request, token in responses:
            self._respond(request, token)
        for request in batch.requests:
            self._commit(request)
        for request in to_terminate:
            self._terminate(request)
        self._events.flush()
        self._probe("updated", batch)
        if self._connector is not None:
            for request in (held for done in self._connector.get_finished() for held in done):
                if request.request_id in self._held:
                    self._terminate(request)
        self._probe("polled", batch)
        return ran

    def fail_all(self, error: str, reason: str = ERROR) -> None:
        """End every request; pages that a transfer may use are kept."""
        message = error if reason == ERROR else None
        for request in self._scheduler.requests:
            self._end_early(request, reason, message)
        # A connector callback that raised may have come between a request's last token and its response.
        for client in list(self._clients.values()):
            self._deliver(client.request, [], reason, message)

    @property
    def requests(self) -> list[LlmRequest]:
        """Everything that has not ended, and ended requests whose pages a transfer still uses."""
        return self._scheduler.requests + list(self._held.values())

    @property
    def blocks(self) -> BlockManager:
        return self._blocks

    def stats(self) -> RankStats:
        running = self._scheduler.running
        parked = sum(request.state is RequestState.DISAGG_GENERATION_TRANS_IN_PROGRESS for request in running)
        return RankStats(
            rank=self._rank,
            total_blocks=self._pool.num_blocks,
            active_blocks=self._blocks.num_referenced,
            cached_blocks=self._blocks.tree.num_evictable,
            waiting_requests=self._scheduler.num_waiting,
            running_requests=len(running),
            parked_requests=parked + len(self._held),
            iterations=self._counters.iterations,
            computed_prompt_tokens=self._counters.computed_prompt_tokens,
            generated_tokens=self._counters.generated_tokens,
            output_errors=self._counters.output_errors,
            dropped_events=self._events.dropped_event_count,
        )

    def _forward(self, batch: Batch) -> list[torch.Tensor | None]:
        """Logits per request of `batch.requests`; None for a chunk that is not the last."""
        groups = [RowGroup((_context_segment(request),)) for request in batch.context]
        decodes = [_decode_segment(request) for request in batch.generation]
        if self._config.batch_invariant_decode:
            groups.extend(RowGroup((segment,)) for segment in decodes)
        elif decodes:
            groups.append(RowGroup(tuple(decodes)))
        worker = self._connector.worker if self._connector is not None else None
        hooked = worker if batch.context or self._config.layer_hooks_in_decode else None
        # Layer hooks run inside, as in TensorRT-LLM; the connector's other callbacks get ordinary tensors to work with.
        with self._forward_lock, torch.inference_mode():
            logits = self._model.forward(
                self._pool,
                groups,
                before_layer=(lambda layer: hooked.wait_for_layer_load(layer, self._stream)) if hooked else None,
                after_layer=(lambda layer: hooked.save_kv_layer(layer, self._stream)) if hooked else None,
            )
        if self._after_forward is not None:
            self._after_forward()
        if worker is not None:
            worker.wait_for_save(self._stream)
        return [row for group in logits for row in group]

    def _update(
        self, batch: Batch, logits: list[torch.Tensor | None]
    ) -> tuple[list[tuple[LlmRequest, int]], list[LlmRequest]]:
        """Advance the batch by what was computed: `((request, new token) ..., finished requests)`."""
        for request in batch.context:
            request.context_current_position += request.context_chunk_size
            self._counters.computed_prompt_tokens += request.context_chunk_size
        responses, finished = [], []
        for request, row in zip(batch.requests, logits, strict=True):
            if row is None:
                continue
            token = request.sampler.choose(row)
            if request.options.sampling.return_generation_logits:
                self._clients[request.request_id].logits.append(row.to("cpu", copy=True))
            request.append(token)
            self._counters.generated_tokens += 1
            done = _finish_reason(request) is not None
            request.state = RequestState.GENERATION_COMPLETE if done else RequestState.GENERATION_IN_PROGRESS
            responses.append((request, token))
            if done:
                finished.append(request)
        return responses, finished

    def _finish(self, request: LlmRequest) -> bool:
        """Report a finished request to the connector; True if its pages stay for a save."""
        self._scheduler.remove(request)
        assert request.blocks is not None
        if self._connector is None or not self._connector.request_finished(request, request.blocks.slots):
            return False
        self._held[request.request_id] = request
        return True

    def _end_cancelled(self, cancelled: set[int], finished: set[int]) -> None:
        for request in self._scheduler.requests:
            if request.request_id in cancelled and request.request_id not in finished:
                self._end_early(request, CANCELLED)

    def _end_early(self, request: LlmRequest, reason: str, error: str | None = None) -> None:
        self._scheduler.remove(request)
        self._deliver(request, [], reason, error)
        transferring = self._connector is not None and self._connector.has_pending_transfers(request)
        if transferring and self._config.hold_pages_during_transfers:
            self._held[request.request_id] = request
        else:
            self._terminate(request)

    def _respond(self, request: LlmRequest, token: int) -> None:
        self._deliver(request, [token], _finish_reason(request))

    def _deliver(self, request: LlmRequest, tokens: list[int], reason: str | None, error: str | None = None) -> None:
        client = self._clients.get(request.request_id)
        if client is None:  # ended in this iteration, before its token was handed out
            return
        if reason is not None:
            self._ended.append(self._clients.pop(request.request_id).on_end)
        stats = RequestStats(
            prompt_tokens=request.prompt_len,
            cached_tokens=request.cached_tokens,
            device_reused_tokens=request.device_reused_tokens,
            connector_served_tokens=request.cached_tokens - request.device_reused_tokens,
            generated_tokens=request.num_generated_tokens,
            error=error,
            generation_logits=tuple(client.logits) if reason is not None else (),
        )
        try:
            client.on_output(tokens, reason, stats)
        except Exception:  # noqa: BLE001 - the submitter's code: its fault ends its own request only
            self._counters.output_errors += 1
            _log.exception("rank %d: output callback of request %d failed", self._rank, request.request_id)
            if reason is None:
                self._end_early(request, CANCELLED)

    def _commit(self, request: LlmRequest) -> None:
        """Make what the request computed (or was served) reusable. The newest token is not in the pages yet."""
        if request.blocks is not None:
            computed = len(request.tokens) - 1 if request.num_generated_tokens else request.context_current_position
            self._blocks.commit(request.blocks, request.tokens, computed)

    def _terminate(self, request: LlmRequest) -> None:
        self._held.pop(request.request_id, None)
        if self._connector is not None:
            self._connector.forget(request)
        if request.blocks is not None:
            self._blocks.close(request.blocks)
            request.blocks = None


def _engine_stream(device: torch.device) -> Any:
    """What hooks are given: the stream that forward passes run on, on a GPU one of our own, as in TensorRT-LLM, so that nothing is
    ordered by the default stream. On the CPU work is complete when a call returns."""
    if device.type == "cpu":
        return torch.cpu.current_stream()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # which filled the pages
    return stream


def _current(stream: Any) -> AbstractContextManager[Any]:
    return torch.cuda.stream(stream) if isinstance(stream, torch.cuda.Stream) else nullcontext()


def _context_segment(request: LlmRequest) -> Segment:
    assert request.blocks is not None
    start = request.context_current_position
    return Segment(
        tokens=request.tokens[start : start + request.context_chunk_size],
        start=start,
        slots=request.blocks.slots,
        wants_logits=request.is_last_context_chunk,
        lora=request.lora,
        owner=request.request_id,
        scope=request.blocks.scope,
        history=request.tokens[: start + request.context_chunk_size],
    )


def _decode_segment(request: LlmRequest) -> Segment:
    assert request.blocks is not None
    return Segment(
        tokens=request.tokens[-1:],
        start=len(request.tokens) - 1,
        slots=request.blocks.slots,
        lora=request.lora,
        owner=request.request_id,
        scope=request.blocks.scope,
        history=request.tokens,
    )


def _finish_reason(request: LlmRequest) -> str | None:
    if request.tokens[-1] in request.options.eos_token_ids:
        return STOP
    return LENGTH if request.num_generated_tokens >= request.max_new_tokens else None
