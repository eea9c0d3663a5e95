"""Encoder: a sentence encoder in ONNX Runtime, from text to unit vectors, and the served model's tokenizer, which makes
text of token ids.

Needs the extra `embeddings`. Both read local directories only and download nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.keys import TokenArray

Vectors = npt.NDArray[np.float32]
"""Shape [n, dimension], each row of length 1."""

ONNX_NAMES = ("model.onnx", "onnx/model.onnx")


class Encoder(Protocol):
    """Used by several threads at once."""

    @property
    def dimension(self) -> int:
        """Length of every vector."""
        ...

    def encode(self, texts: Sequence[str], length: int) -> Vectors:
        """One vector for each text, of its first `length` tokens of the encoder; zeros for an empty or blank text."""
        ...


class Detokenizer(Protocol):
    """From the served model's token ids to text. Used by several threads at once."""

    def text(self, tokens: TokenArray) -> str:
        """The text of the tokens, shape [n], without special tokens."""
        ...


def existing(path: str | os.PathLike[str], field: str, *names: str) -> Path:
    """The first of `names` inside `path`, or `path` itself if it is a file. Raises ContractError naming the config
    field."""
    root = Path(path)
    for found in (root, *(root / name for name in names)):
        if found.is_file():
            return found
    raise ContractError(field, str(path), f"a file, or a directory with {' or '.join(names)}")


class OnnxEncoder:
    """BERT-like: `input_ids` and `attention_mask` in (`token_type_ids` where the graph asks for them),
    `last_hidden_state` out; the mean over a text's tokens, scaled to length 1, as sentence-transformers does for
    all-MiniLM-L6-v2.

    One thread a call: ONNX Runtime works in the caller's thread, so a query never waits behind a donor that is being
    embedded.
    """

    def __init__(self, path: str | os.PathLike[str], *, field: str = "evidence.embedding.model_path") -> None:
        """`path`: a directory with `tokenizer.json` and `model.onnx` or `onnx/model.onnx`, or such a file beside its
        tokenizer. Raises ContractError for missing files or an output of another shape, ImportError without the
        extra."""
        import onnxruntime
        import tokenizers

        model = existing(path, field, *ONNX_NAMES)
        root = model.parent.parent if model.parent.name == "onnx" else model.parent
        self._tokenizer = tokenizers.Tokenizer.from_file(str(existing(root, field, "tokenizer.json")))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        self._inputs = {given.name for given in self._session.get_inputs()}
        output = self._session.get_outputs()[0]
        if len(output.shape) != 3 or not isinstance(output.shape[2], int) or "input_ids" not in self._inputs:
            raise ContractError(
                field, f"{output.name} of shape {output.shape}", "input_ids in, [batch, length, dimension] out"
            )
        self._output, self._dimension = output.name, output.shape[2]
        around = self._tokenizer.encode("").ids
        half = (len(around) + 1) // 2
        self._around = around[:half], around[half:]
        """What the encoder wants before and after every text: [CLS], [SEP]."""

    @property
    def dimension(self) -> int:
        """Length of every vector, from the model's output shape."""
        return self._dimension

    def encode(self, texts: Sequence[str], length: int) -> Vectors:
        """Runs the model once for each group of texts with the same number of tokens."""
        before, after = self._around
        parts = [found.ids[:length] for found in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]
        vectors = np.zeros((len(parts), self._dimension), np.float32)
        for n in {
            len(part) for part in parts if part
        }:  # texts of one length together: no padding, and so no padding's cost
            rows = [at for at, part in enumerate(parts) if len(part) == n]
            ids = np.array([[*before, *parts[row], *after] for row in rows], np.int64)
            given = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
            fed = {name: value for name, value in given.items() if name in self._inputs}
            hidden = self._session.run([self._output], fed)[0]
            vectors[rows] = np.asarray(hidden, np.float32).mean(axis=1)
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        unit: Vectors = np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0)
        return unit


class TokenizerFile:
    """The served model's `tokenizer.json`: ids to text, chat markers left out."""

    def __init__(self, path: str | os.PathLike[str], *, field: str = "model.path") -> None:
        import tokenizers

        self._tokenizer = tokenizers.Tokenizer.from_file(str(existing(path, field, "tokenizer.json")))

    def text(self, tokens: TokenArray) -> str:
        """Decodes in the caller's thread, without special tokens."""
        text: str = self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
        return text
