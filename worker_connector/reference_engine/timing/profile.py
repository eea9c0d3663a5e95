"""What is known of one model on one kind of GPU: a YAML file of `timing/profiles`, or one of the user's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import yaml

from worker_connector.reference_engine.models.model_config import LlamaConfig

PROFILES = Path(__file__).parent / "profiles"
_DIGITS_OF_A_SHARE = ("flops_utilisation", "memory_utilisation", "bus_utilisation")


class GpuProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The figures that the cost model needs. Rates are those of all GPUs of one rank together."""

    name: str
    parameters: float
    """Weights that each token is multiplied with."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    weight_bytes: float
    """Of all parameters, as they are read once a pass."""
    kv_bytes_per_element: float
    flops_per_second: float
    """Peak of the matrix units for the data type that the model computes in."""
    flops_utilisation: float
    """Share of the peak that a prefill reaches."""
    memory_bytes_per_second: float
    memory_utilisation: float
    bus_bytes_per_second: float
    """Between device and host memory; loads and saves share it."""
    bus_utilisation: float
    pass_overhead_seconds: float
    """What a pass takes however small it is: scheduling, launches, sampling."""
    kv_memory_bytes: float
    """Device memory that is left for KV."""
    max_seq_len: int
    max_num_tokens: int
    """Token budget of a pass, as the engine is configured with."""
    max_batch_size: int

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name != "name" and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value!r}; it must be positive and finite")
            if name in _DIGITS_OF_A_SHARE and value > 1:
                raise ValueError(f"{name} is {value!r}; it must be at most 1")

    @property
    def kv_bytes_per_token(self) -> float:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bytes_per_element

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV fits into device memory."""
        return int(self.kv_memory_bytes / self.kv_bytes_per_token)

    @property
    def page_config(self) -> LlamaConfig:
        """The shape of the pages that stand for the real ones: 16 bytes of KV a token, and the byte tokenizer's
        vocabulary."""
        return LlamaConfig(
            vocab_size=512,
            hidden_size=2,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=2,
            intermediate_size=2,
            max_position_embeddings=self.max_seq_len,
        )


def known_profiles() -> list[str]:
    """The names of the profiles that come with the engine."""
    return sorted(path.stem for path in PROFILES.glob("*.yaml"))


def load_profile(name: str) -> GpuProfile:
    """A profile by its name, or by the path of a YAML file. ValueError says which field is wrong, or which names are
    known."""
    path = PROFILES / f"{name}.yaml" if name in known_profiles() else Path(name)
    if not path.is_file():
        raise ValueError(f"profile is {name!r}; it must be a YAML file or one of {', '.join(known_profiles())}")
    try:
        values: Any = yaml.safe_load(path.read_text())
        return msgspec.convert(values, GpuProfile)
    except (yaml.YAMLError, msgspec.ValidationError, ValueError) as error:
        raise ValueError(f"profile {path}: {error}") from error
