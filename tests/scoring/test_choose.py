"""The score sheet: one unit, no credit where none is due, and the same answer whatever the order of the input."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_semkv.config.schema import MatchPriors, ScoringConfig, TierCredit
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.evidence import MatchType, SemanticTrtMatch
from dynamo_semkv.contracts.identity import ReplicaKey
from dynamo_semkv.contracts.location import Tier, WorkerLocation
from dynamo_semkv.scoring.choose import ScoreSheet, SheetReason, choose
from dynamo_semkv.scoring.filters import FilteredBy
from dynamo_semkv.scoring.replica_view import ReplicaView

A, B, C, D = ReplicaKey(1, 0), ReplicaKey(1, 1), ReplicaKey(2, 0), ReplicaKey(2, 1)
PROMPT = 8_192
CONFIG = ScoringConfig(
    load_weight=0.5,
    prior=MatchPriors(exact_equivalent=0.8, semantic_candidate=0.1),
    tier_credit=TierCredit(device=1.0, host_pinned=0.75, disk=0.5, external=0.25),
)


def match(donor_id: str = "d", reusable: int = 4_096, exact: int = 0, **fields: Any) -> SemanticTrtMatch:
    base: dict[str, Any] = {
        "match_type": MatchType.EXACT_EQUIVALENT if exact else MatchType.SEMANTIC_CANDIDATE,
        "location": WorkerLocation(9, 9, fields.pop("tier", Tier.HOST_PINNED)),
        "provider": "fingerprint",
        "provider_generation": "g",
        "confidence": 0.5,
    }
    return SemanticTrtMatch(
        donor_id=donor_id, reusable_token_count=reusable, exact_prefix_tokens=exact, **(base | fields)
    )


def views(*replicas: ReplicaKey, **fields: Any) -> list[ReplicaView]:
    return [ReplicaView(replica, queued_prefill_tokens=0, **fields) for replica in replicas]


def sheet(rows: list[ReplicaView], *matches: Any, config: ScoringConfig = CONFIG, seed: bytes = b"s") -> ScoreSheet:
    return choose(rows, matches, PROMPT, config, seed)


def totals(of: ScoreSheet) -> dict[ReplicaKey, float]:
    return {row.replica: row.total for row in of.rows}


def test_every_term_of_the_sum() -> None:
    view = ReplicaView(A, device_tokens=1_000, host_tokens=400, disk_tokens=200, queued_prefill_tokens=300)
    idle = ReplicaView(B, queued_prefill_tokens=100)
    row = next(r for r in sheet([view, idle], (match(reusable=4_000, exact=2_000), A)).rows if r.replica == A)
    values = {part.name: part.value for part in row.parts}
    assert values == pytest.approx(
        {
            "device": 1_000.0,
            "host": 400 * 0.75 * 0.8,
            "disk": 200 * 0.5 * 0.8,
            "donor": 0.75 * (400 * 0.8 + 2_000 * 0.1),
            "load": -0.5 * 200,
            "decode": 0.0,
        }
    )
    assert row.total == pytest.approx(sum(values.values()))
    assert row.evidence == pytest.approx(values["host"] + values["disk"] + values["donor"])
    assert row.claimed_tokens == 3_000


def test_llm_d_kv_cache_357_a_donor_on_one_rank_is_worth_nothing_to_the_other() -> None:
    result = sheet(views(A, B), (match(), B))
    assert result.best is not None
    assert result.best.replica == B
    zero = next(row for row in result.rows if row.replica == A)
    assert (zero.evidence, zero.match, zero.claimed_tokens, zero.total) == (0.0, None, 0, 0.0)


def test_production_stack_1061_a_donor_on_an_unknown_replica_is_ignored() -> None:
    result = sheet(views(A), (match(), ReplicaKey(77, 0)), (match("e"), ReplicaKey(77, 0)))
    assert result.rows[0].match is None


def test_production_stack_1055_no_replica_is_a_clean_refusal() -> None:
    result = sheet([], (match(), A))
    assert (result.best, result.reason, result.rows) == (None, SheetReason.NO_REPLICA, ())


@pytest.mark.parametrize(
    ("view", "reason"),
    [
        (ReplicaView(A, overloaded=True), FilteredBy.OVERLOADED),
        (ReplicaView(A, wrong_role=True), FilteredBy.WRONG_ROLE),
        (ReplicaView(A, not_allowed=True), FilteredBy.NOT_ALLOWED),
        (ReplicaView(A, lacks_taint=True), FilteredBy.LACKS_TAINT),
        (ReplicaView(A, overloaded=True, lacks_taint=True), FilteredBy.LACKS_TAINT),
        (ReplicaView(A, active_decode_blocks=10, total_blocks=10), FilteredBy.NO_ROOM),
    ],
)
def test_a_replica_that_may_not_be_chosen_is_shown_last_with_its_reason(view: ReplicaView, reason: FilteredBy) -> None:
    result = sheet([view, *views(B)], (match(reusable=PROMPT, exact=PROMPT), A))
    assert result.best is not None
    assert result.best.replica == B
    assert result.rows[-1].filtered_by is reason
    alone = sheet([view])
    assert (alone.best, alone.reason) == (None, SheetReason.ALL_FILTERED)


def test_a_replica_of_unknown_size_has_room() -> None:
    assert sheet([ReplicaView(A, active_decode_blocks=10, total_blocks=0)]).best is not None


def test_device_tokens_are_not_paid_for_twice() -> None:
    """A donor whose claim lies inside the replica's own exact prefix adds nothing."""
    rows = [ReplicaView(A, device_tokens=4_096, queued_prefill_tokens=0)]
    row = sheet(rows, (match(reusable=4_096, exact=4_096), A)).rows[0]
    assert (row.total, row.evidence, row.claimed_tokens) == (4_096.0, 0.0, 0)


