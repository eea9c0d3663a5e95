"""Workers of one model that announce different namespaces: the odd one out loses advice, and says so; the others keep
it."""

from __future__ import annotations

import logging

import msgspec
import pytest

from dynamo_semkv.config.load import load_config
from dynamo_semkv.contracts.identity import ReplicaKey
from dynamo_semkv.observe.diagnosis import diagnose
from dynamo_semkv.observe.health import Level
from dynamo_semkv.router.knowledge import Knowledge
from dynamo_semkv.router.replicas import ModelView, ReplicaDirectory, Standing
from tests.router.fakes import NAMESPACE, announcement, card

OTHER = msgspec.structs.replace(NAMESPACE, kv_dtype="fp8")
THIRD = msgspec.structs.replace(NAMESPACE, engine="other/2")


def replica(worker: str, rank: int = 0) -> ReplicaKey:
    return ReplicaKey(ord(worker), rank)


def fleet(directory: ReplicaDirectory, workers: str, ranks: int = 1) -> ReplicaDirectory:
    directory.update_live({replica(w, rank): card(f"w-{w}") for w in workers for rank in range(ranks)})
    for worker in workers:
        for rank in range(ranks):
            directory.announce(announcement(f"w-{worker}", rank))
    return directory


def eligible(view: ModelView) -> str:
    return "".join(sorted({chr(worker) for worker, _ in view.eligible}))


def test_one_worker_that_announces_another_namespace_loses_advice_alone_and_is_named() -> None:
    knowledge = Knowledge(load_config(), "router")
    directory = fleet(knowledge.directory, "abc")
    directory.serve_as("m")
    directory.announce(announcement("w-b", 0, namespace=OTHER))
    view = directory.view_of("m")
    assert (view.namespace, view.standing, eligible(view)) == (NAMESPACE, Standing.OK, "ac")
    assert view.differing == {replica("b"): "kv_dtype"}
    (check,) = (c for c in knowledge.collector.readiness().checks if c.name == "advice")
    assert (check.level, "w-b/0 (namespace_differs: kv_dtype)" in check.detail) == (Level.WARN, True)
    assert "w-a/0" not in check.detail
    snapshot = knowledge.collector.snapshot()
    rows = {row["name"]: (row["standing"], row["differs_in"]) for row in snapshot["replicas"]}
    assert rows == {"w-a/0": ("ok", None), "w-b/0": ("namespace_differs", "kv_dtype"), "w-c/0": ("ok", None)}
    findings = [f for f in diagnose(load_config().config, None, snapshot, snapshot["now"]) if f.check == "replicas"]
    assert [f.detail for f in findings] == ["namespace_differs: w-b/0"]
    directory.announce(announcement("w-b", 0))
    assert eligible(directory.view_of("m")) == "abc"


def test_a_worker_has_one_vote_however_many_ranks_it_has() -> None:
    directory = fleet(ReplicaDirectory(), "abc")
    live = {**directory.live(), **{replica("b", rank): card("w-b") for rank in range(1, 64)}}
    directory.update_live(live)
    for rank in range(64):
        directory.announce(announcement("w-b", rank, namespace=OTHER))
    assert eligible(directory.view_of("m")) == "ac"


def test_a_rank_that_differs_from_the_others_of_its_worker_loses_advice_alone() -> None:
    directory = fleet(ReplicaDirectory(), "ab", ranks=3)
    directory.announce(announcement("w-b", 1, namespace=OTHER))
    assert directory.view_of("m").eligible == directory.live().keys() - {replica("b", 1)}


def test_split_evenly_what_held_before_goes_on_and_a_rolling_upgrade_changes_sides_with_the_majority() -> None:
    directory = fleet(ReplicaDirectory(), "abcd")
    expected = {"a": "bcd", "b": "cd", "c": "abc", "d": "abcd"}
    for worker, advised in expected.items():
        assert directory.view_of("m").namespace is not None
        directory.announce(announcement(f"w-{worker}", 0, namespace=OTHER))
        assert eligible(directory.view_of("m")) == advised
    assert directory.view_of("m").namespace == OTHER


def test_split_evenly_from_the_start_nobody_is_advised_and_all_are_named() -> None:
    directory = fleet(ReplicaDirectory(), "ab")
    directory.announce(announcement("w-b", 0, namespace=OTHER))
    view = directory.view_of("m")
    assert (view.namespace, view.standing, view.eligible) == (None, Standing.NAMESPACE_DIFFERS, frozenset())
    assert directory.shown() == dict.fromkeys((replica("a"), replica("b")), (Standing.NAMESPACE_DIFFERS, "kv_dtype"))


def test_the_most_among_three_are_enough() -> None:
    directory = fleet(ReplicaDirectory(), "abcd")
    directory.announce(announcement("w-c", 0, namespace=OTHER))
    directory.announce(announcement("w-d", 0, namespace=THIRD))
    assert eligible(directory.view_of("m")) == "ab"


def test_a_worker_that_changes_its_mind_at_every_beat_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    directory = fleet(ReplicaDirectory(), "abc")
    caplog.set_level(logging.WARNING)
    for beat in range(64):
        directory.announce(announcement("w-b", 0, namespace=msgspec.structs.replace(NAMESPACE, kv_layout=str(beat))))
        assert eligible(directory.view_of("m")) == "ac"
    assert len(caplog.records) == 7
    assert "w-b/0 in kv_layout" in caplog.text


def test_beats_that_say_the_same_namespace_change_no_view() -> None:
    directory = fleet(ReplicaDirectory(), "ab")
    view = directory.view_of("m")
    directory.announce(msgspec.structs.replace(announcement("w-b", 0), resident_blocks=7))
    assert directory.view_of("m") is view
