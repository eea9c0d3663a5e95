"""A goal is judged by its worst repeat, with what runs in production, and where the verdict is no, it says no."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dynamo_semkv.bench.report import document
from dynamo_semkv.bench.report.goals import GOALS, Verdict, verdicts
from dynamo_semkv.bench.report.readings import all_figures
from dynamo_semkv.bench.report.statistics import Figure, Figures, upper_bound
from tests.bench.report import made

EVENTS = "50,000 events/s on one core, into catalog and index"
STALLS = "no stall > 5 ms while adding, moving, removing, evicting at capacity (thread's own time)"
LOOKUP = "lookup p99 <= 1 ms, 8k tokens built like text, 8 donors a hit, 10,000 and 100,000 donors"
RECALL = "recall@1 >= 0.95 where common runs cover a fifth, at <= 1 % false positives"
PARAPHRASE = "recall >= 0.9 on true paraphrase with the embedding provider, within the default deadline of 5 ms"
BEYOND = "the other scenarios in which something comes again: mean TTFT <= 1.02 of Dynamo kv alone"


def judged(figures: Figures) -> dict[str, Verdict]:
    return {verdict.goal.text: verdict for verdict in verdicts(figures)}


def at_scale(change: dict[str, Any] | None = None, donors: int = 10_000) -> dict[str, Verdict]:
    """Three repeats, of which one at `donors` has other figures."""
    scaling = made.scaling()
    rows = scaling["donors"]
    scaling["donors"] = [*rows, *rows, *({**row, **(change or {} if row["donors"] == donors else {})} for row in rows)]
    return judged(all_figures(made.run(scaling=scaling)["sections"]))


@pytest.mark.parametrize("donors", [10_000, 100_000])
@pytest.mark.parametrize(
    ("goal", "change"),
    [
        (LOOKUP, {"hit_p99": 1_001.0}),
        (LOOKUP, {"miss_p99": 1_001.0}),
        ("<= 4 KiB a donor", {"bytes_per_donor": 4_097.0}),
        ("add >= 5,000 donors/s", {"registers_per_second": 4_999.0}),
        ("add >= 5,000 donors/s", {"at_capacity_per_second": 4_999.0}),
        (STALLS, {"longest_own": 5_001.0}),
        ("the same by the clock, beside lookups", {"stall_max": 5_001.0}),
    ],
)
def test_one_repeat_that_breaks_a_promise_breaks_it(goal: str, change: dict[str, float], donors: int) -> None:
    assert at_scale()[goal].word == "yes"
    verdict = at_scale(change, donors)[goal]
    assert verdict.word == "**no**"
    assert verdict.measured is not None
    assert f"{donors:,} donors" in verdict.measured.note


def test_events_are_judged_with_the_index_and_a_no_is_no() -> None:
    verdict = at_scale()[EVENTS]
    assert verdict.word == "**no**"
    assert verdict.measured is not None
    assert (verdict.measured.figure, verdict.measured.note) == ("5,500/s", "10,000 donors, at_capacity")
    run = made.run(scaling=made.scaling())
    page = document.page(run, all_figures(run["sections"]), {})
    assert "| 100,000 | 5,500 | 80,000 | 90,000 |" in page


@pytest.mark.parametrize("missing", [10_000, 100_000])
def test_with_donors_missing_that_the_goal_names_nothing_is_claimed(missing: int) -> None:
    scaling = made.scaling()
    scaling["donors"] = [row for row in scaling["donors"] if row["donors"] != missing]
    found = judged(all_figures(made.run(scaling=scaling)["sections"]))
    assert {found[goal].word for goal in (LOOKUP, "<= 4 KiB a donor", STALLS)} == {"shown"}


def test_a_router_is_judged_by_its_worst_repeat_at_both_numbers_of_donors() -> None:
    p99 = "added router time p99 <= 3 ms"
    router = made.router()
    assert judged(all_figures(made.run(router=router)["sections"]))[p99].word == "yes"
    router["scales"]["100000"]["wall_p99"] = [1.0, 3.1, 1.0]
    verdict = judged(all_figures(made.run(router=router)["sections"]))[p99]
    assert verdict.word == "**no**"
    assert verdict.measured is not None
    assert verdict.measured.figure == "3.10 ms"
    del router["scales"]["100000"]
    assert judged(all_figures(made.run(router=router)["sections"]))[p99].word == "shown"


@pytest.mark.parametrize(
    ("cases", "false", "word"),
    [(53, 0, "shown"), (399, 0, "shown"), (400, 0, "yes"), (400, 1, "**no**"), (1_000, 4, "yes"), (1_000, 5, "**no**")],
)
def test_false_positives_of_one_percent_need_four_hundred_negatives(cases: int, false: int, word: str) -> None:
    figures = {
        "evidence/2048/other instruction/recall_at_1": Figure("", (1.0,)),
        "evidence/2048/other instruction/true_share": Figure("", (0.9,)),
        "evidence/2048/negative/cases": Figure("", (float(cases),)),
        "evidence/2048/negative/matched": Figure("", (false / cases,)),
        "evidence/paraphrase/minhash/negative/cases": Figure("", (1_000.0,)),
        "evidence/paraphrase/minhash/negative/matched": Figure("", (1.0,)),
    }
    verdict = judged(figures)[RECALL]
    assert verdict.word == word
    assert verdict.measured is not None
    assert f"{false} false of {cases} negatives" in verdict.measured.note


def test_the_bound_is_what_the_trials_leave_possible() -> None:
    assert upper_bound(0, 400) == pytest.approx(1 - 0.05 ** (1 / 400))
    assert upper_bound(3, 3) == 1.0
    assert 0.01 < upper_bound(1, 400) < upper_bound(2, 400) < 0.02
    share = upper_bound(5, 1_000)
    as_few = sum(math.comb(1_000, n) * share**n * (1 - share) ** (1_000 - n) for n in range(6))
    assert as_few == pytest.approx(0.05)


def test_paraphrase_is_judged_within_the_default_deadline() -> None:
    name = "paraphrase, never 5 words in a row in common"
    figures = {
        f"evidence/paraphrase/embedding/{name}/decided": Figure("", (1.0,)),
        f"evidence/paraphrase/budgeted/{name}/decided": Figure("", (0.95,)),
        "evidence/paraphrase/default/negative/decided": Figure("", (0.0,)),
    }
    assert judged(figures)[PARAPHRASE].word == "not measured"
    figures[f"evidence/paraphrase/default/{name}/decided"] = Figure("", (0.2,))
    verdict = judged(figures)[PARAPHRASE]
    assert verdict.word == "**no**"
    assert verdict.measured is not None
    assert verdict.measured.figure == "never 5 words in a row in common 0.20"
    assert "deadline raised 0.95; with a second 1.00" in verdict.measured.note


@pytest.mark.parametrize(("theirs", "word"), [(0.9, "yes"), (0.96, "**no**"), (None, "shown")])
def test_a_faster_method_that_finds_less_has_not_won(theirs: float | None, word: str) -> None:
    start = "evidence/peers 2048"
    figures = {
        f"{start}/fingerprint/find_p50": Figure("", (0.001,)),
        f"{start}/semblend/find_p50": Figure("", (0.2,)),
        f"{start}/fingerprint/reordered chunks/decided": Figure("", (0.95,)),
        f"{start}/fingerprint/negative/decided": Figure("", (0.0,)),
    }
    if theirs is not None:
        figures[f"{start}/semblend/reordered chunks/decided"] = Figure("", (theirs,))
    assert judged(figures)[">= 100 times faster than SemBlend at equal or better recall"].word == word


def test_times_beyond_the_working_set_are_judged_by_the_worst_scenario_and_repeat() -> None:
    def ratio(*values: float) -> Figure:
        return Figure("ratio", values, "lower")

    figures = {
        "scenarios/rfc/working_set_uniform/semkv/ttft_mean_to_kv": ratio(2.0),
        "scenarios/rfc/negative/semkv/ttft_mean_to_kv": ratio(2.0),
        "scenarios/rfc/all_reuse/semkv/ttft_mean_to_kv": ratio(2.0),
        "scenarios/rfc/agent/semkv/ttft_mean_to_kv": ratio(0.7, 1.01, 0.8),
    }
    assert judged(figures)[BEYOND].word == "yes"
    figures["scenarios/disk/agent/semkv/ttft_mean_to_kv"] = ratio(0.7, 1.05, 0.8)
    verdict = judged(figures)[BEYOND]
    assert verdict.word == "**no**"
    assert verdict.measured is not None
    assert (verdict.measured.figure, verdict.measured.note) == ("1.05", "disk/agent; 1 of 2 scenarios above")
    working_set = "working set twice the device pools: mean TTFT <= 0.7 of Dynamo kv alone, uniform arrivals"
    figures["scenarios/rfc/working_set_uniform/semkv/ttft_mean_to_kv"] = ratio(0.5, 0.71, 0.5)
    assert judged(figures)[working_set].word == "**no**"


def test_the_best_peer_is_beaten_in_every_scenario_and_repeat_or_not_at_all() -> None:
    def verdict(**changed: tuple[float, ...]) -> str:
        values = {"system_prompt": (0.9, 1.0), "partial_overlap": (1.0, 1.0), "agent": (1.01, 1.02)} | changed
        made: Figures = {
            f"scenarios/gpu/{name}/semkv/ttft_mean_to_best": Figure("ratio", value, "lower")
            for name, value in values.items()
            if value
        }
        return judged(made)["exact repeats and agent turns: <= 1.02 of the best peer"].word

    assert verdict() == "yes"
    assert verdict(system_prompt=(0.5, 1.03)) == "**no**"
    assert verdict(agent=()) == "not measured"


def test_every_goal_that_was_not_measured_says_so() -> None:
    assert [verdict.word for verdict in verdicts({})] == ["not measured"] * len(GOALS)
