"""Where two documents are verbatim: runs never span a change, the estimate is near the truth, edits are seen."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_semkv.contracts.keys import TokenArray
from dynamo_semkv.contracts.sketch import DonorSketch, SampledText, Samples, sample, sketch_key
from dynamo_semkv.evidence.alignment import Alignment, align
from dynamo_semkv.evidence.partners import nearest
from tests.evidence.documents import document, edited, joined
from tests.evidence.plain_alignment import plain

DIGEST = b"n" * 32


class Run(NamedTuple):
    target_start: int
    donor_start: int
    token_count: int


def runs_of(found: Alignment) -> tuple[Run, ...]:
    return tuple(Run(*place) for place in found.places.tolist())


def aligned(prompt: TokenArray, *donors: TokenArray) -> list[Alignment]:
    """Each donor at its own spacing, as the provider compares them; those of one spacing together."""
    text, sketches = SampledText(prompt, sketch_key(DIGEST)), [DonorSketch.of(donor, DIGEST, []) for donor in donors]
    found: dict[int, Alignment] = {}
    for spacing in {sketch.spacing for sketch in sketches}:
        alike = [n for n, sketch in enumerate(sketches) if sketch.spacing == spacing]
        together = align(text.samples(spacing), len(prompt), [sketches[n] for n in alike])
        found |= dict(zip(alike, together, strict=True))
    return [found[n] for n in range(len(donors))]


def one(prompt: TokenArray, donor: TokenArray) -> Alignment:
    return aligned(prompt, donor)[0]


def assert_verbatim(found: Alignment, prompt: TokenArray, donor: TokenArray) -> None:
    for run in runs_of(found):
        ours = prompt[run.target_start : run.target_start + run.token_count]
        theirs = donor[run.donor_start : run.donor_start + run.token_count]
        assert ours.tolist() == theirs.tolist()


def test_the_same_document_is_one_run() -> None:
    tokens = document(1, 8_000)
    found = one(tokens, tokens)
    assert len(runs_of(found)) == 1
    assert not found.edited
    assert found.reusable_tokens >= 7_900
    assert found.verified_tokens <= found.reusable_tokens <= 8_000


def test_unrelated_documents_share_nothing() -> None:
    prompt = np.random.default_rng(1).integers(0, 50_000, 4_000).astype(np.uint32)
    donor = np.random.default_rng(2).integers(0, 50_000, 4_000).astype(np.uint32)
    found = one(prompt, donor)
    assert (found.reusable_tokens, runs_of(found), found.edited, len(found.shared)) == (0, (), False, 0)


def test_another_instruction_in_front_shifts_the_run() -> None:
    body = document(3, 4_000)
    prompt = joined(document(4, 333), body, document(5, 50))
    found = one(prompt, joined(document(6, 100), body, document(7, 20)))
    assert not found.edited
    assert abs(found.reusable_tokens - 4_000) <= 80
    assert {run.target_start - run.donor_start for run in runs_of(found) if run.token_count > 100} == {233}


def test_reordered_chunks_are_runs_of_their_own() -> None:
    chunks = [document(seed, 800) for seed in range(10, 16)]
    donor = joined(*chunks)
    prompt = joined(*(chunks[n] for n in (3, 1, 5, 0, 4, 2)))
    found = one(prompt, donor)
    assert_verbatim(found, prompt, donor)
    assert abs(found.reusable_tokens - 4_800) <= 480
    assert len([run for run in runs_of(found) if run.token_count > 400]) == 6


def test_a_replaced_paragraph_is_not_claimed_and_is_called_an_edit() -> None:
    old, new = document(20, 6_000), document(21, 200)
    prompt = joined(old[:2_000], new, old[2_200:])
    found = one(prompt, old)
    assert found.edited
    assert_verbatim(found, prompt, old)
    assert not any(run.target_start < 2_200 and run.target_start + run.token_count > 2_000 for run in runs_of(found))
    assert abs(found.reusable_tokens - 5_800) <= 150


@pytest.mark.parametrize(("every", "within"), [(25, 0.2), (50, 0.1), (100, 0.05), (1_000, 0.05)])
def test_scattered_changes_leave_an_estimate_near_the_truth(every: int, within: float) -> None:
    """Number-only variants: most tokens are the same, hardly a run is long (issue: facts on N3a)."""
    rng = np.random.default_rng(every)
    donor = rng.integers(0, 50_000, 8_000).astype(np.uint32)
    prompt = edited(donor, every)
    truth = int((donor == prompt).sum())
    found = one(prompt, donor)
    assert found.edited
    assert_verbatim(found, prompt, donor)
    assert abs(found.reusable_tokens - truth) <= within * truth


def test_an_insertion_is_an_edit_on_a_nearby_diagonal() -> None:
    donor = document(30, 4_000)
    found = one(joined(donor[:2_000], document(31, 20), donor[2_000:]), donor)
    assert found.edited
    assert abs(found.reusable_tokens - 4_000) <= 60


def test_a_passage_the_prompt_repeats_follows_its_context() -> None:
    """The same boilerplate between every two chapters does not tear the runs (the donor is the prompt)."""
    boilerplate = document(40, 300)
    tokens = joined(*(part for seed in range(41, 47) for part in (document(seed, 500), boilerplate)))
    found = one(tokens, tokens)
    assert len(runs_of(found)) == 1
    assert not found.edited


def test_a_passage_repeated_under_a_shared_slot_follows_its_context_too() -> None:
    """Partners are looked up by the upper half of the fingerprint. Here the repeated one shares it with another, which
    comes first."""
    first, repeated = 0x0001_0001, 0x0001_0002
    fingerprints = np.array([first, 0x2222_0000, repeated, 0x3333_0000, repeated, 0x4444_0000], np.uint32)
    positions = np.arange(0, 192, 32, dtype=np.uint32)
    samples = Samples(fingerprints, positions, np.array([1, 2, 3, 4, 5, 0], np.uint16))
    (found,) = align(samples, 168, [DonorSketch.pack(168, samples, [])])
    assert runs_of(found) == (Run(0, 0, 168),)
    assert not found.edited


@pytest.mark.parametrize("fingerprint", [3, 2**31, 2**32 - 1])
def test_of_a_phrase_that_the_prompt_repeats_the_placenearest_to_the_expected_one_counts(fingerprint: int) -> None:
    others = [fingerprint - 1, (fingerprint + 1) % 2**32]
    found = np.array([fingerprint, others[0], fingerprint, others[1], fingerprint], np.uint32)
    prompt = Samples(found, np.array([0, 50, 100, 150, 200], np.uint32), np.zeros(5, np.uint16))
    wanted = np.full(6, fingerprint, np.uint32)
    expected = np.array([-40, 45, 55, 149, 151, 9_000])
    assert nearest(prompt, np.argsort(found, kind="stable"), wanted, expected).tolist() == [0, 0, 2, 2, 4, 4]


def test_a_document_pasted_twice_is_not_counted_beyond_the_prompt() -> None:
    body = document(50, 2_000)
    twice = joined(body, body)
    assert one(body, twice).reusable_tokens <= 2_000
    assert one(twice, body).reusable_tokens <= 2_000
    assert one(twice, twice).reusable_tokens >= 3_900


def test_candidates_do_not_influence_each_other() -> None:
    prompt = joined(document(60, 3_000), document(61, 1_000))
    donors = [document(60, 3_000), document(99, 2_000), edited(document(60, 3_000), 60), document(61, 1_000), prompt]
    together = aligned(prompt, *donors)
    for found, donor in zip(together, donors, strict=True):
        alone = one(prompt, donor)
        assert (found.reusable_tokens, runs_of(found), found.edited) == (
            alone.reusable_tokens,
            runs_of(alone),
            alone.edited,
        )
        assert found.shared.tolist() == alone.shared.tolist()


@pytest.mark.parametrize("tokens", [0, 7, 8, 20])
def test_documents_too_short_to_be_sampled_are_no_error(tokens: int) -> None:
    short, long = document(70, tokens), document(71, 2_000)
    assert one(short, long).reusable_tokens == 0
    assert one(long, short).reusable_tokens == 0
    assert align(sample(long, 1), 2_000, []) == []


PIECES = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 300)), min_size=1, max_size=8)


@settings(max_examples=60)
@given(PIECES, PIECES, st.integers(0, 3), st.sampled_from([3, 60, 20_000]))
def test_no_run_is_ever_anything_but_verbatim(
    ours: list[tuple[int, int]], theirs: list[tuple[int, int]], seed: int, vocabulary: int
) -> None:
    """Whatever pieces two documents are made of, repeated, cut or with a vocabulary of three words."""
    sources = [document(1_000 * seed + n, 300, vocabulary) for n in range(6)]
    prompt = joined(*(sources[n][:length] for n, length in ours))
    donor = joined(*(sources[n][:length] for n, length in theirs))
    found = one(prompt, donor)
    assert_verbatim(found, prompt, donor)
    assert 0 <= found.verified_tokens <= found.reusable_tokens <= min(len(prompt), len(donor))
    assert len(set(found.shared.tolist())) == len(found.shared)


@settings(max_examples=60, derandomize=True)
@given(
    PIECES,
    st.lists(PIECES, min_size=1, max_size=5),
    st.integers(0, 3),
    st.sampled_from([3, 60, 20_000]),
    st.sampled_from([2**32 - 1, 0xFF000FFF]),
    st.booleans(),
)
def test_all_at_once_is_what_the_definition_says_of_each(
    ours: list[tuple[int, int]],
    theirs: list[list[tuple[int, int]]],
    seed: int,
    vocabulary: int,
    kept_bits: int,
    holes: bool,
) -> None:
    """Any number of candidates, with and without repeated passages, evicted parts, and fingerprints that share a slot
    of the table."""
    sources = [document(1_000 * seed + n, 300, vocabulary) for n in range(6)]
    prompt = joined(*(sources[n][:length] for n, length in ours))
    sketches = [DonorSketch.of(joined(*(sources[n][:length] for n, length in it)), DIGEST, []) for it in theirs]
    # What goes on where the prompt ends: one run, and all that is shared.
    sketches.append(DonorSketch.of(joined(prompt, sources[0]), DIGEST, []))
    if holes:
        sketches = [it.within([(0, it.token_count // 3), (it.token_count // 2, it.token_count)], 32) for it in sketches]
    text = SampledText(prompt, sketch_key(DIGEST))
    for spacing in (8, 16, 32):
        alike = [with_bits(it, kept_bits) for it in sketches if it.spacing == spacing]
        samples = text.samples(spacing)
        samples = samples._replace(fingerprints=samples.fingerprints & np.uint32(kept_bits))
        for group in (alike, alike[-1:]):
            for sketch, found in zip(group, align(samples, len(prompt), group), strict=True):
                said = (*found[:2], found.shared.tolist(), found.edited, list(runs_of(found)), found.longest_chain)
                assert said == plain(samples, len(prompt), sketch)


A, B, C, D = (n << 12 for n in (1, 2, 3, 4))  # no two in one slot of the table


@pytest.mark.parametrize(
    ("ours", "links", "theirs"),
    [
        ([A, B], [7, 0], [([C, B, D], [7, 7, 0])]),
        ([A, B, C], [7, 0, 0], [([A, B, C], [7, 0, 0])]),
        ([A, B, C, D], [7, 7, 7, 0], [([A, C, B, D], [7, 7, 7, 0])]),
        ([0, A, B], [7, 7, 0], [([A, B], [7, 0]), ([B], [0])]),
        ([5, 0, A], [7, 7, 0], [([5, A], [7, 0]), ([A], [0])]),
    ],
    ids=["one sample alone", "no link", "another order", "fingerprint 0", "fingerprint 0 in another one's slot"],
)
def test_what_random_text_hardly_ever_has(
    ours: list[int], links: list[int], theirs: list[tuple[list[int], list[int]]]
) -> None:
    prompt = by_hand(ours, links)
    sketches = [DonorSketch.pack(40 * len(it[0]), by_hand(*it), []) for it in theirs]
    for group in (sketches, sketches[:1]):
        for sketch, found in zip(group, align(prompt, 40 * len(ours), group), strict=True):
            said = (*found[:2], found.shared.tolist(), found.edited, list(runs_of(found)), found.longest_chain)
            assert said == plain(prompt, 40 * len(ours), sketch)


def by_hand(fingerprints: list[int], links: list[int]) -> Samples:
    positions = np.arange(len(links), dtype=np.uint32) * np.uint32(32)
    return Samples(np.array(fingerprints, np.uint32), positions, np.array(links, np.uint16))


def with_bits(sketch: DonorSketch, bits: int) -> DonorSketch:
    """With only these bits of each fingerprint."""
    fingerprints = sketch.fingerprints & np.uint32(bits)
    return DonorSketch.pack(sketch.token_count, sketch.samples._replace(fingerprints=fingerprints), [])


class Counted(np.ndarray[Any, Any]):
    """Counts how many operations a prompt's fingerprints go through."""

    operations = 0

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        Counted.operations += 1
        return getattr(ufunc, method)(*[np.asarray(it) for it in inputs], **kwargs)


@pytest.mark.parametrize("alternate", [2, 2_000])
def test_a_prompt_made_of_fingerprints_that_share_a_slot_costs_no_more_operations_than_others(alternate: int) -> None:
    """Each of thousands of places cost a pass over all samples of all donors: half a second of the provider's
    thread."""
    m = 16_000
    links, at = np.ones(m, np.uint16), np.arange(m, dtype=np.uint32) * 8
    spread = np.arange(m, dtype=np.uint32) * np.uint32(2**18)
    donor = DonorSketch.pack(2_500, Samples(spread[:300], at[:300], links[:300]), [])
    counts = []
    for fingerprints in (np.arange(m, dtype=np.uint32) % np.uint32(alternate), spread):
        Counted.operations = 0
        align(Samples(fingerprints.view(Counted), at, links), 8 * m, [donor])
        counts.append(Counted.operations)
    assert counts[0] < counts[1] + 50
