"""Verdicts: what is offered, and the one reason that is given when nothing is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_semkv.contracts.evidence import Bucket
from dynamo_semkv.contracts.hints import DonorHint
from dynamo_semkv.contracts.load_plan import ExpectedMode
from dynamo_semkv.contracts.namespace import CacheNamespace
from dynamo_semkv.contracts.report import Outcome, Reason
from worker_connector.ledger.ledger import MatchEnd
from worker_connector.requests.load_decision import Accept, Decline, HintFacts, Question, before_lookup, explain, judge

HERE = "aa" * 32
GENERATION = "now"


def question(prompt: int = 100, local: int = 0, **options: object) -> Question:
    return Question(prompt, local, 4, **options)  # type: ignore[arg-type]


@given(prompt=st.integers(0, 200), local=st.integers(0, 200), matched=st.integers(0, 60), minimum=st.integers(1, 40))
def test_offers_are_whole_blocks_beyond_what_is_local_and_below_the_prompt(
    prompt: int, local: int, matched: int, minimum: int
) -> None:
    it = question(prompt, min(local, prompt), min_offer_tokens=minimum)
    verdict = before_lookup(it) or judge(it, matched, MatchEnd.NOT_RESIDENT)
    if isinstance(verdict, Accept):
        end = verdict.blocks * 4
        assert it.local_tokens % 4 == 0
        assert end - it.local_tokens >= minimum
        assert end < prompt
        assert verdict.blocks <= matched


@pytest.mark.parametrize(
    ("it", "expected"),
    [
        (question(problem=Reason.SALT_UNKNOWN), Decline(Outcome.DECLINED, Reason.SALT_UNKNOWN)),
        (question(prompt=4), Decline(Outcome.NO_DONOR, Reason.PROMPT_TOO_SHORT)),
        (question(prompt=0), Decline(Outcome.NO_DONOR, Reason.PROMPT_TOO_SHORT)),
        (question(local=98), Decline(Outcome.LOCAL_EXACT, Reason.LOCAL_COVERS)),
        (question(local=30), Decline(Outcome.DECLINED, Reason.MISALIGNED_LOCAL)),
        (question(local=32), None),
    ],
)
def test_before_lookup(it: Question, expected: Decline | None) -> None:
    assert before_lookup(it) == expected


@pytest.mark.parametrize(
    ("it", "matched", "end", "damaged", "expected"),
    [
        (question(), 0, MatchEnd.NOT_RESIDENT, False, Decline(Outcome.NO_DONOR, Reason.NOT_RESIDENT)),
        (question(local=8), 2, MatchEnd.LIMIT, False, Decline(Outcome.LOCAL_EXACT, Reason.LOCAL_COVERS)),
        (question(), 0, MatchEnd.TOKENS_DIFFER, False, Decline(Outcome.DECLINED, Reason.TOKEN_MISMATCH)),
        (question(), 0, MatchEnd.NOT_RESIDENT, True, Decline(Outcome.DECLINED, Reason.CHECKSUM_MISMATCH)),
        (question(), 3, MatchEnd.TOKENS_DIFFER, False, Accept(3)),
        (question(), 99, MatchEnd.LIMIT, False, Accept(24)),
        (question(min_offer_tokens=64), 15, MatchEnd.LIMIT, False, Decline(Outcome.DECLINED, Reason.BELOW_MINIMUM)),
        (question(leases_left=False), 9, MatchEnd.LIMIT, False, Decline(Outcome.DECLINED, Reason.LEASES_EXHAUSTED)),
    ],
)
def test_judge(it: Question, matched: int, end: MatchEnd, damaged: bool, expected: Accept | Decline) -> None:
    assert judge(it, matched, end, damaged) == expected


def hint(**changes: object) -> DonorHint:
    options: dict[str, object] = {
        "route_id": "0" * 32,
        "donor_id": "d",
        "expected_mode": ExpectedMode.EXACT_EQUIVALENT,
        "generation": GENERATION,
        "namespace": HERE,
        "token_count": 80,
        "exact_prefix_tokens": 0,
        "score_bucket": Bucket.HIGH,
    }
    return DonorHint(**options | changes)  # type: ignore[arg-type]


def facts(known: bool = True, donor: CacheNamespace | None = None, mine: CacheNamespace | None = None) -> HintFacts:
    return HintFacts(HERE, mine, GENERATION, known, donor)


COLD = Decline(Outcome.NO_DONOR, Reason.NOT_RESIDENT)


@pytest.mark.parametrize(
    ("decline", "it", "the_hint", "known", "outcome", "reason"),
    [
        (COLD, question(local=80), hint(), True, Outcome.LOCAL_EXACT, Reason.LOCAL_COVERS),
        (
            COLD,
            question(local=16),
            hint(token_count=18, exact_prefix_tokens=16),
            True,
            Outcome.LOCAL_EXACT,
            Reason.LOCAL_COVERS,
        ),
        (COLD, question(local=16), hint(exact_prefix_tokens=16), True, Outcome.DECLINED, Reason.NOT_IDENTICAL),
        (
            Decline(Outcome.DECLINED, Reason.MATERIALIZATION_OFF),
            question(),
            hint(),
            True,
            Outcome.DECLINED,
            Reason.MATERIALIZATION_OFF,
        ),
        (COLD, question(), hint(namespace="bb" * 32), True, Outcome.NAMESPACE_MISMATCH, Reason.NAMESPACE_DIFFERS),
        (COLD, question(), hint(generation="then"), False, Outcome.STALE_DONOR, Reason.GENERATION_STALE),
        (COLD, question(), hint(), False, Outcome.STALE_DONOR, Reason.DONOR_EVICTED),
        (COLD, question(), hint(generation="then"), True, Outcome.DECLINED, Reason.NOT_IDENTICAL),
        (COLD, question(), hint(generation=""), False, Outcome.DECLINED, Reason.NOT_RESIDENT),
        (
            COLD,
            question(),
            hint(expected_mode=ExpectedMode.SEMANTIC_EXPERIMENTAL),
            True,
            Outcome.DECLINED,
            Reason.EXPERIMENTAL_REFUSED,
        ),
        (COLD, question(), hint(), True, Outcome.DECLINED, Reason.NOT_IDENTICAL),
        (COLD, question(), hint(exact_prefix_tokens=40), True, Outcome.DECLINED, Reason.NOT_RESIDENT),
        (
            Decline(Outcome.NO_DONOR, Reason.PROMPT_TOO_SHORT),
            question(prompt=3),
            hint(),
            True,
            Outcome.DECLINED,
            Reason.PROMPT_TOO_SHORT,
        ),
        (
            Decline(Outcome.DECLINED, Reason.CHECKSUM_MISMATCH),
            question(),
            hint(),
            True,
            Outcome.DECLINED,
            Reason.CHECKSUM_MISMATCH,
        ),
    ],
)
def test_explained_to_whoever_hinted(
    decline: Decline, it: Question, the_hint: DonorHint, known: bool, outcome: Outcome, reason: Reason
) -> None:
    found = explain(decline, it, the_hint, facts(known))
    assert (found.outcome, found.reason) == (outcome, reason)


def test_differing_field_is_named() -> None:
    mine, donor = CacheNamespace(model="m", engine="e1"), CacheNamespace(model="m", engine="e2")
    found = explain(COLD, question(), hint(namespace="bb" * 32), facts(True, donor, mine))
    assert found.differing_field == "engine"


@pytest.mark.parametrize(
    ("local", "reason", "expected"),
    [
        (0, Reason.MATERIALIZATION_OFF, Decline(Outcome.NO_DONOR, Reason.MATERIALIZATION_OFF)),
        (8, Reason.MATERIALIZATION_OFF, Decline(Outcome.LOCAL_EXACT, Reason.LOCAL_COVERS)),
        (0, Reason.ADAPTER_UNKNOWN, Decline(Outcome.NO_DONOR, Reason.ADAPTER_UNKNOWN)),
        (0, Reason.CHECKSUM_MISMATCH, Decline(Outcome.DECLINED, Reason.CHECKSUM_MISMATCH)),
    ],
)
def test_without_a_hint(local: int, reason: Reason, expected: Decline) -> None:
    assert explain(Decline(Outcome.DECLINED, reason), question(local=local), None, facts()) == expected


@given(
    decline=st.builds(Decline, st.sampled_from(list(Outcome)), st.sampled_from(list(Reason))),
    prompt=st.integers(0, 200),
    local=st.integers(0, 200),
    mode=st.sampled_from(list(ExpectedMode)),
    namespace=st.sampled_from([HERE, "bb" * 32]),
    generation=st.sampled_from([GENERATION, "then", ""]),
    exact=st.integers(0, 100),
    known=st.booleans(),
)
def test_every_hinted_decline_has_one_answer_and_none_claims_a_load(
    decline: Decline,
    prompt: int,
    local: int,
    mode: ExpectedMode,
    namespace: str,
    generation: str,
    exact: int,
    known: bool,
) -> None:
    it = question(prompt, min(prompt, local))
    the_hint = hint(expected_mode=mode, namespace=namespace, generation=generation, exact_prefix_tokens=exact)
    found = explain(decline, it, the_hint, facts(known))
    assert found.outcome in (Outcome.DECLINED, Outcome.STALE_DONOR, Outcome.NAMESPACE_MISMATCH, Outcome.LOCAL_EXACT)


@pytest.mark.parametrize(
    ("decline", "local", "expected"),
    [
        (COLD, 0, Decline(Outcome.DECLINED, Reason.HINT_EXPIRED)),
        (
            Decline(Outcome.DECLINED, Reason.MATERIALIZATION_OFF),
            0,
            Decline(Outcome.DECLINED, Reason.MATERIALIZATION_OFF),
        ),
        (Decline(Outcome.DECLINED, Reason.MATERIALIZATION_OFF), 4, Decline(Outcome.LOCAL_EXACT, Reason.LOCAL_COVERS)),
        (Decline(Outcome.DECLINED, Reason.BELOW_MINIMUM), 0, Decline(Outcome.DECLINED, Reason.BELOW_MINIMUM)),
    ],
)
def test_a_hint_that_came_too_early_is_no_missing_donor(decline: Decline, local: int, expected: Decline) -> None:
    assert explain(decline, question(local=local), None, facts(), hint_expired=True) == expected
