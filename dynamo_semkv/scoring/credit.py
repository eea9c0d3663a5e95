"""Credit: what a claim on a replica is worth, as two shares. What was learned of them comes from outside; without, the
configuration.

    value of a claim = tokens x share x saving

`share` is P(materialize): of the tokens that such a match claims, how many the backend confirms. `saving`: what part of
its prefill a confirmed token spares, after the cost of loading it from its tier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from dynamo_semkv.config.schema import MatchPriors, Materialization, ScoringConfig, TierCredit
from dynamo_semkv.contracts.evidence import Bucket, MatchType
from dynamo_semkv.contracts.identity import StableReplica
from dynamo_semkv.contracts.location import Tier


class Kind(NamedTuple):
    """What claims are told apart by on one replica. All sets are closed, so the cells of a replica are bounded."""

    match_type: MatchType
    overlap: Bucket
    tier: Tier
    mode: Materialization = Materialization.EXACT
    """Of the replica's connector, as it announced it: what was learned in one mode says nothing about another."""


class Credit(Protocol):
    """`replica` None: it has no stable id, so nothing can have been learned of it."""

    def share(self, replica: StableReplica | None, kind: Kind) -> float:
        """In [0, 1]."""
        ...

    def saving(self, replica: StableReplica | None, kind: Kind) -> float:
        """In [-1, 1]; below 0 where loading costs more than computing."""
        ...


@dataclass(frozen=True, slots=True)
class PriorCredit:
    """`scoring.prior` and `scoring.tier_credit`, whatever was observed."""

    config: ScoringConfig

    def share(self, replica: StableReplica | None, kind: Kind) -> float:
        """The configured prior of the match type; 0 where the connector loads nothing."""
        return prior_share(self.config.prior, kind)

    def saving(self, replica: StableReplica | None, kind: Kind) -> float:
        """The configured credit of the tier."""
        return prior_saving(self.config.tier_credit, kind.tier)


def prior_share(prior: MatchPriors, kind: Kind) -> float:
    """The configured share of the match type; 0 where the connector announced that it loads nothing."""
    if kind.mode is Materialization.OFF:
        return 0.0
    return prior.exact_equivalent if kind.match_type is MatchType.EXACT_EQUIVALENT else prior.semantic_candidate


def prior_saving(credit: TierCredit, tier: Tier) -> float:
    """The configured credit of the tier, in [-1, 1]."""
    return float(getattr(credit, tier.value))


_MODES = {mode.value: mode for mode in Materialization}


def mode_of(said: str | None) -> Materialization:
    """The mode that an announcement or a route event names. A name that only another release knows, or none, counts as
    exact, the mode of nearly all."""
    return _MODES.get(said, Materialization.EXACT) if said is not None else Materialization.EXACT
