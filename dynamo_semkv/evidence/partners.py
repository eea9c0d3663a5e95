"""Partners: which sample of a donor corresponds to which sample of the prompt.

Samples are paired by fingerprint; where the prompt has a fingerprint more than once, by the samples before and after
it. NumPy handles all candidates at once. What only prompts that repeat themselves need is done for those alone, since
the cost of a short array is mostly that of the call.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynamo_semkv.contracts.sketch import NGRAM, DonorSketch, Samples

I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

APART_BITS = 40
"""Positions of different candidates differ by 2**40 at least: no step from one candidate to the next looks like one
inside a document."""
_TABLE_BITS = 20
_SHIFT = np.uint32(32 - _TABLE_BITS)
MOST_SAMPLES = 1 << 16
"""Of a prompt: what the table's numbers can name."""


class Flat(NamedTuple):
    """The samples of all candidates, one after the other, with an empty place before and after those of each:
    neighbours in it are neighbours in one document."""

    fingerprints: npt.NDArray[np.uint32]
    positions: I64
    """In tokens, 2**40 more a candidate. The place before holds -1, the one after the first position at which no window
    fits any more."""
    links: npt.NDArray[np.uint16]
    """0 after the last sample of a candidate."""
    owner: I64
    """Candidate of each place."""
    empty: I64
    """The places that hold no sample."""
    lengths: list[int]
    """Tokens of each candidate."""

    @classmethod
    def of(cls, donors: Sequence[DonorSketch]) -> Flat:
        """Lays the samples of all donors out, in their order. All donors have one spacing."""
        samples = [donor.samples for donor in donors]
        lengths = [donor.token_count for donor in donors]
        counts = [len(one.fingerprints) for one in samples]
        places = sum(counts) + 2 * len(donors)
        fingerprints, positions = np.empty(places, np.uint32), np.empty(places, np.int64)
        links, owner = np.zeros(places, np.uint16), np.zeros(places, np.int64)
        empty: list[int] = []
        start = 0
        for candidate, (one, count, length) in enumerate(zip(samples, counts, lengths, strict=True)):
            end = start + count + 1
            fingerprints[start + 1 : end] = one.fingerprints
            positions[start] = -1
            positions[start + 1 : end] = one.positions
            positions[end] = length - NGRAM + 1
            if count > 1:
                links[start + 1 : end - 1] = one.links[:-1]
            if candidate:
                owner[start : end + 1] = candidate
                positions[start : end + 1] += candidate << APART_BITS
            empty += (start, end)
            start = end + 1
        places_without = np.array(empty)
        fingerprints[places_without] = 0
        return cls(fingerprints, positions, links, owner, places_without, lengths)


class Partners(NamedTuple):
    """Samples that both have, in donor order."""

    target: I64
    """Index of the prompt's sample."""
    donor: I64
    """Place in `Flat`."""
    sure: Bools | None
    """The partner is the only one, or the one that its neighbours ask for. None: all are the only ones."""


class _Table(threading.local):
    """Where in the prompt a fingerprint stands, by its upper bits. One a thread, never cleared: what an earlier prompt
    left is found not to be the fingerprint that was looked for."""

    def __init__(self) -> None:
        self.places = np.zeros(1 << _TABLE_BITS, np.uint16)


_table = _Table()
_NUMBERS = np.arange(MOST_SAMPLES, dtype=np.uint16)
_BACKWARDS = _NUMBERS[::-1].copy()


def sole_partners(ours: npt.NDArray[np.uint32], theirs: npt.NDArray[np.uint32]) -> tuple[I64, Bools, bool]:
    """`at` and `found`, of the shape of `theirs`: where `found`, ours[at] is the same fingerprint. The last one says
    that these are all: that no fingerprint of ours is there twice, and none was put into another one's place."""
    table, m = _table.places, len(ours)
    slots = ours >> _SHIFT
    table[slots[::-1]] = _BACKWARDS[-m:]
    at = table.take(theirs >> _SHIFT)
    found = ours.take(at, mode="clip") == theirs
    return at.astype(np.int64), found, bool((table.take(slots) == _NUMBERS[:m]).all())


def partners(prompt: Samples, donor: Flat) -> Partners:
    """Where the prompt has a fingerprint more than once, the place counts that continues the last unambiguous partner
    before, else leads to the next one after, else is nearest to where that partner would have it; without one the first
    for the donor's first, and so on."""
    at, found, sole = sole_partners(prompt.fingerprints, donor.fingerprints)
    found[donor.empty] = False
    if sole:
        places = found.nonzero()[0]
        return Partners(at.take(places), places, None)
    at[~found] = -1
    return _repaired(prompt, donor, at)


