"""From records to figures, to goals, to the page; and two runs side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynamo_semkv.bench.report import compare, document, plots, raw
from dynamo_semkv.bench.report.__main__ import numbers_of_donors
from dynamo_semkv.bench.report.figures import figures, reasons
from dynamo_semkv.bench.report.goals import verdicts
from dynamo_semkv.bench.report.readings import all_figures
from dynamo_semkv.bench.report.scaling_pages import curves
from dynamo_semkv.bench.report.statistics import Figure
from dynamo_semkv.config.host_memory import Available
from tests.bench.report import made

LOOKUP = "lookup p99 <= 1 ms, 8k tokens built like text, 8 donors a hit, 10,000 and 100,000 donors"


def test_what_the_rfc_asks_for() -> None:
    found = figures(made.group())
    assert found["set/semkv/ttft_mean"].values == pytest.approx((0.25, 0.5))
    assert found["set/semkv/ttft_mean_to_kv"].values == pytest.approx((0.625, 0.625)), (
        "paired: the slow repeat cancels out"
    )
    assert found["set/semkv/ttft_cold"].values == pytest.approx((0.4, 0.8))
    assert found["set/semkv/ttft_loaded"].values == pytest.approx((0.1, 0.2))
    assert found["set/semkv/ttft_again"].values == pytest.approx((0.1, 0.2))
    assert found["set/semkv/cached_share"].values == (0.48, 0.48)
    assert found["set/semkv/materialized_share"].values == (0.48, 0.48)
    assert found["set/semkv/materialized_tokens"].values == (96.0, 96.0)
    assert found["set/semkv/placement_rate"].values == (0.5, 0.5)
    assert found["set/semkv/load_host"].values == (0.002, 0.002)
    assert found["set/semkv/tokens_per_second"].values == (100.0, 100.0)
    assert found["none/semkv/declined_rate"].values == (1.0, 1.0)
    assert found["all_negative/semkv/ttft_mean_to_kv"].values == pytest.approx((1.05, 1.05))
    assert found["all_negative/semkv/ttft_beyond_kv"].values == pytest.approx((0.02, 0.04))
    assert reasons(made.group()) == {"none/semkv": {"not_identical": 2}}


def test_the_best_peer_is_another_one_in_each_repeat() -> None:
    """The connector under Dynamo's own router is faster than Dynamo alone in the first repeat only."""
    group = made.group()
    group["records"] += [made.record("set", "kv_connector", repeat, 0, ttft) for repeat, ttft in ((0, 0.2), (1, 2.0))]
    found = figures(group)
    ours = found["set/semkv/ttft_mean"].values
    assert found["set/semkv/ttft_mean_to_best"].values == pytest.approx((ours[0] / 0.2, ours[1] / 0.8))


def test_a_placement_is_not_reuse_and_others_have_no_zero_of_ours() -> None:
    found = figures(made.group())
    assert found["none/semkv/placement_rate"].values == (1.0, 1.0)
    assert found["none/semkv/materialized_share"].values == (0.0, 0.0)
    assert not [path for path in found if "/kv/" in path and ("materialized" in path or "placement" in path)]


def test_a_figure_that_one_repeat_lacks_is_left_out() -> None:
    group = made.group()
    for record in group["records"]:
        if record["repeat"] == 1 and record["contender"] == "semkv":
            record["route"] = {**record["route"], "ttft_class": "cold"}
    assert "set/semkv/ttft_loaded" not in figures(group)
    assert "set/semkv/ttft_mean" in figures(group)


def words(run: dict[str, object]) -> dict[str, str]:
    return {verdict.goal.text: verdict.word for verdict in verdicts(all_figures(run["sections"]))}  # type: ignore[arg-type]


def test_goals_say_yes_no_or_not_measured() -> None:
    nothing = words(made.run())
    assert set(nothing.values()) == {"not measured"}
    found = words(made.run(scenarios=made.scenarios(), scaling=made.scaling()))
    assert found["negative controls: mean TTFT <= 1.02 of Dynamo kv alone"] == "**no**"
    assert found[LOOKUP] == "yes"
    assert found["lookup grows no faster than the logarithm of the donors"] == "yes"
    assert found["<= 4 KiB a donor"] == "yes"
    exact = "loaded KV gives the same log-probabilities: largest difference to the device-warm run is 0.0"
    assert found[exact] == "yes"
    differs = made.scenarios() | {"exactness": [made.exactness(1e-9)]}
    assert words(made.run(scenarios=differs))[exact] == "**no**"
    steep = words(made.run(scaling=made.scaling(at_100k=5_000.0)))
    assert steep["lookup grows no faster than the logarithm of the donors"] == "**no**"


