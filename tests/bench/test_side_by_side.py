"""The comparison with other methods: what is counted, and the small methods that need nothing but packages of the
lock."""

from __future__ import annotations

import argparse
import math
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from dynamo_semkv.bench.corpus import Words, tokens_of
from dynamo_semkv.bench.evidence import OURS
from dynamo_semkv.bench.evidence_arguments import NAMES, add_arguments
from dynamo_semkv.bench.evidence_cost import document
from dynamo_semkv.bench.labelled import Case, Donor
from dynamo_semkv.bench.paraphrase import pairs, verses
from dynamo_semkv.bench.peers import DynamoExact, Found, Peer, Provided, peers
from dynamo_semkv.bench.side_by_side import compare, in_turn, table
from dynamo_semkv.contracts.keys import TokenArray
from dynamo_semkv.evidence.fingerprint import FingerprintProvider
from dynamo_semkv.testing import ManualClock


class Scripted:
    """Scores every prompt by its first token: as the donor `d<token>`, with the score token / 100."""

    name = "scripted"
    closed = False

    def __init__(self, decided: bool) -> None:
        self._decided = decided

    def add(self, donor_id: str, tokens: TokenArray) -> None:
        """Knows everybody."""

    def find(self, tokens: TokenArray) -> Found | None:
        first = int(tokens[0])
        return Found(f"d{first}", first / 100, len(tokens) // 2, self._decided) if first else None

    def close(self) -> None:
        self.closed = True


def prompt(first: int, right: bool, scenario: str = "s") -> Case:
    tokens = np.full(10, first, np.uint32)
    return Case(scenario, tokens, (f"d{first}",), 10) if right else Case("negative", tokens)


def test_a_method_that_decides_is_taken_at_its_word() -> None:
    peer = Scripted(decided=True)
    cases = [prompt(50, True), prompt(0, True), prompt(60, False), prompt(0, False)]
    (standing,) = compare([peer], [Donor("d50", document(1, 10))], cases)
    assert (standing.threshold, standing.false_positives, standing.negatives) == (None, 0.5, 2)
    assert [(line.prompts, line.ranked, line.decided) for line in standing.lines] == [(2, 0.5, 0.5)]
    assert standing.error_p95 == pytest.approx(0.5)
    assert peer.closed


def test_a_method_that_only_ranks_gets_the_best_threshold_there_is() -> None:
    """The highest negative scores 0.6: right answers with less are ranked and not decided."""
    cases = [prompt(50, True), prompt(70, True), prompt(90, True), prompt(60, False), prompt(40, False)]
    (standing,) = compare([Scripted(decided=False)], [], cases)
    assert (standing.threshold, standing.false_positives) == (0.6, 0.0)
    (line,) = standing.lines
    assert (line.ranked, line.decided) == (1.0, pytest.approx(2 / 3))
    assert table("t", [standing]).row_count == 7


def test_one_negative_in_a_hundred_may_be_accepted() -> None:
    negatives = [prompt(n, False) for n in range(1, 101)]
    (standing,) = compare([Scripted(decided=False)], [], [prompt(95, True), *negatives])
    assert (standing.threshold, standing.false_positives) == (0.99, 0.01)


class Slow(Scripted):
    """Takes a second for each donor and each prompt."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(decided=True)
        self._clock = clock

    def add(self, donor_id: str, tokens: TokenArray) -> None:
        self._clock.advance(1.0)

    def find(self, tokens: TokenArray) -> Found | None:
        self._clock.advance(1.0)
        return super().find(tokens)


def test_a_slow_method_is_asked_something_of_every_scenario_until_its_time_is_over() -> None:
    cases = [prompt(50, True, scenario) for scenario in "aaaabb"] + [prompt(60, False), prompt(0, False)]
    assert [case.scenario for case in in_turn(cases)] == ["a", "b", "negative", "a", "b", "negative", "a", "a"]
    clock = ManualClock()
    (standing,) = compare([Slow(clock)], [Donor("d50", document(1, 10))], cases, budget=3.5, clock=clock)
    assert (standing.asked, standing.of, standing.negatives) == (4, 8, 1)
    assert [(line.scenario, line.prompts) for line in standing.lines] == [("a", 2), ("b", 1)]
    assert standing.find_p50 == 1.0


def test_a_method_that_cannot_take_in_the_donors_in_time_is_not_asked() -> None:
    clock = ManualClock()
    donors = [Donor(f"d{n}", document(1, 10)) for n in range(9)]
    slow, quick = compare([Slow(clock), Scripted(decided=True)], donors, [prompt(50, True)], budget=3.5, clock=clock)
    assert (slow.donors, slow.asked, slow.of, quick.asked) == (4, 0, 1, 1)
    assert table("t", [slow, quick]).row_count == 7


@pytest.fixture(params=["fingerprint", "dynamo"])
def peer(request: pytest.FixtureRequest) -> Peer:
    (made,) = peers(OURS, Words(), None, None, [request.param])
    return made


def test_methods_find_a_prefix_and_nothing_in_a_stranger(peer: Peer) -> None:
    for n in range(4):
        peer.add(f"d{n}", document(n, 1_024))
    found = peer.find(np.concatenate((document(2, 1_024)[:960], document(9, 64))))
    assert found is not None
    assert (found.donor_id, found.decided) == ("d2", True)
    assert found.tokens == pytest.approx(960, rel=0.05)
    assert peer.find(document(77, 1_024)) is None
    peer.close()


def test_an_answer_after_the_deadline_is_none() -> None:
    for deadline, found in ((math.inf, True), (0.0, False)):
        peer = Provided(FingerprintProvider(), OURS, deadline=deadline)
        peer.add("d", document(1, 512))
        assert (peer.find(document(1, 512)) is not None) is found


def test_dynamos_index_does_not_see_behind_a_changed_beginning() -> None:
    index = DynamoExact()
    index.add("d", document(1, 1_024))
    assert index.find(np.concatenate((document(2, 32), document(1, 1_024)[32:]))) is None


def write_verses(path: Path, said: dict[tuple[int, int, int], str]) -> Path:
    with sqlite3.connect(path) as database:
        database.execute("create table verses (book_id, chapter_number, verse_number, text)")
        database.executemany("insert into verses values (?, ?, ?, ?)", [(*key, text) for key, text in said.items()])
    return path


def test_paraphrased_documents_share_no_eight_words_in_a_row_and_no_verse(tmp_path: Path) -> None:
    plain = "the king went up to the city with all of his men on that day"
    other = "on the same day the ruler and every one of his soldiers climbed to the town"
    earlier = {(1, 1, n): f"{plain} {n}" for n in range(1, 30)}
    later = {key: (f"{text} indeed" if key[2] % 2 else f"{other} {key[2]}") for key, text in earlier.items()}
    read = verses(write_verses(tmp_path / "b", later)), verses(write_verses(tmp_path / "a", earlier))
    made = list(pairs(60, *read))
    assert len(made) >= 2
    numbers = [set(filter(str.isdigit, pair.prompt.split())) for pair in made]
    assert not set.intersection(*numbers)
    assert all(int(number) % 2 == 0 for found in numbers for number in found), "odd verses were left as they were"
    assert all(other in pair.donor and plain in pair.prompt for pair in made)


def test_words_come_back_from_tokens() -> None:
    assert Words().text(tokens_of("Read the text, then answer (2).")) == "Read the text , then answer ( 2 ) ."


def test_arguments_have_all_methods_by_default() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert tuple(parser.parse_args([]).peers) == NAMES
    assert parser.parse_args(["--tokens", "--peers"]).tokens == []