def test_host_residency_is_paid_once_and_names_its_evidence() -> None:
    """Dynamo's host tier and the match that reports it are the same tokens (architecture, step 5)."""
    rows = [ReplicaView(A, device_tokens=1_024, host_tokens=2_048, queued_prefill_tokens=0)]
    dynamo = match("host-tier", reusable=3_072, exact=3_072, provider="dynamo")
    row = sheet(rows, (dynamo, A)).rows[0]
    assert row.match == dynamo
    assert row.evidence == pytest.approx(2_048 * 0.75 * 0.8)
    assert row.claimed_tokens == 2_048
    assert row.part("donor").value == 0.0
    weaker = match("similar", reusable=2_000)
    assert sheet(rows, (weaker, A), (dynamo, A)).rows[0].match == dynamo


def test_a_donor_that_adds_to_the_host_tier_is_named_instead() -> None:
    rows = [ReplicaView(A, host_tokens=1_024, queued_prefill_tokens=0)]
    dynamo = match("host-tier", reusable=1_024, exact=1_024, provider="dynamo")
    more = match("more", reusable=6_000, exact=1_024)
    row = sheet(rows, (dynamo, A), (more, A)).rows[0]
    assert row.match == more
    assert row.evidence == pytest.approx(1_024 * 0.75 * 0.8 + (6_000 - 1_024) * 0.75 * 0.1)


def test_donors_on_one_replica_do_not_add_up() -> None:
    one = sheet(views(A), (match("a"), A)).rows[0].total
    three = sheet(views(A), (match("a"), A), (match("b"), A), (match("c"), A)).rows[0]
    assert three.total == one
    assert three.match is not None
    assert three.match.donor_id == "a"


@pytest.mark.parametrize(
    ("tier", "credit"), [("device", 1.0), ("host_pinned", 0.75), ("disk", 0.5), ("external", 0.25)]
)
def test_a_token_is_worth_what_its_tier_saves(tier: str, credit: float) -> None:
    row = sheet(views(A), (match(reusable=1_000, exact=1_000, tier=Tier(tier)), A)).rows[0]
    assert row.total == pytest.approx(1_000 * credit * 0.8)


def test_load_costs_only_what_is_above_the_idlest() -> None:
    rows = [ReplicaView(r, queued_prefill_tokens=q) for r, q in ((A, 10_000), (B, 12_000), (C, 10_500))]
    assert totals(sheet(rows)) == {A: 0.0, B: -1_000.0, C: -250.0}


def test_an_overloaded_replica_does_not_set_the_idlest_mark() -> None:
    rows = [
        ReplicaView(A, queued_prefill_tokens=0, overloaded=True),
        *[ReplicaView(r, queued_prefill_tokens=4_000) for r in (B, C)],
    ]
    assert totals(sheet(rows))[B] == 0.0


def test_an_unknown_queue_is_neither_idle_nor_busy() -> None:
    rows = [
        ReplicaView(A, queued_prefill_tokens=0),
        ReplicaView(B, queued_prefill_tokens=2_000),
        ReplicaView(C, queued_prefill_tokens=None),
    ]
    assert totals(sheet(rows)) == {A: 0.0, B: -1_000.0, C: -500.0}
    assert totals(sheet([ReplicaView(A), ReplicaView(B)])) == {A: 0.0, B: 0.0}