@pytest.mark.parametrize(("without", "word"), [(1.97, "yes"), (1.9, "**no**")])
def test_what_a_lookup_takes_of_a_batch_is_judged_beside_the_same_without_it(without: float, word: str) -> None:
    scenarios = made.scenarios()
    group = scenarios["groups"]["rfc"]
    group["scenarios"]["high_load"] = {"title": "a batch", "kind": "high_load", "requests": 1, "paced": False}
    group["records"] += [
        made.record("high_load", contender, repeat, 0, 0.5, pass_seconds=seconds)
        for repeat in range(2)
        for contender, seconds in (("semkv", 2.0), ("no_lookup", without), ("kv", 1.5), ("passing", 1.6))
    ]
    found = {v.goal.text: v for v in verdicts(all_figures(made.run(scenarios=scenarios)["sections"]))}
    batch = found["high-load batch: the lookup does not reduce throughput (tokens/s over the same without it >= 0.98)"]
    assert batch.word == word
    assert batch.measured is not None
    assert "over Dynamo kv: ours 0.75, a router off 0.94" in batch.measured.note


def test_a_million_donors_are_shown_and_the_goals_of_a_hundred_thousand_are_judged_there() -> None:
    scaling = made.scaling()
    largest = next(row for row in scaling["donors"] if row["donors"] == 100_000)
    scaling["donors"].append({**largest, "donors": 1_000_000, "hit_p99": 4_000.0, "registers_per_second": 100.0})
    run = made.run(scaling=scaling)
    found = words(run)
    assert found[LOOKUP] == "yes"
    assert found["add >= 5,000 donors/s"] == "yes"
    assert curves(run["sections"])["events"].xs[-1] == 1_000_000
    page = document.page(run, all_figures(run["sections"]), {})
    assert "1,000,000: 500" in page
    assert "(1,000 to 1,000,000 donors, median of hits)" in page


@pytest.mark.parametrize(
    ("quick", "million", "free", "expected"),
    [
        (False, None, 9 << 30, 4),
        (False, None, 7 << 30, 3),
        (True, None, 9 << 30, 3),
        (False, False, 9 << 30, 3),
        (False, True, 0, 4),
    ],
)
def test_a_million_donors_are_measured_where_memory_allows(
    monkeypatch: pytest.MonkeyPatch, quick: bool, million: bool | None, free: int, expected: int
) -> None:
    monkeypatch.setattr("dynamo_semkv.bench.report.__main__.available_memory", lambda: Available(free, "a test"))
    assert len(numbers_of_donors(quick, million)) == expected


def test_the_routers_bench_is_read_where_it_is_there() -> None:
    run = made.run(router=made.router(), scaling=made.scaling())
    found = words(run)
    assert found["added router time p50 <= 1 ms (8k tokens, 10,000 and 100,000 donors, 8 ranks)"] == "yes"
    assert words(made.run(router=made.router(p50=2.0)))["added router time p99 <= 3 ms"] == "**no**"
    page = document.page(run, all_figures(run["sections"]), {})
    assert "| whole | 0.800 | 1.600 | 0.800 | 1.600 |" in page
    assert "| ours | 42.0 (28.0 to 56.0) | 7.5 (5.0 to 10.0) | 4.0 |" in page
    assert found["requests/s over the bare Python pass-through >= 0.9"] == "yes"
    assert found["the same over Dynamo's own router, reported beside"] == "shown"
    assert curves(run["sections"])["route"].exponent == pytest.approx(1.0)


def test_curves_have_their_limit_beside() -> None:
    found = curves(made.run(scaling=made.scaling())["sections"])
    assert set(found) == {"lookup", "memory", "events", "decision"}
    assert found["decision"].exponent == pytest.approx(1.0)
    assert found["events"].distance > 1.0
    assert all(curve.limit[-1] < curve.ys[-1] for name, curve in found.items() if name != "events")


def test_the_page_and_its_plots(tmp_path: Path) -> None:
    run = made.run(scenarios=made.scenarios(), scaling=made.scaling())
    found = raw.figures_of(run)
    pictures = plots.draw(run["sections"], found, tmp_path)
    assert set(pictures) == {"lookup", "memory", "events", "decision", "ttft_rfc"}
    once = {name: (tmp_path / file).read_text() for name, file in pictures.items()}
    assert all(text.startswith("<?xml") and "</svg>" in text for text in once.values())
    plots.draw(run["sections"], found, tmp_path)
    assert once == {name: (tmp_path / file).read_text() for name, file in pictures.items()}, (
        "the same figures, the same files"
    )
    page = document.page(run, found, {name: f"benchmarks/{file}" for name, file in pictures.items()})
    assert "Generated by `dynamo_semkv bench report`" in page
    assert "0.62 (" not in page, "a ratio that all repeats agree on has no spread"
    assert "| a set | 375 (250 to 500) | 600 (400 to 800) |" in page
    assert "Left out: semkv with SemBlend (not installed: torch)." in page
    assert "not_identical 2" in page
    assert all(f"(benchmarks/{file})" in page for file in pictures.values())
    assert "Not measured in this run" in page, "of the other sections"


