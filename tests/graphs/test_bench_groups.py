"""The report's groups as they are planned, without a graph: enough text for every repeat, each scenario once, nothing
without its rival."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dynamo_semkv.bench.corpus import installed
from dynamo_semkv.bench.report.arrivals import CONVERSATION_INTERVALS
from dynamo_semkv.bench.report.library import Library
from graphs.bench import __main__ as command
from graphs.bench import contenders, groups, measure

REPEATS = 2
KNOWN = {**groups.groups(), **groups.quick()}


@pytest.mark.parametrize("name", KNOWN)
def test_there_is_text_for_every_repeat(name: str) -> None:
    """The library gives more than it is asked for, so what is asked for is cut to exactly that."""
    group = KNOWN[name]
    text = Library(group.characters, installed()).take(group.characters).text
    seen: set[str] = set()
    for repeat in range(REPEATS):
        library = Library.__new__(Library)
        library._text, library._at, library._number = text, 0, 0
        planned = group.planned(library, group.sizes, repeat, CONVERSATION_INTERVALS)
        names = [one.scenario.name for one in planned]
        assert len(names) == len(set(names))
        assert all({"semkv", "kv"} <= set(one.contenders) for one in planned), "nothing without its rival"
        seen |= set(names)
    assert seen


def test_a_device_pool_holds_half_of_the_working_set() -> None:
    rfc = KNOWN["rfc"]
    pools = rfc.workers * rfc.blocks_per_rank * 32
    assert 1.9 <= rfc.sizes.documents * rfc.sizes.characters / pools <= 2.3


def test_one_scenario_can_be_asked_for_with_the_same_prompts() -> None:
    group = KNOWN["quick"]
    text = Library(group.characters, installed()).take(group.characters).text

    def plan(only: tuple[str, ...]) -> list[groups.Planned]:
        library = Library.__new__(Library)
        library._text, library._at, library._number = text, 0, 0
        return replace(group, only=only).planned(library, group.sizes, 7, CONVERSATION_INTERVALS)

    (one,) = plan(("negative",))
    assert one in plan(())


def test_contenders_differ_in_what_they_are_about_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "model_directory", lambda: tmp_path / "encoder")
    made = {name: contenders.settings(name, KNOWN["disk"], tmp_path, tmp_path / "disk") for name in groups.ALL}
    assert len({(s.model, s.workers, s.blocks_per_rank, s.max_num_tokens, s.threads) for s in made.values()}) == 1
    assert {name for name, s in made.items() if s.connector} == {"semkv", "no_lookup", "kv_connector", "semblend"}
    assert {name: s.router_mode for name, s in made.items()} == {
        "semkv": None,
        "no_lookup": None,
        "kv": "kv",
        "kv_connector": "kv",
        "passing": None,
        "round_robin": "round-robin",
        "semblend": None,
        "cold": "round-robin",
    }
    assert {name for name, s in made.items() if s.mode == "off"} == {"passing"}
    assert made["semkv"].overrides["connector"] == made["kv_connector"].overrides["connector"]
    assert made["semkv"].overrides["connector"]["disk_path"] == str(tmp_path / "disk")
    assert made["no_lookup"].overrides == {**made["semkv"].overrides, "evidence": {"fingerprint": {"enabled": False}}}
    assert made["semblend"].overrides["evidence"]["fingerprint"] == {"enabled": False}


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "find_spec", lambda name: None)
    monkeypatch.setattr(contenders, "model_directory", lambda: None)
    assert contenders.missing("semblend") == [*contenders.SEMBLEND_NEEDS, contenders.MODEL_PACKAGE]
    assert contenders.missing("kv") == []


def test_what_takes_minutes_is_measured_once_unless_it_is_asked_for() -> None:
    def repeats(*arguments: str) -> list[int]:
        parsed = command._parser().parse_args(["--json", "f", "--repeats", "3", *arguments])
        return [command._repeats(KNOWN[name], parsed) for name in ("rfc", "longest")]

    assert repeats() == [3, 1]
    assert repeats("--group", "longest", "rfc") == [3, 3]


def test_the_next_contender_waits_until_the_one_before_is_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [0.0], list[float]()
    monkeypatch.setattr(measure.time, "monotonic", lambda: now[0])

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(measure.time, "sleep", sleep)
    readings = iter([1.0, 1.2, 1.4, 1.41])
    measure.rest(lambda: next(readings))
    assert len(slept) == 3
    slept.clear()
    measure.rest(lambda: now[0])  # never at rest
    assert sum(slept) == pytest.approx(measure.REST_SECONDS, abs=1.0)
