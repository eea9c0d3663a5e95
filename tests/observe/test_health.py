"""Readiness names what is missing, and the broker alone does not keep a router unready."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamo_semkv.observe.health import (
    DONOR_GRACE_SECONDS,
    DROP_SECONDS,
    START_SECONDS,
    VERSION_SECONDS,
    Level,
    readiness,
)
from dynamo_semkv.observe.state import ReplicaStatus, RouterState, StreamStatus
from tests.observe.fake_state import empty_state, fake_history, fake_state

HISTORY = fake_history(1)


def state(**changes) -> RouterState:
    return fake_state(HISTORY, **changes)


def check(state: RouterState, name: str) -> tuple[Level, str]:
    (found,) = (check for check in readiness(state).checks if check.name == name)
    return found.level, found.detail


def away(state: RouterState) -> RouterState:
    assert state.publisher is not None
    assert state.subscriber is not None
    return replace(
        state,
        publisher=replace(state.publisher, connected=False),
        subscriber=replace(state.subscriber, connected=False),
        streams=[replace(stream, caught_up=False) for stream in state.streams],
    )


def test_all_is_well() -> None:
    assert readiness(state()).state == "ready"
    assert {c.level for c in readiness(state()).checks} == {Level.OK}


def test_not_ready_before_a_worker_has_come() -> None:
    assert readiness(empty_state()).state == "not_ready"
    assert check(empty_state(), "workers")[0] is Level.FAIL


def test_a_configuration_file_that_is_refused_or_waits_for_a_restart_is_a_degradation_with_its_words() -> None:
    refused = state(configuration={"last_reload_error": "placement.mode: got 'bold'", "restart_needed": ["bus.url"]})
    level, detail = check(refused, "configuration")
    assert (readiness(refused).state, level) == ("degraded", Level.WARN)
    assert "placement.mode: got 'bold'" in detail
    assert refused.config_hash in detail
    waits = state(configuration={"last_reload_error": None, "restart_needed": ["bus.url"]})
    assert check(waits, "configuration") == (Level.WARN, "takes effect only after a restart: bus.url")


def test_broker_away_later_is_a_degradation() -> None:
    found = readiness(away(state()))
    assert (found.state, found.ready) == ("degraded", True)
    assert check(away(state()), "bus")[0] is Level.WARN


@pytest.mark.parametrize(("uptime", "expected"), [(START_SECONDS - 1, "not_ready"), (START_SECONDS + 1, "degraded")])
def test_first_replay_has_a_time(uptime: float, expected: str) -> None:
    starting = away(state(replayed=False, uptime_seconds=uptime))
    assert readiness(starting).state == expected


def test_replay_after_a_lost_connection_does_not_make_it_unready() -> None:
    streams = [StreamStatus("reports", False)]
    assert check(state(streams=streams, uptime_seconds=5.0), "replay")[0] is Level.WARN
    assert "reports" in check(state(streams=streams), "replay")[1]


def test_replica_without_donor_events_is_named_dynamo_12095() -> None:
    replicas = [*state().replicas, ReplicaStatus(worker_id=9, dp_rank=0, stable_routing_id="worker-c")]
    assert check(state(replicas=replicas), "donor_events") == (Level.WARN, "no donor events from worker-c/0")
    early = state(replicas=replicas, uptime_seconds=DONOR_GRACE_SECONDS - 1)
    assert check(early, "donor_events")[0] is Level.OK


def test_an_emitter_that_speaks_by_instance_id_is_heard() -> None:
    """SemBlend's emitter and unnamed workers use the instance id."""
    catalog = {"donors": 1, "streams": [{"worker_id": "9", "dp_rank": 0, "quarantined": False, "absent": False}]}
    replicas = [ReplicaStatus(worker_id=9, dp_rank=0, stable_routing_id="w c")]  # no id that our wire could carry
    assert check(state(replicas=replicas, catalog=catalog), "donor_events")[0] is Level.OK


def test_replicas_without_advice_are_named_with_their_reason() -> None:
    replicas = [ReplicaStatus(worker_id=n, dp_rank=0, standing="unannounced") for n in range(8)]
    level, detail = check(state(replicas=replicas), "advice")
    assert level is Level.WARN
    assert "0/0 (unannounced)" in detail
    assert detail.endswith("and 3 more")


def test_mode_off_asks_nothing_of_donors() -> None:
    replicas = [ReplicaStatus(worker_id=1, dp_rank=0, standing="unannounced")]
    off = state(mode="off", replicas=replicas, catalog={"donors": 0, "streams": []})
    assert check(off, "advice")[0] is check(off, "donor_events")[0] is Level.OK


def test_quarantined_stream_is_named() -> None:
    catalog = {"donors": 0, "streams": [{"worker_id": "7", "dp_rank": 1, "quarantined": True, "absent": False}]}
    level, detail = check(state(catalog=catalog), "catalog")
    assert level is Level.WARN
    assert "7/1" in detail


@pytest.mark.parametrize(
    ("provider", "words"),
    [
        ({"stuck": True, "breaker": "closed"}, "stuck"),
        ({"stuck": False, "breaker": "open", "last_error": "ValueError"}, "put aside (open; ValueError)"),
    ],
)
def test_provider_that_does_not_answer_is_named(provider: dict[str, object], words: str) -> None:
    level, detail = check(state(providers={"fingerprint": provider}), "providers")
    assert level is Level.WARN
    assert words in detail


def test_dropped_messages_show_and_are_over_once_messages_flow_again() -> None:
    publisher = state().publisher
    assert publisher is not None
    words = "connected; 7 messages were dropped"
    now = replace(publisher, dropped=7, seconds_since_drop=0.5)
    assert check(state(publisher=now), "bus") == (Level.WARN, words)
    assert readiness(state(publisher=now)).state == "degraded"
    later = replace(now, seconds_since_drop=DROP_SECONDS)
    assert check(state(publisher=later), "bus") == (Level.OK, words)  # still told, and counted
    assert readiness(state(publisher=later)).state == "ready"
    assert check(state(publisher=replace(later, connected=False)), "bus")[0] is Level.WARN


def test_releases_that_are_too_far_apart_are_named_and_forgotten_when_it_is_over() -> None:
    def heard(ago: float) -> RouterState:
        stranger = StreamStatus("reports", True, 10, 0, 7, 0, (ago, "2.0"))
        return state(streams=[StreamStatus("donors", True, 5), stranger])

    level, detail = check(heard(3.0), "versions")
    assert (level, readiness(heard(3.0)).ready) == (Level.WARN, True)
    assert "reports (version 2.0, 7 dropped)" in detail
    assert "upgrade the older ones" in detail
    level, detail = check(heard(VERSION_SECONDS + 1), "versions")
    assert (level, "7 dropped" in detail) == (Level.OK, True)
    assert check(state(), "versions")[0] is Level.OK


def test_a_stream_that_the_broker_refuses_is_told_with_its_words() -> None:
    publisher = state().publisher
    assert publisher is not None
    refused = replace(publisher, refused_streams={"SEMKV_DONORS": "insufficient storage resources available"})
    level, words = check(state(publisher=refused), "bus")
    assert level is Level.WARN
    assert "SEMKV_DONORS: insufficient storage resources available" in words
    assert readiness(state(publisher=refused)).state == "degraded"
