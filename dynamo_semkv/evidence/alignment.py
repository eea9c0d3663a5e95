"""Alignment: finds from shared samples where a prompt and its candidate donors are equal token by token, and how many
tokens that makes.

A *run* is a chain of neighbouring samples that are equal in both and whose links are equal: every token from its first
window to the end of its last one is the same, with a chance of error of 2**-16 for each link. Segments claim runs, so
no segment spans a change, however short.

The *estimate* also counts what lies beside the runs. Between two runs on (nearly) one diagonal there is a change; how
much of the gap it took follows from the samples that died in it: a changed token kills 8 windows, a replaced passage
all of its own. At the loose end of a run the change comes, on average, half way to the next sample that contradicts it.
A sample with nothing near on either side is a common phrase, and counts as no more than it is.

All candidates are aligned at once in NumPy: the cost hardly depends on how many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynamo_semkv.contracts.sketch import NGRAM, SAMPLING, DonorSketch, Samples
from dynamo_semkv.evidence.partners import APART_BITS, Flat, Partners, partners, sole_partners

NEAR_SHIFT = 64
"""Tokens that an edit may insert or delete; a bigger shift of the diagonal is another passage, not the same document
edited."""
NEAR_GAP = 512
_FEW_DEAD = 2
_MANY_DEAD = 12
_UNLIKELY = 0.02
_UNLIKELY_AT_THE_SAME_LENGTH = 1e-6
"""A gap with fewer dead samples holds isolated changes, one with more a replaced passage; between the two, it is
whichever is likelier."""

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_NOWHERE: I64 = np.empty((0, 3), np.int64)
_NOTHING: I64 = np.empty(0, np.int64)
_NO_STEPS: Bools = np.empty(0, np.bool_)
_BEYOND = np.array([[-1], [1]])
"""The offset from the first sample of a run to the one before it, and from the last sample to the one after it."""


class Alignment(NamedTuple):
    """One candidate against the prompt."""

    reusable_tokens: int
    """Estimate of the tokens that are verbatim in both."""
    verified_tokens: int
    """The part of it that runs cover."""
    shared: I64
    """Indices of the prompt's samples that the donor has too, each once."""
    edited: bool
    """Whether a run breaks off and continues a little later on nearly the same diagonal."""
    places: I64
    """Runs by position in the prompt, shape [n, 3]: start in the prompt, start in the donor, tokens."""
    longest_chain: int = 0
    """Tokens of the longest chain of runs with only small changes between them: an edited document has no long run, but
    many short ones in a row."""

    @property
    def longest_run(self) -> int:
        """Tokens of the longest run; 0 if there is none."""
        return int(self.places[:, 2].max(initial=0))


_UNALIKE = Alignment(0, 0, _NOTHING, False, _NOWHERE)


def align(prompt: Samples, prompt_tokens: int, donors: Sequence[DonorSketch]) -> list[Alignment]:
    """One Alignment a donor, in order. All donors have one spacing, and `prompt`, of at most MOST_SAMPLES samples, is
    sampled at it. Cost: O(samples of the prompt and all donors)."""
    if not donors or len(prompt.fingerprints) == 0:
        return [_UNALIKE] * len(donors)
    pairs = None
    if len(donors) == 1:
        theirs = donors[0].samples
        at, found, sole = sole_partners(prompt.fingerprints, theirs.fingerprints)
        if sole:
            places = found.nonzero()[0]
            if len(places) == 0:
                return [_UNALIKE]
            pairs = Partners(at.take(places), places, None)
            only = _one_run(prompt, prompt_tokens, theirs, donors[0].token_count, pairs)
            if only is not None:
                return [only]
            places += 1  # as in `Flat`
    flat = Flat.of(donors)
    pairs = pairs if pairs is not None else partners(prompt, flat)
    if len(pairs.donor) == 0:
        return [_UNALIKE] * len(donors)
    prompt_at = np.empty(len(prompt.positions) + 2, np.int64)
    prompt_at[0], prompt_at[1:-1], prompt_at[-1] = -1, prompt.positions, prompt_tokens - NGRAM + 1
    pairs = _without_repeats_and_strays(pairs, prompt_at, flat, len(prompt.fingerprints))
    runs = _Runs.of(prompt, prompt_at, flat, pairs)
    estimate = runs.verified() + runs.between_runs(donors[0].spacing) + runs.loose_ends()
    return _collect(runs, flat, estimate, prompt_tokens)


