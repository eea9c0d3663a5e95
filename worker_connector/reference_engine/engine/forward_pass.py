"""Runs a batch through the model: segments, layer hooks, wait_for_save, sampling.

The result is what the device knows behind the pass. The host learns it when the executor takes it over: at once, or one
iteration later with overlap scheduling; until then a sampled token is the request's `inflight_token`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from worker_connector.reference_engine.engine.config import EngineConfig
from worker_connector.reference_engine.engine.connector_manager import Batch, ConnectorManager
from worker_connector.reference_engine.engine.fair_lock import FairLock
from worker_connector.reference_engine.engine.request import LlmRequest
from worker_connector.reference_engine.models.kv_pool import KvPool
from worker_connector.reference_engine.models.model import ForwardModel, RowGroup, Segment
from worker_connector.reference_engine.timing.pass_timer import PassTimer


@dataclass(frozen=True)
class Computed:
    """One request's part of a forward pass that has run."""

    request: LlmRequest
    #: `request.allocation` at the pass: if the request has another one now, this result is dropped.
    allocation: int
    #: Positions below `end` hold KV, or will in stream order.
    end: int
    #: The sampled token; None behind a prefill chunk that is not the last.
    token: int | None
    #: `[vocab_size]`, where the request wants them.
    logits: torch.Tensor | None

    @property
    def is_current(self) -> bool:
        """False if the request has ended, or lost its pages, since the pass began."""
        return self.allocation == self.request.allocation and self.request.blocks is not None


@dataclass(frozen=True)
class Device:
    """What the passes of one rank run on."""

    model: ForwardModel
    pool: KvPool
    #: Ranks of a process take turns by it.
    lock: FairLock
    #: The clock of another GPU; None: a pass takes what it takes.
    timer: PassTimer | None = None


class ForwardPass:
    """The forward passes of one rank; ranks of a process take turns by `lock`."""

    def __init__(
        self,
        config: EngineConfig,
        device: Device,
        connector: ConnectorManager | None,
        stream: Any,
    ) -> None:
        self._config = config
        self._model = device.model
        self._pool = device.pool
        self._connector = connector
        self._worker = connector.worker if connector is not None else None
        self._lock = device.lock
        self._stream = stream
        self._timer = device.timer
        self._after = connector.worker.register_forward_pass_callable() if connector is not None else None

    def run(self, batch: Batch) -> list[Computed]:
        """Run one pass; results in the order of `batch.requests`. Exceptions of layer hooks, model and wait_for_save
        pass through."""
        segments = [_context_segment(request) for request in batch.context]
        groups = [RowGroup((segment,)) for segment in segments]
        decodes = [_decode_segment(request) for request in batch.generation]
        if self._config.batch_invariant_decode:
            groups.extend(RowGroup((segment,)) for segment in decodes)
        elif decodes:
            groups.append(RowGroup(tuple(decodes)))
        hooked = self._worker if batch.context or self._config.layer_hooks_in_decode else None
        if self._timer is not None:
            self._timer.begin()
        # Layer hooks run in inference mode, as in TensorRT-LLM; the connector's other callbacks get ordinary tensors.
        with self._lock, torch.inference_mode():
            logits = self._model.forward(
                self._pool,
                groups,
                before_layer=(lambda layer: hooked.wait_for_layer_load(layer, self._stream)) if hooked else None,
                after_layer=(lambda layer: hooked.save_kv_layer(layer, self._stream)) if hooked else None,
            )
        if self._timer is not None:
            self._take_its_time(self._timer, segments + decodes)
        if self._after is not None:
            self._after()
        if self._worker is not None:
            self._worker.wait_for_save(self._stream)
        rows = [row for group in logits for row in group]
        ends = [segment.start + len(segment.tokens) for segment in segments + decodes]
        return [_computed(*part) for part in zip(batch.requests, ends, rows, strict=True)]

    def _take_its_time(self, timer: PassTimer, segments: list[Segment]) -> None:
        """Wait until the pass has ended on the timer's GPU. With a connector each full block is saved once, as soon as
        it is computed."""
        if self._connector is None:
            timer.finish(segments, 0.0)
            return
        timer.finish(segments, self._connector.loaded_at)
        size = self._config.tokens_per_block
        full = sum((one.start + len(one.tokens)) // size - one.start // size for one in segments)
        timer.bus.copy(full * size)


def warm_up(model: ForwardModel, pool: KvPool, max_tokens: int) -> None:
    """Run a pass over pages for up to `max_tokens` tokens, as TensorRT-LLM does before a connector is attached: no hook
    sees it, and what it leaves in the pages belongs to no request."""
    count = min(max_tokens, pool.num_blocks * pool.tokens_per_block)
    tokens = [0] * count
    slots = [range(-(-count // pool.tokens_per_block)) for _ in pool.groups]
    with torch.inference_mode():
        model.forward(
            pool, [RowGroup((Segment(tokens, 0, slots, wants_logits=False, scope="warm-up", history=tokens),))]
        )


def _computed(request: LlmRequest, end: int, row: torch.Tensor | None) -> Computed:
    token = None if row is None else request.sampler.choose(row)
    wanted = row if request.options.sampling.return_generation_logits else None
    return Computed(request, request.allocation, end, token, wanted)


def _context_segment(request: LlmRequest) -> Segment:
    assert request.blocks is not None
    start = request.context_current_position
    end = start + request.context_chunk_size
    return Segment(
        tokens=request.tokens[start:end],
        start=start,
        slots=request.blocks.by_group,
        wants_logits=request.is_last_context_chunk,
        lora=request.lora,
        owner=request.request_id,
        scope=request.blocks.scope,
        history=request.tokens[:end],
    )


def _decode_segment(request: LlmRequest) -> Segment:
    assert request.blocks is not None
    tokens = request.device_tokens
    return Segment(
        tokens=tokens[-1:],
        start=len(tokens) - 1,
        slots=request.blocks.by_group,
        lora=request.lora,
        owner=request.request_id,
        scope=request.blocks.scope,
        history=tokens,
    )
