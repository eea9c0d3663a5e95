"""Postings: which rows carry a fingerprint. A set-associative table in one NumPy array.

A fingerprint chooses a set; the set has `ways` slots. When a set is full one of its oldest postings falls out, so
memory and the cost of every operation are fixed: no list grows, nothing is rebuilt, and a fingerprint that everybody
carries occupies one set. How many rows carry it is counted apart, because that is what makes it worthless as evidence.

A slot holds 12 bits of the fingerprint beside the row, so a stray row turns up now and then; whoever uses a row
verifies it against the donor's own samples. Rows are small integers; it knows nothing about donors.
"""

from __future__ import annotations

import logging
import mmap
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynamo_semkv.contracts.sketch import U32Array

logger = logging.getLogger(__name__)

ROW_BITS = 20
MAX_ROWS = 1 << ROW_BITS
FILL = 0.7
"""Share of the slots that a table is meant to use: about one posting in a hundred falls out of a set that is full by
chance."""
_LARGE = 1 << 20
_PAGE = 4_096
_TAGS = np.uint32((1 << (32 - ROW_BITS)) - 1)
_ONE = np.uint32(1)
_HALF = np.uint64(32)
_ROW_SHIFT = np.uint32(ROW_BITS)
_ROW_MASK = np.uint32(MAX_ROWS - 1)
_RANGE = np.arange(4_096)

IntArray = npt.NDArray[np.intp]


class _Looked(NamedTuple):
    """What a table had at the sets of the fingerprints that it was asked for."""

    table: Postings
    sets: IntArray
    slots: U32Array
    query: IntArray


class Hits:
    """`query[i]`, an index into the fingerprints asked for, is carried by row `rows[i]`."""

    __slots__ = ("_asked", "_looked", "query", "rows")

    def __init__(self, query: IntArray, rows: U32Array, asked: int, looked: tuple[_Looked, ...]) -> None:
        self.query = query
        self.rows = rows
        self._asked = asked
        self._looked = looked

    def joined(self, other: Hits, kept: npt.NDArray[np.bool_]) -> Hits:
        """`kept`: of these hits; of the other ones all. Both of the same fingerprints."""
        query = np.concatenate((self.query[kept], other.query))
        rows = np.concatenate((self.rows[kept], other.rows))
        return Hits(query, rows, self._asked, self._looked + other._looked)

    def carriers(self) -> npt.NDArray[np.int64]:
        """How many rows carry each of the fingerprints asked for. Of tables that did not change since; not needed where
        nobody is found, which is what most prompts find."""
        found: npt.NDArray[np.int64] | None = None
        for table, sets, slots, query in self._looked:
            carriers = np.bincount(query, minlength=self._asked)
            hit = carriers.nonzero()[0]
            # What others keep in the set is not this fingerprint's; what fell out of it most likely is.
            fallen = table.population(sets.take(hit)) - (slots.take(hit, axis=0) != 0).sum(axis=1)
            carriers[hit] += np.maximum(fallen, 0)
            found = carriers if found is None else np.maximum(found, carriers)
        return found if found is not None else np.zeros(self._asked, np.int64)


def _pages(size: int) -> mmap.mmap | None:
    """Zeroed memory that the kernel backs page by page as it is touched; None for a small table, or where that cannot
    be had. With huge pages the first few postings, which fall all over it, would make the kernel clear all of it at
    once: 100 ms at 100,000 donors."""
    if size < _LARGE or not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return None
    # Private: of shared memory no page is given back before all of it is.
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    except OSError as error:
        # A kernel without huge pages refuses the advice, and does not need it.
        logger.debug("madvise: %s", error)
    return pages


