"""Shape of a Llama-architecture model."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class LlamaConfig:
    """Hyperparameters under the names of a Hugging Face Llama `config.json`, apart from `num_layers` and
    `num_heads`."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "tie_word_embeddings" and value <= 0:
                raise ValueError(f"{field.name} is {value}; it must be positive")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary embedding needs an even number")

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of one token's key (or value) in one layer."""
        return self.num_kv_heads * self.head_dim


#: The `tiny` model: fast enough for unit tests, deep and wide enough that wrong KV changes its tokens.
TINY = LlamaConfig(
    vocab_size=512,
    hidden_size=256,
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    intermediate_size=512,
    max_position_embeddings=40_960,
)
