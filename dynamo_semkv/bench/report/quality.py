"""An answer against the answer of the cold run, all in [0, 1]; 1.0 is the same. Sequences of tokens, any hashable.

token_match   share of the positions with the same token, over the longer of the two
rouge_l       F1 of the longest common subsequence (Lin 2004)
f1            F1 of the bags of tokens (as SQuAD scores answers)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Likeness:
    """The three scores of one answer."""

    token_match: float
    rouge_l: float
    f1: float


def likeness(cold: Sequence[Hashable], answer: Sequence[Hashable]) -> Likeness:
    """All three scores."""
    return Likeness(token_match(cold, answer), rouge_l(cold, answer), f1(cold, answer))


def token_match(cold: Sequence[Hashable], answer: Sequence[Hashable]) -> float:
    """Share of equal positions, over the longer answer; 1.0 for two empty ones."""
    longer = max(len(cold), len(answer))
    return sum(a == b for a, b in zip(cold, answer, strict=False)) / longer if longer else 1.0


def rouge_l(cold: Sequence[Hashable], answer: Sequence[Hashable]) -> float:
    """F1 of the longest common subsequence; takes time in proportion to the product of the lengths."""
    return _f1(_longest_common(cold, answer), len(cold), len(answer))


def f1(cold: Sequence[Hashable], answer: Sequence[Hashable]) -> float:
    """F1 of the bags of tokens."""
    return _f1(sum((Counter(cold) & Counter(answer)).values()), len(cold), len(answer))


def _f1(common: int, cold: int, answer: int) -> float:
    """2PR / (P + R) with P = common / answer and R = common / cold; two empty answers are the same."""
    return 2 * common / (cold + answer) if cold + answer else 1.0


def _longest_common(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    row = [0] * (len(b) + 1)
    for left in a:
        diagonal = 0
        for n, right in enumerate(b, start=1):
            diagonal, row[n] = row[n], diagonal + 1 if left == right else max(row[n], row[n - 1])
    return row[-1]
