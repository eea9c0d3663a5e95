"""The sketch is a wire contract: golden vectors, and the definition written down a second time without NumPy."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.keys import BlockKey, TokenArray, as_tokens, block_keys
from dynamo_semkv.contracts.sketch import (
    MAX_SAMPLES,
    NGRAM,
    DonorSketch,
    SampledText,
    Samples,
    checkpoint_ordinals,
    common_at_most,
    sample,
    sketch_key,
    spacing_of,
)
from tests.evidence.documents import document, joined

DIGEST = bytes(range(32))
GOLDEN_KEY = 13_997_483_708_150_396_454
GOLDEN_SAMPLES = [(150950890, 3, 2303), (2957434117, 6, 8516), (983946618, 10, 3232)]
GOLDEN_SKETCH = (1234, "816e71bf2217111f2c580c4d9024400d36300014e6bd1cd8cb626c57cb65b863")

MASK = 2**64 - 1
R, C = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95


def mix(h: int) -> int:
    h ^= h >> 30
    h = h * 0xBF58476D1CE4E5B9 & MASK
    h ^= h >> 27
    h = h * 0x94D049BB133111EB & MASK
    return h ^ h >> 31


def polynomial(tokens: list[int]) -> int:
    return C * sum(token * pow(R, k, 2**64) for k, token in enumerate(tokens)) & MASK


def by_definition(tokens: list[int], key: int, spacing: int) -> list[tuple[int, int, int]]:
    """(fingerprint, position, link) from the module's docstring, one window at a time in Python integers."""
    found: list[tuple[int, int]] = []
    for i in range(len(tokens) - NGRAM + 1):
        s = polynomial(tokens[i : i + NGRAM]) + key & MASK
        fingerprint = mix(s) >> 32
        if s < 2**61 and fingerprint % (spacing // 8) == 0 and not (found and found[-1][0] == fingerprint):
            found.append((fingerprint, i))
    links = []
    for (_, p), (_, q) in itertools.pairwise(found):
        links.append(max(mix((polynomial(tokens[p : q + NGRAM]) + key & MASK) ^ ((q - p) * C & MASK)) >> 48, 1))
    return [(f, p, link) for (f, p), link in zip(found, [*links, 0], strict=False)]


def rows(samples: Samples) -> list[tuple[int, int, int]]:
    return [
        (int(f), int(p), int(link))
        for f, p, link in zip(samples.fingerprints, samples.positions, samples.links, strict=True)
    ]


def test_golden_vector() -> None:
    """Changing this test means a new ALGORITHM: old donors would never match again."""
    tokens = as_tokens([(i * i * 7 + 13 * i) % 32_003 for i in range(1_000)])
    key = sketch_key(DIGEST)
    assert key == GOLDEN_KEY
    assert rows(sample(tokens, key))[:3] == GOLDEN_SAMPLES
    raw = DonorSketch.of(tokens, DIGEST, block_keys(DIGEST, tokens, 32)).to_bytes()
    assert (len(raw), hashlib.sha256(raw).hexdigest()) == GOLDEN_SKETCH


@given(st.integers(0, 2**32), st.integers(0, 400), st.sampled_from([2, 50, 2**32 - 1]))
def test_arrays_follow_the_definition(seed: int, length: int, vocabulary: int) -> None:
    tokens = np.random.default_rng(seed).integers(0, vocabulary, length).astype(np.uint32)
    key = sketch_key(seed.to_bytes(32, "little"))
    text = SampledText(tokens, key)
    for spacing in (8, 16, 32):
        assert rows(text.samples(spacing)) == by_definition(tokens.tolist(), key, spacing)
    assert rows(sample(tokens, key)) == rows(text.samples(spacing_of(length)))


@pytest.mark.parametrize(("length", "spacing"), [(2_560, 8), (2_561, 16), (5_120, 16), (5_121, 32), (100_000, 32)])
def test_the_longer_a_text_the_wider_its_samples(length: int, spacing: int) -> None:
    tokens = np.random.default_rng(1).integers(0, 50_000, length).astype(np.uint32)
    count = len(sample(tokens, 99).fingerprints)
    assert abs(count - length / spacing) < 5 * (length / spacing) ** 0.5


def test_samples_at_a_spacing_are_among_those_at_every_smaller_one() -> None:
    text = SampledText(document(2, 6_000), 99)
    wide, middle, dense = (set(text.samples(spacing).positions.tolist()) for spacing in (32, 16, 8))
    assert wide < middle < dense


def test_a_run_of_one_token_is_one_sample_at_most() -> None:
    """A prompt of padding must not fill an index: whatever the key, no fingerprint follows itself."""
    for key in range(200):
        assert len(sample(np.full(5_000, 7, np.uint32), key).fingerprints) <= 1


def test_an_insertion_shifts_positions_and_changes_nothing_else() -> None:
    body = document(3, 4_000)
    before = sample(body, 5)
    after = sample(joined(document(4, 37), body), 5)
    tail = slice(len(after.fingerprints) - len(before.fingerprints) + 1, None)
    assert after.fingerprints[tail].tolist() == before.fingerprints[1:].tolist()
    assert (after.positions[tail] - 37).tolist() == before.positions[1:].tolist()
    assert after.links[tail].tolist() == before.links[1:].tolist()


def test_one_changed_token_breaks_the_one_link_that_spans_it() -> None:
    body = document(8, 4_000)
    before = sample(body, 5)
    gaps = np.diff(before.positions.astype(int)) - NGRAM
    hidden = 0
    for broken in np.flatnonzero(gaps >= 3)[:20].tolist():
        changed = body.copy()
        changed[int(before.positions[broken]) + NGRAM + 1] += 1
        after = sample(changed, 5)
        if len(after.fingerprints) != len(before.fingerprints):
            continue  # the change made a sample of its own
        assert after.fingerprints.tolist() == before.fingerprints.tolist()
        assert np.flatnonzero(after.links != before.links).tolist() == [broken]
        hidden += 1
    assert hidden >= 10


def test_equal_text_under_two_tenants_has_unrelated_samples() -> None:
    tokens = document(5, 20_000)
    a = sample(tokens, sketch_key(b"a" * 32))
    b = sample(tokens, sketch_key(b"b" * 32))
    assert not set(a.fingerprints.tolist()) & set(b.fingerprints.tolist())


@pytest.mark.parametrize("length", [0, 7, 8, 500, 65_543, 65_544, 140_000])
def test_wire_form_round_trips(length: int) -> None:
    tokens = document(6, length)
    sketch = DonorSketch.of(tokens, DIGEST, block_keys(DIGEST, tokens, 32, limit=40))
    again = DonorSketch.from_bytes(sketch.to_bytes())
    samples = sample(tokens, sketch_key(DIGEST))
    assert len(samples.fingerprints) <= MAX_SAMPLES
    for sketched in (sketch, again):
        assert sketched.token_count == length
        assert sketched.sample_count == len(samples.fingerprints)
        assert sketched.fingerprints.tolist() == samples.fingerprints.tolist()
        assert sketched.positions.tolist() == samples.positions.tolist()
        assert sketched.links.tolist() == samples.links.tolist()
    assert again.checkpoints == sketch.checkpoints


def test_an_8k_donor_fits_the_byte_budget() -> None:
    tokens = document(7, 8_192)
    assert len(DonorSketch.of(tokens, DIGEST, block_keys(DIGEST, tokens, 32)).to_bytes()) < 3_200


def good_raw() -> bytes:
    tokens = document(9, 600)
    return DonorSketch.of(tokens, DIGEST, block_keys(DIGEST, tokens, 32)).to_bytes()


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (b"", "sketch.algorithm"),
        (b"ng8m32-1" + good_raw()[8:], "sketch.algorithm"),
        (good_raw()[:-1], "sketch.length"),
        (good_raw() + b"\0", "sketch.length"),
        (good_raw()[:14] + b"\xff\xff\xff\xff" + good_raw()[18:], "sketch.counts"),
        (good_raw()[:8] + (40).to_bytes(4, "little") + good_raw()[12:], "sketch.positions"),
    ],
)
def test_malformed_sketches_are_refused_by_name(raw: bytes, field: str) -> None:
    with pytest.raises(ContractError) as refused:
        DonorSketch.from_bytes(raw)
    assert refused.value.field == field


