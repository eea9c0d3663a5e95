"""The module that TensorRT-LLM's `kv_connector_config.connector_module` names: both classes of the connector, and the
functions that take the engine's KV cache events, let requests wait for their blocks on disk, and report changed weights
or a reset cache."""

from worker_connector.donors.kv_event_registry import observe_kv_events
from worker_connector.leader.cache_reset import reset_cache, weights_changed
from worker_connector.leader.disk_prefetch_wait import disk_door
from worker_connector.scheduler import SemkvConnectorScheduler
from worker_connector.worker import SemkvConnectorWorker

__all__ = [
    "SemkvConnectorScheduler",
    "SemkvConnectorWorker",
    "disk_door",
    "observe_kv_events",
    "reset_cache",
    "weights_changed",
]
