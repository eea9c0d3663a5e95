"""Synthetic documents that are built like text and resemble each other: any number of them, from the language reference
that every CPython has.

    alike(n, tokens)            donor n
    asked(family, n, tokens)    a prompt with FAMILY right donors
    unknown(n, tokens)          one with none

A document begins with a part that all share (an eighth), continues with a part that FAMILY documents share (a half),
and ends with a part of its own. Each part is a piece of the reference with its words renamed: it repeats itself as text
does, and no two parts have anything in common. Random tokens, of which no n-gram comes twice and each prompt has one
donor, make lookups look cheaper than they are.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from dynamo_semkv.bench.corpus import reference, tokens_of
from dynamo_semkv.contracts.keys import TokenArray

FAMILY = 8
"""How many donors a prompt matches, as many as a lookup names (`evidence.max_matches`)."""
VOCABULARY = 50_021
"""A prime, so that `a * word + b` gives each word a name of its own."""
_EVERYBODY, _FAMILIES, _OWN, _ASKED, _UNKNOWN = range(5)


def alike(n: int, tokens: int) -> TokenArray:
    """Donor `n`, u32 of shape [tokens]."""
    family = n // FAMILY
    return _joined(tokens, _part(_EVERYBODY, 0, tokens // 8), _part(_FAMILIES, family, tokens // 2), (_OWN, n))


def asked(family: int, n: int, tokens: int, *, from_the_start: bool = False) -> TokenArray:
    """A prompt with the part that its donors share, after another beginning; with `from_the_start` after the beginning
    of all, so that an engine can reuse it."""
    beginning = _part(_EVERYBODY, 0, tokens // 8) if from_the_start else _part(_ASKED, n, tokens // 16)
    return _joined(tokens, beginning, _part(_FAMILIES, family, tokens // 2), (_ASKED, n))


def unknown(n: int, tokens: int) -> TokenArray:
    """A prompt without a right donor; it begins as all donors do."""
    return _joined(tokens, _part(_EVERYBODY, 0, tokens // 8), np.empty(0, np.uint32), (_UNKNOWN, n))


def donors_of(family: int) -> tuple[str, ...]:
    """The ids of a family's donors, where a donor's id is its number."""
    return tuple(str(n) for n in range(family * FAMILY, (family + 1) * FAMILY))


def _joined(tokens: int, first: TokenArray, second: TokenArray, rest: tuple[int, int]) -> TokenArray:
    return np.concatenate((first, second, _part(*rest, tokens - len(first) - len(second))))


def _part(kind: int, n: int, tokens: int) -> TokenArray:
    words = _words()
    rng = np.random.default_rng((kind, n))
    start, factor, offset = rng.integers(0, len(words)), rng.integers(1, VOCABULARY), rng.integers(0, VOCABULARY)
    piece = np.take(words, np.arange(start, start + tokens), mode="wrap")
    renamed: TokenArray = ((piece * factor + offset) % VOCABULARY).astype(np.uint32)
    return renamed


@cache
def _words() -> npt.NDArray[np.int64]:
    """The reference, as the numbers of its words."""
    _, numbers = np.unique(np.concatenate([tokens_of(text) for text in reference()]), return_inverse=True)
    return numbers.astype(np.int64).ravel()
