"""Removes what a client may not send: hints are for the router to give.

A hint names donors and their KV; a client that could send one could point an engine at another tenant's blocks. So
every place where a hint could enter is cleared before the request is looked at, and how many were found is counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HINT_KEYS = frozenset({"kv_hint", "kv_hints", "semkv", "kv_transfer_params", "router_hint", "semantic_donor"})
"""Names under which engines and Dynamo look for hints; cleared at every level where a client can write."""

PIN_KEYS = ("backend_instance_id", "decode_worker_id", "prefill_worker_id")
"""Where a client's pin to an instance is found in `routing`."""
DECODE_KEYS = ("decode_worker_id", "dp_rank")
"""Where a disaggregated request says which replica is to decode it; its prefill half goes where `prefill_*` says."""


def _clear(mapping: Any) -> tuple[Any, int]:
    if not (type(mapping) is dict or isinstance(mapping, Mapping)) or HINT_KEYS.isdisjoint(mapping):
        return mapping, 0
    found = [key for key in mapping if key in HINT_KEYS]
    return {key: value for key, value in mapping.items() if key not in HINT_KEYS}, len(found)


def strip_client_hints(request: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """The request without anything a client could have meant as a hint, and how many such fields it had.

    Looks at the top level, `extra_args`, `nvext` and `extra_args.nvext`. The given request is not changed; parts that
    need no change are shared.
    """
    cleared, count = _clear(request)
    result = dict(cleared)
    for name in ("extra_args", "nvext"):
        given = result.get(name)
        if given is None or not isinstance(given, (dict, Mapping)):
            continue
        part, found = _clear(given)
        count += found
        if name == "extra_args" and isinstance(part.get("nvext"), Mapping):
            nvext, found = _clear(part["nvext"])
            if found:
                part = {**part, "nvext": nvext}
                count += found
        result[name] = part
    return result, count


def without_own_pin(request: Mapping[str, Any], instance_id: int | None) -> Mapping[str, Any]:
    """The request without a pin that names this very router. `nvext.worker_id` shows a client our id, so some send it
    back; the frontend has honoured it by dispatching to us, and no worker has it."""
    routing = request.get("routing")
    if instance_id is None or not isinstance(routing, Mapping):
        return request
    own = [key for key in PIN_KEYS if routing.get(key) == instance_id]
    if not own:
        return request
    return {**request, "routing": {key: value for key, value in routing.items() if key not in own}}


def prefill_half(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """The request as the prefill workers of a disaggregated pair get it: without the client's choice of a decode
    worker. Dynamo's KvRouter takes a request from us for a whole one, and would look for that worker among the prefill
    workers."""
    routing = request.get("routing")
    if not isinstance(routing, Mapping) or routing.get("decode_worker_id") is None:
        return request
    return {**request, "routing": {key: value for key, value in routing.items() if key not in DECODE_KEYS}}
