"""Postings and partitions: what was added is found, what was removed is not, and no step pays for a rebuild."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynamo_semkv.contracts.sketch import DonorSketch, SampledText, U32Array, sketch_key
from dynamo_semkv.evidence import partition as partitions
from dynamo_semkv.evidence import postings
from dynamo_semkv.evidence.partition import AT_ONCE, MOVED_PER_STEP, POSTINGS_PER_DONOR, Partition, posted_by
from dynamo_semkv.evidence.postings import Hits, Postings
from tests.evidence.documents import document, namespace, sketch_of
from tests.evidence.donors import donor

NS = namespace()


def posted(sketch: DonorSketch) -> U32Array:
    return posted_by([(0, sketch)])[0]


def fingerprints(*values: int) -> U32Array:
    return np.array(values, np.uint32)


def rows_of(hits: Hits, index: int) -> set[int]:
    return set(hits.rows[hits.query == index].tolist())


def scattered(seed: int, count: int) -> U32Array:
    return np.unique(np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32))


def test_every_row_of_a_fingerprint_is_found_with_its_count() -> None:
    table = Postings(capacity=1_000, ways=16)
    a, b = scattered(1, 50), scattered(2, 50)
    table.insert(a, np.full(len(a), 3, np.uint32))
    table.insert(a, np.full(len(a), 4, np.uint32))
    table.insert(b, np.full(len(b), 5, np.uint32))
    hits = table.find(a)
    assert all(rows_of(hits, n) >= {3, 4} for n in range(len(a)))
    assert hits.carriers().tolist() == [2] * len(a)
    assert table.find(scattered(3, 50)).carriers().sum() <= 1


def test_removal_takes_out_one_row_only() -> None:
    table = Postings(capacity=1_000, ways=16)
    values = scattered(1, 60)
    for row in (1, 2, 3):
        table.insert(values, np.full(len(values), row, np.uint32))
    table.remove(values, 2)
    hits = table.find(values)
    assert all(rows_of(hits, n) == {1, 3} for n in range(len(values)))
    assert table.used == 2 * len(values)
    table.remove(values, 1)
    table.remove(values, 3)
    assert table.used == 0
    assert len(table.find(values).query) == 0


def test_one_fingerprint_of_everybody_takes_one_set_and_is_counted() -> None:
    table = Postings(capacity=5_000, ways=16)
    common = fingerprints(0xDEADBEEF)
    for row in range(1_000):
        table.insert(common, np.array([row], np.uint32))
    hits = table.find(common)
    assert hits.carriers().tolist() == [1_000]
    assert rows_of(hits, 0) == set(range(984, 1_000)), "the newest sixteen"
    before = table.nbytes
    for row in range(1_000):
        table.remove(common, row)
    assert table.find(common).carriers().tolist() == [0]
    assert table.nbytes == before


def test_more_postings_of_one_donor_than_a_set_has_room_for() -> None:
    table = Postings(capacity=1, ways=4)
    values = scattered(5, 400)
    table.insert(values, np.full(len(values), 9, np.uint32))
    assert table.used == len(values)
    assert rows_of(table.find(values), 0) <= {9}
    table.remove(values, 9)
    assert len(table.find(values).query) == 0


def test_inserting_nothing_changes_nothing() -> None:
    table = Postings(capacity=10, ways=16)
    table.insert(fingerprints(), np.empty(0, np.uint32))
    table.remove(fingerprints(), 1)
    assert table.used == 0
    assert len(table.find(fingerprints()).query) == 0


def test_at_its_intended_fill_hardly_a_posting_falls_out() -> None:
    table = Postings(capacity=20_000, ways=16)
    donors = [scattered(n, 100) for n in range(200)]
    for row, values in enumerate(donors):
        table.insert(values, np.full(len(values), row, np.uint32))
    kept = sum(
        row in rows_of(hits, n) for row, v in enumerate(donors) for hits in [table.find(v)] for n in range(len(v))
    )
    assert kept >= 0.97 * sum(map(len, donors))


def test_a_long_donor_is_thinned_by_content() -> None:
    long, middle = sketch_of(document(1, 30_000), NS), sketch_of(document(2, 6_000), NS)
    assert len(posted(long)) <= POSTINGS_PER_DONOR
    assert set(posted(long)) <= set(long.fingerprints)
    assert len(posted(middle)) in range(64, POSTINGS_PER_DONOR + 1)


def test_of_a_short_donor_those_are_posted_that_a_long_prompt_would_ask_for() -> None:
    """Its other samples are for alignment only: a prompt is looked up at the widest spacing, whatever is there to be
    found."""
    tokens = document(2, 2_000)
    short = sketch_of(tokens, NS)
    wide = SampledText(tokens, sketch_key(NS.digest())).samples(32)
    assert set(posted(short)) == set(wide.fingerprints)
    assert len(posted(short)) < short.sample_count / 3


def test_a_large_table_is_there_before_it_is_used_and_goes_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postings, "_LARGE", 4_096)
    table = Postings(capacity=4_000, ways=16)
    assert table.nbytes > 5 * 4_096
    steps = 1
    while not table.warm(4_096):
        steps += 1
    assert steps == -(-table.nbytes // 4_096)
    values = scattered(1, 50)
    table.insert(values, np.full(len(values), 3, np.uint32))
    assert all(rows_of(table.find(values), n) == {3} for n in range(len(values)))
    released = 1
    while not table.release(4_096):
        released += 1
    assert released == steps
    assert table.release(4_096), "again changes nothing"
    assert table.find(values).carriers().sum() == 0, "the memory is the system's again"


@pytest.mark.parametrize("large", [1 << 20, 4_096])
def test_growth_happens_in_small_steps_and_loses_nobody(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While tables are exchanged every donor stays findable and no call moves more than a few rows. Large tables are
    waited for."""
    monkeypatch.setattr(postings, "_LARGE", large)
    monkeypatch.setattr(partitions, "BYTES_PER_STEP", 512)
    partition = Partition(ways=16)
    donors = [donor(f"d{n}", document(n, 800), NS) for n in range(400)]
    moving = coming = 0
    for n, one in enumerate(donors):
        assert one.sketch is not None
        before = int(partition._moved.sum())
        partition.add(one, one.sketch)
        moving += partition._next is not None
        assert int(partition._moved.sum()) - before <= (MOVED_PER_STEP + 1) * AT_ONCE
        coming += partition._warming is not None
        if n % 40 == 0:
            assert all(findable(partition, earlier.donor_id, earlier.sketch) for earlier in donors[: n + 1 : 7])
    assert moving > 20, "the test went through exchanges of tables"
    assert (coming > 20) == (large == 4_096), "and waited for large ones"
    assert all(findable(partition, one.donor_id, one.sketch) for one in donors)


