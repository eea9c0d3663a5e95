"""The labelled workload is labelled right, and the provider is right about it: no times, which depend on the
machine."""

from __future__ import annotations

import json
import random
from difflib import SequenceMatcher

import numpy as np
import pytest
from msgspec.structs import replace

from dynamo_semkv.bench.corpus import DIGITS, documents, hidden_overlap, reference, tokens_of
from dynamo_semkv.bench.evidence import _scores, main, measure
from dynamo_semkv.bench.labelled import (
    EDIT_EVERY,
    MAX_HIDDEN_OVERLAP,
    Case,
    Workload,
    build,
    common_tokens,
    edited,
    other_numbers,
    with_numbers,
)
from dynamo_semkv.contracts.evidence import MatchType, SemanticTrtMatch, SemanticTrtSegment
from dynamo_semkv.contracts.location import Tier, WorkerLocation

SIZE = 3
VERBATIM = {
    "other instruction",
    "reordered chunks",
    "5 of 10 chunks shared",
    "right one of 6 number-only siblings",
    "same template, own body",
    "same template, new body",
}
EDITED = {*(f"1 in {every} tokens edited" for every in EDIT_EVERY), "all numbers changed"}


@pytest.fixture(scope="module")
def workload() -> Workload:
    return build(SIZE, 2_048, reference())


def test_the_provider_is_right_about_the_labelled_workload(workload: Workload) -> None:
    report = measure(workload, background=50, repeats=1)
    scores = {score.scenario: score for score in report.scores}
    assert set(scores) == VERBATIM | EDITED | {"negative"}
    assert report.donors == len(workload.donors) + len(workload.strangers) + 50
    assert report.cross_tenant == 0
    assert sum(score.wrong_segments for score in report.scores) == 0
    assert scores["negative"].matched == 0.0
    for name in VERBATIM | {"1 in 100 tokens edited", "1 in 50 tokens edited"}:
        assert scores[name].recall_at_1 == 1.0, name
        assert scores[name].segments > 0, name
    for name in ("other instruction", "right one of 6 number-only siblings"):
        assert scores[name].edited == 0.0, name
    for name in EDITED:
        assert scores[name].edited in (1.0, None), name
    error = scores["other instruction"].token_error_p95
    assert error is not None
    assert error <= 0.1


def test_the_workload_is_repeatable_and_its_negatives_are_negative(workload: Workload) -> None:
    again = build(SIZE, 2_048, reference())
    assert [case.scenario for case in again.cases] == [case.scenario for case in workload.cases]
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(again.cases, workload.cases, strict=True))
    assert workload.worst_hidden_overlap <= MAX_HIDDEN_OVERLAP
    donors = {donor.donor_id for donor in workload.donors}
    for case in workload.cases:
        assert set(case.right) <= donors
        assert bool(case.right) == (case.scenario != "negative")
        assert 0 <= case.common <= len(case.tokens)


def test_there_are_as_many_negatives_as_asked_for_and_the_rest_is_the_same() -> None:
    few, many = build(2, 512, reference()), build(2, 512, reference(), negatives=9)
    cases = [case for case in many.cases if case.scenario == "negative"]
    assert len(cases) == 9
    assert [case.scenario for case in few.cases if case.right] == [case.scenario for case in many.cases if case.right]
    assert many.worst_hidden_overlap <= MAX_HIDDEN_OVERLAP


@pytest.mark.parametrize("every", EDIT_EVERY)
def test_edits_leave_as_many_tokens_as_they_say(every: int) -> None:
    body = np.arange(1_000, 1_510, dtype=np.uint32)
    changed, origin = edited(body, every, random.Random(every))
    known = origin >= 0
    assert np.array_equal(changed[known], body[origin[known]])
    blocks = SequenceMatcher(None, body.tolist(), changed.tolist(), autojunk=False).get_matching_blocks()
    common, _ = common_tokens(origin)
    assert sum(block.size for block in blocks) == common
    assert len(body) - -(-len(body) // every) <= common < len(body) + 1


def test_common_tokens_are_counted_with_and_without_short_runs() -> None:
    origin = np.array([-1, 4, 5, 6, -1, -1, *range(20, 28), 30, -1, 31])
    assert common_tokens(origin) == (13, 8)
    assert common_tokens(np.arange(9)) == (9, 9)
    assert common_tokens(np.full(3, -1)) == (0, 0)


def test_numbers_change_in_every_digit_and_nowhere_else() -> None:
    (text,) = documents(1, 1_024, reference())
    body = with_numbers(tokens_of(text), random.Random(1))
    changed = other_numbers(body, random.Random(2))
    digits = np.isin(body, DIGITS)
    assert digits.any()
    assert np.array_equal(changed != body, digits)
    assert np.isin(changed[digits], DIGITS).all()


def test_tokens_are_words_digits_and_signs() -> None:
    assert tokens_of("Model_12, model!").tolist() == tokens_of("Model _ 1 2 , model !").tolist()
    assert len(tokens_of("Model_12, model!")) == 7


def test_hidden_overlap_sees_a_copy_and_not_a_stranger() -> None:
    first, second = documents(2, 300, reference())
    assert hidden_overlap(first, [second, first]) == 1.0
    assert hidden_overlap(first, [second]) <= MAX_HIDDEN_OVERLAP


def test_too_little_text_names_the_numbers() -> None:
    with pytest.raises(ValueError, match="got 3 documents of 100 tokens, the sources hold 0"):
        documents(3, 100, ["a short text"])


def test_a_segment_that_is_not_true_is_counted() -> None:
    donor = np.arange(100, dtype=np.uint32)
    case = Case(
        "made up", np.concatenate((np.full(10, 7, np.uint32), donor[:50])), ("d",), common=50, common_in_runs=50
    )
    true = SemanticTrtSegment(target_start=10, donor_start=0, token_count=50)
    match = SemanticTrtMatch(
        donor_id="d",
        reusable_token_count=40,
        match_type=MatchType.SEMANTIC_CANDIDATE,
        location=WorkerLocation(1, 0, Tier.DEVICE),
        provider="test",
        provider_generation="g",
        segments=(true, replace(true, target_start=9)),
    )
    (score,) = _scores([case], [[match]], {"d": donor})
    assert (score.segments, score.wrong_segments) == (2, 1)
    assert (score.recall_at_1, score.token_error_p50) == (1.0, pytest.approx(0.2))
    (score,) = _scores([case], [[replace(match, donor_id="another")]], {"d": donor})
    assert (score.recall_at_1, score.matched, score.token_error_p50) == (0.0, 1.0, None)


def test_the_command_prints_json_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--tokens", "512", "--size", "1", "--background", "3"]
    assert main([*arguments, "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["tokens"] == 512
    assert {score["scenario"] for score in report["scores"]} == VERBATIM | EDITED | {"negative"}
    assert main(arguments) == 0
    assert "0 matches across tenants" in capsys.readouterr().out
