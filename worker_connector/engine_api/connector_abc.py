"""The KV cache connector ABC, in TensorRT-LLM's shape, for processes without tensorrt_llm.

Import it through `worker_connector.engine_api.engine`, which hands out the real classes where tensorrt_llm is
installed. Names, argument order, defaults and the rules between the flat and the per-layer-group callbacks follow
TensorRT-LLM's "KV Cache Connector" document and its public ABC as of the KVCacheManagerV2 support
(NVIDIA/TensorRT-LLM#18762). A class written against this module subclasses the real ABC unchanged.

Vocabulary: a *page slot* (block id) is the index of a block in its pool; a *layer group* is the set of layers that
share one slot space; slot -1 (`BAD_PAGE_INDEX`) marks a block that has no page.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from worker_connector.engine_api.cache_layout import KvCacheLayout


@dataclass
class RequestData:
    """What changed for one scheduled request since the last report.

    The lists are deltas: a request's whole token and block lists are the concatenation over its reports.
    """

    request_id: int
    #: Tokens the engine learnt since the last report; the whole prompt in the first one.
    new_tokens: list[int]
    #: Page slots appended since the last report; empty when there are several layer groups.
    new_block_ids: list[int]
    #: First token position without valid KV. In a request's first report the tokens that the connector serves are
    #: not counted, so this is where the connector's load starts.
    computed_position: int
    #: Tokens of this request in the coming forward pass.
    num_scheduled_tokens: int
    #: Hash chain of full blocks, or [] where the cache manager has none.
    block_hashes: list[int] = field(default_factory=list)
    #: Retention priority per new block, or None where retention is not honoured.
    priorities: list[int] | None = None
    #: Reuse isolation of the request; must be part of every key.
    cache_salt: str | None = None
    #: Entry [g] lists the page slots appended in layer group g; [] when block ids are one flat space.
    new_block_ids_by_layer_group: list[list[int]] = field(default_factory=list)


@dataclass
class SchedulerOutput:
    """One iteration's scheduled requests, as `build_connector_meta` sees them."""

    #: Requests in their first report since their KV was allocated.
    new_requests: list[RequestData] = field(default_factory=list)
    #: Requests that were reported before: later prefill chunks and decodes.
    cached_requests: list[RequestData] = field(default_factory=list)
    #: Owner of the block ids under attention data parallelism, else None. Not a storage namespace.
    attention_dp_rank: int | None = None


def _refuse_flat(flat: str, grouped: str) -> Callable[..., Any]:
    def refused(self: object, *args: object, **kwargs: object) -> Any:
        raise NotImplementedError(
            f"{type(self).__name__} implements {grouped}, not {flat}; {flat} is called by a cache that reports one "
            "flat block list, so implement it to run on such a model"
        )

    refused.__name__ = flat
    refused.__qualname__ = flat
    return refused


def _let_grouped_stand_in(cls: type, base: type, pairs: dict[str, str]) -> None:
    """Clear the abstract flag of a flat method whose per-layer-group form `cls` overrides.

    Runs in `__init_subclass__`, that is before ABCMeta collects the abstract names. A class with neither form keeps
    the flag and fails at construction with TypeError.
    """
    for flat, grouped in pairs.items():
        overridden = getattr(cls, grouped, None) is not getattr(base, grouped)
        if overridden and getattr(getattr(cls, flat, None), "__isabstractmethod__", False):
            setattr(cls, flat, _refuse_flat(flat, grouped))


def _only_group(method: str, owner: object, by_layer_group: list[list[int]]) -> list[int]:
    if len(by_layer_group) != 1:
        raise NotImplementedError(
            f"{type(owner).__name__} does not implement {method}, and this KV cache has {len(by_layer_group)} layer "
            "groups, which one flat list cannot describe"
        )
    return by_layer_group[0]


