"""The command: sections, files, a run that is put together of two; and the harness itself, small and without a look at
times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dynamo_semkv.bench.report import __main__ as report
from dynamo_semkv.bench.report import limits, machine, scaling, sections
from dynamo_semkv.bench.report.sections import NAMES, Failed, Options, Sections
from tests.bench.report import made

ROOT = Path(__file__).parents[3]
WRITE_A_FILE = ("graphs.bench", "dynamo_semkv.bench.report.scaling", "dynamo_semkv.bench.evidence_run")


def test_each_section_is_a_program_and_a_failed_one_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command[2:])
        if command[2] in WRITE_A_FILE:
            Path(command[command.index("--json") + 1]).write_text("{}")
        status = 3 if "worker_connector.bench" in command else 0
        return subprocess.CompletedProcess(command, status, stdout="noise\n{}")

    monkeypatch.setattr(sections.subprocess, "run", run)
    monkeypatch.setattr(sections, "commit", lambda: "abc")
    monkeypatch.setattr(sections, "find_spec", lambda name: name != sections.ROUTER_MODULE or None)
    options = Options(quick=True, trace=Path("t.jsonl"), groups=("quick",))
    found = {name: Sections(options).run(name) for name in NAMES}
    assert "ended with status 3" in found["connector"]["missing"]
    assert "there is no" in found["router"]["missing"]
    assert {one["commit"] for one in found.values()} == {"abc"}
    assert found["scenarios"]["found"] == found["scaling"]["found"] == {}
    assert set(found["replay"]["found"]) >= {"index_sees_host", "salted", "requests"}
    assert all("--quick" in command for command in asked if command[0] in ("graphs.bench", "worker_connector.bench"))
    assert asked[0][asked[0].index("--trace") :][:2] == ["--trace", "t.jsonl"]


def test_a_program_that_writes_no_json_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sections.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, stdout="tables")
    )
    with pytest.raises(Failed, match="wrote no JSON"):
        Sections(Options())._from_stdout("m", [])


def test_a_run_is_put_together_of_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {"scenarios": made.scenarios(), "scaling": made.scaling()}
    monkeypatch.setattr(Sections, "run", lambda self, name: made.run(**{name: measured[name]})["sections"][name])
    places = ["--docs", str(tmp_path / "docs"), "--raw", str(tmp_path / "raw")]
    assert report.main(["--sections", "scaling", *places]) == 0
    (first,) = (tmp_path / "raw").glob("*.json")
    first = first.rename(tmp_path / "first.json")
    assert report.main(["--sections", "scenarios", "--json-in", str(first), *places]) == 0
    latest = json.loads((tmp_path / "docs" / "benchmarks" / "latest.json").read_text())
    assert {path.split("/")[0] for path in latest["figures"]} == {"scenarios", "scaling"}
    page = (tmp_path / "docs" / "benchmarks.md").read_text()
    assert "![lookup, median against donors](benchmarks/lookup.svg)" in page
    assert report.main(["--json-in", str(tmp_path / "docs" / "benchmarks" / "latest.json"), *places]) == 2


def test_a_quick_run_leaves_the_page_of_real_figures_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sections, "run", lambda self, name: made.run(scaling=made.scaling())["sections"][name])
    monkeypatch.chdir(tmp_path)
    assert report.main(["--quick", "--sections", "scaling"]) == 0
    assert (tmp_path / ".run" / "bench" / "quick" / "benchmarks.md").exists()
    assert not (tmp_path / "docs").exists()


def test_groups_of_scenarios_can_be_measured_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"groups": {"rfc": made.group()}, "left_out": {}, "exactness": None}
    other = {"groups": {"long": made.group()}, "left_out": {"semblend": "why"}, "exactness": [made.exactness()]}
    answers = iter([one, other, one])
    monkeypatch.setattr(Sections, "run", lambda self, name: made.run(scenarios=next(answers))["sections"][name])
    places = ["--docs", str(tmp_path / "docs"), "--raw", str(tmp_path / "raw"), "--sections", "scenarios"]

    def measured(*arguments: str) -> dict[str, Any]:
        assert report.main([*places, *arguments]) == 0
        newest = max((tmp_path / "raw").glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
        section: dict[str, Any] = json.loads(newest.rename(tmp_path / "earlier.json").read_text())["sections"][
            "scenarios"
        ]
        return section

    measured("--group", "rfc")
    both = measured("--group", "long", "--json-in", str(tmp_path / "earlier.json"))
    assert set(both["found"]["groups"]) == {"rfc", "long"}
    assert both["found"]["exactness"]
    assert both["seconds"] == 120.0
    assert set(measured("--json-in", str(tmp_path / "earlier.json"))["found"]["groups"]) == {"rfc"}, (
        "measured anew as a whole"
    )


def test_unknown_sections_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        report.main(["--sections", "everything"])
    assert "section 'everything' is none of scenarios," in capsys.readouterr().err


def test_the_machine_is_described_without_its_name() -> None:
    found = machine.describe()
    assert found["cores"] >= 1
    assert found["memory_gib"] > 0
    assert os.uname().nodename not in json.dumps(found)
    assert len(machine.words(found)) == 2


def test_limits_and_decisions_are_measured() -> None:
    found = limits.measure(mib=1, rounds=1, order=32)
    assert min(found.copy_bytes_per_second, found.read_bytes_per_second, found.miss_seconds, found.flops_per_second) > 0
    row = scaling.decision_seconds(3, 2)
    assert row["replicas"] == 3
    assert row["own_p50"] > 0
    assert 0 < row["p50"] <= row["p99"]
    with pytest.raises(RuntimeError, match="0 donors"):
        scaling.donor_cost(0, 8)
    cost = scaling.donor_cost(50, 256, 5)
    assert set(made.scaling()["donors"][0]) <= set(cost), "what goals and plots read of it"
    assert cost["donors"] == 50


@pytest.mark.graph
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_harness_measures_real_graphs(tmp_path: Path) -> None:
    """Two contenders, one repeat, everything in between real. What is checked is what must be so on any machine, never
    a time."""
    arguments = ["--quick", "--sections", "scenarios", "--repeats", "1", "--contenders", "semkv", "kv"]
    ran = subprocess.run(
        [sys.executable, "-m", "dynamo_semkv", "bench", "report", *arguments, "--docs", "docs", "--raw", "raw"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    (file,) = (tmp_path / "raw").glob("*.json")
    group = json.loads(file.read_text())["sections"]["scenarios"]["found"]["groups"]["quick"]
    records = group["records"]
    assert group["trouble"] == []
    assert all(record["ok"] for record in records), [r["error"] for r in records]
    assert {record["contender"] for record in records} == {"semkv", "kv"}
    sent = {
        c: [(r["scenario"], r["number"], r["prompt_tokens"]) for r in records if r["contender"] == c]
        for c in ("semkv", "kv")
    }
    assert sent["semkv"] == sent["kv"], "the same requests in the same order"
    assert all(record["route"] is not None for record in records if record["contender"] == "semkv")
    assert all(record["route"] is None for record in records if record["contender"] == "kv")
    assert all(record["likeness"]["token_match"] == 1.0 for record in records if record["likeness"] is not None)
    (loaded,) = [r for r in records if r["phase"] == "after_eviction" and r["contender"] == "semkv"]
    (forgotten,) = [r for r in records if r["phase"] == "after_eviction" and r["contender"] == "kv"]
    assert loaded["route"]["outcome"] == "materialized_exact"
    assert loaded["route"]["confirmed"] == loaded["cached_tokens"] > 0
    assert forgotten["cached_tokens"] == 0
    negative = [r["route"] for r in records if r["scenario"] == "negative" and r["contender"] == "semkv"]
    assert [(r["placed"], r["confirmed"]) for r in negative] == [(0, 0)] * len(negative)
    assert "real graphs" not in (tmp_path / "docs" / "benchmarks.md").read_text()
    assert "A quick run" in (tmp_path / "docs" / "benchmarks.md").read_text()
