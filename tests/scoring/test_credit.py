"""What was learned enters the sheet as a share, per replica, match type, overlap and tier; without it the prior counts."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from dynamo_semkv.config.schema import MatchPriors, ScoringConfig
from dynamo_semkv.contracts.evidence import Bucket, MatchType
from dynamo_semkv.contracts.identity import ReplicaKey, StableReplica
from dynamo_semkv.contracts.location import Tier
from dynamo_semkv.scoring.candidate import ReplicaView
from dynamo_semkv.scoring.choose import ScoreRow, choose
from dynamo_semkv.scoring.credit import Credit, PriorCredit
from tests.scoring.test_choose import A, B, match

EXACT, SEMANTIC = MatchType.EXACT_EQUIVALENT, MatchType.SEMANTIC_CANDIDATE
CONFIG = ScoringConfig(prior=MatchPriors(exact_equivalent=0.8, semantic_candidate=0.1))
NAMES = {A: StableReplica("w-a", 0), B: StableReplica("w-b", 0)}
Asked = tuple[StableReplica | None, MatchType, Bucket, Tier]


@dataclass
class Told:
    """Answers as told, else one half."""

    shares: dict[StableReplica | None, float] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)

    def share(self, replica: StableReplica | None, match_type: MatchType, overlap: Bucket, tier: Tier) -> float:
        self.asked.append((replica, match_type, overlap, tier))
        return self.shares.get(replica, 0.5)


def rows(credit: Credit | None, *, host: int = 200, disk: int = 0) -> dict[ReplicaKey, ScoreRow]:
    """Two alike: 100 tokens on the device, `host` beyond; a donor that proves 600 and claims 900 of 1,000."""
    views = [
        ReplicaView(key, name, device_tokens=100, host_tokens=host, disk_tokens=disk, queued_prefill_tokens=0)
        for key, name in NAMES.items()
    ]
    found = match(reusable=900, exact=600, overlap=0.9)
    sheet = choose(views, [(found, A), (found, B)], 1_000, CONFIG, b"s", credit)
    return {row.replica: row for row in sheet.rows}


def test_without_anything_learned_it_is_the_prior_to_the_last_bit() -> None:
    assert rows(None) == rows(PriorCredit(CONFIG.prior))
    row = rows(None)[A]
    assert row.part("host").value == 200 * 0.75 * 0.8
    assert row.part("donor").value == pytest.approx(0.75 * (300 * 0.8 + 300 * 0.1))


def test_each_term_is_asked_for_with_its_own_cell() -> None:
    told = Told()
    rows(told, disk=50)
    assert {asked[1:] for asked in told.asked if asked[0] == NAMES[A]} == {
        (EXACT, Bucket.MEDIUM, Tier.HOST_PINNED),  # Dynamo's host tier: 300 of 1,000
        (EXACT, Bucket.MEDIUM, Tier.DISK),  # its disk tier: 350
        (EXACT, Bucket.FULL, Tier.HOST_PINNED),  # the donor's proven prefix
        (SEMANTIC, Bucket.FULL, Tier.HOST_PINNED),  # the rest of its claim
    }


def test_nothing_is_left_where_nothing_is_confirmed_and_the_other_replica_is_best() -> None:
    found = rows(Told({NAMES[A]: 0.0, NAMES[B]: 1.0}))
    assert found[A].evidence == 0.0
    assert found[A].total == found[A].part("device").value == 100.0
    assert found[B].evidence == pytest.approx(0.75 * (200 + 300 + 300))
    assert list(found) == [B, A]
    # The claim is a fact about the donor and does not depend on what was learned.
    assert (
        (found[A].claimed_tokens, found[A].proven_tokens)
        == (found[B].claimed_tokens, found[B].proven_tokens)
        == (800, 500)
    )
