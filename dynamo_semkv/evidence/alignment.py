"""Alignment: from shared samples to the places where a prompt and its candidate donors are verbatim, and to how many tokens that makes.

A *run* is a chain of neighbouring samples that are equal in both and whose links are equal: every token from its first window to the end
of its last one is the same, but for a chance of 2**-16 a link. Runs are what segments claim, so no segment spans a change, however short.

The *estimate* also counts what lies beside the runs. Between two runs on (nearly) one diagonal there is a change; how much of the gap it
took follows from the samples that died in it: a changed token kills 8 windows, a replaced passage all of its own. At the loose end of a
run the change comes, on average, half way to the next sample that contradicts it. A sample with nothing near on either side is a
common phrase, and counts as no more than it is.

All candidates are aligned at once in NumPy: the cost hardly depends on how many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynamo_semkv.contracts.sketch import NGRAM, SAMPLING, DonorSketch, Samples

NEAR_SHIFT = 64
"""Tokens that an edit may insert or delete; a bigger shift of the diagonal is another passage, not the same document edited."""
NEAR_GAP = 512
_FEW_DEAD = 2
_MANY_DEAD = 12
_UNLIKELY = 0.02
_UNLIKELY_AT_THE_SAME_LENGTH = 1e-6
"""A gap with fewer dead samples holds isolated changes, one with more a replaced passage; between the two, it is whichever is likelier."""

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


_NOWHERE: I64 = np.empty((0, 3), np.int64)


class Run(NamedTuple):
    target_start: int
    donor_start: int
    token_count: int


@dataclass(frozen=True, slots=True)
class Alignment:
    """One candidate against the prompt."""

    reusable_tokens: int
    """Estimate of the tokens that are verbatim in both."""
    verified_tokens: int
    """The part of it that runs cover."""
    shared: I64
    """Indices of the prompt's samples that the donor has too, each once."""
    edited: bool
    """A run breaks off and goes on a little later on nearly the same diagonal."""
    places: I64
    """Runs by position in the prompt, shape [n, 3]: start in the prompt, start in the donor, tokens."""
    longest_chain: int = 0
    """Tokens of the runs that only small changes part: an edited document has no long run, and many short ones one behind the other."""

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(Run(*place) for place in self.places.tolist())

    @property
    def longest_run(self) -> int:
        return int(self.places[:, 2].max(initial=0))


def align(prompt: Samples, prompt_tokens: int, donors: Sequence[DonorSketch]) -> list[Alignment]:
    """One Alignment a donor, in order. All donors have one spacing, and `prompt` is sampled at it. Cost: O(samples of the prompt
    and all donors)."""
    if not donors or len(prompt.fingerprints) == 0:
        return [Alignment(0, 0, np.empty(0, np.int64), False, _NOWHERE) for _ in donors]
    donor = _Flat.of(donors)
    partners = _partners(prompt, donor)
    prompt_at = prompt.positions.astype(np.int64)
    pairs = _Pairs.of(prompt, prompt_at, donor, partners)
    verified = pairs.verified()
    estimate = verified + pairs.between(donors[0].spacing) + pairs.loose_ends(prompt_at, donor, prompt_tokens)
    return _collect(pairs, donor, verified, estimate, prompt_tokens)


class _Flat(NamedTuple):
    """The samples of all candidates, one after the other."""

    fingerprints: npt.NDArray[np.uint32]
    positions: I64
    links: npt.NDArray[np.uint16]
    owner: I64
    """Candidate of each sample."""
    first: Bools
    """First sample of its candidate."""
    lengths: I64
    """Tokens of each candidate."""

    @classmethod
    def of(cls, donors: Sequence[DonorSketch]) -> _Flat:
        counts = np.array([donor.sample_count for donor in donors])
        owner = np.repeat(np.arange(len(donors)), counts)
        first = np.ones(len(owner), np.bool_)
        first[1:] = owner[1:] != owner[:-1]
        return cls(
            np.concatenate([donor.fingerprints for donor in donors]),
            np.concatenate([donor.positions for donor in donors]).astype(np.int64),
            np.concatenate([donor.links for donor in donors]),
            owner,
            first,
            np.array([donor.token_count for donor in donors]),
        )


