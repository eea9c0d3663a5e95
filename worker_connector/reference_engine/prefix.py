"""Serving a connector's prefix: the query, how much of the offer is honoured, and the allocation report.

Two call orders, both TensorRT-LLM's. V2 goes request by request (query, honour, allocate, report). V1 asks for every
request of the batch before it reports the first allocation, and gives all pages of the prompt at once.
"""

from __future__ import annotations

from worker_connector.reference_engine.block_manager import BlockManager
from worker_connector.reference_engine.config import EngineConfig
from worker_connector.reference_engine.connector_manager import Batch, ConnectorManager
from worker_connector.reference_engine.request import LlmRequest
from worker_connector.reference_engine.scheduler import chunk_end


def prepare_pages(batch: Batch, blocks: BlockManager, connector: ConnectorManager | None, config: EngineConfig) -> None:
    """Give every request of the batch the pages of its coming tokens, after asking the connector about new ones."""
    fresh = [request for request in batch.context if _is_unasked(request, connector)]
    if config.kv_cache_manager == "v1":
        for request in fresh:
            if connector is not None:
                _serve_v1(request, connector, config)
            _grow(request, blocks, request.prompt_len)
        _report_allocations(fresh, connector)
    else:
        for request in fresh:
            if connector is not None:
                _serve_v2(request, connector, config)
            _grow(request, blocks, request.context_current_position + request.context_chunk_size)
            _report_allocations([request], connector)
    for request in batch.context:
        _grow(request, blocks, request.context_current_position + request.context_chunk_size)
    for request in batch.generation:
        _grow(request, blocks, len(request.tokens))


def _is_unasked(request: LlmRequest, connector: ConnectorManager | None) -> bool:
    if request.py_connector_allocation_reported or not request.is_first_context_chunk:
        return False
    return connector is None or connector.should_ask(request)


def _report_allocations(requests: list[LlmRequest], connector: ConnectorManager | None) -> None:
    for request in requests:
        request.py_connector_allocation_reported = True
        if connector is not None:
            assert request.blocks is not None
            connector.update_state_after_alloc(request, request.blocks.slots)


def _grow(request: LlmRequest, blocks: BlockManager, num_tokens: int) -> None:
    assert request.blocks is not None
    blocks.grow(request.blocks, num_tokens)


def _serve_v1(request: LlmRequest, connector: ConnectorManager, config: EngineConfig) -> None:
    """The whole offer is honoured, since all pages of the prompt are allocated in the same call."""
    local_end = request.context_current_position
    offered, load_async = connector.query(request, local_end)
    if local_end + offered >= request.prompt_len:
        raise RuntimeError(
            f"request {request.request_id}: the connector offers {offered} tokens after {local_end} of a prompt of "
            f"{request.prompt_len}; the prepopulated length must stay below the prompt's"
        )
    connector.commit(request, offered, load_async)
    end = chunk_end(local_end + offered, request.context_chunk_size, request.prompt_len, config.tokens_per_block)
    _populate(request, local_end + offered, end)


def _serve_v2(request: LlmRequest, connector: ConnectorManager, config: EngineConfig) -> None:
    """Honour a prefix of the offer: never the last prompt token.

    An offer that ends inside the scheduled chunk shortens the chunk; one that goes beyond moves the chunk behind it,
    which takes pages that the admission has reserved.
    """
    local_end = request.context_current_position
    scheduled_end = local_end + request.context_chunk_size
    offered, load_async = connector.query(request, local_end)
    position = min(local_end + offered, request.prompt_len - 1)
    if position < scheduled_end:
        end = scheduled_end
    else:
        end = chunk_end(position, request.context_chunk_size, request.prompt_len, config.tokens_per_block)
    connector.commit(request, position - local_end, load_async)
    _populate(request, position, end)


def _populate(request: LlmRequest, position: int, end: int) -> None:
    request.prepopulated_prompt_len = request.context_current_position = position
    request.context_chunk_size = end - position
    request.py_connector_served_position = position