def findable(partition: Partition, donor_id: str, sketch: object) -> bool:
    values = posted(sketch)  # type: ignore[arg-type]
    hits = partition.find(values)
    found = {partition.donor(row) for row in set(hits.rows.tolist())}
    return any(one is not None and one.donor_id == donor_id for one in found)


class PartitionMachine(RuleBasedStateMachine):
    """Adds and removes in any order, across exchanges of tables, against a plain dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.partition = Partition(ways=16)
        self.here: dict[str, int] = {}
        self.made = 0

    @rule(seed=st.integers(0, 30), burst=st.integers(1, 12))
    def add(self, seed: int, burst: int) -> None:
        for n in range(burst):
            one = DONORS[(seed + n) % len(DONORS)]
            if one.donor_id not in self.here:
                assert one.sketch is not None
                self.here[one.donor_id] = self.partition.add(one, one.sketch)

    @precondition(lambda self: bool(self.here))
    @rule(data=st.data(), burst=st.integers(1, 12))
    def remove(self, data: st.DataObject, burst: int) -> None:
        for _ in range(min(burst, len(self.here))):
            donor_id = data.draw(st.sampled_from(sorted(self.here)))
            self.partition.remove(self.here.pop(donor_id))

    @invariant()
    def who_is_here_is_found_and_nobody_else(self) -> None:
        assert len(self.partition) == len(self.here)
        for n, one in enumerate(DONORS):
            if n % 5 == 0 or one.donor_id in self.here:
                assert findable(self.partition, one.donor_id, one.sketch) == (one.donor_id in self.here)


DONORS = [donor(f"d{n}", document(500 + n, 1_500), NS) for n in range(40)]
TestPartition = PartitionMachine.TestCase
TestPartition.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("lengths", [(800,), (9_000,), (30_000,), (9_000, 30_000), (800, 30_000)])
def test_asked_is_all_that_any_donor_here_would_have_posted(lengths: tuple[int, ...], repeats: bool) -> None:
    """Where all donors are long, half of a prompt's fingerprints or more need not be looked up."""
    partition, donors = Partition(16), [donor(f"d{n}", document(n, length), NS) for n, length in enumerate(lengths)]
    for one in donors:
        assert one.sketch is not None
        partition.add(one, one.sketch)
    tokens = np.concatenate([document(n, length) for n, length in enumerate(lengths)] * (1 + repeats))
    prompt = SampledText(tokens, sketch_key(NS.digest())).windows(32, 16_384).fingerprints
    asked, places = partition.postable(prompt)
    assert asked.tolist() == sorted(set(asked.tolist()))
    assert set(asked) <= set(prompt)
    for one in donors:
        assert one.sketch is not None
        assert set(posted(one.sketch)) & set(prompt) <= set(asked)
    if places is not None:
        assert prompt[places].tolist() == asked.tolist()
    assert (places is None) >= repeats
    if min(lengths) >= 9_000:
        assert len(asked) < 0.7 * len(set(prompt))


