"""Alignment by its definition: one candidate at a time, one sample at a time. What `dynamo_semkv.evidence.alignment`
has to say, slowly."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dynamo_semkv.contracts.sketch import NGRAM, SAMPLING, DonorSketch, Samples

NEAR_SHIFT, NEAR_GAP = 64, 512


class Pair(NamedTuple):
    """Samples of prompt and donor with one fingerprint."""

    target: int
    donor: int
    sure: bool


class Plain(NamedTuple):
    reusable_tokens: int
    verified_tokens: int
    shared: list[int]
    edited: bool
    runs: list[tuple[int, int, int]]
    longest_chain: int


def plain(prompt: Samples, prompt_tokens: int, sketch: DonorSketch) -> Plain:
    ours, theirs = prompt.positions.tolist(), sketch.positions.tolist()
    our_links, their_links = prompt.links.tolist(), sketch.links.tolist()
    pairs = _without_strays(_once(_pairs(prompt, sketch)), ours, theirs)
    linked, near, edits = list[bool](), list[bool](), list[bool]()
    for one, two in pairwise(pairs):
        link = their_links[one.donor]
        neighbours = two.target - one.target == two.donor - one.donor == 1
        linked.append(neighbours and link != 0 and our_links[one.target] == link)
        tokens, donor_tokens = ours[two.target] - ours[one.target], theirs[two.donor] - theirs[one.donor]
        close = abs(tokens - donor_tokens) <= NEAR_SHIFT and max(tokens, donor_tokens) <= NEAR_GAP
        near.append(not linked[-1] and tokens > 0 and donor_tokens > 0 and close)
        edits.append(near[-1] and link != 0 and one.sure and two.sure)
    begins = [n for n in range(len(pairs)) if n == 0 or not linked[n - 1]]
    ends = [n for n in range(len(pairs)) if n == len(pairs) - 1 or not linked[n]]
    runs = [
        (ours[pairs[a].target], theirs[pairs[a].donor], ours[pairs[b].target] - ours[pairs[a].target] + NGRAM)
        for a, b in zip(begins, ends, strict=True)
    ]
    verified = sum(tokens for _, _, tokens in runs)
    estimate = verified + _between(pairs, near, sum(linked), ours, theirs, sketch.spacing)
    for a, b in zip(begins, ends, strict=True):
        open_start, open_end = a == 0 or not near[a - 1], b == len(pairs) - 1 or not near[b]
        if a == b and open_start and open_end:
            continue
        if open_end:
            last = pairs[b]
            estimate += (
                min(
                    _gap(ours, last.target, last.target + 1, prompt_tokens),
                    _gap(theirs, last.donor, last.donor + 1, sketch.token_count),
                )
                / 2
            )
        if open_start:
            first = pairs[a]
            estimate += (
                min(
                    _gap(ours, first.target - 1, first.target, prompt_tokens),
                    _gap(theirs, first.donor - 1, first.donor, sketch.token_count),
                )
                / 2
            )
    chains, chain = [0], 0
    for n, (_, _, tokens) in enumerate(runs):
        chain = chain + tokens if n and near[ends[n - 1]] else tokens
        chains.append(chain)
    ceiling = min(prompt_tokens, sketch.token_count)
    return Plain(
        min(ceiling, round(estimate)),
        min(ceiling, verified),
        [pair.target for pair in pairs],
        any(edits),
        sorted(runs, key=lambda run: run[0]),
        max(chains),
    )


def _gap(positions: list[int], before: int, after: int, tokens: int) -> int:
    """Tokens between two neighbouring window starts; in front of the first one and behind the last, to the end of the
    document."""
    begin = positions[before] if before >= 0 else -1
    end = positions[after] if after < len(positions) else tokens - NGRAM + 1
    return end - begin - 1


def _pairs(prompt: Samples, sketch: DonorSketch) -> list[Pair]:
    ours, theirs = prompt.fingerprints.tolist(), sketch.fingerprints.tolist()
    our_at, their_at = prompt.positions.tolist(), sketch.positions.tolist()
    where: dict[int, list[int]] = {}
    for n, fingerprint in enumerate(ours):
        where.setdefault(fingerprint, []).append(n)
    anchors = [n for n, fingerprint in enumerate(theirs) if len(where.get(fingerprint, ())) == 1]
    turns: Counter[int] = Counter()
    found = []
    for n, fingerprint in enumerate(theirs):
        places = where.get(fingerprint)
        if places is None:
            continue
        if len(places) == 1:
            found.append(Pair(places[0], n, True))
            continue
        at = bisect_left(anchors, n)
        around = [*anchors[at - 1 : at], *anchors[at : at + 1]] if at else anchors[:1]
        continued = [where[theirs[anchor]][0] + n - anchor for anchor in around]
        fits = [place for place in continued if 0 <= place < len(ours) and ours[place] == fingerprint]
        if fits:
            found.append(Pair(fits[0], n, True))
        elif around:
            wish = our_at[where[theirs[around[0]]][0]] + their_at[n] - their_at[around[0]]
            found.append(Pair(min(places, key=lambda place: abs(our_at[place] - wish)), n, False))
        else:
            found.append(Pair(places[min(turns[fingerprint], len(places) - 1)], n, False))
        turns[fingerprint] += not fits
    return found


def _once(pairs: list[Pair]) -> list[Pair]:
    def neighbours(n: int) -> int:
        steps = [pairs[at : at + 2] for at in (n - 1, n) if 0 <= at < len(pairs) - 1]
        return sum(b.target - a.target == b.donor - a.donor == 1 for a, b in steps)

    best: dict[int, int] = {}
    for n, pair in enumerate(pairs):
        if pair.target not in best or neighbours(n) > neighbours(best[pair.target]):
            best[pair.target] = n
    return [pairs[n] for n in sorted(best.values())]


def _without_strays(pairs: list[Pair], ours: list[int], theirs: list[int]) -> list[Pair]:
    diagonal = [ours[pair.target] - theirs[pair.donor] for pair in pairs]
    return [
        pair
        for n, pair in enumerate(pairs)
        if n in (0, len(pairs) - 1)
        or abs(diagonal[n + 1] - diagonal[n - 1]) > NEAR_SHIFT
        or abs(diagonal[n] - diagonal[n - 1]) <= NEAR_SHIFT
        or abs(diagonal[n] - diagonal[n + 1]) <= NEAR_SHIFT
    ]


def _between(
    pairs: list[Pair], near: list[bool], linked: int, ours: list[int], theirs: list[int], spacing: int
) -> float:
    density = SAMPLING // spacing
    least = 2 + density.bit_length() - 1
    gaps = []
    for n in (n for n, it in enumerate(near) if it):
        one, two = pairs[n], pairs[n + 1]
        tokens, donor_tokens = ours[two.target] - ours[one.target], theirs[two.donor] - theirs[one.donor]
        dead = two.target - one.target - 1, two.donor - one.donor - 1
        gaps.append((tokens, donor_tokens, sum(dead) / 2, max(dead)))
    few = [mean <= least for _, _, mean, _ in gaps]
    for _ in range(2):
        died = sum(mean for (_, _, mean, _), it in zip(gaps, few, strict=True) if it)
        share = np.clip(died / max(1.0, linked + sum(few) + died), 1e-6, 0.9)
        few = [
            most <= np.clip(np.log(1e-6 if tokens == donor_tokens else 0.02) / np.log(share), least, density * 12)
            for tokens, donor_tokens, _, most in gaps
        ]
    left = 0.0
    for (tokens, donor_tokens, mean, _), isolated in zip(gaps, few, strict=True):
        lost = max(1.0, mean * spacing / NGRAM) + abs(tokens - donor_tokens)
        left += max(
            0.0, min(tokens, donor_tokens) - NGRAM - (lost if isolated else max(1.0, mean * spacing - NGRAM + 1))
        )
    return left
