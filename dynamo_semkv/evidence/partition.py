"""Partition: the donors of one namespace digest (so of one tenant) and their postings. A search sees one partition and
no other.

It grows in small steps: a bigger table is filled a few rows at a time while the smaller one is still asked, so no call
pays for a rebuild.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dynamo_semkv.contracts.sketch import SAMPLING, DonorSketch, U32Array
from dynamo_semkv.evidence.chains import Row
from dynamo_semkv.evidence.donor import CatalogDonor
from dynamo_semkv.evidence.postings import MAX_ROWS, Hits, Postings

POSTINGS_PER_DONOR = 128
"""A longer donor posts only every second, fourth, ... fingerprint, chosen by its low bits; verification uses all. A
short donor, whose samples are closer together, posts those that it would have at the widest spacing, which is what a
prompt of any length asks for."""
CLEANED_PER_STEP = 2
MOVED_PER_STEP = 2
AT_ONCE = 8
"""Donors that are posted together: what NumPy costs a call is paid once, and the longest step is still a millisecond or
two."""
BYTES_PER_STEP = 32 * 1_024
"""Of a table that is being prepared or released, for each add."""
VISITED_PER_STEP = 64
GROWTH = 1.5
"""A new table has this many times the capacity of the old one, or up to twice that: so all rows are moved before it is
full itself."""
_FIRST_CAPACITY = 4 * POSTINGS_PER_DONOR
_SPACING_BITS = 2
"""Low bits of a fingerprint that are zero at the widest spacing."""

FloatArray = npt.NDArray[np.float64]


def thinning(sketch: DonorSketch) -> int:
    """k: fingerprints at the widest spacing whose next k bits are zero are posted, one in 2**k."""
    wide = sketch.sample_count * sketch.spacing // SAMPLING
    return ((wide - 1) // POSTINGS_PER_DONOR).bit_length() if wide else 0


def unposted_bits(thinned: int) -> np.uint32:
    """Set in a fingerprint of which none is posted: those that tell the spacings apart, and `thinned` more."""
    bits: np.uint32 = np.uint32((1 << _SPACING_BITS + thinned) - 1)
    return bits


def posted_by(donors: Sequence[tuple[int, DonorSketch]]) -> tuple[U32Array, U32Array]:
    """Fingerprints to post, ascending, and the row of each, for several (row, sketch) at once."""
    parts = [sketch.fingerprints for _, sketch in donors]
    counts = [len(part) for part in parts]
    masks = np.repeat(np.array([unposted_bits(thinning(sketch)) for _, sketch in donors], np.uint32), counts)
    rows = np.repeat(np.array([row for row, _ in donors], np.uint64), counts)
    fingerprints = np.concatenate(parts)
    keep = (fingerprints & masks == 0).nonzero()[0]
    keys = fingerprints[keep].astype(np.uint64)
    keys <<= np.uint64(32)
    keys |= rows[keep]
    keys.sort()
    first = np.ones(len(keys), np.bool_)
    np.not_equal(keys[1:], keys[:-1], out=first[1:])
    halves = keys[first].astype("<u8", copy=False).view("<u4")
    return np.ascontiguousarray(halves[1::2]), np.ascontiguousarray(halves[::2])


class Partition:
    """Not thread-safe. A donor's row is stable while it is here."""

    def __init__(self, ways: int, max_donors: int = MAX_ROWS) -> None:
        """`max_donors`: how many it is meant to hold at most; one of its tables' sizes is just right for that many."""
        self._ways = ways
        self._max_donors = max_donors
        self._count = 0
        self._donors: Row[CatalogDonor] = Row()
        self._rows = 0
        """How many rows were ever taken, the free ones included."""
        self._arriving: dict[int, DonorSketch] = {}
        """Donors that are added and not posted yet; that happens for a few at a time, or at the next search."""
        self._free: list[int] = []
        self._leaving: deque[tuple[int, DonorSketch | None]] = deque()
        """Rows whose donor is gone and whose postings are still to be removed; None: they went with an old table."""
        self._thinned = np.zeros(16, np.uint8)
        self._by_thinning: Counter[int] = Counter()
        self._posters: FloatArray | None = None
        """How many donors here would post a fingerprint, by its low bits. None: to be counted again."""
        self._moved = np.zeros(16, np.bool_)
        """Rows whose postings are in the next table: those in the current one no longer count."""
        self._adds_since_upkeep = 0
        """Adds since the last upkeep."""
        self._table = Postings(_FIRST_CAPACITY, ways)
        self._next: Postings | None = None
        self._warming: Postings | None = None
        """Becomes the next table as soon as the kernel has backed all its memory."""
        self._releasing: Postings | None = None
        """The table before the current one, whose memory is being given back."""
        self._cursor = 0

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes of all tables that searches and moves use."""
        return sum(table.nbytes for table in (self._table, self._next, self._warming) if table is not None)

    @property
    def full(self) -> bool:
        """No row is left."""
        return not self._free and self._rows >= MAX_ROWS

    def donor(self, row: int) -> CatalogDonor | None:
        """The donor in the row; None if it was removed."""
        return self._donors[row]

    def add(self, donor: CatalogDonor, sketch: DonorSketch) -> int:
        """A donor that is not here yet; `sketch` is its own. Returns the row that it has from now on."""
        row = self._take_row()
        self._count += 1
        self._donors[row] = donor
        k = thinning(sketch)
        self._thinned[row] = k
        self._by_thinning[k] += 1
        self._posters = None
        self._arriving[row] = sketch
        self._adds_since_upkeep += 1
        if self._adds_since_upkeep >= AT_ONCE:
            self._clear_departed(CLEANED_PER_STEP * self._adds_since_upkeep)
            self._post_arrivals()
            self._prepare_tables(BYTES_PER_STEP * self._adds_since_upkeep)
            self._move_rows(MOVED_PER_STEP * self._adds_since_upkeep)
            self._adds_since_upkeep = 0
        return row

    def replace(self, row: int, donor: CatalogDonor) -> None:
        """The same donor with the same sketch at another place."""
        self._donors[row] = donor

    def remove(self, row: int) -> None:
        """At once for every search; its postings are taken out as others are added, so that removing many does not
        stall."""
        self._count -= 1
        donor = self._donors[row]
        self._donors[row] = None
        self._by_thinning[int(self._thinned[row])] -= 1
        self._posters = None
        if self._arriving.pop(row, None) is not None:
            self._free.append(row)
            return
        self._leaving.append((row, donor.sketch if donor is not None else None))

    def postable(self, fingerprints: U32Array) -> tuple[U32Array, npt.NDArray[np.intp] | None]:
        """The fingerprints of a prompt, shape [n], that any donor here would have posted: ascending, each once. And
        their indices in the prompt; None where one occurs more than once."""
        least = min((k for k, count in self._by_thinning.items() if count), default=0)
        places = (fingerprints & unposted_bits(least) == 0).nonzero()[0]
        asked = fingerprints.take(places)
        order = asked.argsort(kind="stable")
        asked = asked.take(order)
        again = asked[1:] == asked[:-1]
        if again.any():
            return asked[np.concatenate(([True], ~again))], None
        return asked, places.take(order)

    def find(self, fingerprints: U32Array) -> Hits:
        """`fingerprints`: shape [n], each once."""
        self._post_arrivals()
        hits = self._table.find(fingerprints)
        if self._next is None:
            return hits
        return hits.joined(self._next.find(fingerprints), ~self._moved[hits.rows])

    def thinned(self, rows: U32Array) -> npt.NDArray[np.uint8]:
        """For each of `rows`, shape [n], the k of its `thinning`."""
        return self._thinned[rows]

    def rarity(self, fingerprints: U32Array, hits: Hits) -> FloatArray:
        """Weight of each fingerprint asked for, shape [n], in [0, 1]: 1 where one donor has it, 0 where all have it or
        none.

        Thinned donors do not post most of theirs, so carriers are counted among the donors that would have posted it.
        """
        donors = max(1, self._count)
        found = hits.carriers()
        if self._posters is None:
            self._posters = self._count_posters()
        asked = self._posters.take(fingerprints & np.uint32(len(self._posters) - 1))
        carriers = found / asked
        np.minimum(carriers, 1.0, out=carriers)
        carriers *= donors
        np.maximum(carriers, 1.0, out=carriers)
        weight: FloatArray = np.log((donors + 1) / carriers) / np.log(donors + 1)
        weight[found == 0] = 0.0
        return weight

    def _count_posters(self) -> FloatArray:
        """At least 1 each, since a donor that is gone may be found for a while."""
        most = max(self._by_thinning, default=0)
        low = np.arange(1 << _SPACING_BITS + most, dtype=np.uint32)
        posters = np.zeros(len(low))
        for k, count in self._by_thinning.items():
            posters += count * (low & unposted_bits(k) == 0)
        return np.maximum(posters, 1.0)

    def _take_row(self) -> int:
        if self._free:
            return self._free.pop()
        self._rows += 1
        if self._rows > len(self._moved):
            self._thinned = np.concatenate((self._thinned, np.zeros_like(self._thinned)))
            self._moved = np.concatenate((self._moved, np.zeros_like(self._moved)))
        return self._rows - 1

    def _post_arrivals(self) -> None:
        """Posts the donors that were added since the last call. A search has to wait for nothing else."""
        if not self._arriving:
            return
        arriving = list(self._arriving.items())
        self._arriving.clear()
        fingerprints, rows = posted_by(arriving)
        if self._next is None and self._warming is None and self._table.used + len(rows) > self._table.capacity:
            self._warming = Postings(self._next_capacity(), self._ways)
            self._prepare_tables(0)
        self._moved[[row for row, _ in arriving]] = self._next is not None
        (self._next or self._table).insert(fingerprints, rows)

    def _prepare_tables(self, size: int) -> None:
        """The next table, as soon as its memory is there: until then the current one gets a few per cent fuller than it
        should."""
        if self._releasing is not None and self._releasing.release(size):
            self._releasing = None
        if self._warming is not None and self._warming.warm(size):
            self._next, self._warming = self._warming, None
            self._cursor = 0
            self._moved[:] = False

    def _clear_departed(self, rows: int) -> None:
        here: list[tuple[int, DonorSketch]] = []
        there: list[tuple[int, DonorSketch]] = []
        for _ in range(min(rows, len(self._leaving))):
            row, sketch = self._leaving.popleft()
            if sketch is not None:
                (there if self._next is not None and self._moved[row] else here).append((row, sketch))
            self._free.append(row)
        for table, leaving in ((self._table, here), (self._next, there)):
            if leaving and table is not None:
                table.remove(*posted_by(leaving))

    def _next_capacity(self) -> int:
        """Half, a quarter, ... of what `max_donors` like those here need, and a sixteenth of room for rows that left
        and were not cleaned up yet: so the table is just right once it is full, and was not exchanged shortly
        before."""
        wanted = self._max_donors * self._table.used // max(1, self._count) * 17 // 16
        while wanted >= 2 * GROWTH * self._table.capacity:
            wanted //= 2
        # More donors than `max_donors`, or longer ones.
        return max(wanted, int(GROWTH * self._table.capacity))

    def _move_rows(self, rows: int) -> None:
        """Takes a few more rows along to the next table; the last step replaces the current one."""
        if self._next is None:
            return
        moving: list[tuple[int, DonorSketch]] = []
        stop = min(self._rows, self._cursor + max(VISITED_PER_STEP, rows))
        while len(moving) < rows and self._cursor < stop:
            row = self._cursor
            self._cursor += 1
            donor = self._donors[row]
            if donor is not None and donor.sketch is not None and not self._moved[row] and row not in self._arriving:
                moving.append((row, donor.sketch))
        if moving:
            self._next.insert(*posted_by(moving))
            self._moved[[row for row, _ in moving]] = True
        if self._cursor >= self._rows:
            self._releasing, self._table, self._next = self._table, self._next, None
            self._leaving = deque((row, sketch if self._moved[row] else None) for row, sketch in self._leaving)
            self._moved[:] = False
