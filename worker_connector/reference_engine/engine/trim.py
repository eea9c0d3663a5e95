"""Shortens a batch whose tokens exceed the budget after the connector was asked (NVIDIA/TensorRT-LLM#13318)."""

from __future__ import annotations

from worker_connector.reference_engine.engine.connector_manager import Batch
from worker_connector.reference_engine.engine.request import LlmRequest


def fit_token_budget(batch: Batch, budget: int, tokens_per_block: int, *, defer: bool) -> None:
    """Shed context tokens from the end of the batch until it fits; no chunk but a prompt's last may end inside a block.

    A chunk keeps at least the tokens up to its first block boundary. With `defer` a chunk that is still too long leaves
    the batch, and with it all prefills behind it; without `defer` the batch stays over the budget, as newer versions
    let it.
    """
    excess = len(batch.generation) + sum(request.context_chunk_size for request in batch.context) - budget
    for request in reversed(list(batch.context)):
        if excess <= 0:
            return
        shed = _shrink(request, excess, tokens_per_block)
        if defer and shed < excess and len(batch.requests) > 1:
            shed += request.context_chunk_size
            batch.context.remove(request)
        excess -= shed


def _shrink(request: LlmRequest, excess: int, tokens_per_block: int) -> int:
    """Shorten the chunk by at least `excess` tokens if possible; returns the tokens that it lost."""
    start, size = request.context_current_position, request.context_chunk_size
    end = (start + max(size - excess, 0)) // tokens_per_block * tokens_per_block
    end = max(end, (start // tokens_per_block + 1) * tokens_per_block)
    if end >= start + size:
        return 0
    request.context_chunk_size = end - start
    return size - request.context_chunk_size