class KvCacheConnectorScheduler(ABC):
    """Leader side: decides what is loaded and saved. One instance per leader, or per rank under attention DP."""

    #: True only if request and allocation state is kept per owner rank.
    supports_attention_dp: bool = False

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        super().__init__()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _let_grouped_stand_in(
            cls,
            KvCacheConnectorScheduler,
            {
                "request_finished": "request_finished_by_layer_group",
                "update_state_after_alloc": "update_state_after_alloc_by_layer_group",
            },
        )

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> object:
        """Turn the batch into the (picklable) instructions that every worker gets. An exception ends the executor."""

    @abstractmethod
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Offer `(tokens beyond num_computed_tokens, load is asynchronous)`; asked once per KV allocation.

        `(0, True)` is illegal. The runtime may honour any prefix of the offer, down to nothing.
        """

    @abstractmethod
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """A request generated its last token. True keeps its pages until the worker's `get_finished` names it.

        Not called for cancelled or failed requests.
        """

    def request_finished_by_layer_group(self, request: Any, cache_block_ids_by_layer_group: list[list[int]]) -> bool:
        """`request_finished` with entry [g][i] = page slot of block i in group g; folds one group to the flat form."""
        flat = _only_group("request_finished_by_layer_group", self, cache_block_ids_by_layer_group)
        return self.request_finished(request, flat)

    @abstractmethod
    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """The request's pages are allocated; with chunked prefill only those of the first chunk."""

    def update_state_after_alloc_by_layer_group(self, request: Any, block_ids_by_layer_group: list[list[int]]) -> None:
        """`update_state_after_alloc` with one list per layer group; folds one group to the flat form."""
        flat = _only_group("update_state_after_alloc_by_layer_group", self, block_ids_by_layer_group)
        self.update_state_after_alloc(request, flat)

    def wait_for_initialization(self) -> None:  # noqa: B027 - optional hook, as in the original
        """Called once after the workers have registered their caches; may block until external parts are up."""


class KvCacheConnectorWorker(ABC):
    """Rank side: moves bytes between the rank's KV pages and the connector's store."""

    #: True only if transfers and their completion are local to the owner rank.
    supports_attention_dp: bool = False

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata: object | None = None
        super().__init__()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _let_grouped_stand_in(cls, KvCacheConnectorWorker, {"register_kv_caches": "register_kv_cache_layout"})

    def bind_connector_meta(self, metadata: object) -> None:
        """Take the iteration's metadata; it stays bound until the next call."""
        self._metadata = metadata

    def get_connector_meta(self) -> object:
        """The metadata that was bound last; None before the first."""
        return self._metadata

    def _clear_connector_meta(self) -> None:
        """Not called by the executor."""
        self._metadata = None

    def register_forward_pass_callable(self) -> Callable[[], Any] | None:
        """A callable to run at the end of each forward pass on its stream, or None."""
        return None

    @abstractmethod
    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        """Take the pool `[num_blocks, num_layers, kv_factor, block_size]`; row i is page slot i."""

    def register_kv_cache_layout(self, layout: KvCacheLayout) -> None:
        """Take the pools as byte ranges; by default folds a single pool to `register_kv_caches`."""
        tensor = layout.as_single_pool_tensor()
        if tensor is None:
            regions = sum(len(group.regions) for group in layout.groups)
            raise NotImplementedError(
                f"{type(self).__name__} does not implement register_kv_cache_layout, and one pool tensor cannot "
                f"describe this KV cache: {len(layout.groups)} layer group(s), {regions} region(s)"
            )
        self.register_kv_caches(tensor)

    @abstractmethod
    def start_load_kv(self, stream: Any) -> None:
        """Begin the loads of the bound metadata; called before every forward pass. An exception ends the executor."""

    @abstractmethod
    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Make `stream` wait until the loads of one layer are complete; called before that layer runs."""

    @abstractmethod
    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """One layer's KV of this forward pass has been enqueued on `stream`."""

    @abstractmethod
    def wait_for_save(self, stream: Any) -> None:
        """End of the forward pass; not called when the batch became empty."""

    @abstractmethod
    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Poll async work: `(ids that finished saving, ids that finished loading)`; called every iteration.

        The arguments name each id once; an id that was never named must not be returned.
        """
