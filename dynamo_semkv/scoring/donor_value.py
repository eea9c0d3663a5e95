"""What one donor is worth on one replica, beyond what Dynamo knows to be there exactly.

A count of tokens is an integer and a fact or a claim; a value is a float of *expected* tokens of prefill saved. They
are different types, so that a tier-weighted score can never be used as a block count (llm-d/llm-d-router P #2091).
"""

from __future__ import annotations

from typing import NamedTuple, NewType

from dynamo_semkv.config.schema import ScoringConfig
from dynamo_semkv.contracts.evidence import Bucket, MatchType, SemanticTrtMatch
from dynamo_semkv.contracts.location import Tier
from dynamo_semkv.scoring.credit import Credit, Kind, prior_saving
from dynamo_semkv.scoring.replica_view import ReplicaView

TokenValue = NewType("TokenValue", float)
"""Expected tokens of prefill saved; negative for what costs."""
_NOTHING = (TokenValue(0.0), TokenValue(0.0), TokenValue(0.0))


class DonorValue(NamedTuple):
    """What one match is worth on one replica."""

    match: SemanticTrtMatch
    beyond_exact: TokenValue
    """What it adds to the exact prefix that Dynamo reports on the replica."""
    explains: TokenValue
    """`beyond_exact` and the host and disk tokens that it is evidence for as well: who names the reason when nothing is
    added."""
    claimed_tokens: int
    """Tokens that it claims beyond the device prefix. A claim, not an expectation."""
    proven_tokens: int
    """Of these, the ones of a proven common prefix."""


def exact_value(
    view: ReplicaView, input_tokens: int, config: ScoringConfig, credit: Credit
) -> tuple[TokenValue, TokenValue, TokenValue]:
    """(device, host, disk). Device KV is there; the other tiers still have to be confirmed by the connector."""
    if not (view.device_tokens or view.host_tokens or view.disk_tokens):
        return _NOTHING  # most replicas have nothing of most prompts

    def hoped(tokens: int, up_to: int, tier: Tier) -> TokenValue:
        if tokens == 0:
            return TokenValue(0.0)
        overlap = Bucket.of(min(1.0, up_to / input_tokens) if input_tokens > 0 else 0.0)
        return TokenValue(tokens * _worth(credit, view, Kind(MatchType.EXACT_EQUIVALENT, overlap, tier, view.mode)))

    return (
        TokenValue(view.device_tokens * prior_saving(config.tier_credit, Tier.DEVICE)),
        hoped(view.host_tokens, view.device_tokens + view.host_tokens, Tier.HOST_PINNED),
        hoped(view.disk_tokens, view.exact_tokens, Tier.DISK),
    )


def donor_value(
    match: SemanticTrtMatch,
    view: ReplicaView,
    input_tokens: int,
    credit: Credit,
    exact_values: tuple[TokenValue, TokenValue, TokenValue],
) -> DonorValue:
    """The proven prefix counts with the credit of exact matches, the rest of the claim with that of semantic ones: an
    exact engine can load the first and will decline the second, whichever of the two gave the match its type.
    `exact_values`: those of the view."""
    reusable = min(match.reusable_token_count, input_tokens)
    prefix = min(match.exact_prefix_tokens, input_tokens)
    exact = view.exact_tokens
    proven = max(0, prefix - exact)
    similar = max(0, reusable - max(prefix, exact))
    overlap, tier = match.overlap_bucket, match.location.tier
    beyond = sum(
        tokens * _worth(credit, view, Kind(match_type, overlap, tier, view.mode))
        for tokens, match_type in ((proven, MatchType.EXACT_EQUIVALENT), (similar, MatchType.SEMANTIC_CANDIDATE))
        if tokens > 0
    )
    _, host, disk = exact_values
    covered_host = _share(prefix - view.device_tokens, view.host_tokens)
    covered_disk = _share(prefix - view.device_tokens - view.host_tokens, view.disk_tokens)
    return DonorValue(
        match=match,
        beyond_exact=TokenValue(beyond),
        explains=TokenValue(beyond + covered_host * host + covered_disk * disk),
        claimed_tokens=max(0, max(reusable, prefix) - view.device_tokens),
        proven_tokens=max(0, prefix - view.device_tokens),
    )


def _worth(credit: Credit, view: ReplicaView, kind: Kind) -> float:
    """Tokens of prefill that one claimed token is expected to save."""
    return credit.share(view.stable, kind) * credit.saving(view.stable, kind)


def _share(covered: int, of: int) -> float:
    return min(1.0, max(0, covered) / of) if of else 0.0
