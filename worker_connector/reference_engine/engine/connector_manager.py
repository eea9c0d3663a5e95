"""The runtime's side of one rank's connector: bookkeeping between the executor and the public ABC.

Behaves like TensorRT-LLM's `KvCacheConnectorManager` for a single rank, or an attention data-parallel owner: it decides
who is reported as new or cached with which deltas, who waits for an asynchronous load or save, and which ids
`get_finished` may name. Exceptions of the connector pass through; the executor decides what they do to the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from worker_connector.engine_api.engine import (
    KvCacheConnectorScheduler,
    KvCacheConnectorWorker,
    RequestData,
    SchedulerOutput,
)
from worker_connector.reference_engine.engine.block_manager import BlockSequence
from worker_connector.reference_engine.engine.config import ConnectorSpec, EngineConfig, ReferenceLlmArgs
from worker_connector.reference_engine.engine.optional_hooks import OptionalHooks
from worker_connector.reference_engine.engine.request import LlmRequest, RequestState
from worker_connector.reference_engine.engine.reuse import chain_hash
from worker_connector.reference_engine.models.kv_pool import KvPool
from worker_connector.reference_engine.timing.bus import Bus
from worker_connector.reference_engine.timing.pass_timer import PassTimer


@dataclass
class Batch:
    """The requests of one iteration."""

    context: list[LlmRequest] = field(default_factory=list)
    generation: list[LlmRequest] = field(default_factory=list)

    @property
    def requests(self) -> list[LlmRequest]:
        """Prefills first, then decodes."""
        return self.context + self.generation

    def __bool__(self) -> bool:
        return bool(self.context or self.generation)

    def clear(self) -> None:
        """Take every request out."""
        self.context, self.generation = [], []


@dataclass
class _Transfers:
    saving: dict[int, LlmRequest] = field(default_factory=dict)
    loading: dict[int, LlmRequest] = field(default_factory=dict)


@dataclass
class _Reported:
    """How much of a request the connector has been told."""

    num_tokens: int = 0
    num_blocks: int = 0
    #: Hash chain of its full blocks; V1 only.
    hashes: list[int] = field(default_factory=list)


def bring_up(
    spec: ConnectorSpec, args: ReferenceLlmArgs, pool: KvPool, config: EngineConfig, timer: PassTimer | None = None
) -> ConnectorManager:
    """Construct the connector of one rank and give it the pool.

    Scheduler and worker are constructed concurrently, so neither can rely on the other having been first.
    NotImplementedError for a combination that TensorRT-LLM refuses too.
    """
    if args.enable_attention_dp:
        for cls in (spec.worker, spec.scheduler):
            if getattr(cls, "supports_attention_dp", False) is not True:
                raise NotImplementedError(
                    f"{cls.__name__}.supports_attention_dp is not True, and data_parallel_size is "
                    f"{config.data_parallel_size}; declare it if request state and transfers are owner-local"
                )
    if not config.enable_block_reuse:
        raise NotImplementedError("enable_block_reuse is False; a connector's prefix is never honoured without it")
    _check_windows(spec, pool, config)
    with ThreadPoolExecutor(2, thread_name_prefix="connector-bring-up") as constructors:
        worker_future = constructors.submit(spec.worker, args)
        scheduler_future = constructors.submit(spec.scheduler, args)
        worker, scheduler = worker_future.result(), scheduler_future.result()
    if config.kv_cache_manager == "v2":
        worker.register_kv_cache_layout(pool.layout())
    else:
        worker.register_kv_caches(pool.tensor)
    bus = timer.bus if timer is not None else None
    manager = ConnectorManager(scheduler, worker, args, dialect=config.behaviours.dialect, bus=bus)
    scheduler.wait_for_initialization()
    return manager


def _check_windows(spec: ConnectorSpec, pool: KvPool, config: EngineConfig) -> None:
    """Page slots are scoped to a layer group, so several groups need the callbacks that say which."""
    windows = [pages.group.window for pages in pool.groups]
    if config.kv_cache_manager == "v1" and any(window is not None for window in windows):
        raise NotImplementedError(
            "VSWA: kv_cache_manager 'v1' cannot describe attention windows to a connector; use 'v2'"
        )
    missing = [
        name
        for name in ("update_state_after_alloc_by_layer_group", "request_finished_by_layer_group")
        if getattr(spec.scheduler, name) is getattr(KvCacheConnectorScheduler, name)
    ]
    if len(windows) > 1 and missing:
        raise NotImplementedError(
            f"{spec.scheduler.__name__} does not implement {' and '.join(missing)}, and this KV cache has "
            f"{len(windows)} layer groups"
        )


class ConnectorManager:
    """What one executor and its connector pair have told each other. Not thread-safe: the executor owns it."""

    def __init__(
        self,
        scheduler: KvCacheConnectorScheduler,
        worker: KvCacheConnectorWorker,
        args: ReferenceLlmArgs,
        *,
        dialect: str = "M",
        bus: Bus | None = None,
    ) -> None:
        """`bus`: what copies take the time of; None: a copy has ended when the connector says so."""
        self.scheduler = scheduler
        self.worker = worker
        self._hooks = OptionalHooks(scheduler, worker, called=dialect == "B")
        self._by_dict = dialect == "B"
        self._tokens_per_block = args.kv_cache_config.tokens_per_block
        self._grouped = args.kv_cache_config.use_kv_cache_manager_v2
        self._dp_rank = args.attention_dp_rank if args.enable_attention_dp else None
        self._reported: dict[int, _Reported] = {}
        #: Served tokens of requests whose query was answered in this iteration.
        self._external: dict[int, int] = {}
        self._output: SchedulerOutput | None = None
        #: Transfers begun in this iteration, not yet named to `get_finished`.
        self._new = _Transfers()
        #: Named to `get_finished`, not yet named by it.
        self._pending = _Transfers()
        #: Requests whose async load is done: their prefix is served and they are not asked again.
        self._loaded: set[int] = set()
        self._bus = bus
        #: When what the connector loads for the next pass has arrived, by the bus; 0.0: nothing, or no bus.
        self.loaded_at = 0.0
        #: The same of each asynchronous load.
        self._due: dict[int, float] = {}
        #: Asynchronous loads that the connector has ended and the bus has not.
        self._on_bus: set[int] = set()

    def query(self, request: LlmRequest, num_computed_tokens: int) -> tuple[int, bool]:
        """Ask for the connector's offer, (tokens, whether asynchronous); changes nothing here. RuntimeError for `(0,
        True)` or a negative count."""
        num_tokens, load_async = self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)
        if num_tokens == 0 and load_async:
            raise RuntimeError("get_num_new_matched_tokens answered (0, True): an async load of nothing")
        if num_tokens < 0:
            raise RuntimeError(f"get_num_new_matched_tokens answered {num_tokens} tokens")
        return num_tokens, load_async

    def trim_offer(self, request: LlmRequest, start: int, end: int) -> None:
        """Tell that the local cache has the tokens [start, end) of an offer by now; the rest still counts as served."""
        self._hooks.cancel_load(request, start, end)

    def commit(self, request: LlmRequest, offered: int, honoured: int, load_async: bool) -> None:
        """Record how much of the offer is consumed.

        An asynchronous load is waited for even if nothing is honoured: the connector has started it already, and must
        not write the pages while the forward pass does.
        """
        if load_async:
            self._new.loading[request.request_id] = request
            if self._bus is not None:
                self._due[request.request_id] = self._bus.copy(honoured)
        if honoured < offered:
            local_end = request.context_current_position
            self._hooks.cancel_load(request, local_end + honoured, local_end + offered)
        self._external[request.request_id] = honoured
        request.py_num_connector_matched_tokens = honoured

    def should_ask(self, request: LlmRequest) -> bool:
        """False for a request whose asynchronous load is done: its prefix is served."""
        return request.request_id not in self._loaded

    def update_state_after_alloc(self, request: LlmRequest, by_group: Sequence[Sequence[int]]) -> None:
        """Report the page slots of a request, one sequence a layer group."""
        if self._grouped:
            self.scheduler.update_state_after_alloc_by_layer_group(request, [list(slots) for slots in by_group])
        else:
            self.scheduler.update_state_after_alloc(request, list(by_group[0]))

    def is_loading(self, request: LlmRequest) -> bool:
        """True if the request's asynchronous load was begun in this iteration."""
        return request.request_id in self._new.loading

    def build_scheduler_output(self, batch: Batch) -> None:
        """Make the report that `handle_metadata` gives to the connector. Served tokens count for this iteration's
        report only: a request that left the batch since it was asked about is reported, next time, as starting behind
        them."""
        output = SchedulerOutput(attention_dp_rank=self._dp_rank)
        self._put_loads_on_bus(batch)
        for request in batch.context:
            if request.request_id in self._new.loading:
                continue
            is_new = request.request_id not in self._reported
            data = self._request_data(request)
            data.computed_position -= self._external.get(request.request_id, 0)
            (output.new_requests if is_new else output.cached_requests).append(data)
        generating = [request for request in batch.generation if not request.is_dummy_request]
        output.cached_requests.extend(self._request_data(request) for request in generating)
        self._external.clear()
        self._output = output

    def handle_metadata(self) -> None:
        """Have the metadata made from the scheduler output and bind it to the worker."""
        output, self._output = self._output, None
        assert output is not None
        self.worker.bind_connector_meta(self.scheduler.build_connector_meta(output))

    def park_loading(self, batch: Batch) -> None:
        """Take the requests with an asynchronous load out of the batch."""
        for request in batch.context:
            if request.request_id in self._new.loading:
                request.state = RequestState.DISAGG_GENERATION_TRANS_IN_PROGRESS
        batch.context = [request for request in batch.context if request.request_id not in self._new.loading]

    def request_finished(self, request: LlmRequest, by_group: Sequence[Sequence[int]]) -> bool:
        """Report the end; True: the connector saves asynchronously, and the request keeps its pages until then."""
        self._loaded.discard(request.request_id)
        if self._grouped:
            saving = self.scheduler.request_finished_by_layer_group(request, [list(slots) for slots in by_group])
        else:
            saving = self.scheduler.request_finished(request, list(by_group[0]))
        if saving:
            self._new.saving[request.request_id] = request
            request.state = RequestState.DISAGG_CONTEXT_TRANS_IN_PROGRESS
        return saving

    def get_finished(self) -> tuple[list[LlmRequest], list[LlmRequest]]:
        """Poll the worker: `(requests whose save ended, requests whose load ended)`.

        KeyError if the worker names an id that is not pending.
        """
        new, self._new = self._new, _Transfers()
        self._pending.saving |= new.saving
        self._pending.loading |= new.loading
        saved_ids, loaded_ids = self.worker.get_finished(list(new.saving), list(new.loading))
        saved = [self._pending.saving.pop(request_id) for request_id in saved_ids]
        loaded = [self._pending.loading.pop(request_id) for request_id in self._arrived(loaded_ids)]
        for request in loaded:
            if request.blocks is not None:  # else it was terminated in the meantime
                request.state = RequestState.CONTEXT_INIT
                self._loaded.add(request.request_id)
        return saved, loaded

    def _put_loads_on_bus(self, batch: Batch) -> None:
        """The loads that the connector begins before the next pass, which reads what they bring."""
        self.loaded_at = 0.0
        here = [request.request_id for request in batch.context if request.request_id not in self._new.loading]
        tokens = sum(self._external.get(request_id, 0) for request_id in here)
        if self._bus is not None and tokens:
            self.loaded_at = self._bus.copy(tokens)

    def _arrived(self, ended: Sequence[int]) -> list[int]:
        """Those asynchronous loads that have ended for the connector and on the bus; `ended`: for the connector, since
        the last call."""
        if self._bus is None:
            return list(ended)
        self._on_bus.update(ended)
        arrived = [request_id for request_id in self._on_bus if self._bus.has_arrived(self._due.get(request_id, 0.0))]
        self._on_bus.difference_update(arrived)
        for request_id in arrived:
            self._due.pop(request_id, None)
        return arrived

    def has_pending_transfers(self, request: LlmRequest | None = None) -> bool:
        """Whether one request, or any at all, has a transfer that has not ended."""
        stages = (self._new.saving, self._new.loading, self._pending.saving, self._pending.loading)
        if request is None:
            return any(stages)
        return any(request.request_id in stage for stage in stages)

    def reset_request(self, request: LlmRequest) -> None:
        """The request's pages are destroyed: the deltas start over, so its replay is reported as a new request. A
        finished asynchronous load is not forgotten, as in TensorRT-LLM's `reset_request_state`: such a replay is not
        asked about."""
        self._reported.pop(request.request_id, None)
        self._external.pop(request.request_id, None)
        self._hooks.request_reset(request)

    def take_failed_loads(self) -> set[int]:
        """After start_load_kv: ids of requests whose pages were not all filled; their saves are dropped."""
        failed = self._hooks.take_failed_loads()
        if failed:
            self._hooks.drop_bound_saves(failed)
        return failed

    def take_failed_parked_loads(self, loaded: Sequence[LlmRequest]) -> list[LlmRequest]:
        """After get_finished: those of `loaded` whose pages were not all filled. They are asked about again."""
        failed = self._hooks.take_failed_parked_loads()
        self._loaded -= failed
        return [request for request in loaded if request.request_id in failed]

    def forget(self, request: LlmRequest) -> None:
        """The request is terminated and its pages are gone. The connector is not told; its transfers may go on."""
        self._reported.pop(request.request_id, None)
        self._external.pop(request.request_id, None)
        self._loaded.discard(request.request_id)

    def _extend_hashes(self, hashes: list[int], tokens: Sequence[int], blocks: BlockSequence) -> list[int]:
        """Appends to `hashes` up to the last full block that has a page; returns them all, named as KV events name
        blocks."""
        size = self._tokens_per_block
        for block in range(len(hashes), min(len(tokens) // size, blocks.num_blocks)):
            parent = hashes[-1].to_bytes(8, "little") if hashes else blocks.scope.seed()
            hashes.append(chain_hash(parent, tokens[block * size : (block + 1) * size]))
        return list(hashes)

    def _request_data(self, request: LlmRequest) -> RequestData:
        assert request.blocks is not None
        seen = self._reported.setdefault(request.request_id, _Reported())
        tokens, blocks = request.tokens, request.blocks
        new_tokens = tokens[seen.num_tokens :]
        by_group = [slots[seen.num_blocks :] for slots in blocks.by_group]
        seen.num_tokens, seen.num_blocks = len(tokens), max(seen.num_blocks, blocks.num_blocks)
        if request.state is RequestState.CONTEXT_INIT:
            position = request.context_current_position
            scheduled = min(request.context_remaining_length, request.context_chunk_size)
        else:
            position, scheduled = len(tokens) - 1, 1
        extra: dict[str, Any] = {}
        if self._grouped:
            extra["new_block_ids_by_layer_group"] = dict(enumerate(by_group)) if self._by_dict else by_group
        else:  # V2 has no accessor for either, and honours no retention priority
            extra["block_hashes"] = self._extend_hashes(seen.hashes, tokens, blocks)
            if request.options.retention_priority is not None:
                extra["priorities"] = [blocks.priority for _ in by_group[0]]
        return RequestData(
            request.request_id,
            new_tokens,
            by_group[0] if len(by_group) == 1 else [],
            position,
            scheduled,
            cache_salt=request.cache_salt,
            **extra,
        )
