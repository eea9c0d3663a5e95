"""A CPU engine with TensorRT-LLM's connector lifecycle: real attention over real paged KV, without a GPU.

Import the public names from here. `Engine` runs a real model with a thread per rank. `SteppedEngine` is one rank that a
caller steps, with a `ShadowModel` that computes nothing and checks every page: `stepped.py` says how it is used. Both
take TensorRT-LLM's less common paths as `EngineConfig.behaviours` says (`behaviours.py` lists them, each with its source).
"""

from worker_connector.reference_engine.behaviours import Behaviours, Dice, SeededDice
from worker_connector.reference_engine.config import ConnectorSpec, EngineConfig, ReferenceLlmArgs
from worker_connector.reference_engine.engine import Engine, EngineDeadError, Generation, RequestHandle
from worker_connector.reference_engine.model_config import TINY, LlamaConfig
from worker_connector.reference_engine.model_directory import write_model_directory
from worker_connector.reference_engine.models import SMOLLM2_NAME, TINY_NAME, ModelSource
from worker_connector.reference_engine.outcome import OnOutput, RankStats, RequestStats
from worker_connector.reference_engine.sampling import SamplingParams
from worker_connector.reference_engine.shadow_model import SHADOW_TINY, PageFault, ShadowModel
from worker_connector.reference_engine.stepped import SteppedEngine

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
