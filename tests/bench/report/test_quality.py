"""An answer against the cold one: by definition, and on cases worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_semkv.bench.report.quality import Likeness, f1, likeness, rouge_l, token_match

TOKENS = st.lists(st.integers(0, 4), max_size=12)


@given(TOKENS)
def test_the_same_answer_is_exactly_one(tokens: list[int]) -> None:
    assert likeness(tokens, list(tokens)) == Likeness(1.0, 1.0, 1.0)


@given(TOKENS, TOKENS)
def test_all_are_shares_and_order_costs_in_this_order(a: list[int], b: list[int]) -> None:
    """What stands at the same place is a common subsequence, and a common subsequence is common whatever the order."""
    found = likeness(a, b)
    assert 0.0 <= found.token_match <= 1.0
    assert 0.0 <= found.rouge_l <= found.f1 <= 1.0
    assert (found.token_match == 1.0) == (a == b)


def test_by_hand() -> None:
    cold, answer = ["the", "cat", "sat", "on", "the", "mat"], ["the", "cat", "on", "the", "mat", "sat"]
    assert token_match(cold, answer) == pytest.approx(2 / 6)
    assert rouge_l(cold, answer) == pytest.approx(5 / 6)  # the cat on the mat
    assert f1(cold, answer) == 1.0
    assert rouge_l([1, 2], [3]) == f1([1], []) == 0.0