class _Partners(NamedTuple):
    at: I64
    """For each donor sample the prompt's sample with the same fingerprint, or -1."""
    sure: Bools
    """The partner is the only one, or the one that its neighbours ask for."""


def _partners(prompt: Samples, donor: _Flat) -> _Partners:
    """Where the prompt has a fingerprint more than once, the place counts that continues the last unambiguous partner before, else leads to
    the next one after, else is nearest to where that partner would have it; without one the first for the donor's first, and so on."""
    m = len(prompt.fingerprints)
    shift = np.uint32(16 if m <= 1_024 else 11)
    table = np.zeros(1 << (32 - int(shift)), np.int32)
    table[prompt.fingerprints[::-1] >> shift] = np.arange(m, 0, -1, dtype=np.int32)
    at: I64 = table[donor.fingerprints >> shift].astype(np.int64) - 1
    at[prompt.fingerprints[at] != donor.fingerprints] = -1
    first = table[prompt.fingerprints >> shift] - 1
    # Two fingerprints that share a slot of the table: one in two prompts has such a pair. All at once: a prompt can be made of them.
    lost = (prompt.fingerprints[first] != prompt.fingerprints).nonzero()[0]
    if len(lost):
        values, begins = np.unique(prompt.fingerprints[lost], return_index=True)
        for fingerprints, places in ((donor.fingerprints, at), (prompt.fingerprints, first)):
            slot = np.minimum(np.searchsorted(values, fingerprints), len(values) - 1)
            found = (values[slot] == fingerprints).nonzero()[0]
            places[found] = lost[begins[slot[found]]]
    again = (first != np.arange(m)) & (prompt.fingerprints[first] == prompt.fingerprints)
    sure = at >= 0
    if again.any():
        repeated = np.zeros(m, np.bool_)
        repeated[first[again]] = True
        _follow_neighbours(prompt, donor, at, sure, repeated)
    return _Partners(at, sure)


def _follow_neighbours(prompt: Samples, donor: _Flat, at: I64, sure: Bools, repeated: Bools) -> None:
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
    at[led] = _nearest(prompt, by_value, donor.fingerprints[led], expected)


