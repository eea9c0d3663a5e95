"""The variants of TensorRT-LLM's connector API, and what differs for us.

* Base: `RequestData.new_block_ids_by_layer_group` is a list of lists; a load that fails can only end the executor.
* "B", of the Mooncake store's branch (NVIDIA/TensorRT-LLM#18676): the same field is a dict by layer group id; optional
  hooks `cancel_load`, `request_reset`, `shutdown`, and on the worker `take_failed_load_requests`, by which a failed
  load restarts its request.
* "R", prefix reservations: the runtime gives a connector that implements `reserve_prefix`, `release_prefix_reservation`
  and `get_finished_prefix_loads` another protocol, rejects one with some of them, and asks one with none as before. We
  have none.

Nothing is asked of a version number: fields and hooks are looked for by name.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

from worker_connector.engine_api.engine import ENGINE_API, LOCAL_API, KvCacheConnectorWorker
from worker_connector.link.metadata import Unloadable

RESERVATION_HOOKS = (
    "reserve_prefix",
    "trim_prefix_reservation",
    "release_prefix_reservation",
    "get_finished_prefix_loads",
)
"""Never define one of them alone: the runtime would reject the connector at bring-up."""


def restarts_failed_loads(worker_base: type = KvCacheConnectorWorker) -> bool:
    """Does this runtime take requests whose load failed out of the batch, and compute them? On one that does not, an
    untold failure would run on unwritten pages."""
    return runtime_asks("take_failed_load_requests", worker_base)


def restarts_failed_parked_loads(worker_base: type = KvCacheConnectorWorker) -> bool:
    """The same for requests that were parked for a load."""
    return runtime_asks("take_failed_async_load_requests", worker_base)


def runtime_asks(hook: str, worker_base: type) -> bool:
    """Does the runtime that `worker_base` belongs to know the optional `hook` of a worker?

    It does where the base class declares the hook, or where a function of the loaded executor package names it: a
    runtime may look an optional hook up by name and declare it nowhere. A connector of somebody else that only defines
    the hook proves nothing.
    """
    if hasattr(worker_base, hook):
        return True
    if ENGINE_API == LOCAL_API and worker_base is KvCacheConnectorWorker:
        return False  # the local classes belong to no executor
    package = worker_base.__module__.rpartition(".")[0].removesuffix(".connectors")
    modules = [
        module
        for name, module in list(sys.modules.items())
        if module is not None and package and (name == package or name.startswith(package + "."))
    ]
    return any(hook in words for module in modules for words in _words_of_functions(module))


def _words_of_functions(module: ModuleType) -> Iterator[set[str]]:
    """Of each function that the module defines, inside classes too: the names that its code looks up and its
    strings."""
    stack: list[object] = list(vars(module).values())
    while stack:
        found = stack.pop()
        if isinstance(found, type) and found.__module__ == module.__name__:
            stack.extend(vars(found).values())
        code = getattr(inspect.unwrap(getattr(found, "__func__", found)), "__code__", None) if callable(found) else None
        if isinstance(code, CodeType) and getattr(found, "__module__", module.__name__) == module.__name__:
            yield from _words_of(code)


def _words_of(code: CodeType) -> Iterator[set[str]]:
    yield {*code.co_names, *(word for word in code.co_consts if isinstance(word, str))}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _words_of(inner)


def unmet_reservations(scheduler_output: Any) -> tuple[Unloadable, ...]:
    """Loads of reserved prefixes, which nobody here has promised. The runtime believes in them, so they may not pass in
    silence."""
    loads = getattr(scheduler_output, "prefix_loads", None)
    if not loads:
        return ()
    return tuple(
        Unloadable(
            None,
            f"request {getattr(load, 'request_id', '?')}: the engine expects the load of a reserved prefix, and this "
            "connector reserves none. Remedy: set scheduler_config.enable_prefix_aware_scheduling to false",
        )
        for load in loads
    )
