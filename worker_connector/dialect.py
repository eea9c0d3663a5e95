"""The variants of TensorRT-LLM's connector API, and what differs for us.

* Base: `RequestData.new_block_ids_by_layer_group` is a list of lists; a load that fails can only end the executor.
* "B", of the Mooncake store's branch (NVIDIA/TensorRT-LLM#18676): the same field is a dict by layer group id; optional hooks `cancel_load`,
  `request_reset`, `shutdown`, and on the worker `take_failed_load_requests`, by which a failed load restarts its request.
* "R", prefix reservations: the runtime gives a connector that implements `reserve_prefix`, `release_prefix_reservation` and
  `get_finished_prefix_loads` another protocol, rejects one with some of them, and asks one with none as before. We have none.

Nothing is asked of a version number: fields and hooks are looked for by name.
"""

from __future__ import annotations

from typing import Any

from worker_connector.engine import KvCacheConnectorWorker
from worker_connector.metadata import Unloadable

RESERVATION_HOOKS = (
    "reserve_prefix",
    "trim_prefix_reservation",
    "release_prefix_reservation",
    "get_finished_prefix_loads",
)
"""Never define one of them alone: the runtime would reject the connector at bring-up."""


def restarts_failed_loads(worker_base: type = KvCacheConnectorWorker) -> bool:
    """Does this runtime take requests whose load failed out of the batch, and compute them? Asked of the engine's own base class: only a
    runtime that knows the hook declares it, and on any other an untold failure would run on unwritten pages."""
    return hasattr(worker_base, "take_failed_load_requests")


def restarts_failed_parked_loads(worker_base: type = KvCacheConnectorWorker) -> bool:
    """The same for requests that were parked for a load."""
    return hasattr(worker_base, "take_failed_async_load_requests")


def unmet_reservations(scheduler_output: Any) -> tuple[Unloadable, ...]:
    """Loads of reserved prefixes, which nobody here has promised. The runtime believes in them, so they may not pass in silence."""
    loads = getattr(scheduler_output, "prefix_loads", None)
    if not loads:
        return ()
    return tuple(
        Unloadable(
            None,
            f"request {getattr(load, 'request_id', '?')}: the engine expects the load of a reserved prefix, and this connector reserves "
            "none. Remedy: set scheduler_config.enable_prefix_aware_scheduling to false",
        )
        for load in loads
    )
