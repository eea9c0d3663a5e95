"""Real documents without a download: the language reference that every CPython carries in `pydoc_data.topics`.

Its topics repeat each other (whole sections are in two of them), which would make "unrelated" documents related. So a
paragraph is used once, and only if hardly any of its word 8-grams were used before: any two documents are disjoint by
measurement, not by title.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pydoc_data.topics import topics

SHINGLE_WORDS = 8
MAX_SEEN_SHARE = 0.02
_MIN_PARAGRAPH = 80

Shingles = frozenset[tuple[str, ...]]


@dataclass(frozen=True)
class Document:
    """One disjoint piece of text; `topic` is where it comes from."""

    topic: str
    text: str


def shingles(text: str, words: int = SHINGLE_WORDS) -> Shingles:
    """All runs of `words` words in the text, lower case; empty for a text that is shorter."""
    parts = re.findall(r"\w+", text.lower())
    return frozenset(tuple(parts[i : i + words]) for i in range(len(parts) - words + 1))


def common_share(left: str, right: str) -> float:
    """Share of the smaller text's word 8-grams that also occur in the other, in [0, 1]; 0 when either is too short to
    have one."""
    a, b = shingles(left), shingles(right)
    smaller = min(len(a), len(b))
    return len(a & b) / smaller if smaller else 0.0


def documents(count: int, characters: int) -> list[Document]:
    """`count` pairwise disjoint documents of at least `characters` each (and at most one paragraph more), always the
    same ones.

    Raises ValueError when this Python's reference does not hold that much disjoint text.
    """
    found: list[Document] = []
    seen: set[tuple[str, ...]] = set()
    for topic in sorted(topics, key=lambda name: (-len(topics[name]), name)):
        parts: list[str] = []
        size = 0
        for paragraph in _paragraphs(topics[topic]):
            mine = shingles(paragraph)
            if not mine or len(mine & seen) > MAX_SEEN_SHARE * len(mine):
                continue
            seen |= mine
            parts.append(paragraph)
            size += len(paragraph) + 2
            if size - 2 >= characters:
                found.append(Document(topic, "\n\n".join(parts)))
                if len(found) == count:
                    return found
                parts, size = [], 0
    raise ValueError(
        f"count: got {count} documents of {characters} characters, this Python's reference holds {len(found)}"
    )


def _paragraphs(text: str) -> list[str]:
    plain = (" ".join(part.split()) for part in text.split("\n\n"))
    return [part for part in plain if len(part) >= _MIN_PARAGRAPH]