def test_unordered_positions_are_refused() -> None:
    samples = sample(document(9, 600), 1)
    swapped = Samples(samples.fingerprints, samples.positions[::-1].copy(), samples.links)
    with pytest.raises(ContractError, match=r"sketch\.positions"):
        DonorSketch.pack(600, swapped, [])


@pytest.mark.parametrize(
    ("blocks", "ordinals"), [(0, []), (1, [0]), (5, [0, 1, 2, 3, 4]), (13, [0, 1, 2, 3, 5, 7, 11, 12])]
)
def test_checkpoint_ordinals(blocks: int, ordinals: list[int]) -> None:
    assert checkpoint_ordinals(blocks) == ordinals


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 300))
def test_proven_blocks_never_exceed_the_common_prefix_and_miss_less_than_a_third(
    shared: int, donor_more: int, query_more: int
) -> None:
    def chain(more: int, salt: str) -> list[bytes]:
        names = [f"s{i}" for i in range(shared)] + [f"{salt}{i}" for i in range(more)]
        return [hashlib.blake2b(name.encode(), digest_size=16).digest() for name in names]

    donor, query = chain(donor_more, "d"), chain(query_more, "q")
    sketch = DonorSketch.of(as_tokens([]), DIGEST, donor)  # type: ignore[arg-type]
    proven = sketch.proven_blocks(query)  # type: ignore[arg-type]
    assert proven <= shared
    assert proven * 3 >= shared * 2 - 2


