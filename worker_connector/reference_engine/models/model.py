"""Llama forward pass in float32, over a paged KV pool on the same device.

The unit of work is a `RowGroup`: rows that share each matrix product. A prefill chunk is a group of its own, so its
result cannot depend on what else is in the batch; decodes share one group. Attention runs per segment, over keys and
values that are read back from the pool, also for the tokens just computed. So a request sees the same numbers whether
its context was computed in this process or loaded into the pages by someone else.

Nothing here knows about requests, scheduling or connectors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from worker_connector.reference_engine.models.kv_pool import GroupPages, KvPool, to_device
from worker_connector.reference_engine.models.model_config import LlamaConfig
from worker_connector.reference_engine.models.weights import LayerWeights, LlamaWeights, LoraWeights

LayerHook = Callable[[int], None]


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one sequence: positions [start, start + len(tokens)) on the sequence's page slots."""

    tokens: Sequence[int]
    start: int
    #: Page slots from the sequence's block 0 on, by layer group; must cover the last token. -1: no page, and none read.
    slots: Sequence[Sequence[int]]
    #: False for a prefill chunk that is not the last: no logits are computed.
    wants_logits: bool = True
    lora: LoraWeights | None = None
    #: For a model that knows what every page must hold (`models/shadow_model.py`): the request whose sequence it is,
    #: what besides tokens decides its KV, and all its tokens up to the last one computed here.
    owner: int = 0
    scope: Hashable = None
    history: Sequence[int] = ()


@dataclass(frozen=True)
class RowGroup:
    """Segments whose rows share each matrix product."""

    segments: tuple[Segment, ...]


@dataclass
class _Addresses:
    """What is the same in every layer of a layer group: keys are the first `length` tokens of the pages at
    `page_rows`."""

    page_rows: torch.Tensor
    length: int
    token_rows: torch.Tensor
    mask: torch.Tensor | None
    is_causal: bool


@dataclass
class _SegmentPlan:
    rows: slice
    by_group: list[_Addresses]
    lora: LoraWeights | None


@dataclass
class _GroupPlan:
    hidden: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    segments: list[_SegmentPlan]
    logit_rows: list[int]


class ForwardModel(Protocol):
    """What an executor needs of a model; `LlamaModel.forward` says what the arguments are."""

    config: LlamaConfig

    def forward(
        self,
        pool: KvPool,
        groups: Sequence[RowGroup],
        before_layer: LayerHook | None = None,
        after_layer: LayerHook | None = None,
    ) -> list[list[torch.Tensor | None]]:
        """Must write the KV of all groups into `pool` and return their logits."""
        ...