def _one_run(prompt: Samples, prompt_tokens: int, theirs: Samples, tokens: int, pairs: Partners) -> Alignment | None:
    """A short way for one candidate, a donor of `tokens` tokens that shares a single run, as a conversation that goes
    on does. The result is what the rest of this module would give. None: it shares more than one run. `pairs`: at least
    one, and all sure."""
    target, donor, _ = pairs
    begin, end, donor_begin, donor_end = int(target[0]), int(target[-1]), int(donor[0]), int(donor[-1])
    steps = len(target) - 1
    if not steps == end - begin == donor_end - donor_begin or not (target[1:] > target[:-1]).all():
        return None
    links = theirs.links[donor_begin:donor_end]
    linked = prompt.links[begin:end] == links
    linked &= links != 0
    if not linked.all():
        return None
    before, first, last, after = _around(prompt, begin, end, prompt_tokens)
    donor_before, donor_first, donor_last, donor_after = _around(theirs, donor_begin, donor_end, tokens)
    if last - first != donor_last - donor_first:
        return None
    verified = last - first + NGRAM
    # A sample on its own is a common phrase, as in `loose_ends`.
    room = min(first - before, donor_first - donor_before) + min(after - last, donor_after - donor_last) - 2
    ceiling = min(prompt_tokens, tokens)
    return Alignment(
        reusable_tokens=min(ceiling, round(verified + room / 2) if steps else verified),
        verified_tokens=min(ceiling, verified),
        shared=target,
        edited=False,
        places=np.array([[first, donor_first, verified]]),
        longest_chain=verified,
    )


def _around(samples: Samples, begin: int, end: int, tokens: int) -> tuple[int, int, int, int]:
    """Positions of the sample before `begin`, of `begin` and `end`, and of the sample after `end`. At the edges of the
    text, of `tokens` tokens, they are those of `Flat`."""
    at = samples.positions
    before = int(at[begin - 1]) if begin else -1
    after = int(at[end + 1]) if end + 1 < len(at) else tokens - NGRAM + 1
    return before, int(at[begin]), int(at[end]), after


def _without_repeats_and_strays(found: Partners, prompt_at: I64, flat: Flat, m: int) -> Partners:
    """The pairs in donor order, each sample of the prompt (there are `m`) once for each candidate, and without strays.
    A sample that occurs twice shows as a step that does not go forward."""
    target, donor, sure = found
    place = target if len(flat.lengths) == 1 else flat.owner.take(donor) * m + target
    if not (place[1:] > place[:-1]).all() and np.bincount(place).max() > 1:
        kept = _once(place, donor)
        target, donor, sure = target[kept], donor[kept], sure[kept] if sure is not None else None
    diagonal = prompt_at.take(target + 1) - flat.positions.take(donor)
    stray = _strays(diagonal)
    if stray is not None:
        kept = (~stray).nonzero()[0]
        target, donor, sure = target[kept], donor[kept], sure[kept] if sure is not None else None
    return Partners(target, donor, sure)


