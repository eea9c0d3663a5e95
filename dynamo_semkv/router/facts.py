"""The facts of one preprocessed request that matter to advice: tokens, tenant, adapter, media, and whether it is ours
to place.

Pure. The field names are those of Dynamo's PreprocessedRequest; text is never looked at, identity comes from Dynamo's
token ids alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.router.runtime_types import Request

PIN_FIELDS = (
    "backend_instance_id",
    "decode_worker_id",
    "prefill_worker_id",
    "dp_rank",
    "prefill_dp_rank",
)
"""Where a client, or a gateway before us, can say which worker or rank it wants."""
FLOW_FIELDS = ("prefill_result", "bootstrap_info")
"""A request that carries these is one half of a disaggregated pair: its place follows from the other half."""
MEDIA_FIELDS = ("multi_modal_data", "multi_modal_uuids", "mm_routing_info", "prompt_embeds")
QUERY_ANNOTATION = "query_instance_id"


@dataclass(frozen=True)
class Constraints:
    """Which replicas a request may go to. Dynamo applies the same constraints, so it would refuse a placement outside
    them."""

    workers: frozenset[int] | None = None
    """`routing.allowed_worker_ids`; None: any."""
    required_taints: frozenset[str] = frozenset()
    """Every one of them must be on the worker's card."""

    def allow(self, worker_id: int) -> bool:
        """Whether `routing.allowed_worker_ids` lets this worker serve; taints are not looked at."""
        return self.workers is None or worker_id in self.workers


UNCONSTRAINED = Constraints()


class RequestFacts(msgspec.Struct, frozen=True):
    """What advice needs to know of one request, read by `request_facts`."""

    model: str
    token_ids: list[int]
    """The prompt as plain integers: Dynamo's queries read packed bytes as one token a byte."""
    salt: str | None
    lora_name: str | None
    multimodal: tuple[str, ...] | None
    """Content hashes; `()` without media, None where there is media without a hash for each."""
    client_pinned: bool
    constraints: Constraints = UNCONSTRAINED

    @property
    def salt_is_empty(self) -> bool:
        """True for a cache salt of no characters, which names no tenant; False without a salt (the shared tenant)."""
        return self.salt == ""


def request_facts(request: Request) -> RequestFacts:
    """Raises ContractError for a request that does not have the shape of Dynamo's PreprocessedRequest."""
    routing = _mapping(request, "routing")
    extra_args = _mapping(request, "extra_args")
    nvext = {**_mapping(request, "nvext"), **_mapping(extra_args, "nvext")}
    places = [where for where in (routing, nvext, request) if where]
    constraints = _constraints(places)
    return RequestFacts(
        model=str(request.get("model") or ""),
        token_ids=token_list(request.get("token_ids")),
        salt=_salt(routing, nvext),
        lora_name=_text("routing.lora_name", routing.get("lora_name")) or None,
        multimodal=_multimodal(request, extra_args),
        client_pinned=constraints is None or _client_pinned(request, places),
        constraints=constraints or UNCONSTRAINED,
    )


def constraints_of(request: Request) -> Constraints | None:
    """The constraints of a request whose other facts do not matter. None: see `_constraints`."""
    nvext = {**_mapping(request, "nvext"), **_mapping(_mapping(request, "extra_args"), "nvext")}
    return _constraints([_mapping(request, "routing"), nvext, request])


def token_list(token_ids: object) -> list[int]:
    """The ids as a list: a list as it is, packed little-endian i32 unpacked. ContractError for anything else."""
    if type(token_ids) is list:
        return token_ids
    if isinstance(token_ids, (bytes, bytearray, memoryview)):
        raw = bytes(token_ids)
        if len(raw) % 4:
            raise ContractError("token_ids.bytes", len(raw), "a multiple of 4")
        unpacked: list[int] = np.frombuffer(raw, "<i4").tolist()
        return unpacked
    if isinstance(token_ids, list):
        return token_ids
    if isinstance(token_ids, Sequence) and not isinstance(token_ids, str):
        return list(token_ids)
    raise ContractError("token_ids", type(token_ids).__name__, "a list of integers or packed little-endian i32")


_NOTHING: Mapping[str, Any] = {}


def _mapping(container: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = container.get(name)
    # What Dynamo hands over is a dict or nothing; a check against an abstract class takes ten times as long.
    return value if type(value) is dict or isinstance(value, Mapping) else _NOTHING


def _text(field: str, value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise ContractError(field, type(value).__name__, "text")


def _salt(routing: Mapping[str, Any], nvext: Mapping[str, Any]) -> str | None:
    """`routing.cache_salt` is what Dynamo routes by; dynamo.trtllm falls back to nvext's. Where both are there and
    differ, router and engine would see two tenants."""
    routed = _text("routing.cache_salt", routing.get("cache_salt"))
    given = _text("nvext.cache_salt", nvext.get("cache_salt")) if nvext else None
    if routed is not None and given is not None and routed != given:
        raise ContractError("cache_salt", "two values", "the same in routing and nvext", secret=True)
    return routed if routed is not None else given


def _multimodal(request: Request, extra_args: Mapping[str, Any]) -> tuple[str, ...] | None:
    for name in MEDIA_FIELDS:
        value = request.get(name)
        if value is not None and _present(value):
            break
    else:
        return ()
    hashes = extra_args.get("mm_hashes")
    if not isinstance(hashes, (list, tuple)) or not hashes or not all(isinstance(h, str) and h for h in hashes):
        return None
    items = sum(len(part) for part in _mapping(request, "multi_modal_data").values() if isinstance(part, (list, tuple)))
    return tuple(hashes) if items in (0, len(hashes)) else None


def _constraints(places: Sequence[Mapping[str, Any]]) -> Constraints | None:
    """None: the request says more than which workers may not serve it (preferred taints are weights in Dynamo's own
    choice, which a pin would override), or says it in a form that is not understood."""
    workers: frozenset[int] | None = None
    taints: set[str] = set()
    for where in places:
        allowed = where.get("allowed_worker_ids")
        if allowed is not None:
            if not isinstance(allowed, (list, tuple, set, frozenset)) or not all(type(it) is int for it in allowed):
                return None
            workers = frozenset(allowed) if workers is None else workers & frozenset(allowed)
        asked = where.get("routing_constraints")
        if asked is None or not _present(asked):
            continue
        if not isinstance(asked, Mapping) or any(
            _present(value) for name, value in asked.items() if name != "required_taints"
        ):
            return None
        required = asked.get("required_taints") or ()
        if not isinstance(required, (list, tuple, set, frozenset)) or not all(isinstance(it, str) for it in required):
            return None
        taints.update(required)
    return Constraints(workers, frozenset(taints)) if workers is not None or taints else UNCONSTRAINED


def _client_pinned(request: Request, places: Sequence[Mapping[str, Any]]) -> bool:
    for where in places:
        for name in PIN_FIELDS:
            if name in where and _present(where[name]):
                return True
    for name in FLOW_FIELDS:
        if name in request and _present(request[name]):
            return True
    if "agent_context" in request and _present(_mapping(request, "agent_context").get("session_id")):
        return True
    annotations = request.get("annotations")
    if not annotations or not isinstance(annotations, (list, tuple)):
        return False
    return any(isinstance(item, str) and item.startswith(QUERY_ANNOTATION) for item in annotations)


def _present(value: object) -> bool:
    """Rank 0 and worker 0 are values; None, an empty list and an empty mapping say nothing."""
    return value is not None and value is not False and not (isinstance(value, (str, list, tuple, dict)) and not value)
