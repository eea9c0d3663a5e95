"""What is sent and when: disjoint text, arrivals, scenarios that repeat what they say they repeat."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynamo_semkv.bench.corpus import installed
from dynamo_semkv.bench.report import workload
from dynamo_semkv.bench.report.arrivals import CONVERSATION_INTERVALS, offsets, trace_intervals
from dynamo_semkv.bench.report.library import Library
from dynamo_semkv.bench.report.workload import Pass, Sizes, Timed
from dynamo_semkv.bench.texts import common_share
from dynamo_semkv.contracts.errors import ContractError

SIZES = Sizes(characters=600, gap=0.5, repeats=3, documents=4, passes=2, negatives=3, batch=5)


@pytest.fixture(scope="module")
def text() -> str:
    return Library(60_000, installed()).take(60_000).text


class Fixed(Library):
    """A library over text that is there already."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._number = text, 0, 0


def prompts(scenario: Timed) -> list[str]:
    return [message["content"] for one in scenario.passes for r in one.requests for message in r.messages]


def test_the_library_hands_out_nothing_twice(text: str) -> None:
    library = Fixed(text)
    passages = library.many(6, 900)
    assert {len(passage.text) for passage in passages} == {900}
    assert all(passage.text.isascii() for passage in passages)
    assert max(common_share(a.text, b.text) for a in passages for b in passages if a != b) <= 0.02
    with pytest.raises(ValueError, match="the library holds"):
        library.take(library.left + 1)


def test_arrivals() -> None:
    assert offsets("uniform", 3, gap=0.5) == (0.0, 0.5, 1.0)
    assert offsets("bursty", 6, gap=0.5) == (0.0, 0.0, 0.0, 0.0, 2.0, 2.0)
    assert offsets("at_once", 2, gap=0.5) == (0.0, 0.0)
    with pytest.raises(ValueError, match="pattern is 'poisson'"):
        offsets("poisson", 2, gap=0.5)


@pytest.mark.parametrize("count", [1, 2, 10, 24, 100])
def test_trace_arrivals_keep_their_shape_and_the_mean_gap(count: int) -> None:
    times = offsets("mooncake", count, gap=0.5)
    assert len(times) == count
    assert list(times) == sorted(times)
    assert times[0] == 0.0
    moves = sum(CONVERSATION_INTERVALS[n % len(CONVERSATION_INTERVALS)] > 0 for n in range(count - 1))
    assert len(set(times)) == 1 + moves
    assert times[-1] == (pytest.approx(0.5 * (count - 1)) if moves else 0.0) or times[-1] <= 0.5 * (count - 1)


def test_a_trace_file_gives_its_own_intervals(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [json.dumps({"timestamp": ms, "input_length": 600, "hash_ids": [1, 2]}) for ms in (0, 0, 3000, 3500)]
    file.write_text("\n".join(lines))
    assert trace_intervals(file, 3) == [0.0, 3.0, 0.5]
    file.write_text('{"timestamp": 1}')
    with pytest.raises(ContractError, match="line 1"):
        trace_intervals(file, 3)


def test_a_pass_has_a_time_for_each_request() -> None:
    with pytest.raises(ValueError, match="offsets and phases: got 1 and 0, there are 0 requests"):
        Pass((), (0.0,))


def test_a_working_set_comes_again_in_the_same_order(text: str) -> None:
    scenario = workload.working_set(Fixed(text), SIZES, "bursty")
    (one,) = scenario.passes
    documents = [request.messages[0]["content"] for request in one.requests]
    assert documents[:4] == documents[4:]
    assert len(set(documents)) == 4
    assert [one.phase(n) for n in range(8)] == ["first"] * 4 + ["again"] * 4
    (salted,) = workload.working_set(Fixed(text), SIZES, "uniform", salt="t").passes
    assert {request.cache_salt for request in salted.requests} == {"t"}
    assert [r.messages for r in salted.requests] == [r.messages for r in one.requests]


def test_negatives_and_load_repeat_nothing(text: str) -> None:
    library = Fixed(text)
    for scenario in (
        workload.negatives(library, SIZES),
        workload.unhurried(library, SIZES),
        workload.high_load(library, SIZES),
    ):
        said = [text for text in prompts(scenario) if len(text) > 100]
        assert max(common_share(a, b) for a in said for b in said if a != b) <= 0.02, scenario.name


def test_partial_overlap_shares_the_first_half_only(text: str) -> None:
    said = [t for t in prompts(workload.partial_overlap(Fixed(text), SIZES)) if len(t) > 100]
    assert len({t[:300] for t in said}) == 1
    assert len({t[300:] for t in said}) == len(said) == 3


def test_lengths_come_cold_again_and_after_the_device_forgot(text: str) -> None:
    (scenario,) = workload.by_length(Fixed(text), [1024])
    assert scenario.name == "long_1k"
    assert [(one.phase(0), one.empties_device) for one in scenario.passes] == [
        ("first", False),
        ("again", False),
        ("after_eviction", True),
    ]
    first = scenario.passes[0].requests
    assert all(one.requests == first for one in scenario.passes)


def test_contenders_come_in_another_order_that_the_seed_gives() -> None:
    orders = [workload.shuffled(["a", "b", "c"], seed) for seed in range(8)]
    assert orders == [workload.shuffled(["a", "b", "c"], seed) for seed in range(8)]
    assert len({tuple(order) for order in orders}) > 1
