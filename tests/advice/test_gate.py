"""The gate on candidates made by hand: when a request is placed, and when the choice stays Dynamo's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_semkv.advice.decision import Decision, DecisionReason
from dynamo_semkv.advice.gate import Candidate, decide, effective_mode
from dynamo_semkv.config.schema import PlacementConfig, PlacementMode
from dynamo_semkv.contracts.evidence import MatchType, SemanticTrtMatch
from dynamo_semkv.contracts.identity import ReplicaKey
from dynamo_semkv.contracts.location import Tier, WorkerLocation

A, B, C = ReplicaKey(1, 0), ReplicaKey(1, 1), ReplicaKey(2, 0)
CONFIG = PlacementConfig(mode=PlacementMode.ENFORCE, min_tokens=256, margin_tokens=128)


def match(donor: str, tokens: int) -> SemanticTrtMatch:
    return SemanticTrtMatch(
        donor_id=donor,
        reusable_token_count=tokens,
        exact_prefix_tokens=tokens,
        match_type=MatchType.EXACT_EQUIVALENT,
        location=WorkerLocation(worker_id=1, dp_rank=0, tier=Tier.HOST_PINNED),
        provider="test",
        provider_generation="g",
        overlap=0.5,
    )


def candidate(
    replica: ReplicaKey, *, exact: float = 0.0, evidence: float = 0.0, tokens: int | None = None
) -> Candidate:
    count = int(evidence) if tokens is None else tokens
    return Candidate(
        replica, exact + evidence, evidence, match(f"d{replica}".replace(" ", ""), count) if count else None, count
    )


def run(*candidates: Candidate, best: ReplicaKey | None = None, **changes: Any) -> Decision:
    if best is None and candidates:
        best = max(candidates, key=lambda c: c.total).replica
    options: dict[str, Any] = {"mode": PlacementMode.ENFORCE, "config": CONFIG, "hints_enabled": True, **changes}
    return decide(candidates, best, **options)


def test_a_donor_that_changes_the_choice_is_placed_and_hinted() -> None:
    got = run(candidate(A), candidate(B, evidence=1000), candidate(C))
    assert (got.reason, got.placed) == (DecisionReason.PLACED, B)
    assert (got.evidence_tokens, got.placed_tokens, got.hinted_tokens) == (1000, 1000, 1000)
    assert got.match is not None
    assert got.shadow_choice is None


def test_no_placement_without_evidence() -> None:
    assert run(candidate(A, exact=5000), candidate(B)).reason is DecisionReason.NO_EVIDENCE
    assert run().reason is DecisionReason.NO_EVIDENCE
    got = run(candidate(A), otherwise=DecisionReason.LOOKUP_TIMEOUT)
    assert (got.reason, got.placed, got.evidence_tokens) == (DecisionReason.LOOKUP_TIMEOUT, None, 0)
    # A match that claims nothing beyond the device is none, whatever its score.
    empty = Candidate(A, 900.0, 900.0, match("d", 1), 0)
    assert run(empty).placed is None


def test_exact_device_overlap_and_load_are_dynamos_job() -> None:
    # The best replica has no evidence at all.
    got = run(candidate(A, exact=4000), candidate(B, evidence=1000))
    assert (got.reason, got.placed, got.evidence_tokens) == (DecisionReason.DYNAMO_EXACT, None, 1000)
    # It has some, but it would be the best by the same margin without.
    got = run(candidate(A, exact=4000, evidence=500), candidate(B, evidence=1000))
    assert (got.reason, got.placed) == (DecisionReason.DYNAMO_EXACT, None)
    # A lead within the margin is a matter of chance: here the evidence decides.
    got = run(candidate(A, exact=50, evidence=2000), candidate(B))
    assert (got.reason, got.placed) == (DecisionReason.PLACED, A)


def test_equal_replicas_are_told_apart_by_evidence_alone() -> None:
    got = run(candidate(A, evidence=600), candidate(B), candidate(C))
    assert got.placed == A


def test_the_only_replica_is_placed_so_that_it_can_be_hinted() -> None:
    assert run(candidate(A, evidence=600)).placed == A


def test_minimum_and_margin_have_their_reasons() -> None:
    got = run(candidate(A, evidence=255, tokens=2550), candidate(B))
    assert (got.reason, got.placed, got.placed_tokens, got.evidence_tokens) == (
        DecisionReason.BELOW_MINIMUM,
        None,
        0,
        2550,
    )
    # 1000 expected tokens, but the other replica holds 900 of them on its device.
    got = run(candidate(A, evidence=1000), candidate(B, exact=900))
    assert (got.reason, got.placed) == (DecisionReason.BELOW_MARGIN, None)
    # A rival's own evidence does not count against the best: both rest on donors.
    got = run(candidate(A, evidence=1000), candidate(B, evidence=990))
    assert got.placed == A


def test_evidence_on_replicas_that_were_filtered_places_nothing() -> None:
    got = run(candidate(A, evidence=1000), best=B)
    assert (got.reason, got.placed) == (DecisionReason.DONOR_UNREACHABLE, None)


def test_shadow_decides_and_does_not_act() -> None:
    got = run(candidate(A), candidate(B, evidence=1000), mode=PlacementMode.SHADOW)
    assert (got.reason, got.placed, got.shadow_choice) == (DecisionReason.SHADOW, None, B)
    assert (got.evidence_tokens, got.placed_tokens, got.hinted_tokens) == (1000, 0, 0)


def test_hints_off_places_without_hint() -> None:
    got = run(candidate(A), candidate(B, evidence=1000), hints_enabled=False)
    assert (got.placed, got.placed_tokens, got.hinted_tokens) == (B, 1000, 0)


@pytest.mark.parametrize("mode", [PlacementMode.OFF, PlacementMode.SHADOW, PlacementMode.ENFORCE])
def test_modes_other_than_canary_are_the_same_for_all(mode: PlacementMode) -> None:
    config = PlacementConfig(mode=mode, canary_percent=50.0)
    assert {effective_mode(config, str(i)) for i in range(50)} == {mode}


def test_canary_share_is_stable_and_about_right() -> None:
    ids = [f"request-{i}" for i in range(2000)]

    def share(percent: float) -> set[str]:
        config = PlacementConfig(mode=PlacementMode.CANARY, canary_percent=percent)
        return {i for i in ids if effective_mode(config, i) is PlacementMode.CANARY}

    assert share(0.0) == set()
    assert len(share(100.0)) == len(ids)
    quarter = share(25.0)
    assert 0.2 < len(quarter) / len(ids) < 0.3
    assert quarter == share(25.0)
    # Raising the share moves nobody out.
    assert quarter < share(60.0)
    outside = next(i for i in ids if i not in quarter)
    config = PlacementConfig(mode=PlacementMode.CANARY, canary_percent=25.0)
    assert effective_mode(config, outside) is PlacementMode.SHADOW


CANDIDATES = st.lists(
    st.builds(
        lambda i, exact, evidence, tokens: candidate(
            ReplicaKey(i, 0), exact=exact, evidence=evidence if tokens else 0.0, tokens=tokens
        ),
        st.integers(0, 50),
        st.integers(-5000, 5000),
        st.integers(0, 5000),
        st.integers(0, 5000),
    ),
    max_size=6,
    unique_by=lambda c: c.replica,
)


@settings(deadline=None, max_examples=50)
@given(CANDIDATES, st.sampled_from(list(PlacementMode)), st.booleans(), st.randoms())
def test_llm_d_router_2896_the_funnel_never_grows_and_order_does_not_matter(
    candidates: list[Candidate], mode: PlacementMode, hints: bool, random: Any
) -> None:
    best = max(candidates, key=lambda c: (c.total, c.replica)).replica if candidates else None
    got = decide(candidates, best, mode=mode, config=CONFIG, hints_enabled=hints)
    assert 0 <= got.hinted_tokens <= got.placed_tokens <= got.evidence_tokens
    assert (got.placed is not None) == (got.reason is DecisionReason.PLACED)
    assert (got.shadow_choice is not None) == (got.reason is DecisionReason.SHADOW)
    if got.placed is not None:
        assert mode in (PlacementMode.ENFORCE, PlacementMode.CANARY)
        assert got.placed == best
        assert got.placed_tokens > 0
    else:
        assert got.placed_tokens == 0
    shuffled = list(candidates)
    random.shuffle(shuffled)
    again = decide(shuffled, best, mode=mode, config=CONFIG, hints_enabled=hints)
    assert (again.reason, again.placed, again.evidence_tokens) == (got.reason, got.placed, got.evidence_tokens)