class LlamaModel:
    """Weights plus rotary tables; stateless between calls and safe to share between threads."""

    def __init__(self, config: LlamaConfig, weights: LlamaWeights) -> None:
        self.config = config
        self.weights = weights
        half = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float()
        inverse_frequency = 1.0 / (config.rope_theta ** (half / config.head_dim))
        angles = torch.outer(torch.arange(config.max_position_embeddings).float(), inverse_frequency)
        angles = torch.cat((angles, angles), dim=-1)
        self._device = weights.embedding.device
        self._cos, self._sin = angles.cos().to(self._device), angles.sin().to(self._device)

    def forward(
        self,
        pool: KvPool,
        groups: Sequence[RowGroup],
        before_layer: LayerHook | None = None,
        after_layer: LayerHook | None = None,
    ) -> list[list[torch.Tensor | None]]:
        """Compute all groups, layer by layer, writing KV into `pool`.

        Returns per group and segment the logits `[vocab_size]` after the segment's last token, or None where the
        segment does not want them. The hooks are called once a layer, around the layer's work for the whole batch.
        """
        plans = [self._plan(pool, group) for group in groups]
        for index, layer in enumerate(self.weights.layers):
            if before_layer is not None:
                before_layer(index)
            for plan in plans:
                self._run_layer(pool, index, layer, plan)
            if after_layer is not None:
                after_layer(index)
        return [self._logits(group, plan) for group, plan in zip(groups, plans, strict=True)]

    def _plan(self, pool: KvPool, group: RowGroup) -> _GroupPlan:
        segments, positions, logit_rows, row = [], [], [], 0
        for segment in group.segments:
            count = len(segment.tokens)
            by_group = [
                _addresses(pages, segment.start, segment.start + count, slots, pool.tokens_per_block)
                for pages, slots in zip(pool.groups, segment.slots, strict=True)
            ]
            segments.append(_SegmentPlan(slice(row, row + count), by_group, segment.lora))
            positions.append(torch.arange(segment.start, segment.start + count))
            row += count
            logit_rows.append(row - 1)
        tokens = torch.tensor([token for segment in group.segments for token in segment.tokens])
        where = to_device(torch.cat(positions), self._device)
        return _GroupPlan(
            hidden=self.weights.embedding[to_device(tokens, self._device)],
            cos=self._cos[where].unsqueeze(1),
            sin=self._sin[where].unsqueeze(1),
            segments=segments,
            logit_rows=logit_rows,
        )

    def _run_layer(self, pool: KvPool, index: int, layer: LayerWeights, plan: _GroupPlan) -> None:
        config = self.config
        rows = plan.hidden.shape[0]
        q_size, kv_size = config.num_heads * config.head_dim, config.kv_elements_per_token

        normed = F.rms_norm(plan.hidden, (config.hidden_size,), layer.attention_norm, config.rms_norm_eps)
        query, kv = F.linear(normed, layer.qkv).split((q_size, 2 * kv_size), dim=-1)
        for segment in plan.segments:
            if segment.lora is not None:
                down = F.linear(normed[segment.rows], segment.lora.down[index])
                kv[segment.rows] += F.linear(down, segment.lora.up[index])
        key, value = kv.split((kv_size, kv_size), dim=-1)
        query = _rotate(query.view(rows, config.num_heads, config.head_dim), plan.cos, plan.sin)
        key = _rotate(key.view(rows, config.num_kv_heads, config.head_dim), plan.cos, plan.sin).view(rows, kv_size)

        attended = torch.empty(rows, q_size, device=self._device)
        pages, own_index = pool.of_layer(index)
        for segment in plan.segments:
            where = segment.by_group[pages.group.group_id]
            pages.write(own_index, where.token_rows, key[segment.rows], value[segment.rows])
            keys, values = pages.read(own_index, where.page_rows, where.length)
            output = F.scaled_dot_product_attention(
                query[segment.rows].transpose(0, 1).unsqueeze(0),
                keys,
                values,
                attn_mask=where.mask,
                is_causal=where.is_causal,
                enable_gqa=True,
            )
            attended[segment.rows] = output.squeeze(0).transpose(0, 1).reshape(-1, q_size)
        hidden = plan.hidden + F.linear(attended, layer.attention_output)

        normed = F.rms_norm(hidden, (config.hidden_size,), layer.mlp_norm, config.rms_norm_eps)
        gate, up = F.linear(normed, layer.gate_up).split(config.intermediate_size, dim=-1)
        plan.hidden = hidden + F.linear(F.silu(gate) * up, layer.down)

    def _logits(self, group: RowGroup, plan: _GroupPlan) -> list[torch.Tensor | None]:
        wanted = [row for segment, row in zip(group.segments, plan.logit_rows, strict=True) if segment.wants_logits]
        if not wanted:
            return [None] * len(group.segments)
        rows_wanted = to_device(torch.tensor(wanted), self._device)
        last = F.rms_norm(
            plan.hidden[rows_wanted], (self.config.hidden_size,), self.weights.norm, self.config.rms_norm_eps
        )
        rows = iter(F.linear(last, self.weights.lm_head))
        return [next(rows) if segment.wants_logits else None for segment in group.segments]


def _addresses(pages: GroupPages, start: int, end: int, slots: Sequence[int], tokens_per_block: int) -> _Addresses:
    """For the tokens [start, end) of a sequence on `slots`."""
    group, device = pages.group, pages.tensor.device
    used = slots[: -(-end // tokens_per_block)]
    token_rows = pages.token_rows(used, start, end)
    if group.window is None:
        # Square causal attention needs no mask; with context before the chunk, torch would align it top-left.
        mask = _causal_mask(start, end, device) if end - start > 1 and start > 0 else None
        return _Addresses(pages.page_rows(used), end, token_rows, mask, is_causal=end - start > 1 and start == 0)
    stale = group.stale_blocks(start, tokens_per_block)
    live = [block for block in range(len(used)) if block not in stale]
    keys = torch.cat([torch.arange(block * tokens_per_block, (block + 1) * tokens_per_block) for block in live])
    keys = keys[keys < end]
    queries = torch.arange(start, end).unsqueeze(1)
    visible = (keys <= queries) & ((keys > queries - group.window) | (keys < group.sink_tokens))
    mask = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))
    rows = pages.page_rows([used[block] for block in live])
    return _Addresses(rows, len(keys), token_rows, to_device(mask, device), is_causal=False)


def _causal_mask(start: int, end: int, device: torch.device) -> torch.Tensor:
    """Additive mask `[end - start, end]`: the row of position p sees keys 0..p."""
    visible = torch.arange(end, device=device).unsqueeze(0) <= torch.arange(start, end, device=device).unsqueeze(1)
    return torch.zeros(end - start, end, device=device).masked_fill_(~visible, float("-inf"))


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of `[rows, heads, head_dim]`, pairing element i with i + head_dim / 2."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin
