"""The gate: decides whether the best row of a score sheet is worth acting on, and whether the mode allows it.

Pure. The rule behind all of it: Dynamo routes. A request is pinned only when evidence that Dynamo does not weigh (a
donor, or host-tier KV that the connector may load) makes another replica the better one, by enough.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from dynamo_semkv.advice.decision import Decision, DecisionReason
from dynamo_semkv.config.schema import PlacementConfig, PlacementMode
from dynamo_semkv.contracts.evidence import SemanticTrtMatch
from dynamo_semkv.contracts.identity import ReplicaKey

_CANARY_STEPS = 10_000


class Candidate(msgspec.Struct, frozen=True):
    """One replica that may be chosen. `total` and `evidence` are in expected tokens of prefill saved."""

    replica: ReplicaKey
    total: float
    """Everything: exact device overlap, evidence, less load."""
    evidence: float
    """The part of `total` that rests on a donor or on host-tier KV, and so on a confirmation that is still to come."""
    match: SemanticTrtMatch | None
    tokens: int
    """Tokens that the match claims beyond what this replica holds on its device."""
    proven: int = 0
    """Of these, the ones of a proven common prefix."""

    @property
    def without_evidence(self) -> float:
        """What the replica is worth by exact device overlap and load alone, in expected tokens."""
        return self.total - self.evidence


def effective_mode(config: PlacementConfig, request_id: str) -> PlacementMode:
    """The mode of one request. In `canary` the same request id is on the same side in every router and for every
    attempt."""
    if config.mode is not PlacementMode.CANARY:
        return config.mode
    digest = hashlib.blake2b(request_id.encode(), digest_size=8, person=b"semkv-canary").digest()
    bucket = int.from_bytes(digest, "little") % _CANARY_STEPS
    return PlacementMode.CANARY if bucket < config.canary_percent * _CANARY_STEPS / 100 else PlacementMode.SHADOW


def no_advice(mode: PlacementMode, reason: DecisionReason) -> Decision:
    """The choice is Dynamo's, and nothing was weighed."""
    return Decision(mode, reason)


def decide(
    candidates: Sequence[Candidate],
    best: ReplicaKey | None,
    *,
    mode: PlacementMode,
    config: PlacementConfig,
    hints_enabled: bool,
    otherwise: DecisionReason = DecisionReason.NO_EVIDENCE,
) -> Decision:
    """`candidates`: the rows of the score sheet that were not filtered; `best`: the picker's choice among them.

    `otherwise`: the reason when nobody has evidence (it was not looked for, came too late, or there is none).
    """
    strongest: Candidate | None = None
    chosen: Candidate | None = None
    for c in candidates:
        if chosen is None and c.replica == best:
            chosen = c
        if c.match is None or c.tokens < 1:
            continue
        if strongest is None or (c.tokens, c.evidence) > (strongest.tokens, strongest.evidence):
            strongest = c
    if strongest is None:
        return Decision(mode, otherwise)
    evidence_tokens = strongest.tokens
    reason = _reason(chosen, [c for c in candidates if c is not chosen], config)
    if reason is not DecisionReason.PLACED or chosen is None:
        return Decision(mode, reason, match=strongest.match, evidence_tokens=evidence_tokens)
    if mode not in (PlacementMode.ENFORCE, PlacementMode.CANARY):
        return Decision(
            mode,
            DecisionReason.SHADOW,
            shadow_choice=chosen.replica,
            match=chosen.match,
            evidence_tokens=evidence_tokens,
        )
    return Decision(
        mode,
        DecisionReason.PLACED,
        placed=chosen.replica,
        match=chosen.match,
        evidence_tokens=evidence_tokens,
        placed_tokens=chosen.tokens,
        hinted_tokens=chosen.tokens if hints_enabled else 0,
        proven_tokens=min(chosen.proven, chosen.tokens),
    )


def _reason(chosen: Candidate | None, rivals: Sequence[Candidate], config: PlacementConfig) -> DecisionReason:
    if chosen is None:
        return DecisionReason.DONOR_UNREACHABLE
    if chosen.match is None or chosen.tokens < 1 or not chosen.evidence > 0.0:
        return DecisionReason.DYNAMO_EXACT
    if rivals and chosen.without_evidence - max([c.total for c in rivals]) >= max(config.margin_tokens, 1):
        return DecisionReason.DYNAMO_EXACT
    if chosen.evidence < config.min_tokens:
        return DecisionReason.BELOW_MINIMUM
    if rivals and chosen.total - max([c.total - c.evidence for c in rivals]) < config.margin_tokens:
        return DecisionReason.BELOW_MARGIN
    return DecisionReason.PLACED
