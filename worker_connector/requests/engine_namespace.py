"""The CacheNamespace of an engine, and of a request on it (RFC semantic KV cache reuse, "Namespace and Compatibility").

Read from `llm_args` by name, because versions and engines differ in what they carry, and from the pool that was
registered, which is what the engine really made of its settings (NVIDIA/TensorRT-LLM#13320: the two may disagree). A
field that cannot be known stays None, and one such field keeps every request from being materialized.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.namespace import CacheNamespace, tenant_scope
from dynamo_semkv.contracts.report import Reason
from worker_connector.engine_api.engine import ENGINE_API, LOCAL_API
from worker_connector.engine_api.request_view import RequestScope
from worker_connector.link.channel import RankReady

CONNECTOR_VERSION = "semkv/1"
"""Raised when keys, layout of the slab or the meaning of a namespace field change."""
CONTENT_GENERATION = "0"
PROMPT_FORMAT = "token-ids"
"""Identity is by token ids, whatever template produced them, so the format is in the tokens."""
_SCOPES = 4_096


def engine_namespace(
    llm_args: Any, pool: RankReady, served_model: str | None, weights_revision: str | None = None
) -> CacheNamespace:
    """Without a request in it: tenant, adapter and media are None. `weights_revision`: of weights that were put in
    place of those that `llm_args` names."""
    return CacheNamespace(
        model=_model(llm_args, served_model, weights_revision),
        engine=_engine(),
        tokenizer=_tokenizer(llm_args),
        prompt_format=PROMPT_FORMAT,
        backend_mode=_text(getattr(llm_args, "backend", None)),
        tokens_per_block=pool.tokens_per_block,
        kv_dtype=_kv_dtype(llm_args, pool),
        kv_layout=pool.kv_layout,
        attention_window=_window(llm_args, pool),
        attention_shape=_shape(llm_args, pool),
        parallelism=_parallelism(llm_args),
        ptuning="",
        speculative="" if getattr(llm_args, "speculative_config", None) is None else None,
        multimodal_policy="content-hash",
        connector=CONNECTOR_VERSION,
        provider_generation=CONTENT_GENERATION,
    )


def served_model_name(llm_args: Any, configured: str | None) -> str:
    """What a request's `model` says: configured, or the engine's own name for it."""
    name = configured or getattr(llm_args, "served_model_name", None) or getattr(llm_args, "model", None)
    return str(name) if name else "unknown"


class RequestNamespaces:
    """Narrows the engine's namespace to requests; remembers the digests of the last few thousand scopes.

    Not thread-safe: the leader's lock covers it.
    """

    def __init__(self, base: CacheNamespace, adapters: Mapping[int, str], salt_key: bytes) -> None:
        self.base = base
        self._adapters = adapters
        self._salt_key = salt_key
        self._known: OrderedDict[RequestScope, tuple[CacheNamespace, bytes, Reason | None]] = OrderedDict()

    def rebase(self, base: CacheNamespace) -> None:
        """The engine's namespace is another one from now on."""
        self.base = base
        self._known.clear()

    @property
    def open_digest(self) -> bytes:
        """Of requests with neither salt, adapter nor media: blocks in it may be named by their tokens alone."""
        return self.of(RequestScope(None, True, None, ()))[1]

    def of(self, scope: RequestScope) -> tuple[CacheNamespace, bytes, Reason | None]:
        """Namespace, digest, and why nothing may be materialized in it (None: it may)."""
        found = self._known.get(scope)
        if found is None:
            found = self._narrow(scope)
            self._known[scope] = found
            if len(self._known) > _SCOPES:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(scope)
        return found

    def _narrow(self, scope: RequestScope) -> tuple[CacheNamespace, bytes, Reason | None]:
        tenant, problem = self._tenant(scope)
        lora, revision = "", ""
        if scope.adapter is not None:
            known = self._adapters.get(scope.adapter)
            lora = str(scope.adapter)
            if known is None:
                problem = problem or Reason.ADAPTER_UNKNOWN
            revision = known or ""
        if scope.multimodal is None:
            problem = problem or Reason.MULTIMODAL_UNHASHED
        namespace = self.base.for_request(
            tenant=tenant,
            lora=lora,
            lora_revision=None if scope.adapter is not None and not revision else revision,
            multimodal=scope.multimodal,
        )
        if problem is None and namespace.unknown_fields():
            problem = Reason.NAMESPACE_UNKNOWN
        return namespace, namespace.digest(), problem

    def _tenant(self, scope: RequestScope) -> tuple[str | None, Reason | None]:
        if not scope.salt_known:
            return None, Reason.SALT_UNKNOWN
        try:
            return tenant_scope(scope.salt, self._salt_key), None
        except ContractError:
            return None, Reason.SALT_UNKNOWN


