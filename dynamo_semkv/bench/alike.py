"""Synthetic documents that are built like text and are alike: as many as one likes, from the language reference that
every CPython has.

    alike(n, tokens)            donor n
    asked(family, n, tokens)    a prompt with FAMILY right donors
    unknown(n, tokens)          one with none

A document begins with what everybody's begins with (an eighth), goes on with what FAMILY documents have in common (a
half), and ends with its own. Each part is a piece of the reference under other names for its words: it repeats itself
as text does, and no two have it in common. Random tokens, of which no n-gram comes twice and each prompt has one donor,
make lookups look cheaper than they are.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from dynamo_semkv.bench.corpus import reference, tokens_of
from dynamo_semkv.contracts.keys import TokenArray

FAMILY = 8
"""Donors that a prompt matches, as many as a lookup names (`evidence.max_matches`)."""
VOCABULARY = 50_021
"""A prime, so that `a * word + b` gives each word a name of its own."""
_EVERYBODY, _FAMILIES, _OWN, _ASKED, _UNKNOWN = range(5)


def alike(n: int, tokens: int) -> TokenArray:
    family = n // FAMILY
    return _joined(tokens, _part(_EVERYBODY, 0, tokens // 8), _part(_FAMILIES, family, tokens // 2), (_OWN, n))


def asked(family: int, n: int, tokens: int, *, from_the_start: bool = False) -> TokenArray:
    """What its donors have in common, behind another beginning; or `from_the_start`, as an engine can reuse it."""
    beginning = _part(_EVERYBODY, 0, tokens // 8) if from_the_start else _part(_ASKED, n, tokens // 16)
    return _joined(tokens, beginning, _part(_FAMILIES, family, tokens // 2), (_ASKED, n))


def unknown(n: int, tokens: int) -> TokenArray:
    """It begins as all donors do."""
    return _joined(tokens, _part(_EVERYBODY, 0, tokens // 8), np.empty(0, np.uint32), (_UNKNOWN, n))


def donors_of(family: int) -> tuple[str, ...]:
    """Their ids, where a donor is called by its number."""
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
    """The reference as numbers of its words."""
    _, numbers = np.unique(np.concatenate([tokens_of(text) for text in reference()]), return_inverse=True)
    return numbers.astype(np.int64).ravel()


__all__ = ["FAMILY", "alike", "asked", "donors_of", "unknown"]
