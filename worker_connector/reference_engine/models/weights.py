"""Weights of a Llama model as the forward pass wants them, and the seeded random ones of the `tiny` model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker_connector.reference_engine.models.model_config import LlamaConfig


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; every matrix is `[out_features, in_features]`, float32."""

    attention_norm: torch.Tensor
    #: Query, key and value rows stacked, heads in order, for rotary embedding by halves.
    qkv: torch.Tensor
    attention_output: torch.Tensor
    mlp_norm: torch.Tensor
    #: Gate rows, then up rows.
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class LlamaWeights:
    """All weights of a model, float32; the embedding and `lm_head` are `[vocab_size, hidden_size]`."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    #: The same tensor as the embedding where the two are tied.
    lm_head: torch.Tensor

    def to(self, device: torch.device) -> LlamaWeights:
        """The same numbers on another device."""
        embedding = self.embedding.to(device)
        return LlamaWeights(
            embedding=embedding,
            layers=tuple(
                LayerWeights(**{name: matrix.to(device) for name, matrix in vars(layer).items()})
                for layer in self.layers
            ),
            norm=self.norm.to(device),
            lm_head=embedding if self.lm_head is self.embedding else self.lm_head.to(device),
        )


@dataclass(frozen=True)
class LoraWeights:
    """A low-rank addition to each layer's key and value projection.

    Only keys and values have one, because its purpose is a KV cache that really differs between adapters.
    """

    #: Per layer `[rank, hidden]` and `[2 * kv_elements_per_token, rank]`.
    down: tuple[torch.Tensor, ...]
    up: tuple[torch.Tensor, ...]

    def to(self, device: torch.device) -> LoraWeights:
        """The same numbers on another device."""
        return LoraWeights(tuple(part.to(device) for part in self.down), tuple(part.to(device) for part in self.up))


def random_weights(config: LlamaConfig, seed: int, silent_from: int | None = None) -> LlamaWeights:
    """Weights that depend only on `config` and `seed`, scaled so that activations keep their size.

    Token ids from `silent_from` on get zero logits, so greedy decoding never picks them (the others have many draws of
    unit variance, of which one is positive).
    """
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(columns**-0.5)

    q_size = config.num_heads * config.head_dim
    layers = tuple(
        LayerWeights(
            attention_norm=torch.ones(config.hidden_size),
            qkv=matrix(q_size + 2 * config.kv_elements_per_token, config.hidden_size),
            attention_output=matrix(config.hidden_size, q_size),
            mlp_norm=torch.ones(config.hidden_size),
            gate_up=matrix(2 * config.intermediate_size, config.hidden_size),
            down=matrix(config.hidden_size, config.intermediate_size),
        )
        for _ in range(config.num_layers)
    )
    embedding = torch.randn(config.vocab_size, config.hidden_size, generator=generator)
    lm_head = embedding if config.tie_word_embeddings else matrix(config.vocab_size, config.hidden_size)
    if silent_from is not None:
        lm_head[silent_from:] = 0.0
    norm = torch.ones(config.hidden_size)
    return LlamaWeights(embedding=embedding, layers=layers, norm=norm, lm_head=lm_head)


def random_lora(config: LlamaConfig, seed: int, rank: int = 4) -> LoraWeights:
    """A seeded adapter that is strong enough to change keys and values visibly."""
    generator = torch.Generator().manual_seed(seed)
    down, up = [], []
    for _ in range(config.num_layers):
        down.append(torch.randn(rank, config.hidden_size, generator=generator) / config.hidden_size**0.5)
        up.append(torch.randn(2 * config.kv_elements_per_token, rank, generator=generator) * (0.5 / rank**0.5))
    return LoraWeights(down=tuple(down), up=tuple(up))