@given(st.lists(st.integers(0, 2**32 - 1), unique=True, max_size=60), st.integers(4, 16))
def test_rarity_is_a_weight(values: list[int], ways: int) -> None:
    partition = Partition(ways)
    one = DONORS[0]
    assert one.sketch is not None
    partition.add(one, one.sketch)
    asked = np.array(sorted(values), np.uint32)
    hits = partition.find(asked)
    rarity = partition.rarity(asked, hits)
    assert ((rarity >= 0.0) & (rarity <= 1.0)).all()
    assert (rarity[hits.carriers() == 0] == 0.0).all()


def test_what_everybody_carries_weighs_nothing_and_what_one_carries_weighs_one() -> None:
    partition = Partition(16)
    common = document(1, 1_000)
    for n in range(60):
        one = donor(f"d{n}", np.concatenate((common, document(100 + n, 1_000))), NS)
        assert one.sketch is not None
        partition.add(one, one.sketch)
    shared = posted(sketch_of(common, NS))
    assert partition.rarity(shared, partition.find(shared)).max() < 0.2
    own = np.setdiff1d(posted(sketch_of(document(100, 1_000), NS)), shared)
    assert np.median(partition.rarity(own, partition.find(own))) > 0.95


def test_a_template_of_thinned_donors_is_not_rare_because_few_say_so() -> None:
    """Most donors are long and post half of their fingerprints; the other half of the template is known from the short
    ones only."""
    template = document(3, 1_000)
    partition = Partition(16)
    for n in range(30):
        one = donor(f"d{n}", np.concatenate((template, document(200 + n, 1_000 if n % 5 == 0 else 7_000))), NS)
        assert one.sketch is not None
        partition.add(one, one.sketch)
    shared = posted(sketch_of(template, NS))
    assert partition.rarity(shared, partition.find(shared)).max() < 0.25


def test_what_all_that_are_left_carry_weighs_nothing_once_the_others_are_gone() -> None:
    common, partition = document(5, 1_000), Partition(16)
    rows = []
    for n, tokens in enumerate([common] * 6 + [document(300 + n, 9_000) for n in range(6)]):
        one = donor(f"d{n}", tokens, NS)
        assert one.sketch is not None
        rows.append(partition.add(one, one.sketch))
    shared = posted(sketch_of(common, NS))
    assert partition.rarity(shared, partition.find(shared)).max() > 0.2
    for row in rows[6:]:
        partition.remove(row)
    assert partition.rarity(shared, partition.find(shared)).max() < 0.1
