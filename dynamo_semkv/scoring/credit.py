"""Credit: the expected share of a claim that the backend will confirm. What was learned of it comes from outside; without, the prior."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dynamo_semkv.config.schema import MatchPriors
from dynamo_semkv.contracts.evidence import Bucket, MatchType
from dynamo_semkv.contracts.identity import StableReplica
from dynamo_semkv.contracts.location import Tier


class Credit(Protocol):
    def share(self, replica: StableReplica | None, match_type: MatchType, overlap: Bucket, tier: Tier) -> float:
        """In [0, 1]: of the tokens that such a match claims on this replica, how many the backend confirms. `replica` None: it has no
        stable id, so nothing can have been learned of it."""
        ...


@dataclass(frozen=True, slots=True)
class PriorCredit:
    """`scoring.prior`, whatever was observed."""

    prior: MatchPriors

    def share(self, replica: StableReplica | None, match_type: MatchType, overlap: Bucket, tier: Tier) -> float:
        return prior_share(self.prior, match_type)


def prior_share(prior: MatchPriors, match_type: MatchType) -> float:
    return prior.exact_equivalent if match_type is MatchType.EXACT_EQUIVALENT else prior.semantic_candidate