class _Runs(NamedTuple):
    """Runs in donor order, candidates one after the other, shape [r]; the step from run n to run n + 1 has shape [r -
    1]."""

    candidates: int
    owner: I64
    pairs: Partners
    ends: I64
    """Indices of the first and last pair of each run, shape [2, r]."""
    target_at: I64
    donor_at: I64
    """Where the windows of these begin, in tokens, shape [2, r]; 2**40 more a candidate in the donor."""
    room: I64
    """Tokens before the first window, and behind the last one, that no sample of either says anything about, shape [2,
    r]."""
    tokens: I64
    near: Bools
    """The step hides a change in what is otherwise the same passage."""
    edits: Bools
    """Near, and neither because evicted parts of the donor left a hole nor because a repeated passage was taken for
    another."""

    @classmethod
    def of(cls, prompt: Samples, prompt_at: I64, flat: Flat, pairs: Partners) -> _Runs:
        """`pairs`: at least one. `prompt_at`: as `Flat.positions`, of the prompt."""
        target, donor, sure = pairs
        before, donor_before = target[:-1], donor[:-1]
        links = flat.links.take(donor_before)
        broken = target[1:] - before != 1
        broken |= donor[1:] - donor_before != 1
        broken |= prompt.links.take(before) != links
        broken |= links == 0
        breaks = broken.nonzero()[0]
        ends = np.empty((2, len(breaks) + 1), np.int64)
        ends[0, 0], ends[1, -1] = 0, len(target) - 1
        ends[1, :-1] = breaks
        np.add(breaks, 1, out=ends[0, 1:])
        theirs = donor.take(ends)
        ours = target.take(ends)
        ours += 1
        target_at, donor_at = prompt_at.take(ours), flat.positions.take(theirs)
        room = np.minimum(
            np.abs(prompt_at.take(ours + _BEYOND) - target_at), np.abs(flat.positions.take(theirs + _BEYOND) - donor_at)
        )
        room -= 1
        near = edits = _NO_STEPS
        if len(breaks):
            step, donor_step = target_at[0, 1:] - target_at[1, :-1], donor_at[0, 1:] - donor_at[1, :-1]
            near = (step > 0) & (donor_step > 0) & (np.abs(step - donor_step) <= NEAR_SHIFT)
            near &= np.maximum(step, donor_step) <= NEAR_GAP
            edits = near & (links.take(breaks) != 0)
            if sure is not None:
                edits &= sure[1:].take(breaks) & sure.take(breaks)
        tokens = target_at[1] - target_at[0]
        tokens += NGRAM
        owner = flat.owner.take(theirs[0])
        return cls(len(flat.lengths), owner, pairs, ends, target_at, donor_at, room, tokens, near, edits)

    def chains(self) -> I64:
        """For each run the tokens of all runs of its chain."""
        chain = np.zeros(len(self.tokens), np.int64)
        np.cumsum(~self.near, out=chain[1:])
        return np.bincount(chain, self.tokens).astype(np.int64)[chain]

    def verified(self) -> F64:
        """Tokens inside runs, by candidate."""
        return self.total(self.owner, self.tokens)

    def between_runs(self, spacing: int) -> F64:
        """Tokens between near runs that the change left alone, by candidate. `spacing` of the samples."""
        step = self.near.nonzero()[0]
        if len(step) == 0:
            return np.zeros(self.candidates)
        target, donor, _ = self.pairs
        tokens = self.target_at[0, step + 1] - self.target_at[1, step]
        donor_tokens = self.donor_at[0, step + 1] - self.donor_at[1, step]
        gap = np.minimum(tokens, donor_tokens) - NGRAM
        ends, begins = self.ends[1, step], self.ends[0, step + 1]
        dead, donor_dead = target[begins] - target[ends] - 1, donor[begins] - donor[ends] - 1
        mean = (dead + donor_dead) / 2
        few = self._isolated(step, mean, np.maximum(dead, donor_dead), tokens == donor_tokens, SAMPLING // spacing)
        isolated = np.maximum(1.0, mean * spacing / NGRAM) + np.abs(tokens - donor_tokens)
        replaced = np.maximum(1.0, mean * spacing - NGRAM + 1)
        return self.total(self.owner[step], np.maximum(0.0, gap - np.where(few, isolated, replaced)))

    def _isolated(self, step: I64, dead: F64, most_dead: I64, same_length: Bools, density: int) -> Bools:
        """Gaps whose samples isolated changes may have killed: the more die in the candidate's small gaps, the more may
        die in a row. A replaced passage hardly ever has the length of what it replaced, so where the diagonal stays the
        same, more may die."""
        least = _FEW_DEAD + density.bit_length() - 1
        few = dead <= least
        owner = self.owner[step]
        alive = self.total(self.owner, self.ends[1] - self.ends[0])
        unlikely = np.log(np.where(same_length, _UNLIKELY_AT_THE_SAME_LENGTH, _UNLIKELY))
        for _ in range(2):  # what was found to be isolated says more about how many die
            kept = alive + self.total(owner, few)
            died = self.total(owner, np.where(few, dead, 0.0))
            share = np.clip(died / np.maximum(1.0, kept + died), 1e-6, 0.9)
            few = most_dead <= np.clip(unlikely / np.log(share)[owner], least, density * _MANY_DEAD)
        return few

    def loose_ends(self) -> F64:
        """Expected tokens beyond the ends of runs that nothing near continues, by candidate: half of the room up to the
        next sample, or to the end of the document."""
        loose = np.ones(self.ends.shape, np.bool_)
        np.logical_not(self.near, out=loose[0, 1:])
        loose[1, :-1] = loose[0, 1:]
        # A sample on its own is a common phrase rather than a passage: it is what it is.
        alone = (self.ends[0] == self.ends[1]) & loose[0] & loose[1]
        room = self.room * loose
        room[:, alone] = 0
        return self.total(self.owner, room[0] + room[1]) / 2

    def total(self, owner: I64, what: F64 | I64 | Bools) -> F64:
        """Sums by candidate."""
        return np.bincount(owner, what, minlength=self.candidates).astype(np.float64, copy=False)


def _strays(diagonal: I64) -> Bools | None:
    """Pairs between two others of one diagonal that lie on another one: a phrase that occurs elsewhere too, in the
    place of one that changed. Left in, it would hide that the passage goes on. None: there are none. `diagonal`: no two
    candidates have nearly the same."""
    jump = np.abs(diagonal[1:] - diagonal[:-1]) > NEAR_SHIFT
    off = jump[1:] & jump[:-1]
    if not off.any():
        return None
    stray = np.zeros(len(diagonal), np.bool_)
    stray[1:-1] = off & (np.abs(diagonal[2:] - diagonal[:-2]) <= NEAR_SHIFT)
    return stray


def _once(place: I64, donor: I64) -> I64:
    """Indices that keep each place of the prompt once, in donor order: a passage that the donor repeats covers it only
    once. Of several the one with neighbours on both sides stays, so that a stray repetition does not tear the run."""
    joined = np.zeros(len(place), np.int64)
    step = (np.diff(place) == 1) & (np.diff(donor) == 1)
    joined[1:] += step
    joined[:-1] += step
    order = np.lexsort((np.arange(len(place)), -joined, place))
    best = order[np.concatenate(([True], np.diff(place[order]) != 0))]
    best.sort()
    return best


def _collect(runs: _Runs, flat: Flat, estimate: F64, prompt_tokens: int) -> list[Alignment]:
    places = np.empty((len(runs.tokens), 3), np.int64)
    places[:, 0], places[:, 2] = runs.target_at[0], runs.tokens
    np.subtract(runs.donor_at[0], runs.owner << APART_BITS, out=places[:, 1])
    chains = runs.chains() if len(runs.near) else runs.tokens
    verified = runs.verified().tolist()
    if runs.candidates == 1:
        runs_of, edits = [0, len(places)], [runs.edits.any()]
    else:
        runs_of = np.searchsorted(runs.owner, np.arange(runs.candidates + 1)).tolist()
        edits = runs.total(runs.owner[:-1], runs.edits).tolist()
    found = []
    for c, estimated in enumerate(estimate.tolist()):
        begin, end = runs_of[c], runs_of[c + 1]
        if begin == end:
            found.append(_UNALIKE)
            continue
        ceiling = min(prompt_tokens, flat.lengths[c])
        own = places[begin:end]
        found.append(
            Alignment(
                reusable_tokens=min(ceiling, round(estimated)),
                verified_tokens=min(ceiling, int(verified[c])),
                shared=runs.pairs.target[runs.ends[0, begin] : runs.ends[1, end - 1] + 1],
                edited=bool(edits[c]),
                places=own if len(own) == 1 else own[own[:, 0].argsort(kind="stable")],
                longest_chain=int(chains[begin:end].max()),
            )
        )
    return found
