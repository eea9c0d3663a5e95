"""Connectors for driving the engine: one that records its calls, one that keeps the bytes it saved."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from worker_connector.engine_api.engine import (
    KvCacheConnectorScheduler,
    KvCacheConnectorWorker,
    SchedulerOutput,
)
from worker_connector.reference_engine import ConnectorSpec

Offer = tuple[int, bool]


def offer_nothing(request: Any, num_computed_tokens: int) -> Offer:
    return 0, False


@dataclass
class Recorder:
    """What the engine called, in order, over all instances of a recording connector."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)
    outputs: list[SchedulerOutput] = field(default_factory=list)
    offer: Callable[[Any, int], Offer] = offer_nothing
    #: Answer of request_finished.
    saves_async: bool = False
    #: Ids that get_finished may name; None: all, at once.
    release: set[int] | None = None
    #: Callback name -> exception to raise.
    failures: dict[str, Exception] = field(default_factory=dict)
    #: What `take_failed_load_requests` and `take_failed_async_load_requests` name next.
    failed_loads: set[int] = field(default_factory=set)
    failed_parked_loads: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, name: str, *details: Any) -> None:
        with self.lock:
            self.calls.append((name, *details))
        if name in self.failures:
            raise self.failures[name]

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    def count(self, name: str) -> int:
        return self.names().count(name)


def recording_connector(recorder: Recorder, *, attention_dp: bool = True) -> ConnectorSpec:
    """A connector that moves no bytes; `recorder` decides what it answers."""

    class Scheduler(KvCacheConnectorScheduler):
        supports_attention_dp = attention_dp

        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Offer:
            recorder.note("query", request.request_id, num_computed_tokens)
            return recorder.offer(request, num_computed_tokens)

        def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
            recorder.note("alloc", request.request_id, list(block_ids))

        def build_connector_meta(self, scheduler_output: SchedulerOutput) -> object:
            recorder.outputs.append(scheduler_output)
            recorder.note("meta")
            return len(recorder.outputs)

        def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
            recorder.note("request_finished", request.request_id, list(cache_block_ids))
            return recorder.saves_async

        def wait_for_initialization(self) -> None:
            recorder.note("wait_for_initialization")

    class Worker(KvCacheConnectorWorker):
        supports_attention_dp = attention_dp

        def __init__(self, llm_args: Any) -> None:
            super().__init__(llm_args)
            self._saving: set[int] = set()
            self._loading: set[int] = set()

        def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
            recorder.note("register", tuple(kv_cache_tensor.shape))

        def start_load_kv(self, stream: Any) -> None:
            recorder.note("start_load", self.get_connector_meta())

        def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
            recorder.note("wait_layer", layer_idx)

        def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
            recorder.note("save_layer", layer_idx)

        def wait_for_save(self, stream: Any) -> None:
            recorder.note("wait_for_save")

        def get_finished(
            self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
        ) -> tuple[list[int], list[int]]:
            recorder.note("get_finished", finished_gen_req_ids, started_loading_req_ids)
            self._saving.update(finished_gen_req_ids)
            self._loading.update(started_loading_req_ids)
            done = [
                {request_id for request_id in ids if recorder.release is None or request_id in recorder.release}
                for ids in (self._saving, self._loading)
            ]
            self._saving -= done[0]
            self._loading -= done[1]
            return list(done[0]), list(done[1])

    return ConnectorSpec(Scheduler, Worker)


def with_optional_hooks(recorder: Recorder) -> ConnectorSpec:
    """`recording_connector` with the hooks of the Mooncake store's branch."""
    base = recording_connector(recorder)

    class Scheduler(base.scheduler):  # type: ignore[misc, name-defined]
        def cancel_load(self, request: Any, start: int, end: int) -> None:
            recorder.note("cancel_load", request.request_id, start, end)

        def request_reset(self, request: Any) -> None:
            recorder.note("request_reset", request.request_id)

    class Worker(base.worker):  # type: ignore[misc, name-defined]
        def take_failed_load_requests(self) -> set[int]:
            recorder.note("take_failed")
            failed, recorder.failed_loads = recorder.failed_loads, set()
            return failed

        def take_failed_async_load_requests(self) -> set[int]:
            recorder.note("take_failed_async")
            failed, recorder.failed_parked_loads = recorder.failed_parked_loads, set()
            return failed

        def drop_bound_saves(self, request_ids: set[int]) -> None:
            recorder.note("drop_bound_saves", sorted(request_ids))

    return ConnectorSpec(Scheduler, Worker)


BlockKey = tuple[str | None, int | None, tuple[int, ...]]


