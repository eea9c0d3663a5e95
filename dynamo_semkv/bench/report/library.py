"""Disjoint real text, handed out once: no two prompts share a passage unless a scenario makes them."""

from __future__ import annotations

from collections.abc import Iterable

from dynamo_semkv.bench.corpus import documents
from dynamo_semkv.bench.texts import Document

_CHARACTERS_A_WORD = 3.5
"""Tokens of `corpus` are words and signs: they have at least so many characters each, on average over a document."""


class Library:
    """Hands out text of installed packages from the front, never the same twice. Plain ASCII, so that for the byte
    tokenizer of the `tiny` model a character is a token."""

    def __init__(self, characters: int, sources: Iterable[str]) -> None:
        """Holds at least `characters`; ValueError when the sources do not."""
        words = 400
        count = int(characters / _CHARACTERS_A_WORD / words) + 1
        joined = "\n\n".join(documents(count, words, sources))
        self._text = joined.encode("ascii", "ignore").decode()
        self._at = 0
        self._number = 0

    @property
    def left(self) -> int:
        """How many characters are left."""
        return len(self._text) - self._at

    def take(self, characters: int) -> Document:
        """The next document, of exactly so many characters. ValueError when fewer are left."""
        if characters > self.left:
            raise ValueError(f"characters: got {characters}, the library holds {self.left} more")
        text = self._text[self._at : self._at + characters]
        self._at += characters
        self._number += 1
        return Document(f"passage {self._number}", text)

    def many(self, count: int, characters: int) -> list[Document]:
        """The next `count` documents of so many characters each. ValueError as `take`."""
        return [self.take(characters) for _ in range(count)]
