"""Chooses which requests run in the next iteration, and how much of each prompt.

Continuous batching with chunked prefill under one token budget: running decodes come first, then prefills in order of
arrival, then admissions. Admission is GUARANTEED_NO_EVICT: a request enters when all pages it can ever need are
reserved, and the first request that does not fit makes the later ones wait. Chunks are sized as if a connector served
nothing.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque

from worker_connector.reference_engine.engine.block_manager import BlockManager
from worker_connector.reference_engine.engine.config import EngineConfig
from worker_connector.reference_engine.engine.connector_manager import Batch
from worker_connector.reference_engine.engine.request import LlmRequest, RequestState
from worker_connector.reference_engine.engine.reuse import ReuseScope


class BatchScheduler:
    """Waiting and running requests of one rank. The engine thread owns it; `num_waiting` may be read by others."""

    def __init__(self, config: EngineConfig, blocks: BlockManager) -> None:
        self._config = config
        self._blocks = blocks
        self._waiting: deque[LlmRequest] = deque()
        #: Admitted requests in order of admission, including those that wait for an asynchronous load.
        self.running: list[LlmRequest] = []

    @property
    def num_waiting(self) -> int:
        """Requests that are not admitted."""
        return len(self._waiting)

    @property
    def requests(self) -> list[LlmRequest]:
        """Everything that has not been removed."""
        return self.running + list(self._waiting)

    def add(self, request: LlmRequest) -> None:
        """Queue a new request behind all that wait."""
        self._waiting.append(request)

    def put_back(self, request: LlmRequest) -> None:
        """Let a running request wait again, before all others; it must have no pages."""
        self.running.remove(request)
        self._waiting.appendleft(request)

    def remove(self, request: LlmRequest) -> None:
        """Forget a request, wherever it is; the caller takes care of its pages."""
        if request in self.running:
            self.running.remove(request)
        elif request in self._waiting:
            self._waiting.remove(request)

    def schedule(self) -> Batch:
        """The next batch, with `context_chunk_size` set on its prefills and new requests admitted."""
        batch = Batch()
        budget = self._config.max_num_tokens
        for request in self.running:
            if request.state is RequestState.GENERATION_IN_PROGRESS:
                batch.generation.append(request)
                budget -= 1
        for request in self.running:
            if request.state is RequestState.CONTEXT_INIT:
                budget -= self._schedule_chunk(request, budget, batch)
        while self._waiting and budget > 0 and len(self.running) < self._config.max_batch_size:
            request = self._waiting[0]
            if not self._admit(request):
                break
            self._waiting.popleft()
            self.running.append(request)
            budget -= self._schedule_chunk(request, budget, batch)
        return batch

    def _schedule_chunk(self, request: LlmRequest, budget: int, batch: Batch) -> int:
        """Add the request's next chunk to the batch and return its tokens; 0 if the budget allows none."""
        start = request.context_current_position
        end = chunk_end(start, budget, request.prompt_len, self._config.tokens_per_block)
        if end <= start:
            return 0
        request.context_chunk_size = end - start
        batch.context.append(request)
        return end - start

    def _admit(self, request: LlmRequest) -> bool:
        options = request.options
        request.blocks = self._blocks.open(
            request.tokens,
            reuse_scope(request),
            request.orig_prompt_len + options.max_new_tokens,
            options.retention_priority,
        )
        if request.blocks is None:
            return False
        reused = request.blocks.reused_tokens
        request.device_reused_tokens = reused
        request.prepopulated_prompt_len = request.context_current_position = reused
        return True


def chunk_end(start: int, budget: int, prompt_len: int, tokens_per_block: int) -> int:
    """Where a chunk of at most `budget` tokens from `start` ends: the prompt's end, else a block boundary."""
    if start + budget >= prompt_len:
        return prompt_len
    return (start + budget) // tokens_per_block * tokens_per_block


def reuse_scope(request: LlmRequest) -> ReuseScope:
    """What decides, besides tokens, which cached KV the request may share."""
    digest = b""
    if request.multimodal_hashes:
        words = array("q", [word for item in request.multimodal_hashes for word in [len(item), *item]])
        digest = hashlib.blake2b(words.tobytes(), digest_size=16).digest()
    return ReuseScope(cache_salt=request.cache_salt, lora_task_id=request.lora_task_id, multimodal=digest)
