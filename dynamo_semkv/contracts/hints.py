"""KV hints: the versioned envelope and the two actions we speak (RFC versioned KV hints protocol,
NVIDIA/TensorRT-LLM#18153).

Rules: another envelope version is refused at ingress; an unknown action type or version, or a bad payload, skips that
action and the others go on; payloads stay opaque to the transport; unknown fields of envelope and action are ignored
(optional additions need no new version). A hint is advice: acting on it, or not, never changes what is correct.
"""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo_semkv.contracts.evidence import Bucket
from dynamo_semkv.contracts.load_plan import ExpectedMode

PROTOCOL_VERSION = "0.1"
MAX_ACTIONS = 16
MAX_BLOCK_HASHES = 16_384
MAX_HINT_BYTES = 256 * 1024

DONOR_ACTION = "semkv.donor"
DONOR_VERSION = "1.0"
FETCH_ACTION = "kv.fetch"
FETCH_VERSION = "1.0"

EXTRA_ARGS_KEY = "semkv"
"""Where our envelope rides in a request's `extra_args`: Dynamo's KvRouter replaces a caller's own `kv_hint`."""


class KvHintAction(msgspec.Struct, frozen=True, kw_only=True):
    """One action of an envelope (RFC KV hints); `payload` is the action type's own."""

    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any]


class KvHintsEnvelope(msgspec.Struct, frozen=True, kw_only=True):
    """What travels with a request (RFC KV hints); receivers ignore actions that they do not know."""

    protocol_version: str
    message_id: str
    actions: list[KvHintAction]


class DonorHint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Payload of `semkv.donor@1.0` (stability: alpha): why the request was sent here, and what may be reused."""

    route_id: str
    donor_id: str
    expected_mode: ExpectedMode
    generation: str
    namespace: str
    """Hex digest of the CacheNamespace."""
    token_count: int
    """Reusable tokens that the evidence claims."""
    exact_prefix_tokens: int
    score_bucket: Bucket
    traceparent: str | None = None
    """W3C context of the route's span: an engine that carries hints on its requests need not carry a trace context
    too."""


class FetchHint(msgspec.Struct, frozen=True, kw_only=True):
    """Payload of `kv.fetch@1.0`, made by Dynamo's KvRouter: entry i of `block_hashes` is the source's hash of request
    block i."""

    source_control_endpoint: str
    block_hashes: list[int]


class HintDelivery(msgspec.Struct, frozen=True, kw_only=True):
    """The out-of-band hint table's row: the router publishes it just before it dispatches, the connector's leader keeps
    it for seconds and finds it by hashing the request's tokens. Late or lost costs nothing but the hint; two equal
    prompts share one safely."""

    version: str
    stable_routing_id: str
    dp_rank: int
    prompt_key: bytes
    envelope: KvHintsEnvelope
    traceparent: str | None = None


HINT_DELIVERY_VERSION = "1.0"