@given(
    st.integers(0, 3_000), st.integers(0, 3_000), st.integers(0, 3_000), st.integers(0, 3), st.sampled_from([3, 20_000])
)
@settings(max_examples=60)
def test_what_samples_rule_out_is_not_common_and_changes_no_proof(
    shared: int, donor_more: int, prompt_more: int, seed: int, vocabulary: int
) -> None:
    """Neither for a donor of which a part in the middle is gone."""
    same = document(seed, shared, vocabulary)
    donor = joined(same, document(seed + 10, donor_more, vocabulary))
    prompt = joined(same, document(seed + 20, prompt_more, vocabulary))
    n = min(len(donor), len(prompt))
    differs = np.flatnonzero(donor[:n] != prompt[:n])
    common = int(differs[0]) if len(differs) else n
    whole = DonorSketch.of(donor, DIGEST, block_keys(DIGEST, donor, 4))
    part = whole.within([(0, len(donor) // 3), (len(donor) // 2, len(donor))], 4)
    for sketch, there in ((whole, len(donor)), (part, len(donor) // 3)):
        samples = SampledText(prompt, sketch_key(DIGEST)).samples(sketch.spacing)
        at_most = common_at_most(samples, sketch.samples)
        assert at_most is None or at_most >= min(common, there)
        chain = block_keys(DIGEST, prompt, 4)
        assert sketch.proven_blocks(chain, samples, 4) == sketch.proven_blocks(chain)


def test_a_link_that_a_donor_does_not_have_rules_nothing_out() -> None:
    whole = sample(document(1, 6_000), 5)
    torn = whole._replace(links=whole.links * (np.arange(len(whole.links)) != 3).astype(np.uint16))
    assert common_at_most(whole, torn) is None
    changed = whole._replace(links=whole.links ^ (np.arange(len(whole.links)) == 3).astype(np.uint16))
    assert common_at_most(whole, changed) == whole.positions[4] + NGRAM - 1


def test_keys_of_blocks_that_differ_by_their_samples_are_not_made() -> None:
    same = document(1, 4_096)
    donor, prompt = (joined(same, document(seed, 4_096)) for seed in (2, 3))
    sketch = DonorSketch.of(donor, DIGEST, block_keys(DIGEST, donor, 32))
    chain = Made(block_keys(DIGEST, prompt, 32))
    assert sketch.proven_blocks(chain, SampledText(prompt, sketch_key(DIGEST)).samples(32), 32) == 128
    assert chain.last == 127
    assert sketch.proven_blocks(chain) == 128
    assert chain.last == 191


class Made(list[BlockKey]):
    """A chain that knows the last block whose key was asked for."""

    last = -1

    def __getitem__(self, at: Any) -> Any:
        self.last = max(self.last, at)
        return super().__getitem__(at)


@given(st.lists(st.tuples(st.integers(0, 3_000), st.integers(1, 800)), max_size=5), st.integers(0, 5))
def test_within_keeps_only_what_lies_in_the_live_ranges(spans: list[tuple[int, int]], seed: int) -> None:
    tokens: TokenArray = document(seed, 3_000)
    whole = DonorSketch.of(tokens, DIGEST, block_keys(DIGEST, tokens, 32))
    ranges = [(start, min(start + length, 3_000)) for start, length in spans if start < 3_000]
    live = {token for start, end in ranges for token in range(start, end)}
    part = whole.within(ranges, 32)
    kept = part.positions.tolist()
    assert kept == [p for p in whole.positions.tolist() if live.issuperset(range(p, p + NGRAM))]
    for position, follower, link in zip(kept, kept[1:], part.links.tolist(), strict=False):
        assert bool(link) == live.issuperset(range(position, follower + NGRAM))
    assert not any(part.links[-1:])
    assert all(live.issuperset(range((ordinal + 1) * 32)) for ordinal, _ in part.checkpoints)
    if ranges == [(0, 3_000)]:
        assert part.to_bytes() == whole.to_bytes()
