"""The models that the reference engine knows by name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from worker_connector.reference_engine.models.model import ForwardModel, LlamaModel
from worker_connector.reference_engine.models.model_config import TINY, LlamaConfig
from worker_connector.reference_engine.models.timed_model import TimedModel
from worker_connector.reference_engine.models.weights import random_weights

if TYPE_CHECKING:
    from worker_connector.reference_engine.models.gguf_file import GgufModel

TINY_NAME = "tiny"
SMOLLM2_NAME = "SmolLM2-135M-Instruct"
TIMED_NAME = "timed"
MODEL_NAMES = (TINY_NAME, SMOLLM2_NAME, TIMED_NAME)

#: Ids below this are printable ASCII in the byte tokenizer of `tiny`; greedy text stays valid and never ends by itself.
_TINY_PRINTABLE = 94


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, with the identity that a cache namespace needs."""

    name: str
    #: Content digest of the weight file, or the seed of random weights: equal revisions compute equal KV.
    revision: str
    model: ForwardModel

    @property
    def config(self) -> LlamaConfig:
        """The model's shape."""
        return self.model.config


@dataclass(frozen=True)
class ModelSource:
    """Which model to load. `seed` and `config` apply to `tiny`, where None means `TINY`, and to `timed`, whose config
    describes its pages (`timing/profile.py`)."""

    name: str = TINY_NAME
    seed: int = 0
    config: LlamaConfig | None = None

    def __post_init__(self) -> None:
        if self.name not in MODEL_NAMES:
            raise ValueError(f"model name is {self.name!r}; known are {', '.join(MODEL_NAMES)}")
        if self.name == SMOLLM2_NAME and (self.config is not None or self.seed):
            raise ValueError(f"model {self.name!r} takes neither seed nor config")
        if self.name == TIMED_NAME and self.config is None:
            raise ValueError(f"model {self.name!r} needs the config of a profile")


@cache
def smollm2_file() -> GgufModel:
    """The parsed SmolLM2 file, shared: parsing takes seconds."""
    # Imported here, because the `tiny` model must run where no GGUF reader is installed.
    from worker_connector.reference_engine.models.gguf_file import GgufModel, smollm2_path

    return GgufModel(smollm2_path())


@cache
def load_model(source: ModelSource, device: str = "cpu") -> LoadedModel:
    """Load a model once for each process and device; ranks and engines share the weights, which nobody writes."""
    where = torch.device(device)
    with torch.no_grad():
        if source.name == SMOLLM2_NAME:
            file = smollm2_file()
            return LoadedModel(source.name, file.digest(), LlamaModel(file.config, file.weights().to(where)))
        config = source.config or TINY
        if source.name == TIMED_NAME:
            return LoadedModel(source.name, f"seed-{source.seed}", TimedModel(config, source.seed))
        weights = random_weights(config, source.seed, silent_from=_TINY_PRINTABLE)
        return LoadedModel(source.name, f"seed-{source.seed}", LlamaModel(config, weights.to(where)))