@dataclass
class ByteStore:
    """Block bytes by (salt, LoRA, all tokens up to the block's end): the simplest store that cannot mix two up."""

    pages: dict[BlockKey, torch.Tensor] = field(default_factory=dict)
    loaded_blocks: int = 0
    #: Cap on an offer, in tokens; None: everything there is.
    offer_limit: int | None = None
    #: Load asynchronously: the copy happens a few polls after the engine parked the request.
    load_async: bool = False
    #: Copies that were planned for parked requests, by request id.
    planned: dict[int, list[tuple[BlockKey, int]]] = field(default_factory=dict)


@dataclass
class _Known:
    tokens: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    saved: int = 0
    salt: str | None = None
    lora: int | None = None


@dataclass(frozen=True)
class _Copies:
    load: tuple[tuple[BlockKey, int], ...]
    save: tuple[tuple[BlockKey, int], ...]


def storing_connector(store: ByteStore) -> ConnectorSpec:
    """A connector that saves each full block once computed and offers what it has, block aligned."""

    def key(known: _Known, block: int, size: int) -> BlockKey:
        return known.salt, known.lora, tuple(known.tokens[: (block + 1) * size])

    class Scheduler(KvCacheConnectorScheduler):
        supports_attention_dp = True

        def __init__(self, llm_args: Any) -> None:
            super().__init__(llm_args)
            self._size: int = llm_args.kv_cache_config.tokens_per_block
            self._known: dict[int, _Known] = {}
            self._offered: dict[int, int] = {}

        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Offer:
            known = _Known(tokens=request.get_tokens(0), salt=request.cache_salt, lora=request.lora_task_id)
            self._known[request.request_id] = _Known(salt=request.cache_salt, lora=request.lora_task_id)
            first = num_computed_tokens // self._size
            end = first
            while end < (request.prompt_len - 1) // self._size and key(known, end, self._size) in store.pages:
                end += 1
            offer = (end - first) * self._size
            if store.offer_limit is not None:
                offer = min(offer, store.offer_limit)
            return offer, store.load_async and offer > 0

        def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
            served = request.py_num_connector_matched_tokens
            if not store.load_async:
                self._offered[request.request_id] = served
            elif served:
                known = _Known(tokens=request.get_tokens(0), salt=request.cache_salt, lora=request.lora_task_id)
                end = request.context_current_position // self._size
                store.planned[request.request_id] = [
                    (key(known, block, self._size), block_ids[block])
                    for block in range(end - served // self._size, end)
                ]

        def build_connector_meta(self, scheduler_output: SchedulerOutput) -> object:
            load: list[tuple[BlockKey, int]] = []
            save: list[tuple[BlockKey, int]] = []
            for data in scheduler_output.new_requests + scheduler_output.cached_requests:
                known = self._known[data.request_id]
                known.tokens += data.new_tokens
                known.slots += data.new_block_ids
                served = self._offered.pop(data.request_id, 0)
                start = data.computed_position // self._size
                for block in range(start, start + served // self._size):
                    load.append((key(known, block, self._size), known.slots[block]))
                computed = data.computed_position + served + data.num_scheduled_tokens
                for block in range(known.saved, computed // self._size):
                    save.append((key(known, block, self._size), known.slots[block]))
                known.saved = max(known.saved, computed // self._size)
            return _Copies(tuple(load), tuple(save))

        def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
            self._known.pop(request.request_id, None)
            return False

    class Worker(KvCacheConnectorWorker):
        supports_attention_dp = True
        _pool: torch.Tensor

        def __init__(self, llm_args: Any) -> None:
            super().__init__(llm_args)
            #: Polls left until a parked request's copy is made.
            self._loading: dict[int, int] = {}

        def _copy(self, copies: Sequence[tuple[BlockKey, int]]) -> None:
            for block_key, slot in copies:
                assert 0 <= slot < self._pool.shape[0]
                self._pool[slot] = store.pages[block_key]
                store.loaded_blocks += 1

        def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
            self._pool = kv_cache_tensor

        def start_load_kv(self, stream: Any) -> None:
            meta = self.get_connector_meta()
            assert isinstance(meta, _Copies)
            self._copy(meta.load)

        def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
            pass

        def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
            pass

        def wait_for_save(self, stream: Any) -> None:
            meta = self.get_connector_meta()
            assert isinstance(meta, _Copies)
            for block_key, slot in meta.save:
                store.pages[block_key] = self._pool[slot].clone()

        def get_finished(
            self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
        ) -> tuple[list[int], list[int]]:
            self._loading.update(dict.fromkeys(started_loading_req_ids, 3))
            self._loading = {request_id: polls - 1 for request_id, polls in self._loading.items()}
            loaded = [request_id for request_id, polls in self._loading.items() if polls == 0]
            for request_id in loaded:
                del self._loading[request_id]
                self._copy(store.planned.pop(request_id))
            return [], loaded

    return ConnectorSpec(Scheduler, Worker)


def flat(calls: Sequence[tuple[Any, ...]], *names: str) -> list[tuple[Any, ...]]:
    """The calls of these names, in order."""
    return [call for call in calls if call[0] in names]
