"""The decision on one request, and the closed set of reasons for it."""

from __future__ import annotations

from enum import Enum

import msgspec

from dynamo_semkv.config.schema import PlacementMode
from dynamo_semkv.contracts.evidence import SemanticTrtMatch
from dynamo_semkv.contracts.identity import ReplicaKey


class DecisionReason(str, Enum):
    """Why a request was placed, or why the choice was left to Dynamo. Closed: metrics use it as a label."""

    PLACED = "placed"
    SHADOW = "shadow"
    """Would have been placed; the mode of this request does not act."""
    MODE_OFF = "mode_off"
    CLIENT_PINNED = "client_pinned"
    """The client named a worker or a rank, or belongs to a session: that is not ours to override."""
    NAMESPACE_UNKNOWN = "namespace_unknown"
    """No live replica of the model has announced itself."""
    NAMESPACE_DIFFERS = "namespace_differs"
    SALT_UNKNOWN = "salt_unknown"
    """The cache salt is empty: neither a tenant's nor surely nobody's."""
    ADAPTER_UNKNOWN = "adapter_unknown"
    """The request has an adapter whose revision the router does not know: KV of another revision must not look like a
    match."""
    MULTIMODAL_UNHASHED = "multimodal_unhashed"
    """There is media without a content hash: two images would look like one."""
    EXACT_COVERS = "exact_covers"
    """Exact device overlap covers so much of the prompt that no donor was looked for."""
    NO_EVIDENCE = "no_evidence"
    LOOKUP_SKIPPED = "lookup_skipped"
    """No provider could be asked: none is configured, or each is stuck or put aside after failures."""
    LOOKUP_TIMEOUT = "lookup_timeout"
    LOOKUP_ERROR = "lookup_error"
    EXACT_UNKNOWN = "exact_unknown"
    """Dynamo did not say in time what it holds and how loaded it is: nothing can be weighed against it."""
    OVERLOADED = "overloaded"
    """More requests than `evidence.max_inflight` were being weighed in this router: advice is the first thing that is
    shed."""
    DONOR_UNREACHABLE = "donor_unreachable"
    """There is evidence, but only on replicas that may not be chosen (not alive, not advisable, overloaded, ruled out
    by the request)."""
    DYNAMO_EXACT = "dynamo_exact"
    """The best replica is the best by exact device overlap and load alone: Dynamo's own job."""
    BELOW_MINIMUM = "below_minimum"
    """Fewer expected tokens than `placement.min_tokens`."""
    BELOW_MARGIN = "below_margin"
    """Not better by `placement.margin_tokens` than the best replica without donor evidence."""
    FAULT = "fault"
    """A fault of ours; the fallback counter says which."""


class Decision(msgspec.Struct, frozen=True):
    """What was decided for one attempt. Immutable: what happens to it later is another event.

    Token counts are tokens of this prompt beyond what the replica holds on its device, so that each of them can at most
    be confirmed once: `hinted_tokens <= placed_tokens <= evidence_tokens`.
    """

    mode: PlacementMode
    """The mode this request really had: outside the canary share it is `shadow`."""
    reason: DecisionReason
    placed: ReplicaKey | None = None
    """Where it is pinned; None: Dynamo chooses."""
    shadow_choice: ReplicaKey | None = None
    """Where it would have been pinned, when the mode does not act."""
    match: SemanticTrtMatch | None = None
    """The evidence behind the choice; without a choice, the best that was found."""
    evidence_tokens: int = 0
    placed_tokens: int = 0
    hinted_tokens: int = 0
    proven_tokens: int = 0
    """Of `placed_tokens`, those of a proven common prefix."""
