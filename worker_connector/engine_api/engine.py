"""The only module that imports TensorRT-LLM: connector base classes and cache layout types, real or local.

Where tensorrt_llm is installed its own classes are handed out, from the current module path or the older one; elsewhere
local classes of the same shape (`connector_abc`, `cache_layout`), so that the same connector runs in the reference
engine. `ENGINE_API` says which: the module path of the real ABC, or "local".

Only the absence of tensorrt_llm selects the local classes. An installed tensorrt_llm that fails to import, or has the
ABC under neither path, raises: falling back there would make a broken installation look like a working one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from worker_connector.engine_api import cache_layout, connector_abc

#: Value of `ENGINE_API` without tensorrt_llm.
LOCAL_API = "local"

#: Where TensorRT-LLM keeps the ABC, newest first, each with the module that holds the layout types.
ABC_PATHS = (
    (
        "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
        "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_layout",
    ),
    (
        "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
        "tensorrt_llm._torch.pyexecutor.kv_cache_layout",
    ),
)

_ABC_NAMES = ("KvCacheConnectorScheduler", "KvCacheConnectorWorker", "RequestData", "SchedulerOutput")
_LAYOUT_NAMES = (
    "KvCacheBufferRef",
    "KvCacheLayerGroupLayout",
    "KvCacheLayout",
    "KvCacheRegion",
    "valid_page_slots",
)


@dataclass(frozen=True)
class EngineApi:
    """The names that were resolved, and where the ABC came from."""

    source: str
    names: dict[str, Any]


def _import_if_present(path: str, import_module: Callable[[str], ModuleType]) -> ModuleType | None:
    """Import `path`; None if it, or a package on the way to it, does not exist. Any other failure raises."""
    try:
        return import_module(path)
    except ModuleNotFoundError as error:
        if error.name is not None and (path == error.name or path.startswith(error.name + ".")):
            return None
        raise


def resolve_engine_api(import_module: Callable[[str], ModuleType] = importlib.import_module) -> EngineApi:
    """Find the ABC and the layout types. ImportError if tensorrt_llm is installed without a known ABC.

    Versions of TensorRT-LLM before the layout types exist get the local ones for them, name by name.
    """
    local = {name: getattr(connector_abc, name) for name in _ABC_NAMES}
    local |= {name: getattr(cache_layout, name) for name in _LAYOUT_NAMES}
    tensorrt_llm = _import_if_present("tensorrt_llm", import_module)
    if tensorrt_llm is None:
        return EngineApi(LOCAL_API, local)
    for abc_path, layout_path in ABC_PATHS:
        abc_module = _import_if_present(abc_path, import_module)
        if abc_module is None:
            continue
        real = {name: getattr(abc_module, name) for name in _ABC_NAMES}
        layout_module = _import_if_present(layout_path, import_module)
        real |= {name: getattr(layout_module, name, local[name]) for name in _LAYOUT_NAMES}
        return EngineApi(abc_path, real)
    raise ImportError(
        f"tensorrt_llm {getattr(tensorrt_llm, '__version__', 'of unknown version')} is installed but has the KV cache "
        f"connector under none of {[path for path, _ in ABC_PATHS]}"
    )


def engine_rank(import_module: Callable[[str], ModuleType] = importlib.import_module) -> int | None:
    """This process's rank as tensorrt_llm knows it; None without tensorrt_llm, or where it does not say."""
    found = _import_if_present("tensorrt_llm._utils", import_module)
    rank = getattr(found, "mpi_rank", None)
    return int(rank()) if rank is not None else None


_api = resolve_engine_api()
ENGINE_API: str = _api.source
BAD_PAGE_INDEX = cache_layout.BAD_PAGE_INDEX

if TYPE_CHECKING:
    from worker_connector.engine_api.cache_layout import (
        KvCacheBufferRef,
        KvCacheLayerGroupLayout,
        KvCacheLayout,
        KvCacheRegion,
        valid_page_slots,
    )
    from worker_connector.engine_api.connector_abc import (
        KvCacheConnectorScheduler,
        KvCacheConnectorWorker,
        RequestData,
        SchedulerOutput,
    )
else:
    KvCacheConnectorScheduler = _api.names["KvCacheConnectorScheduler"]
    KvCacheConnectorWorker = _api.names["KvCacheConnectorWorker"]
    RequestData = _api.names["RequestData"]
    SchedulerOutput = _api.names["SchedulerOutput"]
    KvCacheBufferRef = _api.names["KvCacheBufferRef"]
    KvCacheLayerGroupLayout = _api.names["KvCacheLayerGroupLayout"]
    KvCacheLayout = _api.names["KvCacheLayout"]
    KvCacheRegion = _api.names["KvCacheRegion"]
    valid_page_slots = _api.names["valid_page_slots"]

__all__ = [
    "BAD_PAGE_INDEX",
    "ENGINE_API",
    "LOCAL_API",
    "EngineApi",
    "KvCacheBufferRef",
    "KvCacheConnectorScheduler",
    "KvCacheConnectorWorker",
    "KvCacheLayerGroupLayout",
    "KvCacheLayout",
    "KvCacheRegion",
    "RequestData",
    "SchedulerOutput",
    "engine_rank",
    "resolve_engine_api",
    "valid_page_slots",
]
