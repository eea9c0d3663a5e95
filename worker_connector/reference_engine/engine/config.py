"""Configuration of the reference engine, and the `llm_args` that it hands to a connector."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from worker_connector.engine_api.engine import KvCacheConnectorScheduler, KvCacheConnectorWorker
from worker_connector.reference_engine.engine.behaviours import Behaviours
from worker_connector.reference_engine.models.model_config import LlamaConfig
from worker_connector.reference_engine.models.presets import LoadedModel, ModelSource
from worker_connector.reference_engine.timing.cost_model import CostModel

KV_CACHE_MANAGERS = ("v1", "v2")


@dataclass(frozen=True)
class EngineConfig:
    """The settings of one engine process. ValueError at construction names the field, its value and what is allowed."""

    model: ModelSource = field(default_factory=ModelSource)
    tokens_per_block: int = 32
    #: Pages of each data-parallel rank.
    num_blocks: int = 256
    #: Token budget of one iteration: decodes plus prefill chunks.
    max_num_tokens: int = 512
    #: Requests admitted at once on a rank.
    max_batch_size: int = 16
    #: Longest prompt plus generation; None: what the model supports.
    max_seq_len: int | None = None
    #: Attention data-parallel ranks in this process, each with its own pool, thread and connector.
    data_parallel_size: int = 1
    #: torch threads of a forward pass. Ranks of a process take turns, processes on one machine do not: give each
    #: process its share of the cores, or their threads wait for each other at every matrix product.
    num_threads: int = 2
    enable_block_reuse: bool = True
    #: Reuse, by copying it, a block of which only the first tokens are the same. Where a request's local prefix ends in
    #: the middle of a block, no block of a connector fits behind it.
    enable_partial_reuse: bool = False
    #: Which call order and block reporting the connector sees: "v2" interleaves query and alloc per request and reports
    #: the blocks of each chunk; "v1" asks for the whole batch first and reports all prompt blocks at once.
    kv_cache_manager: str = "v2"
    #: Events kept per rank until they are polled; 0: none.
    event_buffer_max_size: int = 100_000
    #: False: pure decode iterations skip the layer hooks, as CUDA graph replay does.
    layer_hooks_in_decode: bool = True
    #: True: each decode is computed alone, so logits do not depend on the batch; slower.
    batch_invariant_decode: bool = False
    #: True: cancelled or failed requests keep their pages until their connector transfers end (TensorRT-LLM does so
    #: under attention data parallelism only).
    hold_pages_during_transfers: bool = True
    #: An idle rank still polls the connector this often; None: only while transfers are pending.
    idle_poll_s: float | None = 0.25
    #: Fill pages with NaN until they are written.
    poison_pages: bool = False
    #: Where weights and pages are: "cpu", "cuda" or "cuda:N". Sampling is on the host.
    device: str = "cpu"
    #: Attention windows in tokens, as TensorRT-LLM's `KvCacheConfig.max_attention_window`: layer i has entry i modulo
    #: their number. A window as long as the longest sequence is full attention, and so is (). Layers of one window are
    #: a layer group with a pool of `num_blocks` pages of its own.
    max_attention_window: tuple[int, ...] = ()
    #: The first tokens of a sequence that windows always see.
    sink_token_length: int = 0
    #: The GPU whose time a pass and a copy take; None: they take what they take here.
    gpu: CostModel | None = None
    #: Less common paths of TensorRT-LLM; all off.
    behaviours: Behaviours = field(default_factory=Behaviours)
    #: Adapters by `lora_task_id`: the seed of each one's random weights.
    lora_seeds: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("tokens_per_block", "num_blocks", "max_num_tokens", "max_batch_size", "data_parallel_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_threads < 1:
            raise ValueError(f"num_threads is {self.num_threads}; it must be at least 1")
        if self.max_num_tokens < self.tokens_per_block:
            raise ValueError(
                f"max_num_tokens is {self.max_num_tokens}; a prefill chunk needs at least tokens_per_block "
                f"({self.tokens_per_block}) of it"
            )
        if self.max_seq_len is not None and self.max_seq_len < 2:
            raise ValueError(f"max_seq_len is {self.max_seq_len}; it must be at least 2, or None")
        if any(window < 1 for window in self.max_attention_window):
            raise ValueError(f"max_attention_window is {self.max_attention_window}; every entry must be at least 1")
        if self.sink_token_length < 0:
            raise ValueError(f"sink_token_length is {self.sink_token_length}; it must be 0 or more")
        if self.kv_cache_manager not in KV_CACHE_MANAGERS:
            raise ValueError(f"kv_cache_manager is {self.kv_cache_manager!r}; it must be one of {KV_CACHE_MANAGERS}")
        if self.event_buffer_max_size < 0:
            raise ValueError(f"event_buffer_max_size is {self.event_buffer_max_size}; it must be 0 (off) or more")
        if self.behaviours.dummy_rate and self.data_parallel_size == 1:
            raise ValueError(
                f"behaviours.dummy_rate is {self.behaviours.dummy_rate}; it needs data_parallel_size above 1"
            )
        if self.idle_poll_s is not None and self.idle_poll_s <= 0:
            raise ValueError(f"idle_poll_s is {self.idle_poll_s}; it must be positive, or None")
        _check_device(self.device)

    def resolved_max_seq_len(self, model: LlamaConfig) -> int:
        """The longest prompt plus generation in tokens. ValueError if more is configured than the model supports."""
        if self.max_seq_len is None:
            return model.max_position_embeddings
        if self.max_seq_len > model.max_position_embeddings:
            raise ValueError(f"max_seq_len is {self.max_seq_len}; the model supports {model.max_position_embeddings}")
        return self.max_seq_len


def _check_device(name: str) -> None:
    try:
        kind = torch.device(name).type
    except RuntimeError:
        kind = "unknown"
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device is {name!r}; it must be 'cpu', 'cuda' or 'cuda:N'")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {name!r}; torch {torch.__version__} finds no CUDA device here")


@dataclass(frozen=True)
class ConnectorSpec:
    """The two classes of a connector, as `kv_connector_config` names them."""

    scheduler: type[KvCacheConnectorScheduler]
    worker: type[KvCacheConnectorWorker]
    #: Free text for the connector, `kv_connector_config.server_url`.
    server_url: str | None = None

    @classmethod
    def resolve(
        cls, module: str, scheduler_class: str, worker_class: str, server_url: str | None = None
    ) -> ConnectorSpec:
        """Import the classes by name. ImportError, AttributeError or TypeError if they are not there or no
        connector."""
        imported = importlib.import_module(module)
        scheduler, worker = getattr(imported, scheduler_class), getattr(imported, worker_class)
        for found, base in ((scheduler, KvCacheConnectorScheduler), (worker, KvCacheConnectorWorker)):
            if not (isinstance(found, type) and issubclass(found, base)):
                raise TypeError(f"{module}.{getattr(found, '__name__', found)} is not a subclass of {base.__name__}")
        return cls(scheduler=scheduler, worker=worker, server_url=server_url)


@dataclass(frozen=True)
class KvCacheArgs:
    """`llm_args.kv_cache_config`: the fields of TensorRT-LLM's `KvCacheConfig` that a connector reads."""

    tokens_per_block: int
    enable_block_reuse: bool
    use_kv_cache_manager_v2: bool
    event_buffer_max_size: int
    enable_partial_reuse: bool = False
    host_cache_size: int = 0
    disk_cache_size: int = 0
    dtype: str = "float32"
    max_attention_window: list[int] | None = None
    sink_token_length: int | None = None


