"""Megabytes of real text without a download: CPython's language reference and the docstrings of installed packages, as
word tokens.

Documents are pairwise disjoint by measurement, as those of `texts.py`: a paragraph is taken only if hardly any of its
word 8-grams was used before.
"""

from __future__ import annotations

import re
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

from dynamo_semkv.bench.texts import MAX_SEEN_SHARE, shingles
from dynamo_semkv.contracts.keys import TokenArray

PACKAGES = ("numpy", "networkx", "sympy", "hypothesis")
"""Read after the language reference and the standard library; packages that are not installed are left out."""
MIN_PARAGRAPH = 80
MIN_DOCSTRING = 400

_WORDS = re.compile(r"[A-Za-z]+|\d|[^\w\s]|_")
_SPOKEN: dict[int, str] = {}
_DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)


def tokens_of(text: str) -> TokenArray:
    """Tokens of shape [n], u32: one per word, digit or sign, each the checksum of its characters, so the same text
    always has the same tokens."""
    return np.array([_token(word) for word in _WORDS.findall(text)], np.uint32)


@cache
def _token(word: str) -> int:
    token = zlib.crc32(word.encode())
    _SPOKEN[token] = word
    return token


class Words:
    """Turns tokens back into text, for methods that read text: words with blanks between. Knows the tokens that
    `tokens_of` made in this process."""

    def text(self, tokens: TokenArray) -> str:
        """The text; a token that is not known stands as its number."""
        return " ".join(_SPOKEN.get(token, str(token)) for token in tokens.tolist())


DIGITS = np.array([_token(str(digit)) for digit in range(10)], np.uint32)
SENTENCE_END = _token(".")


def reference() -> Iterator[str]:
    """The language reference alone, which every CPython has, the longest topics first."""
    for topic in sorted(topics, key=lambda name: (-len(topics[name]), name)):
        yield topics[topic]


def installed() -> Iterator[str]:
    """The reference, then docstrings of the standard library and of PACKAGES, in the order of their files."""
    yield from reference()
    yield from _docstrings(Path(sysconfig.get_paths()["stdlib"]))
    for name in PACKAGES:
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:
            yield from _docstrings(Path(spec.origin).parent)


def _docstrings(root: Path) -> Iterator[str]:
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if "site-packages" in inside.parts or "test" in str(inside):
            continue
        for match in _DOCSTRING.finditer(path.read_text(encoding="utf-8", errors="replace")):
            if len(match[1]) >= MIN_DOCSTRING:
                yield match[1]


def documents(count: int, tokens: int, sources: Iterable[str]) -> list[str]:
    """`count` disjoint documents of at least `tokens` tokens each (and at most one paragraph more).

    Raises ValueError when the sources do not hold that much disjoint text.
    """
    found: list[str] = []
    seen: set[tuple[str, ...]] = set()
    parts: list[str] = []
    size = 0
    for source in sources:
        for paragraph in _paragraphs(source):
            mine = shingles(paragraph)
            if not mine or len(mine & seen) > MAX_SEEN_SHARE * len(mine):
                continue
            seen |= mine
            parts.append(paragraph)
            size += len(_WORDS.findall(paragraph))
            if size >= tokens:
                found.append("\n\n".join(parts))
                if len(found) == count:
                    return found
                parts, size = [], 0
    raise ValueError(f"count: got {count} documents of {tokens} tokens, the sources hold {len(found)}")


def hidden_overlaps(texts: Iterable[str], others: Iterable[str]) -> list[float]:
    """For each text the share of its word 8-grams that occur in any of the others, in [0, 1]: a negative control must
    not have such an overlap."""
    known: set[tuple[str, ...]] = set()
    for other in others:
        known |= shingles(other)
    mine = map(shingles, texts)
    return [len(own & known) / len(own) if own else 0.0 for own in mine]


def hidden_overlap(text: str, others: Sequence[str]) -> float:
    """`hidden_overlaps` of one text."""
    return hidden_overlaps([text], others)[0]


def _paragraphs(text: str) -> Iterator[str]:
    for part in text.split("\n\n"):
        plain = " ".join(part.split())
        if len(plain) >= MIN_PARAGRAPH:
            yield plain
