"""Serving a connector's prefix: the query, how much of the offer is honoured, and the allocation report.

Two call orders, both TensorRT-LLM's. V2 goes request by request (query, honour, allocate, report). V1 asks for every
request of the batch before it reports the first allocation, and gives all pages of the prompt at once. Afterwards a
batch may turn out to have more tokens than its budget, and is trimmed.
"""

from __future__ import annotations

from worker_connector.reference_engine.engine.behaviours import Dice
from worker_connector.reference_engine.engine.block_manager import BlockManager
from worker_connector.reference_engine.engine.config import EngineConfig
from worker_connector.reference_engine.engine.connector_manager import Batch, ConnectorManager
from worker_connector.reference_engine.engine.request import LlmRequest
from worker_connector.reference_engine.engine.scheduler import chunk_end
from worker_connector.reference_engine.engine.trim import fit_token_budget


class PagePreparation:
    """Finds pages for a batch, and asks the connector about the batch's new requests before."""

    def __init__(
        self, blocks: BlockManager, connector: ConnectorManager | None, config: EngineConfig, dice: Dice
    ) -> None:
        self._blocks = blocks
        self._connector = connector
        self._config = config
        self._behaviours = config.behaviours
        self._dice = dice

    def prepare(self, batch: Batch) -> None:
        """Give every request of the batch the pages of its coming tokens."""
        for request in batch.requests:
            assert request.blocks is not None
            request.blocks_before = request.blocks.num_blocks
        fresh = [request for request in batch.context if self._is_unasked(request)]
        if self._config.kv_cache_manager == "v1":
            for request in fresh:
                if self._connector is not None:
                    self._serve_v1(request, self._connector)
                self._grow(request, request.prompt_len, request.context_current_position)
            self._report_allocations(fresh)
        else:
            for request in fresh:
                if self._connector is not None:
                    self._serve_v2(request, self._connector)
                self._grow_chunk(request)
                self._report_allocations([request])
        for request in batch.context:
            self._grow_chunk(request)
        for request in batch.generation:
            self._grow(request, len(request.device_tokens), len(request.device_tokens) - 1)

    def trim(self, batch: Batch) -> None:
        """Apply the token-budget trim, if this iteration has one. Requests with an async load compute nothing in it."""
        mode = self._behaviours.token_budget_trim
        if mode == "off" or not self._dice.hits("trim", self._behaviours.trim_rate):
            return
        loading = [r for r in batch.context if self._connector is not None and self._connector.is_loading(r)]
        computing = Batch([r for r in batch.context if r not in loading], batch.generation)
        tokens = len(computing.generation) + sum(request.context_chunk_size for request in computing.context)
        if computing.context:
            budget = self._dice.below("trim", tokens)
            fit_token_budget(computing, budget, self._config.tokens_per_block, defer=mode == "defer")
            batch.context = [r for r in batch.context if r in loading or r in computing.context]

    def _is_unasked(self, request: LlmRequest) -> bool:
        if request.py_connector_allocation_reported or not request.is_first_context_chunk:
            return False
        return self._connector is None or self._connector.should_ask(request)

    def _report_allocations(self, requests: list[LlmRequest]) -> None:
        for request in requests:
            request.py_connector_allocation_reported = True
            if self._connector is not None:
                assert request.blocks is not None
                self._connector.update_state_after_alloc(request, request.blocks.by_group)

    def _grow_chunk(self, request: LlmRequest) -> None:
        start = request.context_current_position
        self._grow(request, start + request.context_chunk_size, start)

    def _grow(self, request: LlmRequest, num_tokens: int, history: int) -> None:
        assert request.blocks is not None
        self._blocks.grow(request.blocks, num_tokens, history)

    def _serve_v1(self, request: LlmRequest, connector: ConnectorManager) -> None:
        """The whole offer is honoured, since all pages of the prompt are allocated in the same call."""
        local_end = request.context_current_position
        offered, load_async = connector.query(request, local_end)
        if local_end + offered >= request.prompt_len:
            raise RuntimeError(
                f"request {request.request_id}: the connector offers {offered} tokens after {local_end} of a prompt of "
                f"{request.prompt_len}; the prepopulated length must stay below the prompt's"
            )
        connector.commit(request, offered, offered, load_async)
        size = self._config.tokens_per_block
        end = chunk_end(local_end + offered, request.context_chunk_size, request.prompt_len, size)
        _populate(request, local_end + offered, end)

    def _serve_v2(self, request: LlmRequest, connector: ConnectorManager) -> None:
        """Honour a prefix of the offer, never the last prompt token.

        An offer that ends inside the scheduled chunk shortens the chunk. One that goes beyond moves the chunk behind
        it, for which the allocation grows. If that growth fails, whole blocks of the pages that the chunk has are
        honoured, as many as leave the chunk a token, or nothing (kv_cache_manager_v2.py,
        `_apply_connector_matched_prefix`). An overtaken offer was asked for when less was cached.
        """
        size = self._config.tokens_per_block
        local_end = request.context_current_position
        scheduled_end = local_end + request.context_chunk_size
        caught_up = local_end
        if local_end >= size and self._dice.hits("overtaken_offer", self._behaviours.overtaken_offer_rate):
            local_end = self._dice.below("overtaken_offer", local_end // size) * size
        offered, load_async = connector.query(request, local_end)
        if offered and caught_up > local_end:
            connector.trim_offer(request, local_end, min(caught_up, local_end + offered))
        offered = max(local_end + offered - caught_up, 0)
        position, end = min(caught_up + offered, request.prompt_len - 1), scheduled_end
        if position >= scheduled_end:
            if self._dice.hits("failed_grow", self._behaviours.failed_grow_rate):
                position = max((scheduled_end - 1) // size * size, caught_up)
            else:
                end = chunk_end(position, request.context_chunk_size, request.prompt_len, size)
        connector.commit(request, offered, position - caught_up, load_async)
        _populate(request, position, end)


def _populate(request: LlmRequest, position: int, end: int) -> None:
    request.prepopulated_prompt_len = request.context_current_position = position
    request.context_chunk_size = end - position
    request.py_connector_served_position = position
