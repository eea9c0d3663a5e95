"""The file of a running router: what takes effect, what waits for a restart, and that a bad file changes nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_semkv.config.limits import limits_of
from dynamo_semkv.config.load import build, config_hash, load_config
from dynamo_semkv.config.schema import Config, PlacementMode, plain
from dynamo_semkv.config.watch import RELOADABLE, ConfigWatch, Reload, merge, reloadable

SHADOW = "placement: {mode: shadow}\n"
ENFORCE = "placement: {mode: enforce}\n"


def test_reloadable_fields_exist() -> None:
    for path in RELOADABLE:
        section: Any = Config
        for part in path.split("."):
            section = limits_of(section)[part].kind


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("placement.mode", True),
        ("scoring.prior.strength", True),
        ("hints.enabled", True),
        ("evidence.deadline_ms", True),
        ("evidence.fingerprint.enabled", False),
        ("bus.url", False),
        ("security.salt_key_file", False),
        ("dashboard.host", False),
        ("connector.materialization", False),
        ("outcome.history_size", False),
    ],
)
def test_what_is_reloadable(path: str, expected: bool) -> None:
    assert reloadable(path) is expected


def test_merge_takes_policy_and_names_the_rest() -> None:
    running = build({"bus": {"url": "nats://a:1"}})
    wanted = build(
        {
            "placement": {"mode": "enforce", "min_tokens": 7},
            "scoring": {"prior": {"semantic_candidate": 0.3}},
            "bus": {"url": "nats://b:1"},
            "evidence": {"deadline_ms": 9.0, "fingerprint": {"max_donors": 5}},
        }
    )
    merged = merge(running, wanted)
    assert set(merged.changed) == {
        "placement.mode",
        "placement.min_tokens",
        "scoring.prior.semantic_candidate",
        "evidence.deadline_ms",
    }
    assert set(merged.restart) == {"bus.url", "evidence.fingerprint.max_donors"}
    assert merged.config.placement.mode is PlacementMode.ENFORCE
    assert merged.config.bus == running.bus
    assert merged.config.evidence.fingerprint == running.evidence.fingerprint
    assert merged.config.evidence.deadline_ms == 9.0


trees = st.fixed_dictionaries(
    {},
    optional={
        "placement": st.fixed_dictionaries(
            {}, optional={"min_tokens": st.integers(0, 9), "canary_percent": st.just(1)}
        ),
        "bus": st.fixed_dictionaries({}, optional={"url": st.sampled_from(["nats://a:1", "nats://b:1"])}),
        "evidence": st.fixed_dictionaries({}, optional={"max_matches": st.integers(1, 9)}),
        "model": st.fixed_dictionaries({}, optional={"name": st.sampled_from(["m", "n", None])}),
    },
)


@given(trees, trees)
@settings(max_examples=50, deadline=None)
def test_merge_is_one_step_and_leaves_only_what_needs_a_restart(running: Any, wanted: Any) -> None:
    first = merge(build(running), build(wanted))
    again = merge(first.config, build(wanted))
    assert (again.config, again.changed, again.restart) == (first.config, (), first.restart)
    assert (first.changed == ()) == (plain(first.config) == plain(build(running)))
    assert not first.restart or first.config != build(wanted)


class File:
    def __init__(self, directory: Path, text: str = SHADOW, env: dict[str, str] | None = None) -> None:
        self.path = directory / "semkv.yaml"
        self.path.write_text(text)
        self.env = env or {}
        self.watch = ConfigWatch(load_config(self.path, self.env), self.env, wall=lambda: 77.0)
        self._ticks = 0

    def write(self, text: str) -> None:
        """As a writer some time later: mtime differs for sure."""
        self.path.write_text(text)
        self._ticks += 1
        at = 2_000_000_000 + self._ticks
        os.utime(self.path, (at, at))

    def settle(self) -> list[Reload]:
        """What several beats say."""
        return [news for _ in range(4) if (news := self.watch.poll()) is not None]


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path)


def test_an_untouched_file_says_nothing(file: File) -> None:
    assert file.settle() == []
    assert file.watch.status() == {
        "hash": config_hash(build({"placement": {"mode": "shadow"}})),
        "watched": True,
        "reloads": 0,
        "reloaded_at": None,
        "last_reload_error": None,
        "restart_needed": [],
    }


def test_an_edit_takes_effect_once_and_with_the_hash_of_what_is_in_force(file: File) -> None:
    file.settle()
    file.write(ENFORCE + "bus: {url: 'nats://elsewhere:1'}\n")
    (news,) = file.settle()
    in_force = build({"placement": {"mode": "enforce"}})
    assert (news.changed, news.restart, news.error) == (("placement.mode",), ("bus.url",), None)
    assert (news.loaded.config, news.loaded.hash) == (in_force, config_hash(in_force))
    status = file.watch.status()
    assert (status["reloads"], status["reloaded_at"], status["restart_needed"]) == (1, 77.0, ["bus.url"])
    file.write(ENFORCE)
    (news,) = file.settle()
    assert (news.changed, news.restart) == ((), ())
    assert file.watch.status()["restart_needed"] == []


def test_an_edit_between_start_and_first_look_is_found(file: File) -> None:
    file.write(ENFORCE)
    (news,) = file.settle()
    assert news.changed == ("placement.mode",)


def test_a_file_that_is_being_written_is_not_read(file: File) -> None:
    file.settle()
    for length in range(1, len(ENFORCE)):
        file.write(ENFORCE[:length])
        assert file.watch.poll() is None
    file.write(ENFORCE)
    assert file.watch.poll() is None
    news = file.watch.poll()
    assert news is not None
    assert news.changed == ("placement.mode",)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("placement: {mode: bold}\n", "placement.mode: got 'bold', allowed: off, shadow, canary, enforce"),
        ("placement: {mod: shadow}\n", "did you mean"),
        ("placement: [\n", "valid YAML"),
        ("", "an empty file"),
        ("connector: {materialization: experimental}\n", "connector.materialization"),
        ("dashboard: {host: 0.0.0.0}\n", "dashboard.host"),
    ],
)
def test_a_bad_file_keeps_the_last_good_one_and_is_told_once(file: File, text: str, expected: str) -> None:
    file.settle()
    before = file.watch.status()["hash"]
    file.write(text)
    (news,) = file.settle()
    assert news.error is not None
    assert expected in news.error
    assert (news.changed, news.loaded.hash) == ((), before)
    assert file.watch.status()["last_reload_error"] == news.error
    file.write(text)
    assert file.settle() == []
    file.write(ENFORCE)
    (news,) = file.settle()
    assert (news.changed, news.error) == (("placement.mode",), None)
    assert file.watch.status()["last_reload_error"] is None


def test_a_file_that_goes_and_comes_back(file: File) -> None:
    file.settle()
    file.path.unlink()
    (news,) = file.settle()
    assert news.error is not None
    assert file.settle() == []
    file.write(SHADOW)
    (news,) = file.settle()
    assert (news.changed, news.error) == ((), None)


def test_a_link_that_is_moved_to_another_file_is_an_edit(tmp_path: Path) -> None:
    """As Kubernetes updates a mounted ConfigMap."""
    for name, text in (("one", SHADOW), ("two", ENFORCE)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "semkv.yaml").write_text(text)
    (tmp_path / "data").symlink_to("one")
    path = tmp_path / "data" / "semkv.yaml"
    watch = ConfigWatch(load_config(path, {}), {})
    assert [watch.poll() for _ in range(3)] == [None] * 3
    (tmp_path / "next").symlink_to("two")
    (tmp_path / "next").rename(tmp_path / "data")
    found = [news for _ in range(3) if (news := watch.poll()) is not None]
    assert [news.changed for news in found] == [("placement.mode",)]


def test_forced_it_reads_at_once_and_answers_even_when_nothing_changed(file: File) -> None:
    file.write(ENFORCE)
    news = file.watch.poll(force=True)
    assert news is not None
    assert news.changed == ("placement.mode",)
    news = file.watch.poll(force=True)
    assert news is not None
    assert (news.changed, news.error) == ((), None)
    file.write("placement: {mode: bold}\n")
    for _ in range(2):
        news = file.watch.poll(force=True)
        assert news is not None
        assert news.error is not None


def test_what_the_environment_sets_stays(tmp_path: Path) -> None:
    file = File(tmp_path, env={"SEMKV_PLACEMENT__MODE": "off"})
    file.write(ENFORCE + "hints: {enabled: false}\n")
    (news,) = file.settle()
    assert news.changed == ("hints.enabled",)
    assert news.loaded.config.placement.mode is PlacementMode.OFF
    assert news.loaded.source.endswith("SEMKV_PLACEMENT__MODE")


def test_without_a_file_there_is_nothing_to_watch() -> None:
    watch = ConfigWatch(load_config(None, {}), {})
    assert watch.poll() is None
    assert watch.poll(force=True) is None
    assert watch.status()["watched"] is False