class Postings:
    """Not thread-safe. `capacity`: postings that it is meant to hold."""

    def __init__(self, capacity: int, ways: int) -> None:
        self.ways = ways
        self.sets = max(8, int(capacity / (FILL * ways)) + 1)
        self._many = np.uint64(self.sets)
        self.capacity = int(self.sets * ways * FILL)
        self.used = 0
        size = self.sets * (4 * ways + 4 + 1)
        self._pages = _pages(size)
        self._bytes = np.zeros(size, np.uint8) if self._pages is None else np.frombuffer(self._pages, np.uint8)
        self._flat: U32Array = self._bytes[: 4 * ways * self.sets].view(np.uint32)
        self._slots = self._flat.reshape(self.sets, ways)
        self._population = self._bytes[4 * ways * self.sets : -self.sets].view(np.int32)
        """Postings of a set, those that fell out included."""
        self._turn = self._bytes[-self.sets :]
        """Of a full set the slot that goes next: nearly the oldest."""
        self._warm = 0
        self._released = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the table, whether or not the kernel backs them yet."""
        return len(self._bytes)

    def warm(self, size: int) -> bool:
        """Makes the kernel back the next `size` bytes, before the first posting. True: all are. Otherwise nearly every
        posting of a new table is the first on its page, which takes ten times as long."""
        if self._pages is None:
            return True
        self._bytes[self._warm : self._warm + size : _PAGE] = 0
        self._warm += size // _PAGE * _PAGE
        return self._warm >= len(self._bytes)

    def release(self, size: int) -> bool:
        """Gives the next `size` bytes of a table that nobody asks any more back to the system. True: all are. To free
        it at once stalls."""
        if self._pages is None or self._released >= len(self._bytes):
            return True
        size = min(size // _PAGE * _PAGE, len(self._bytes) - self._released)
        self._pages.madvise(mmap.MADV_DONTNEED, self._released, size)
        self._released += size
        return self._released >= len(self._bytes)

    def insert(self, fingerprints: U32Array, rows: U32Array | int) -> None:
        """Fingerprints of shape [n], ascending; no (fingerprint, row) pair twice."""
        if len(fingerprints) == 0:
            return
        sets, values = self._sets(fingerprints), self._values(fingerprints, rows)
        self.used += len(fingerprints)
        # One arrival a set and round; once a table has grown, hardly a set has a second one.
        while True:
            again = sets[1:] == sets[:-1]
            if not again.any():
                return self._insert_once(sets, values)
            later = np.zeros(len(sets), np.bool_)
            later[1:] = again
            self._insert_once(sets[~later], values[~later])
            sets, values = sets[later], values[later]

    def _insert_once(self, sets: IntArray, values: U32Array) -> None:
        """Each set once. A free slot takes the arrival; in a full set, the slot whose turn it is."""
        slots = self._slots.take(sets, axis=0)
        free = slots == 0
        way = free.argmax(axis=1)
        full = (~free[self._range(len(sets)), way]).nonzero()[0]
        if len(full):
            turn = self._turn[sets[full]]
            way[full] = turn
            self._turn[sets[full]] = (turn + 1) % self.ways
        self._flat[sets * self.ways + way] = values
        self._population[sets] += 1

    def remove(self, fingerprints: U32Array, rows: U32Array | int) -> None:
        """Removes what `insert` put there, whether or not it was pushed out meanwhile."""
        sets = self._sets(fingerprints)
        self.used -= len(fingerprints)
        np.subtract.at(self._population, sets, 1)
        slots = self._slots.take(sets, axis=0)
        owner = rows if isinstance(rows, int) else rows[:, None]
        mine = (((slots & _ROW_MASK) == owner) & (slots != 0)).ravel().nonzero()[0]
        self._flat[sets[mine // self.ways] * self.ways + mine % self.ways] = 0

    def _range(self, n: int) -> IntArray:
        if n > len(_RANGE):
            return np.arange(n)
        return _RANGE[:n]

    def find(self, fingerprints: U32Array) -> Hits:
        """`fingerprints`: shape [n], each once."""
        sets = self._sets(fingerprints)
        slots = self._slots.take(sets, axis=0)
        tags = self._tags(fingerprints)
        tags <<= _ROW_SHIFT
        # Equal upper bits leave what is no more than a row.
        at = ((slots ^ tags[:, None]) <= _ROW_MASK).ravel().nonzero()[0]
        query = at // self.ways
        return Hits(query, slots.ravel().take(at) & _ROW_MASK, len(fingerprints), (_Looked(self, sets, slots, query),))

    def population(self, sets: IntArray) -> npt.NDArray[np.int32]:
        """Postings that were put into each of the sets and not taken back, those that fell out included."""
        return self._population.take(sets)

    def _sets(self, fingerprints: U32Array) -> IntArray:
        scaled: npt.NDArray[np.uint64] = fingerprints.astype(np.uint64)
        scaled *= self._many
        scaled >>= _HALF
        return scaled.astype(np.intp)

    @staticmethod
    def _tags(fingerprints: U32Array) -> U32Array:
        """1 to 4095, from the low bits (the high ones choose the set); never 0, which marks an empty slot."""
        tags: U32Array = fingerprints % _TAGS
        tags += _ONE
        return tags

    def _values(self, fingerprints: U32Array, rows: U32Array | int) -> U32Array:
        values: U32Array = (self._tags(fingerprints) << _ROW_SHIFT) | np.asarray(rows, np.uint32)
        return values
