"""Two live instances with one DYN_STABLE_ROUTING_ID: a restart for some seconds, then a misconfiguration that is told
everywhere."""

from __future__ import annotations

import logging

import pytest

from dynamo_semkv.config.load import Loaded, load_config
from dynamo_semkv.contracts.identity import ReplicaKey
from dynamo_semkv.observe.diagnosis import diagnose
from dynamo_semkv.observe.health import Level
from dynamo_semkv.router.knowledge import Knowledge
from dynamo_semkv.router.replicas import ReplicaDirectory, Standing
from dynamo_semkv.router.shared_ids import RESTART_SECONDS
from tests.router.fakes import A0, A1, B0, announcement, card

TWIN = ReplicaKey(33, 0)
"""Another instance that carries worker A's stable id."""


def with_a_twin(directory: ReplicaDirectory) -> ReplicaDirectory:
    directory.update_live({A0: card("w-a"), TWIN: card("w-a"), B0: card("w-b")})
    for stable in ("w-a", "w-b"):
        directory.announce(announcement(stable, 0))
    return directory


def loaded() -> Loaded:
    return load_config()


def test_readyz_page_and_doctor_name_the_id_and_both_instances_after_some_seconds() -> None:
    knowledge = Knowledge(loaded(), "router")
    directory = with_a_twin(knowledge.directory)
    directory.tidy(0.0)
    assert "stable_ids" not in {c.name for c in knowledge.collector.readiness().checks if c.level is not Level.OK}
    directory.tidy(RESTART_SECONDS)
    (check,) = (c for c in knowledge.collector.readiness().checks if c.name == "stable_ids")
    assert check.level is Level.WARN
    assert all(said in check.detail for said in ("w-a", "11", "33"))
    snapshot = knowledge.collector.snapshot()
    rows = [(row["name"], row["worker_id"], row["standing"]) for row in snapshot["replicas"]]
    assert rows == [
        ("w-a/0", "11", "stable_id_shared"),
        ("w-a/0", "33", "stable_id_shared"),
        ("w-b/0", "22", "ok"),
    ]
    findings = {f.check: f for f in diagnose(loaded().config, None, snapshot, snapshot["now"])}
    assert all(said in findings["router: stable_ids"].detail for said in ("w-a", "11", "33"))
    assert "DYN_STABLE_ROUTING_ID of its own" in findings["replicas"].remedy
    assert findings["replicas"].level is Level.WARN


def test_neither_of_the_two_is_advised_until_one_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    directory = with_a_twin(ReplicaDirectory())
    directory.tidy(0.0)
    assert directory.view_of("m").eligible == {A0, TWIN, B0}
    caplog.set_level(logging.INFO)
    for now in (RESTART_SECONDS, RESTART_SECONDS + 1):
        directory.tidy(now)
    assert directory.view_of("m").eligible == {B0}
    assert directory.standings()[A0] is Standing.STABLE_ID_SHARED
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "11, 33" in caplog.text
    directory.update_live({TWIN: card("w-a"), B0: card("w-b")})
    directory.tidy(RESTART_SECONDS + 2)
    assert directory.view_of("m").eligible == {TWIN, B0}
    assert "one instance again" in caplog.text


def test_a_restart_is_no_misconfiguration() -> None:
    """The old instance stays listed until its lease ends; then another restart begins anew."""
    directory = with_a_twin(ReplicaDirectory())
    for start in (0.0, 1000.0):
        directory.update_live({A0: card("w-a"), TWIN: card("w-a"), B0: card("w-b")})
        directory.tidy(start)
        directory.tidy(start + RESTART_SECONDS - 1)
        assert directory.view_of("m").eligible == {A0, TWIN, B0}
        directory.update_live({TWIN: card("w-a"), B0: card("w-b")})
        directory.tidy(start + RESTART_SECONDS)


def test_a_worker_that_dies_again_and_again_shares_its_id_with_nobody() -> None:
    directory = ReplicaDirectory()
    for life in range(10):
        directory.update_live({ReplicaKey(life, 0): card("w-a"), ReplicaKey(life + 1, 0): card("w-a")})
        directory.tidy(life * RESTART_SECONDS / 2)
        assert Standing.STABLE_ID_SHARED not in directory.standings().values()


def test_ranks_of_one_worker_and_ids_without_a_name_share_nothing() -> None:
    directory = ReplicaDirectory()
    directory.update_live({A0: card("w-a"), A1: card("w-a"), B0: card(None), TWIN: card(None)})
    for now in (0.0, RESTART_SECONDS):
        directory.tidy(now)
    assert Standing.STABLE_ID_SHARED not in directory.standings().values()
