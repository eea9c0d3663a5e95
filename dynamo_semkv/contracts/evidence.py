"""Evidence: what a provider says about a related earlier prompt (RFC semantic KV cache reuse, "Connector Mapping").

Evidence proposes. It never decides a route and never promises a token.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.location import Location


class MatchType(str, Enum):
    EXACT_EQUIVALENT = "exact_equivalent"
    """The block key chain of the reusable prefix is the same: the engine may load it if it still has it."""
    SEMANTIC_CANDIDATE = "semantic_candidate"
    """Related, with or without verbatim runs: discovery and placement only, on engines without request-local KV."""


class Bucket(str, Enum):
    """A score in [0, 1] in quarters; what metrics and hints may carry instead of the number."""

    NONE = "none"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"
    FULL = "full"

    @classmethod
    def of(cls, share: float) -> Bucket:
        if not share > 0.0:
            return cls.NONE
        if share < 0.25:
            return cls.LOW
        if share < 0.5:
            return cls.MEDIUM
        return cls.HIGH if share < 0.9 else cls.FULL


class SemanticTrtBlockRef(msgspec.Struct, frozen=True, kw_only=True):
    """An opaque handle of one donor block: its key, and where it is. Resolved and validated by the engine side only."""

    block_key: bytes
    ordinal: int
    location: Location | None = None


class SemanticTrtSegment(msgspec.Struct, frozen=True, kw_only=True):
    """`token_count` tokens at `target_start` of the request equal those at `donor_start` of the donor (as far as sampled)."""

    target_start: int
    donor_start: int
    token_count: int
    donor_block_refs: tuple[SemanticTrtBlockRef, ...] = ()

    def __post_init__(self) -> None:
        if self.target_start < 0 or self.donor_start < 0 or self.token_count < 1:
            raise ContractError(
                "segment", (self.target_start, self.donor_start, self.token_count), "starts >= 0 and token_count >= 1"
            )


class SemanticTrtMatch(msgspec.Struct, frozen=True, kw_only=True):
    """One donor that may help one request."""

    donor_id: str
    reusable_token_count: int
    """Tokens that are estimated to be verbatim in both, whatever their position."""
    exact_prefix_tokens: int = 0
    """Tokens of the common prefix whose block key chain was proven equal; what exact materialization can hope for."""
    match_type: MatchType
    location: Location
    provider: str
    """Who says so: `fingerprint`, `embedding`, `semblend`, `dynamo`."""
    provider_generation: str
    segments: tuple[SemanticTrtSegment, ...] = ()
    overlap: float = 0.0
    """reusable_token_count over prompt tokens, in [0, 1]."""
    confidence: float = 0.0
    edited: bool = False
    """The donor's runs are interrupted inside what is otherwise the same document."""

    @property
    def overlap_bucket(self) -> Bucket:
        return Bucket.of(self.overlap)

    @property
    def confidence_bucket(self) -> Bucket:
        return Bucket.of(self.confidence)