def _repaired(prompt: Samples, donor: Flat, at: I64) -> Partners:
    """`at`: for each place of `donor` the prompt's sample that the table has, or -1."""
    ours = prompt.fingerprints
    # For each of the prompt's samples the first of its fingerprint, or that of another one in the same slot.
    first = _table.places.take(ours >> _SHIFT).astype(np.int64)
    # Two fingerprints that share a slot of the table. All at once: a prompt can be made of them.
    lost = (ours[first] != ours).nonzero()[0]
    if len(lost):
        values, begins = np.unique(ours[lost], return_index=True)
        for fingerprints, places in ((donor.fingerprints, at), (ours, first)):
            slot = np.minimum(np.searchsorted(values, fingerprints), len(values) - 1)
            found = (values[slot] == fingerprints).nonzero()[0]
            places[found] = lost[begins[slot[found]]]
        at[donor.empty] = -1
    again = (first != _NUMBERS[: len(ours)]) & (ours[first] == ours)
    sure = at >= 0
    if again.any():
        repeated = np.zeros(len(ours), np.bool_)
        repeated[first[again]] = True
        _follow_neighbours(prompt, donor, at, sure, repeated)
    places = (at >= 0).nonzero()[0]
    return Partners(at[places], places, sure[places])


def _follow_neighbours(prompt: Samples, donor: Flat, at: I64, sure: Bools, repeated: Bools) -> None:
    """Repairs `at` and `sure` in place for donor samples whose fingerprint the prompt has more than once."""
    here = np.arange(len(at))
    open_ones = (sure & repeated[at]).nonzero()[0]
    sure[open_ones] = False
    before = np.maximum.accumulate(np.where(sure, here, -1))
    after = np.minimum.accumulate(np.where(sure, here, len(at))[::-1])[::-1]
    for anchors in (after, before):  # what comes before is followed where both fit
        anchor = anchors[open_ones]
        known = (anchor >= 0) & (anchor < len(at))
        anchor = np.where(known, anchor, 0)
        place = at[anchor] + open_ones - anchor
        fits = known & (donor.owner[anchor] == donor.owner[open_ones])
        fits &= (place >= 0) & (place < len(prompt.fingerprints))
        fits[fits] = prompt.fingerprints[place[fits]] == donor.fingerprints[open_ones[fits]]
        at[open_ones[fits]] = place[fits]
        sure[open_ones[fits]] = True
    lost = open_ones[~sure[open_ones]]
    if len(lost) == 0:
        return
    anchor = before[lost]
    near = (anchor >= 0) & (donor.owner[anchor] == donor.owner[lost])
    anchor = np.where(near, anchor, np.minimum(after[lost], len(at) - 1))
    near |= sure[anchor] & (donor.owner[anchor] == donor.owner[lost])
    by_value = np.argsort(prompt.fingerprints, kind="stable")
    at[lost] = _in_turn(prompt.fingerprints, by_value, donor.fingerprints[lost], donor.owner[lost])
    led = lost[near]
    expected = prompt.positions[at[anchor[near]]] + donor.positions[led] - donor.positions[anchor[near]]
    at[led] = nearest(prompt, by_value, donor.fingerprints[led], expected)


def nearest(prompt: Samples, by_value: I64, wanted: npt.NDArray[np.uint32], expected: I64) -> I64:
    """For each of `wanted` the index of the prompt that has it and is nearest to the expected position. `by_value`: the
    prompt's stable order by fingerprint."""
    places = (prompt.fingerprints[by_value].astype(np.int64) << 31) + prompt.positions[by_value]
    wish = wanted.astype(np.int64) << 31
    above = np.searchsorted(places, wish + np.clip(expected, 0, 2**31 - 1))
    below = np.maximum(above - 1, 0)
    above = np.minimum(above, len(places) - 1)
    distance = [
        np.abs(places[n] - wish - expected) + (places[n] >> 31 != wanted) * np.int64(2**40) for n in (below, above)
    ]
    found: I64 = by_value[np.where(distance[0] <= distance[1], below, above)]
    return found


def _in_turn(prompt: npt.NDArray[np.uint32], by_value: I64, wanted: npt.NDArray[np.uint32], owner: I64) -> I64:
    """For each of `wanted`, grouped by `owner` and in order, an index of the prompt that has it: of several that are
    the same the first goes to the first, the second to the second, and the last one to all that are left. `by_value`:
    the prompt's stable order."""
    ordered = prompt[by_value]
    first = np.searchsorted(ordered, wanted)
    many = np.searchsorted(ordered, wanted, side="right") - first
    groups = np.lexsort((wanted, owner))
    begins = np.ones(len(groups), np.bool_)
    begins[1:] = (wanted[groups][1:] != wanted[groups][:-1]) | (owner[groups][1:] != owner[groups][:-1])
    turn = np.empty(len(groups), np.int64)
    here = np.arange(len(groups))
    turn[groups] = here - np.maximum.accumulate(np.where(begins, here, 0))
    found: I64 = by_value[first + np.minimum(turn, many - 1)]
    return found