def _nearest(prompt: Samples, by_value: I64, wanted: npt.NDArray[np.uint32], expected: I64) -> I64:
    """For each of `wanted` the index of the prompt that has it and is nearest to the expected position. `by_value`: the prompt's stable
    order by fingerprint."""
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
    """For each of `wanted`, grouped by `owner` and in order, an index of the prompt that has it: of several that are the same the first
    goes to the first, the second to the second, and the last one to all that are left. `by_value`: the prompt's stable order."""
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


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Shared samples in donor order, candidates one after the other; flags describe the step from pair n to pair n + 1."""

    target: I64
    """Index of the prompt's sample."""
    donor: I64
    """Index into the flat donor samples."""
    owner: I64
    target_at: I64
    """Positions in tokens."""
    donor_at: I64
    candidates: int
    linked: Bools
    """The step is verified verbatim."""
    near: Bools
    """The step hides a change in what is otherwise the same passage."""
    same: Bools
    """The step stays in one candidate."""
    edits: Bools
    """Near, and neither because evicted parts of the donor left a hole nor because a repeated passage was taken for another."""
    first: I64
    last: I64
    """Indices of the first and last pair of each run."""

    @classmethod
    def of(cls, prompt: Samples, prompt_at: I64, flat: _Flat, partners: _Partners) -> _Pairs:
        donor = (partners.at >= 0).nonzero()[0]
        target, owner = partners.at[donor], flat.owner[donor]
        place = owner * len(prompt.fingerprints) + target
        if len(place) and np.bincount(place).max() > 1:
            donor = donor[_once(place, donor)]
        target = partners.at[donor]
        donor = donor[~_strays(prompt_at[target] - flat.positions[donor], flat.owner[donor])]
        target, owner, sure = partners.at[donor], flat.owner[donor], partners.sure[donor]
        target_at, donor_at = prompt_at[target], flat.positions[donor]
        same = owner[1:] == owner[:-1]
        steps, donor_steps = target[1:] - target[:-1], donor[1:] - donor[:-1]
        links = flat.links[donor[:-1]]
        linked = same & (steps == 1) & (donor_steps == 1) & (links != 0) & (prompt.links[target[:-1]] == links)
        tokens, donor_tokens = target_at[1:] - target_at[:-1], donor_at[1:] - donor_at[:-1]
        near = same & ~linked & (tokens > 0) & (donor_tokens > 0)
        near &= (np.abs(tokens - donor_tokens) <= NEAR_SHIFT) & (np.maximum(tokens, donor_tokens) <= NEAR_GAP)
        breaks = (~linked).nonzero()[0]
        ends = np.array([len(target) - 1] if len(target) else [], np.int64)
        return cls(
            target,
            donor,
            owner,
            target_at,
            donor_at,
            len(flat.lengths),
            linked,
            near,
            same,
            near & (links != 0) & sure[1:] & sure[:-1],
            np.concatenate(([0], breaks + 1)) if len(target) else ends,
            np.concatenate((breaks, ends)),
        )

    def run_tokens(self) -> I64:
        """Length of each run."""
        return self.target_at[self.last] - self.target_at[self.first] + NGRAM

    def chains(self, run_tokens: I64) -> I64:
        """For each run the tokens of all runs of its chain."""
        if len(run_tokens) == 0:
            return run_tokens
        chain = np.concatenate(([0], np.cumsum(~self.near[self.first[1:] - 1])))
        return np.bincount(chain, run_tokens).astype(np.int64)[chain]

    def verified(self) -> F64:
        """Tokens inside runs, by candidate."""
        return self.total(self.owner[self.first], self.run_tokens().astype(np.float64))

    def between(self, spacing: int) -> F64:
        """Tokens between near runs that the change left alone, by candidate. `spacing` of the samples."""
        step = self.near.nonzero()[0]
        if len(step) == 0:
            return np.zeros(self.candidates)
        tokens = self.target_at[step + 1] - self.target_at[step]
        donor_tokens = self.donor_at[step + 1] - self.donor_at[step]
        gap = np.minimum(tokens, donor_tokens) - NGRAM
        dead = self.target[step + 1] - self.target[step] - 1
        donor_dead = self.donor[step + 1] - self.donor[step] - 1
        mean = (dead + donor_dead) / 2
        few = self._few(step, mean, np.maximum(dead, donor_dead), tokens == donor_tokens, SAMPLING // spacing)
        isolated = np.maximum(1.0, mean * spacing / NGRAM) + np.abs(tokens - donor_tokens)
        replaced = np.maximum(1.0, mean * spacing - NGRAM + 1)
        return self.total(self.owner[step], np.maximum(0.0, gap - np.where(few, isolated, replaced)))

    def _few(self, step: I64, dead: F64, most_dead: I64, same_length: Bools, density: int) -> Bools:
        """Gaps whose samples isolated changes may have killed: the more die in the candidate's small gaps, the more may die in a row. A
        replaced passage hardly ever has the length of what it replaced, so where the diagonal stays the same, more may die."""
        least = _FEW_DEAD + density.bit_length() - 1
        few = dead <= least
        owner = self.owner[step]
        alive = self.total(self.owner[:-1], self.linked.astype(np.float64))
        unlikely = np.log(np.where(same_length, _UNLIKELY_AT_THE_SAME_LENGTH, _UNLIKELY))
        for _ in range(2):  # what was found to be isolated says more about how many die
            kept = alive + self.total(owner[few], np.ones(int(few.sum())))
            died = self.total(owner[few], dead[few])
            share = np.clip(died / np.maximum(1.0, kept + died), 1e-6, 0.9)
            few = most_dead <= np.clip(unlikely / np.log(share)[owner], least, density * _MANY_DEAD)
        return few

    def loose_ends(self, prompt_at: I64, flat: _Flat, prompt_tokens: int) -> F64:
        """Expected tokens beyond the ends of runs that nothing near continues, by candidate."""
        if len(self.target) == 0:
            return np.zeros(self.candidates)
        open_end = np.ones(len(self.target), np.bool_)
        open_end[:-1] = ~(self.linked | self.near)
        open_start = np.ones(len(self.target), np.bool_)
        open_start[1:] = open_end[:-1]
        # A sample on its own is a common phrase rather than a passage: it is what it is.
        alone = open_start & open_end
        open_start &= ~alone
        open_end &= ~alone
        ends, starts = open_end.nonzero()[0], open_start.nonzero()[0]
        after = np.minimum(
            _room_after(prompt_at, self.target[ends], prompt_tokens),
            _room_after(flat.positions, self.donor[ends], flat.lengths[self.owner[ends]], flat.first),
        )
        before = np.minimum(
            _room_before(prompt_at, self.target[starts]),
            _room_before(flat.positions, self.donor[starts], flat.first),
        )
        return self.total(self.owner[ends], after / 2) + self.total(self.owner[starts], before / 2)

    def total(self, owner: I64, what: F64) -> F64:
        """Sums by candidate."""
        return np.bincount(owner, what, minlength=self.candidates).astype(np.float64, copy=False)


def _strays(diagonal: I64, owner: I64) -> Bools:
    """Pairs between two others of one diagonal that lie on another one: a phrase that occurs elsewhere too, in the place of one that
    changed. Left in, it would hide that the passage goes on."""
    stray = np.zeros(len(diagonal), np.bool_)
    if len(diagonal) >= 3:
        before, here, after = diagonal[:-2], diagonal[1:-1], diagonal[2:]
        stray[1:-1] = (owner[:-2] == owner[2:]) & (np.abs(after - before) <= NEAR_SHIFT)
        stray[1:-1] &= (np.abs(here - before) > NEAR_SHIFT) & (np.abs(here - after) > NEAR_SHIFT)
    return stray


def _once(place: I64, donor: I64) -> I64:
    """Indices that keep each place of the prompt once, in donor order: a passage that the donor repeats covers it only once. Of several
    the one with neighbours on both sides stays, so that a stray repetition does not tear the run."""
    joined = np.zeros(len(place), np.int64)
    step = (np.diff(place) == 1) & (np.diff(donor) == 1)
    joined[1:] += step
    joined[:-1] += step
    order = np.lexsort((np.arange(len(place)), -joined, place))
    best = order[np.concatenate(([True], np.diff(place[order]) != 0))]
    best.sort()
    return best


def _room_after(positions: I64, index: I64, end: int | I64, first: Bools | None = None) -> I64:
    """Tokens from the end of a sample's window to the end of the next sample's, or to the end of the document."""
    following = np.minimum(index + 1, len(positions) - 1)
    is_last = index + 1 >= len(positions)
    if first is not None:
        is_last |= first[following]
    here = positions[index] + NGRAM
    return np.where(is_last, np.maximum(0, end - here), np.maximum(0, positions[following] + NGRAM - 1 - here))


def _room_before(positions: I64, index: I64, first: Bools | None = None) -> I64:
    """Tokens from the start of the previous sample's window, or of the document, to the start of a sample's."""
    is_first = index == 0 if first is None else first[index]
    return np.where(is_first, positions[index], positions[index] - positions[np.maximum(index - 1, 0)] - 1)


def _collect(pairs: _Pairs, flat: _Flat, verified: F64, estimate: F64, prompt_tokens: int) -> list[Alignment]:
    first = pairs.first
    edits = (
        pairs.total(pairs.owner[:-1], pairs.edits.astype(np.float64))
        if len(pairs.owner)
        else np.zeros(pairs.candidates)
    )
    runs_of = np.searchsorted(pairs.owner[first], np.arange(pairs.candidates + 1))
    pairs_of = np.searchsorted(pairs.owner, np.arange(pairs.candidates + 1))
    chains = pairs.chains(tokens := pairs.run_tokens())
    places = np.stack((pairs.target_at[first], pairs.donor_at[first], tokens), axis=1)
    found = []
    for c in range(pairs.candidates):
        own = slice(runs_of[c], runs_of[c + 1])
        ceiling = min(prompt_tokens, int(flat.lengths[c]))
        found.append(
            Alignment(
                reusable_tokens=min(ceiling, round(float(estimate[c]))),
                verified_tokens=min(ceiling, int(verified[c])),
                shared=pairs.target[pairs_of[c] : pairs_of[c + 1]],
                edited=bool(edits[c]),
                places=places[own][places[own, 0].argsort(kind="stable")],
                longest_chain=int(chains[own].max(initial=0)),
            )
        )
    return found
