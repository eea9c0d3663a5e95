"""Every span and attribute name, once.

Ours are under `semkv.`. Of the GenAI conventions (open-telemetry/semantic-conventions-genai, v0.1.0, status
Development) only those are used that a router of token ids knows: `gen_ai.operation.name` is not among them, since a
preprocessed request no longer says whether it was a chat, and `gen_ai.provider.name` belongs to client spans, of which
we make none. Never in an attribute: prompt, token ids, cache salt, or a hash of them.
"""

from __future__ import annotations

# Spans of the router.
ROUTE = "semkv.route"
"""One attempt of one request, from its arrival at the router to the end of its stream. Child of the frontend's
context."""
EXACT = "semkv.exact"
"""Dynamo asked for exact overlap and load."""
LOOKUP = "semkv.lookup"
SCORE = "semkv.score"
HINT = "semkv.hint"
DISPATCH = "semkv.dispatch"
"""From the opening record to the end of the stream. Dynamo's KvRouter begins a trace of its own for the worker."""
OUTCOME = "semkv.outcome"
"""From the end of the stream to the moment at which the route's outcome was known; links to the connector's span."""

# Spans of the connector.
MATERIALIZE = "semkv.materialize"
"""One attempt as the connector saw it, from the engine's question to its report."""
OFFER = "semkv.offer"
LOAD = "semkv.load"
"""From the order to the ranks until the copies have landed."""
REPORT = "semkv.report"

# Events.
FIRST_CHUNK = "semkv.first_chunk"
PIN_GIVEN_UP = "semkv.pin_given_up"

# Attributes of ours.
ROUTE_ID = "semkv.route.id"
REQUEST_ID = "semkv.request.id"
"""Dynamo's context id: the one in `chatcmpl-<id>`."""
ATTEMPT = "semkv.route.attempt"
ROUTER = "semkv.router.name"
MODE = "semkv.placement.mode"
DECISION = "semkv.placement.reason"
SHADOW_CHOICE = "semkv.placement.shadow_choice"
CONFIG_HASH = "semkv.config.hash"
LOOKUP_RESULT = "semkv.lookup.result"
LOOKUP_MATCHES = "semkv.lookup.matches"
CANDIDATES = "semkv.score.candidates"
UNREACHABLE = "semkv.score.unreachable_matches"
PROVIDER = "semkv.evidence.provider"
MATCH_TYPE = "semkv.evidence.match_type"
OVERLAP = "semkv.evidence.overlap"
TIER = "semkv.evidence.tier"
DONOR_ID = "semkv.evidence.donor"
REPLICA = "semkv.replica.name"
"""`stable_routing_id/dp_rank`, as pinned to or served by."""
WORKER_ID = "semkv.replica.worker_id"
PINNED = "semkv.dispatch.pinned"
PIN_FALLBACK = "semkv.dispatch.fallback"
END = "semkv.dispatch.end"
HINT_SENT = "semkv.hint.sent"
"""Whether the bus took it; the one in the request went anyway."""
INPUT_TOKENS = "semkv.tokens.input"
EXACT_DEVICE_TOKENS = "semkv.tokens.exact_device"
EXACT_HOST_TOKENS = "semkv.tokens.exact_host"
EVIDENCE_TOKENS = "semkv.tokens.evidence"
PLACED_TOKENS = "semkv.tokens.placed"
HINTED_TOKENS = "semkv.tokens.hinted"
LOCAL_TOKENS = "semkv.tokens.local"
OFFERED_TOKENS = "semkv.tokens.offered"
HONOURED_TOKENS = "semkv.tokens.honoured"
COPIED_TOKENS = "semkv.tokens.copied"
CONFIRMED_TOKENS = "semkv.tokens.confirmed"
OUTCOME_RESULT = "semkv.outcome.result"
OUTCOME_REASON = "semkv.outcome.reason"
CROSS_CHECK = "semkv.outcome.cross_check"
EPOCH = "semkv.materialize.epoch"
ENGINE_REQUEST = "semkv.materialize.engine_request"
"""The engine's own number of the request: for its logs."""
CONTEXT_CARRIER = "semkv.materialize.context"
"""How the route's context came to the connector: a value of Carrier."""
LOAD_SECONDS = "semkv.load.seconds"
"""As the report's `load_seconds`."""
REPORT_SENT = "semkv.report.sent"


class Carrier:
    """Values of CONTEXT_CARRIER."""

    REQUEST = "request"
    """The engine carries hints on its requests."""
    HINT = "hint_delivery"
    """The hint of this very route was found by the prompt's key: the span is a child of the route's."""
    EQUAL_PROMPT = "equal_prompt"
    """The hint was given out before, to an equal prompt: linked, not a child."""
    NONE = "none"
    """Nothing was hinted: a trace of its own, which the router's `semkv.outcome` links to."""


# Attributes of the GenAI conventions.
GEN_AI_MODEL = "gen_ai.request.model"
GEN_AI_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
GEN_AI_CACHE_READ_TOKENS = "gen_ai.usage.cache_read.input_tokens"
"""Prompt tokens that the engine itself says it did not compute; absent where it does not say."""

# Of the general conventions (stable).
ERROR_TYPE = "error.type"
SERVICE_NAME = "service.name"
SERVICE_INSTANCE = "service.instance.id"
SERVICE_VERSION = "service.version"

SCOPE = "dynamo_semkv"
"""Name of the instrumentation scope."""
