"""A CPU engine with TensorRT-LLM's connector lifecycle: real attention over real paged KV, without a GPU.

Import the public names from here. `Engine` runs a real model with a thread per rank. `SteppedEngine` is one rank that a
caller steps, with a `ShadowModel` that computes nothing and checks every page: `engine/stepped.py` says how it is used.
Both take TensorRT-LLM's less common paths as `EngineConfig.behaviours` says (`engine/behaviours.py` lists them, each
with its source).
"""

from worker_connector.reference_engine.engine.behaviours import Behaviours, Dice, SeededDice
from worker_connector.reference_engine.engine.config import ConnectorSpec, EngineConfig, ReferenceLlmArgs
from worker_connector.reference_engine.engine.engine import Engine, EngineDeadError, Generation, RequestHandle
from worker_connector.reference_engine.engine.outcome import OnOutput, RankStats, RequestStats
from worker_connector.reference_engine.engine.stepped import SteppedEngine
from worker_connector.reference_engine.models.model_config import TINY, LlamaConfig
from worker_connector.reference_engine.models.model_directory import write_model_directory
from worker_connector.reference_engine.models.presets import SMOLLM2_NAME, TINY_NAME, ModelSource
from worker_connector.reference_engine.models.sampling import SamplingParams
from worker_connector.reference_engine.models.shadow_model import SHADOW_TINY, PageFault, ShadowModel

__all__ = [
    "SHADOW_TINY",
    "SMOLLM2_NAME",
    "TINY",
    "TINY_NAME",
    "Behaviours",
    "ConnectorSpec",
    "Dice",
    "Engine",
    "EngineConfig",
    "EngineDeadError",
    "Generation",
    "LlamaConfig",
    "ModelSource",
    "OnOutput",
    "PageFault",
    "RankStats",
    "ReferenceLlmArgs",
    "RequestHandle",
    "RequestStats",
    "SamplingParams",
    "SeededDice",
    "ShadowModel",
    "SteppedEngine",
    "write_model_directory",
]
