"""Evidence: what a provider says about a related earlier prompt (RFC semantic KV cache reuse, "Connector Mapping").

Evidence proposes. It never decides a route and never promises a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import msgspec
import numpy as np

from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.location import Location

MAX_SIGNALS = 8
"""Quality signals, and entries of metadata, of one match."""
MAX_SIGNAL_NAME = 32
MAX_METADATA_TEXT = 256
_NUMBER = (int, float, np.integer, np.floating)


class MatchType(str, Enum):
    """What a match can be good for."""

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
        """The bucket of a share in [0, 1]; `none` for what is not above 0."""
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
    """`token_count` tokens at `target_start` of the request equal those at `donor_start` of the donor (as far as
    sampled).

    The RFC's `layer_recompute_mask` is not here: no engine of this contract materializes approximate KV, so no layer of
    a segment is ever recomputed on its own. What is exact is loaded in every layer or not at all.
    """

    target_start: int
    donor_start: int
    token_count: int
    donor_block_refs: tuple[SemanticTrtBlockRef, ...] = ()
    """Of providers that know a donor's blocks. Empty in ours, whose sketches name some blocks only: those of a proven
    prefix have the keys of the request's own chain, and only the engine that holds them can resolve a reference
    (`SemanticTrtLoadPlan`)."""

    def __post_init__(self) -> None:
        if self.target_start < 0 or self.donor_start < 0 or self.token_count < 1:
            raise ContractError(
                "segment", (self.target_start, self.donor_start, self.token_count), "starts >= 0 and token_count >= 1"
            )


class SemanticTrtMatch(msgspec.Struct, frozen=True, kw_only=True):
    """One donor that may help one request.

    Two fields of the RFC are not here. `donor_token_ids`: what others wrote never leaves their engine, so a provider
    has sketches and no tokens; the engine compares its own. `donor_block_refs` of the whole match: as
    `SemanticTrtSegment.donor_block_refs` says, a proven prefix is named by the request's own block keys, and what is
    not proven is not loaded.
    """

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
    quality_signals: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Numbers that the provider's judgement rests on, by names of its own; at most `MAX_SIGNALS`. `explain` shows those
    of the chosen match, and scorers may weigh them; nothing of ours decides by them."""
    metadata: Mapping[str, str | int | float] = msgspec.field(default_factory=dict)
    """What else the provider says of the donor, for scorers and logs of this process: it goes into no event, hint or
    page."""

    def __hash__(self) -> int:
        """Signals and metadata are mappings, which have none."""
        return hash((self.donor_id, self.provider, self.provider_generation, self.location, self.reusable_token_count))

    @property
    def overlap_bucket(self) -> Bucket:
        """The overlap in quarters."""
        return Bucket.of(self.overlap)

    @property
    def confidence_bucket(self) -> Bucket:
        """The confidence in quarters."""
        return Bucket.of(self.confidence)


def are_signals(values: object) -> bool:
    """Can these be the quality signals of a match? Finite numbers under a few short names."""
    return _is_small(values) and all(_is_finite(value) for value in values.values())  # type: ignore[attr-defined]


def check_signals(field: str, values: Mapping[str, float]) -> None:
    """Raises ContractError for what `are_signals` does not accept."""
    if not are_signals(values):
        allowed = f"at most {MAX_SIGNALS} finite numbers under ASCII names of 1 to {MAX_SIGNAL_NAME} characters"
        raise ContractError(field, len(values), allowed)


def is_metadata(values: object) -> bool:
    """As `are_signals`, but short texts may be among the values."""
    return _is_small(values) and all(
        len(value) <= MAX_METADATA_TEXT if isinstance(value, str) else _is_finite(value)
        for value in values.values()  # type: ignore[attr-defined]
    )


def _is_small(values: object) -> bool:
    return (
        isinstance(values, dict)
        and len(values) <= MAX_SIGNALS
        and all(isinstance(name, str) and name.isascii() and 0 < len(name) <= MAX_SIGNAL_NAME for name in values)
    )


def _is_finite(value: object) -> bool:
    return isinstance(value, _NUMBER) and not isinstance(value, bool) and bool(abs(value) <= 2.0**63)
