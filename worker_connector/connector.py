"""The module that TensorRT-LLM's `kv_connector_config.connector_module` names: both classes of the connector."""

from worker_connector.scheduler import SemkvConnectorScheduler
from worker_connector.worker import SemkvConnectorWorker

__all__ = ["SemkvConnectorScheduler", "SemkvConnectorWorker"]
