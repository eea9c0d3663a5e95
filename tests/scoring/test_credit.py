"""What was learned enters the sheet as two shares, per replica and kind of claim; without it the configuration
counts."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from dynamo_semkv.config.schema import MatchPriors, Materialization, ScoringConfig
from dynamo_semkv.contracts.evidence import Bucket, MatchType
from dynamo_semkv.contracts.identity import ReplicaKey, StableReplica
from dynamo_semkv.contracts.location import Tier
from dynamo_semkv.scoring.choose import ScoreRow, choose
from dynamo_semkv.scoring.credit import Credit, Kind, PriorCredit, mode_of
from dynamo_semkv.scoring.replica_view import ReplicaView
from tests.scoring.test_choose import A, B, match

EXACT, SEMANTIC = MatchType.EXACT_EQUIVALENT, MatchType.SEMANTIC_CANDIDATE
CONFIG = ScoringConfig(prior=MatchPriors(exact_equivalent=0.8, semantic_candidate=0.1))
NAMES = {A: StableReplica("w-a", 0), B: StableReplica("w-b", 0)}
Asked = tuple[StableReplica | None, Kind]


@dataclass
class Told:
    """Answers as told, else one half; a saving that was not told is the configured one."""

    shares: dict[StableReplica | None, float] = field(default_factory=dict)
    savings: dict[StableReplica | None, float] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)

    def share(self, replica: StableReplica | None, kind: Kind) -> float:
        self.asked.append((replica, kind))
        return self.shares.get(replica, 0.5)

    def saving(self, replica: StableReplica | None, kind: Kind) -> float:
        return self.savings.get(replica, PriorCredit(CONFIG).saving(replica, kind))


def rows(
    credit: Credit | None, *, host: int = 200, disk: int = 0, mode: Materialization = Materialization.EXACT
) -> dict[ReplicaKey, ScoreRow]:
    """Two alike: 100 tokens on the device, `host` beyond; a donor that proves 600 and claims 900 of 1,000."""
    views = [
        ReplicaView(
            key, name, device_tokens=100, host_tokens=host, disk_tokens=disk, queued_prefill_tokens=0, mode=mode
        )
        for key, name in NAMES.items()
    ]
    found = match(reusable=900, exact=600, overlap=0.9)
    sheet = choose(views, [(found, A), (found, B)], 1_000, CONFIG, b"s", credit)
    return {row.replica: row for row in sheet.rows}


def test_without_anything_learned_it_is_the_prior_to_the_last_bit() -> None:
    assert rows(None) == rows(PriorCredit(CONFIG))
    row = rows(None)[A]
    assert row.part("host").value == pytest.approx(200 * 0.75 * 0.8)
    assert row.part("donor").value == pytest.approx(0.75 * (300 * 0.8 + 300 * 0.1))


def test_each_term_is_asked_for_with_its_own_cell() -> None:
    told = Told()
    rows(told, disk=50)
    assert {asked[1] for asked in told.asked if asked[0] == NAMES[A]} == {
        Kind(EXACT, Bucket.MEDIUM, Tier.HOST_PINNED),  # Dynamo's host tier: 300 of 1,000
        Kind(EXACT, Bucket.MEDIUM, Tier.DISK),  # its disk tier: 350
        Kind(EXACT, Bucket.FULL, Tier.HOST_PINNED),  # the donor's proven prefix
        Kind(SEMANTIC, Bucket.FULL, Tier.HOST_PINNED),  # the rest of its claim
    }


def test_the_mode_that_a_connector_announced_is_part_of_the_cell() -> None:
    told = Told()
    rows(told, mode=Materialization.EXPERIMENTAL)
    assert {kind.mode for _, kind in told.asked} == {Materialization.EXPERIMENTAL}


def test_a_connector_that_says_it_loads_nothing_is_worth_nothing() -> None:
    assert {row.evidence for row in rows(None, mode=Materialization.OFF).values()} == {0.0}


def test_a_load_that_costs_more_than_it_spares_counts_against_its_replica() -> None:
    found = rows(Told(savings={NAMES[A]: -0.5, NAMES[B]: 1.0}))
    assert list(found) == [B, A]
    assert found[A].part("host").value == 200 * 0.5 * -0.5
    assert found[A].total < found[A].part("device").value < found[B].total


@pytest.mark.parametrize(
    ("said", "mode"),
    [(None, "exact"), ("off", "off"), ("experimental", "experimental"), ("of a newer peer", "exact")],
)
def test_what_an_announcement_says_of_its_mode(said: str | None, mode: str) -> None:
    assert mode_of(said).value == mode


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