@dataclass(frozen=True)
class KvConnectorArgs:
    """`llm_args.kv_connector_config`, with TensorRT-LLM's names."""

    connector_module: str
    connector_scheduler_class: str
    connector_worker_class: str
    server_url: str | None = None
    connector: str | None = None


@dataclass(frozen=True)
class SchedulerArgs:
    """`llm_args.scheduler_config`, with TensorRT-LLM's names."""

    capacity_scheduler_policy: str = "GUARANTEED_NO_EVICT"


@dataclass(frozen=True)
class ReferenceLlmArgs:
    """`llm_args` of both connector constructors: TensorRT-LLM's names, plus `attention_dp_rank`, `revision` and
    `lora_revisions`.

    As in TensorRT-LLM, attention data parallelism spreads over the tensor-parallel ranks, so with `enable_attention_dp`
    `tensor_parallel_size` is the number of data-parallel ranks while each rank holds all heads.
    """

    #: The model's name, and the digest (or seed) that tells its weights apart.
    model: str
    revision: str
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    kv_cache_config: KvCacheArgs
    kv_connector_config: KvConnectorArgs
    enable_attention_dp: bool
    tensor_parallel_size: int
    #: Rank of the instance that gets these; TensorRT-LLM tells it by MPI and `SchedulerOutput.attention_dp_rank` only.
    attention_dp_rank: int
    #: Names of the adapters' weights by `lora_task_id`.
    lora_revisions: Mapping[int, str]
    scheduler_config: SchedulerArgs = field(default_factory=SchedulerArgs)
    dtype: str = "float32"
    backend: str = "pytorch"
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    max_beam_width: int = 1
    disable_overlap_scheduler: bool = True
    speculative_config: None = None
    quant_config: None = None
    lora_config: None = None
    cuda_graph_config: None = None


def build_llm_args(config: EngineConfig, model: LoadedModel, spec: ConnectorSpec, rank: int) -> ReferenceLlmArgs:
    """What the connector instances of `rank` are constructed with."""
    return ReferenceLlmArgs(
        model=model.name,
        revision=model.revision,
        max_batch_size=config.max_batch_size,
        max_num_tokens=config.max_num_tokens,
        max_seq_len=config.resolved_max_seq_len(model.config),
        kv_cache_config=KvCacheArgs(
            tokens_per_block=config.tokens_per_block,
            enable_block_reuse=config.enable_block_reuse,
            enable_partial_reuse=config.enable_partial_reuse,
            use_kv_cache_manager_v2=config.kv_cache_manager == "v2",
            event_buffer_max_size=config.event_buffer_max_size,
            max_attention_window=list(config.max_attention_window) or None,
            sink_token_length=config.sink_token_length or None,
        ),
        kv_connector_config=KvConnectorArgs(
            connector_module=spec.scheduler.__module__,
            connector_scheduler_class=spec.scheduler.__name__,
            connector_worker_class=spec.worker.__name__,
            server_url=spec.server_url,
        ),
        enable_attention_dp=config.data_parallel_size > 1,
        tensor_parallel_size=config.data_parallel_size,
        attention_dp_rank=rank,
        disable_overlap_scheduler=not config.behaviours.overlap_scheduling,
        lora_revisions={task: f"seed-{seed}" for task, seed in config.lora_seeds.items()},
    )
