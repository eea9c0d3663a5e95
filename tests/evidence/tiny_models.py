"""A sentence encoder of a few kilobytes and a tokenizer, written to a directory as the real ones are: ONNX and
`tokenizer.json`.

The encoder looks its tokens up in a table of random vectors, so that a text's mean vector is that of its bag of words:
the same words in another order are a paraphrase. The ONNX file is encoded by hand (protobuf: a key of field number and
wire type, then the value), which needs no package.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = 2_000
DIMENSION = 32
UNKNOWN = 0
_INT64, _FLOAT = 7, 1


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes | str) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return _varint(field << 3 | 2) + _varint(len(raw)) + raw


def _value_info(name: str, kind: int, shape: list[str | int]) -> bytes:
    dimensions = b"".join(_bytes(1, _bytes(2, size) if isinstance(size, str) else _number(1, size)) for size in shape)
    tensor = _number(1, kind) + _bytes(2, dimensions)
    return _bytes(1, name) + _bytes(2, _bytes(1, tensor))


def onnx_lookup(table: np.ndarray, *, output_shape: list[str | int] | None = None) -> bytes:
    """ModelProto: `last_hidden_state = Gather(table, input_ids)`."""
    gather = _bytes(1, "table") + _bytes(1, "input_ids") + _bytes(2, "last_hidden_state") + _bytes(4, "Gather")
    rows, dimension = table.shape
    weights = _number(1, rows) + _number(1, dimension) + _number(2, _FLOAT) + _bytes(8, "table")
    weights += _bytes(9, table.astype("<f4").tobytes())
    graph = _bytes(1, gather) + _bytes(2, "tiny") + _bytes(5, weights)
    graph += _bytes(11, _value_info("input_ids", _INT64, ["batch", "length"]))
    graph += _bytes(12, _value_info("last_hidden_state", _FLOAT, output_shape or ["batch", "length", dimension]))
    return _number(1, 8) + _bytes(7, graph) + _bytes(8, _bytes(1, "") + _number(2, 13))


def write_tokenizer(directory: Path) -> Path:
    """Word n is written `wn`; word 0 is the unknown one."""
    vocabulary = {f"w{n}": n for n in range(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path = directory / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def write_encoder(directory: Path, seed: int = 3) -> Path:
    table = np.random.default_rng(seed).standard_normal((WORDS, DIMENSION)).astype(np.float32)
    (directory / "model.onnx").write_bytes(onnx_lookup(table))
    write_tokenizer(directory)
    return directory