def adapters_of(llm_args: Any) -> Mapping[int, str]:
    """Revision of each adapter by LoRA task id. TensorRT-LLM has no such thing today, so requests with an adapter are
    not materialized there; the reference engine knows its adapters' weights."""
    found = getattr(llm_args, "lora_revisions", None)
    return dict(found) if isinstance(found, Mapping) else {}


def _text(value: object) -> str | None:
    """Enumerations by value, empty as unknown."""
    if value is None:
        return None
    return str(getattr(value, "value", value)) or None


def _engine() -> str:
    package = "dynamo-semkv" if ENGINE_API == LOCAL_API else "tensorrt_llm"
    name = "reference" if ENGINE_API == LOCAL_API else "tensorrt_llm"
    try:
        return f"{name}/{importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{name}/0"


def _model(llm_args: Any, served_model: str | None, weights_revision: str | None) -> str | None:
    model = getattr(llm_args, "model", None) or served_model
    if not model:
        return None
    revision = weights_revision or _text(getattr(llm_args, "revision", None)) or ""
    quant = getattr(getattr(llm_args, "quant_config", None), "quant_algo", None)
    return f"{model}@{revision}" + (f"+{_text(quant)}" if quant is not None else "")


def _tokenizer(llm_args: Any) -> str | None:
    tokenizer = getattr(llm_args, "tokenizer", None)
    if isinstance(tokenizer, (str, Path)):
        return str(tokenizer)
    name = getattr(tokenizer, "name_or_path", None)
    return _text(name) or _text(getattr(llm_args, "model", None))


def _kv_dtype(llm_args: Any, pool: RankReady) -> str:
    """The configured element type and that of the pool: FP8 pages may be registered as plain bytes."""
    configured = _text(getattr(getattr(llm_args, "kv_cache_config", None), "dtype", None)) or "auto"
    return f"{configured}/{pool.kv_dtype}"


def _window(llm_args: Any, pool: RankReady) -> str:
    windows = list(pool.windows)
    if all(window is None for window in windows):
        windows = list(getattr(getattr(llm_args, "kv_cache_config", None), "max_attention_window", None) or [])
        limit = getattr(llm_args, "max_seq_len", None)
        windows = [window for window in windows if limit is None or window is None or window < limit]
    if not windows:
        return "full"
    return ",".join("full" if window is None else str(window) for window in windows)


def _shape(llm_args: Any, pool: RankReady) -> str:
    """Head counts from the model's own config.json where `model` is a directory; else the bytes that a token takes,
    which together with model and layout say the same."""
    heads = _heads(getattr(llm_args, "model", None))
    return f"{heads or 'heads-by-model'};{pool.bytes_per_block // pool.tokens_per_block}B/token"


def _heads(model: object) -> str | None:
    if not isinstance(model, (str, Path)):
        return None
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config", config)
        return f"{config['num_attention_heads']}/{config.get('num_key_value_heads', config['num_attention_heads'])}"
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return None


def _parallelism(llm_args: Any) -> str:
    """Under attention data parallelism every rank holds all heads, however many ranks there are."""
    if getattr(llm_args, "enable_attention_dp", False):
        return "tp=1"
    return f"tp={getattr(llm_args, 'tensor_parallel_size', 1) or 1}"


def configured_rank(llm_args: Any) -> int | None:
    """0 without attention data parallelism; else the rank if the engine says it, or None until the first scheduler
    output does."""
    if not getattr(llm_args, "enable_attention_dp", False):
        return 0
    rank = getattr(llm_args, "attention_dp_rank", None)
    return rank if isinstance(rank, int) else None
