"""Parses a worker's arguments with Dynamo's own parser for TensorRT-LLM workers, and prints what it made of them as
JSON.

Run as a program: the parser takes four defaults from a type of tensorrt_llm, for which an empty stand-in is put here.
"""

from __future__ import annotations

import collections
import json
import sys
import types


def main() -> None:
    for name in ("tensorrt_llm", "tensorrt_llm.llmapi", "tensorrt_llm.llmapi.llm_args"):
        sys.modules[name] = types.ModuleType(name)
    defaults = collections.defaultdict(lambda: types.SimpleNamespace(default=None))
    stand_in = type("BaseLlmArgs", (), {"model_fields": defaults})
    sys.modules["tensorrt_llm.llmapi.llm_args"].BaseLlmArgs = stand_in  # type: ignore[attr-defined]
    from dynamo.trtllm.args import parse_args

    config = parse_args(sys.argv[1:])
    wanted = (
        "namespace",
        "component",
        "endpoint",
        "endpoint_types",
        "publish_kv_events",
        "enable_attention_dp",
        "tensor_parallel_size",
    )
    wanted += ("extra_engine_args", "disaggregation_mode", "model", "served_model_name", "kv_block_size")
    print(json.dumps({name: getattr(config, name, None) for name in wanted}, default=str))


if __name__ == "__main__":
    main()
