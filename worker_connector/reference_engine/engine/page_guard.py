"""Detects who wrote which page: a copy of the pool follows every legal write, so that any other write is seen.

Legal are the engine's own poisoning and copying, the forward pass on the pages of its batch, and the connector on the
pages between what the device had and what was honoured: in `start_load_kv` for requests of the batch in their first
chunk, at any time for requests that wait for an asynchronous load, and then up to their last page, because the runtime
may honour less of a load than has begun. A page whose request has gone belongs to nobody: a transfer that still writes
it is a fault.

The guard is a `Probe` of an executor whose model is a `ShadowModel`; faults go to the model's list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from worker_connector.reference_engine.engine.connector_manager import Batch
from worker_connector.reference_engine.engine.request import LlmRequest, RequestState
from worker_connector.reference_engine.models.kv_pool import KvPool
from worker_connector.reference_engine.models.shadow_model import PageFault, ShadowModel, page_words

_PARKED = RequestState.DISAGG_GENERATION_TRANS_IN_PROGRESS


#: A page as layer group and slot.
Page = tuple[int, int]


class PageGuard:
    """Not thread-safe. `requests` lists the executor's requests that may have pages."""

    def __init__(self, pool: KvPool, model: ShadowModel, requests: Callable[[], Sequence[LlmRequest]]) -> None:
        self._size = pool.tokens_per_block
        self._words = [page_words(pages, pool.tokens_per_block) for pages in pool.groups]
        self._copies = [words.copy() for words in self._words]
        self._model = model
        self._requests = requests
        self._loads: set[Page] = set()
        pool.on_write = self._written

    def __call__(self, stage: str, batch: Batch) -> None:
        """Compares pages at each stage of an iteration, as `Probe` (`engine/executor.py`) names the stages."""
        if stage == "allocated":
            self.look("between iterations")
            for request in batch.context:
                if request.is_first_context_chunk:
                    self._loads |= self._pages(request, request.device_reused_tokens, request.prepopulated_prompt_len)
        elif stage == "loaded":
            self.look("in start_load_kv")
        elif stage == "computed":
            written: set[Page] = set()
            for request in batch.context:
                start = request.context_current_position
                written |= self._pages(request, start, start + request.context_chunk_size)
            for request in batch.generation:
                position = len(request.device_tokens) - 1
                written |= self._pages(request, position, position + 1)
            self.look("in the forward pass", written)
        elif stage == "failed":
            self._follow()
        elif stage == "updated":
            self.look("behind the forward pass")
            self._loads = self._parked()  # get_finished may end a load and make its last write
        elif stage == "polled":
            self.look("in get_finished")
            self._loads = set()

    def look(self, when: str, written: set[Page] | None = None) -> None:
        """Record every page that changed though nobody may write it, and follow all changes."""
        changed = {
            (group, slot)
            for group, (words, copy) in enumerate(zip(self._words, self._copies, strict=True))
            for slot in np.flatnonzero((words != copy).reshape(len(words), -1).any(axis=1)).tolist()
        }
        if not changed:
            return
        allowed = self._loads | self._parked() | (written or set())
        for group, slot in sorted(changed - allowed):
            self._model.faults.append(PageFault(f"written {when} by somebody who may not", group, slot))
        self._follow()

    def _parked(self) -> set[Page]:
        parked = [request for request in self._requests() if request.state is _PARKED]
        return {page for request in parked for page in self._pages(request, request.device_reused_tokens, None)}

    def _pages(self, request: LlmRequest, start: int, end: int | None) -> set[Page]:
        """Pages of the tokens [start, end); end None: to the last one."""
        if request.blocks is None or (end is not None and end <= start):
            return set()
        last = None if end is None else -(-end // self._size)
        return {
            (group, slot)
            for group, slots in enumerate(request.blocks.by_group)
            for slot in slots[start // self._size : last]
        }

    def _written(self, group: int, slots: Sequence[int]) -> None:
        self._copies[group][list(slots)] = self._words[group][list(slots)]

    def _follow(self) -> None:
        for words, copy in zip(self._words, self._copies, strict=True):
            np.copyto(copy, words)