def test_a_plot_by_length_needs_every_phase_of_both(tmp_path: Path) -> None:
    group = made.group()
    group["scenarios"] = {
        f"long_{n}": {"title": f"{n}", "kind": "reuse", "requests": 3, "paced": False} for n in (1, 2)
    }
    group["records"] = [
        made.record(f"long_{n}", contender, repeat, 0, 0.1 * n, phase=phase, turn=turn, prompt_tokens=1_000 * n)
        for n in (1, 2)
        for contender in ("semkv", "kv")
        for repeat in (0, 1)
        for turn, phase in enumerate(("first", "again", "after_eviction"))
    ]
    run = made.run(scenarios={"groups": {"long": group}, "left_out": {}, "exactness": None})
    found = raw.figures_of(run)
    assert set(plots.draw(run["sections"], found, tmp_path)) == {"ttft_long", "lengths"}
    assert "one request at a time" in document.page(run, found, {})
    group["records"] = [r for r in group["records"] if (r["contender"], r["turn"]) != ("kv", 2)]
    assert set(plots.draw(run["sections"], raw.figures_of(run), tmp_path)) == {"ttft_long"}


def test_a_run_without_anything_is_a_page_too() -> None:
    assert "not measured" in document.page(made.run(), {}, {})


def write(path: Path, value: object) -> Path:
    path.write_text(json.dumps(value))
    return path


def test_the_small_file_holds_the_same_figures(tmp_path: Path) -> None:
    run = made.run(scenarios=made.scenarios(), scaling=made.scaling())
    found = raw.figures_of(run)
    kept = raw.read(write(tmp_path / "latest.json", raw.small(run, found)))
    assert "sections" not in kept
    assert {path: f.values for path, f in raw.figures_of(kept).items()} == {
        path: pytest.approx(f.values) for path, f in found.items()
    }


def test_what_is_no_run_is_refused_with_its_name(tmp_path: Path) -> None:
    for text, why in (("{", "no JSON"), ("[]", "schema is None"), ('{"schema": 2, "figures": {}}', "schema is 2")):
        file = tmp_path / "other.json"
        file.write_text(text)
        with pytest.raises(raw.NotARun, match=why):
            raw.read(file)
    with pytest.raises(raw.NotARun, match="figures"):
        raw.figures_of({"figures": {"a": {"unit": "s"}}})


def test_a_difference_is_marked_beyond_both_spreads_only() -> None:
    before = {
        "slower": Figure("s", (1.0, 1.1), "lower"),
        "faster": Figure("s", (1.0, 1.1), "lower"),
        "more": Figure("1/s", (1.0, 1.1), "higher"),
        "same": Figure("s", (1.0, 1.5), "lower"),
        "neither": Figure("", (1.0, 1.0)),
        "once": Figure("s", (1.0,), "lower"),
        "gone": Figure("s", (1.0,), "lower"),
    }
    after = {
        "slower": Figure("s", (2.0, 2.2), "lower"),
        "faster": Figure("s", (0.5, 0.6), "lower"),
        "more": Figure("1/s", (2.0, 2.2), "higher"),
        "same": Figure("s", (1.4, 2.5), "lower"),
        "neither": Figure("", (2.0, 2.0)),
        "once": Figure("s", (2.0,), "lower"),
        "new": Figure("s", (1.0,), "lower"),
    }
    marks = {d.path: d.mark for d in compare.differences(before, after)}
    assert marks == {
        "slower": "worse",
        "faster": "better",
        "more": "better",
        "same": "",
        "neither": "differs",
        "once": "",
    }
    ratios = {d.path: d.ratio for d in compare.differences(before, after)}
    assert ratios["slower"] == pytest.approx(2.0)


def test_compare_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made.run(scaling=made.scaling())
    a = write(tmp_path / "a.json", run)
    b = write(tmp_path / "b.json", raw.small(run, raw.figures_of(run)))
    assert compare.main([str(a), str(b), "--only", "hit_p50"]) == 0
    said = capsys.readouterr().out
    assert "scaling/donors/1000/hit_p50" in said
    assert "1.000" in said
    assert "3 figures, 0 beyond both spreads; 0 are in one of the runs only" in said
    assert compare.main([str(a), str(tmp_path / "no.json")]) == 2
    assert "no.json" in capsys.readouterr().err


def test_recall_counts_what_the_provider_is_set_to_look_for() -> None:
    """A template that is 4 % of a prompt is below `min_overlap_share`: named, not counted."""

    def score(scenario: str, recall: float, share: float) -> dict[str, object]:
        return {"scenario": scenario, "recall_at_1": recall, "true_share": share, "matched": recall}

    scores = [score("same template, new body", 0.0, 0.04), score("other instruction", 1.0, 0.99)]
    found = {"reports": [{"tokens": 2048, "scores": scores}], "side_by_side": [], "paraphrase": None}
    (verdict,) = [
        v
        for v in verdicts(all_figures(made.run(evidence=found)["sections"]))
        if v.goal.text == "recall@1 >= 0.99 where text is verbatim"
    ]
    assert verdict.word == "yes"
    assert verdict.measured is not None
    assert "2048/same template, new body 0.000" in verdict.measured.note
