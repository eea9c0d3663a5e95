"""Postings: which rows carry a fingerprint. A set-associative table in one NumPy array.

A fingerprint chooses a set; the set has `ways` slots, the newest posting first. When a set is full its oldest posting falls out, so memory
and the cost of every operation are fixed: no list grows, nothing is rebuilt, and a fingerprint that everybody carries occupies one set. How
many rows carry it is counted apart, because that is what makes it worthless as evidence.

A slot holds 12 bits of the fingerprint beside the row, so a stray row turns up now and then; whoever uses a row verifies it against the
donor's own samples. Rows are small integers; it knows nothing about donors.
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
"""Share of the slots that a table is meant to use: about one posting in a hundred falls out of a set that is full by chance."""
_LARGE = 1 << 20
_TAGS = (1 << (32 - ROW_BITS)) - 1
_ROW_SHIFT = np.uint32(ROW_BITS)
_ROW_MASK = np.uint32(MAX_ROWS - 1)

IntArray = npt.NDArray[np.intp]


class Hits(NamedTuple):
    """`query[i]`, an index into the fingerprints asked for, is carried by row `rows[i]`; `carriers[j]` rows carry fingerprint j."""

    query: IntArray
    rows: U32Array
    carriers: npt.NDArray[np.int64]


def _zeros(sets: int, ways: int) -> U32Array:
    """A zeroed table that the kernel backs page by page as it is filled. With huge pages the first few postings, which fall all over it,
    would make the kernel clear the whole table at once: a stall of 100 ms at 100,000 donors."""
    size = 4 * sets * ways
    if size < _LARGE or not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return np.zeros((sets, ways), np.uint32)
    pages = mmap.mmap(-1, size)
    try:
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    except OSError as error:
        # A kernel without huge pages refuses the advice, and does not need it.
        logger.debug("madvise: %s", error)
    return np.frombuffer(pages, np.uint32).reshape(sets, ways)


class Postings:
    """Not thread-safe. `capacity`: postings that it is meant to hold."""

    def __init__(self, capacity: int, ways: int) -> None:
        self.ways = ways
        self.sets = max(8, int(capacity / (FILL * ways)) + 1)
        self.capacity = int(self.sets * ways * FILL)
        self.used = 0
        self._slots = _zeros(self.sets, ways)
        self._population = np.zeros(self.sets, np.int32)
        """Postings of a set, those that fell out included."""

    @property
    def nbytes(self) -> int:
        return self._slots.nbytes + self._population.nbytes

    def insert(self, fingerprints: U32Array, rows: U32Array) -> None:
        """Shapes [n]; no (fingerprint, row) pair twice."""
        if len(fingerprints) == 0:
            return
        sets = self._sets(fingerprints)
        order = np.argsort(sets, kind="stable")
        values, ordered = self._values(fingerprints, rows)[order], sets[order]
        place = np.arange(len(ordered))
        starts = np.ones(len(ordered), np.bool_)
        starts[1:] = ordered[1:] != ordered[:-1]
        nth = place - np.maximum.accumulate(np.where(starts, place, 0))
        # One arrival a set and round; once a table has grown, hardly a set has a second one.
        for n in range(int(nth.max()) + 1):
            arriving = nth == n
            touched = ordered[arriving]
            pushed = np.empty((len(touched), self.ways), np.uint32)
            pushed[:, 0] = values[arriving]
            pushed[:, 1:] = self._slots[touched, :-1]
            self._slots[touched] = pushed
        first = np.flatnonzero(starts)
        self._population[ordered[first]] += np.diff(first, append=len(ordered)).astype(np.int32)
        self.used += len(fingerprints)

    def remove(self, fingerprints: U32Array, row: int) -> None:
        """Takes back what `insert` put there for `row`, whether or not it fell out since."""
        sets = self._sets(fingerprints)
        np.subtract.at(self._population, sets, 1)
        self.used -= len(fingerprints)
        touched = np.unique(sets)
        slots = self._slots[touched]
        keep = ((slots & _ROW_MASK) != row) & (slots != 0)
        packed = np.zeros_like(slots)
        into = np.cumsum(keep, axis=1) - 1
        at = np.nonzero(keep)
        packed[at[0], into[at]] = slots[at]
        self._slots[touched] = packed

    def find(self, fingerprints: U32Array) -> Hits:
        """`fingerprints`: shape [n], each once."""
        sets = self._sets(fingerprints)
        slots = self._slots[sets]
        same = (slots >> _ROW_SHIFT) == self._tags(fingerprints)[:, None]
        query, way = np.nonzero(same)
        rows = slots[query, way] & _ROW_MASK
        found = np.bincount(query, minlength=len(fingerprints))
        # What others keep in the set is not this fingerprint's; what fell out of it most likely is.
        others = np.count_nonzero(slots, axis=1) - found
        return Hits(query, rows, np.maximum(found, np.where(found, self._population[sets] - others, 0)))

    def _sets(self, fingerprints: U32Array) -> IntArray:
        scaled: npt.NDArray[np.uint64] = fingerprints.astype(np.uint64) * np.uint64(self.sets)
        sets: IntArray = (scaled >> np.uint64(32)).astype(np.intp)
        return sets

    @staticmethod
    def _tags(fingerprints: U32Array) -> U32Array:
        """1 to 4095, from the low bits (the high ones choose the set); never 0, which marks an empty slot."""
        tags: U32Array = fingerprints % np.uint32(_TAGS) + np.uint32(1)
        return tags

    def _values(self, fingerprints: U32Array, rows: U32Array) -> U32Array:
        values: U32Array = (self._tags(fingerprints) << _ROW_SHIFT) | rows
        return values
