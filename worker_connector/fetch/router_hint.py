"""The runtime keys by which Dynamo's KvRouter learns that a worker can pull blocks, and from where others can pull its
own.

They go onto the worker's model card, each as JSON text (`ModelRuntimeConfig.set_engine_specific`); names and shapes as
Dynamo's own vLLM worker publishes them (dynamo/common/constants.py, dynamo/vllm/kv_hints.py of 1.6.1;
ai-dynamo/dynamo#13134). The router then adds `kv.fetch@1.0` to a request whose worker holds less of its prefix than
another one of the same role. No Dynamo is imported here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Protocol

CAPABILITY = "router_hint"
WORKER_TYPE = "router_hint_worker_type"
SOURCE_ENDPOINTS = "router_hint_source_control_endpoints"
WORKER_TYPES = ("aggregated", "prefill", "decode")
"""A hint names sources of the same role only."""


class RuntimeConfig(Protocol):
    """What is used of Dynamo's ModelRuntimeConfig."""

    def set_engine_specific(self, key: str, value: str) -> object:
        """`value`: JSON text."""


def publish_router_hint(card: RuntimeConfig, endpoints: Mapping[int, str], worker_type: str = "aggregated") -> None:
    """Before the model is registered. `endpoints`: `tcp://ip:port` of each *global* data-parallel rank. ValueError for
    another role."""
    if worker_type not in WORKER_TYPES:
        raise ValueError(f"worker_type is {worker_type!r}; it must be one of {', '.join(WORKER_TYPES)}")
    card.set_engine_specific(
        SOURCE_ENDPOINTS, json.dumps({str(rank): text for rank, text in sorted(endpoints.items())})
    )
    card.set_engine_specific(WORKER_TYPE, json.dumps(worker_type))
    card.set_engine_specific(
        CAPABILITY, json.dumps(True)
    )  # last: without the others it would promise what nobody finds