def test_evidence_loses_against_enough_load() -> None:
    rows = [ReplicaView(A, queued_prefill_tokens=20_000), ReplicaView(B, queued_prefill_tokens=0)]
    result = sheet(rows, (match(reusable=PROMPT, exact=PROMPT), A))
    assert result.best is not None
    assert result.best.replica == B


def test_claims_beyond_the_prompt_are_cut() -> None:
    row = choose(views(A), [(match(reusable=10**6, exact=10**6), A)], 100, CONFIG, b"").rows[0]
    assert row.total == pytest.approx(100 * 0.75 * 0.8)
    assert row.claimed_tokens == 100


def test_two_views_of_one_replica_are_refused() -> None:
    with pytest.raises(ContractError, match="one view a replica"):
        sheet([*views(A), *views(A)])


@pytest.mark.parametrize("field", ["device_tokens", "host_tokens", "disk_tokens", "queued_prefill_tokens"])
def test_negative_counts_are_refused_by_name(field: str) -> None:
    with pytest.raises(ContractError, match=field):
        ReplicaView(A, **{field: -1})


def test_ties_are_spread_by_the_seed_and_stable_for_one() -> None:
    chosen = Counter(
        result.best.replica
        for n in range(400)
        if (result := sheet(views(A, B, C, D), seed=n.to_bytes(4, "big"))).best is not None
    )
    assert set(chosen) == {A, B, C, D}
    assert min(chosen.values()) > 60
    first = sheet(views(A, B, C, D), seed=b"x")
    assert sheet(views(A, B, C, D), seed=b"x") == first


REPLICAS = st.sampled_from([A, B, C, D])
TOKENS = st.integers(0, 2 * PROMPT)
MATCHES = st.builds(
    match,
    donor_id=st.sampled_from("abcd"),
    reusable=st.integers(1, PROMPT),
    exact=st.sampled_from([0, 32, 4_096, 8_192]),
    tier=st.sampled_from(list(Tier)),
    confidence=st.sampled_from([0.0, 0.5]),
    provider=st.sampled_from(["fingerprint", "dynamo"]),
)
VIEWS = st.lists(
    st.builds(
        ReplicaView,
        replica=REPLICAS,
        device_tokens=TOKENS,
        host_tokens=TOKENS,
        disk_tokens=TOKENS,
        queued_prefill_tokens=st.none() | TOKENS,
        active_decode_blocks=st.integers(0, 4),
        total_blocks=st.integers(0, 4),
        overloaded=st.booleans(),
    ),
    unique_by=lambda view: view.replica,
)


@given(VIEWS, st.lists(st.tuples(MATCHES, REPLICAS), max_size=8), st.integers(0, PROMPT), st.randoms())
def test_the_sheet_does_not_depend_on_the_order_of_its_input(
    rows: list[ReplicaView],
    found: list[tuple[SemanticTrtMatch, ReplicaKey]],
    input_tokens: int,
    rng: random.Random,
) -> None:
    first = choose(rows, found, input_tokens, CONFIG, b"seed")
    shuffled_rows, shuffled_found = rows[:], found[:]
    rng.shuffle(shuffled_rows)
    rng.shuffle(shuffled_found)
    again = choose(shuffled_rows, shuffled_found, input_tokens, CONFIG, b"seed")
    assert totals(again) == totals(first)
    assert [(row.replica, row.claimed_tokens) for row in again.rows] == [
        (row.replica, row.claimed_tokens) for row in first.rows
    ]
    assert (again.best is None) == (first.best is None)


@given(VIEWS, st.lists(st.tuples(MATCHES, REPLICAS), max_size=8), st.integers(0, PROMPT))
def test_rows_are_sound(
    rows: list[ReplicaView], found: list[tuple[SemanticTrtMatch, ReplicaKey]], input_tokens: int
) -> None:
    result = choose(rows, found, input_tokens, CONFIG, b"seed")
    assert sorted(row.replica for row in result.rows) == sorted(view.replica for view in rows)
    for row in result.rows:
        assert all(0.0 <= part.share <= 1.0 for part in row.parts)
        assert row.total == pytest.approx(sum(part.value for part in row.parts))
        assert math.isfinite(row.total)
        assert row.evidence >= 0.0
        assert 0 <= row.claimed_tokens <= input_tokens
        assert (row.match is None) == (row.replica not in {replica for _, replica in found})
    eligible = [row for row in result.rows if row.filtered_by is None]
    assert result.best == (eligible[0] if eligible else None)
    assert all(result.best.total >= row.total - 1e-6 for row in eligible if result.best is not None)
