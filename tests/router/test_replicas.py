"""Who is alive, who is who, and in which namespace: ReplicaDirectory on cards and announcements made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_semkv.config.schema import Materialization
from dynamo_semkv.contracts.identity import ReplicaKey, StableReplica, stable_worker_id
from dynamo_semkv.router.replicas import ReplicaDirectory, Standing
from dynamo_semkv.router.runtime_types import WorkerRole
from tests.router.fakes import A0, A1, B0, B1, NAMESPACE, announcement, card


def two_workers() -> ReplicaDirectory:
    directory = ReplicaDirectory()
    directory.update_live({A0: card("w-a"), A1: card("w-a"), B0: card("w-b"), B1: card("w-b")})
    for stable in ("w-a", "w-b"):
        for rank in (0, 1):
            directory.announce(announcement(stable, rank))
    return directory


def test_resolves_instance_ids_and_stable_ids_with_their_rank() -> None:
    directory = two_workers()
    assert directory.resolve(11, 1) == A1
    assert directory.resolve(stable_worker_id("w-a"), 1) == A1
    assert directory.resolve(stable_worker_id("w-b"), 0) == B0
    assert directory.stable_of(B1) == StableReplica("w-b", 1)


def test_production_stack_1061_unknown_replica_is_none_and_counted() -> None:
    directory = two_workers()
    assert directory.resolve(99, 0) is None
    assert directory.resolve(11, 7) is None
    assert directory.resolve(stable_worker_id("w-c"), 0) is None
    assert directory.counts["unresolved"] == 3
    assert directory.stable_of(ReplicaKey(99, 0)) is None
    assert ReplicaDirectory().view_of("m").eligible == frozenset()


def test_llm_d_kv_cache_357_rank_is_part_of_the_identity() -> None:
    directory = ReplicaDirectory()
    directory.update_live({A0: card("w-a")})
    assert directory.resolve(stable_worker_id("w-a"), 1) is None


@settings(deadline=None, max_examples=50)
@given(st.permutations(["live", "a0", "a1", "b0", "b1"]))
def test_order_of_discovery_and_announcements_does_not_matter(order: list[str]) -> None:
    directory = ReplicaDirectory()
    for step in order:
        if step == "live":
            directory.update_live({A0: card("w-a"), A1: card("w-a"), B0: card("w-b"), B1: card("w-b")})
        else:
            directory.announce(announcement(f"w-{step[0]}", int(step[1])))
    view = directory.view_of("m")
    assert view.namespace == NAMESPACE
    assert view.eligible == {A0, A1, B0, B1}


def test_only_announced_replicas_are_advised() -> None:
    directory = ReplicaDirectory()
    directory.update_live({A0: card("w-a"), B0: card("w-b"), ReplicaKey(33, 0): card(None)})
    assert directory.view_of("m").standing is not Standing.OK
    directory.announce(announcement("w-a", 0))
    assert directory.view_of("m").eligible == {A0}
    assert directory.standings("m") == {
        A0: Standing.OK,
        B0: Standing.UNANNOUNCED,
        ReplicaKey(33, 0): Standing.NO_STABLE_ID,
    }


def test_an_announcement_of_a_dead_replica_is_no_sign_of_life() -> None:
    directory = ReplicaDirectory()
    directory.announce(announcement("w-a", 0))
    assert directory.view_of("m").namespace is None
    assert directory.resolve(stable_worker_id("w-a"), 0) is None


def test_a_replica_that_differs_and_dies_no_longer_silences_the_others() -> None:
    directory = two_workers()
    for rank in (0, 1):
        directory.announce(announcement("w-b", rank, namespace=msgspec.structs.replace(NAMESPACE, engine="other/2")))
    assert directory.view_of("m").namespace is None
    directory.update_live({A0: card("w-a"), A1: card("w-a")})
    assert directory.view_of("m").eligible == {A0, A1}


def test_dynamo_659_block_size_of_card_and_announcement_must_agree() -> None:
    directory = two_workers()
    directory.update_live(
        {A0: card("w-a"), A1: card("w-a"), B0: card("w-b", block_size=64), B1: card("w-b", block_size=64)}
    )
    view = directory.view_of("m")
    assert view.namespace == NAMESPACE
    assert view.eligible == {A0, A1}
    assert directory.counts["block_size_mismatch"] == 2
    assert directory.standings()[B0] is Standing.BLOCK_SIZE_MISMATCH


def test_models_are_apart_and_the_public_name_is_an_alias() -> None:
    directory = ReplicaDirectory()
    directory.serve_as("public")
    directory.update_live({A0: card("w-a"), B0: card("w-b")})
    directory.announce(announcement("w-a", 0, model="m1"))
    directory.announce(announcement("w-b", 0, model="m2", namespace=msgspec.structs.replace(NAMESPACE, model="m2@1")))
    assert directory.view_of("m1").eligible == {A0}
    assert directory.view_of("m2").eligible == {B0}
    assert directory.view_of("other").standing is Standing.MODEL_DIFFERS
    # Under the public name both are asked for, and they are two models.
    assert directory.view_of("public").differing == {A0: "model", B0: "model"}


def test_generation_follows_the_last_announcement() -> None:
    directory = two_workers()
    assert directory.generation_of(A1) == "g1"
    directory.announce(announcement("w-a", 1, generation="g2"))
    assert directory.generation_of(A1) == "g2"
    assert directory.generation_of(A0) == "g1"
    assert directory.generation_of(ReplicaKey(99, 0)) is None


def test_a_dead_replica_is_reported_under_each_of_its_names_once() -> None:
    removed: list[tuple[int, int]] = []
    directory = ReplicaDirectory(lambda worker, rank: removed.append((worker, rank)))
    directory.update_live({A0: card("w-a"), A1: card("w-a"), B0: card("w-b")})
    directory.update_live({B0: card("w-b")})
    directory.update_live({B0: card("w-b")})
    wire = stable_worker_id("w-a")
    assert sorted(removed) == sorted([(11, 0), (11, 1), (wire, 0), (wire, 1)])
    assert directory.counts["removed"] == 2


def test_kthena_1550_a_restarted_worker_already_listed_keeps_its_donors() -> None:
    removed: list[tuple[int, int]] = []
    directory = ReplicaDirectory(lambda worker, rank: removed.append((worker, rank)))
    old, new = ReplicaKey(11, 0), ReplicaKey(12, 0)
    directory.update_live({old: card("w-a")})
    # The old instance stays listed until its lease ends; the new process is listed at once under another instance id.
    directory.update_live({old: card("w-a"), new: card("w-a")})
    assert directory.resolve(stable_worker_id("w-a"), 0) == new
    assert directory.resolve(11, 0) == old
    directory.update_live({new: card("w-a")})
    assert removed == [(11, 0)]
    assert directory.resolve(stable_worker_id("w-a"), 0) == new


def test_kthena_1428_what_was_announced_before_it_went_does_not_count_after() -> None:
    present: list[tuple[int, int, str]] = []
    directory = ReplicaDirectory(on_present=lambda worker, rank, generation: present.append((worker, rank, generation)))
    wire = stable_worker_id("w-a")
    directory.announce(announcement("w-a", 0, generation="g1"))
    assert present == []
    directory.update_live({A0: card("w-a")})
    assert present == [(11, 0, "g1"), (wire, 0, "g1")]
    directory.update_live({})
    directory.update_live({ReplicaKey(12, 0): card("w-a")})
    assert directory.view_of("m").standing is Standing.UNANNOUNCED
    assert present == [(11, 0, "g1"), (wire, 0, "g1")]
    directory.announce(announcement("w-a", 0, generation="g2"))
    assert present[2:] == [(12, 0, "g2"), (wire, 0, "g2")]
    assert directory.view_of("m").eligible == {ReplicaKey(12, 0)}


def test_a_card_that_changes_is_taken_over() -> None:
    directory = ReplicaDirectory()
    directory.update_live({A0: card(None)})
    assert directory.resolve(stable_worker_id("w-a"), 0) is None
    directory.update_live({A0: replace(card(None), stable_routing_id="w-a")})
    assert directory.resolve(stable_worker_id("w-a"), 0) == A0


@pytest.mark.parametrize("bad", ["has blank", "x" * 200, "wild.*"])
def test_a_stable_id_that_the_wire_cannot_carry_leaves_the_worker_reachable_by_instance(bad: str) -> None:
    removed: list[tuple[int, int]] = []
    directory = ReplicaDirectory(lambda worker, rank: removed.append((worker, rank)))
    directory.update_live({A0: card(bad)})
    assert directory.resolve(11, 0) == A0
    assert directory.view_of("m").namespace is None
    directory.update_live({})
    assert removed == [(11, 0)]


def test_what_decisions_ask_about_a_replica_follows_every_change() -> None:
    directory = two_workers()

    def seen(replica: ReplicaKey) -> tuple[Any, ...]:
        profile = directory.profiles()[replica]
        assert profile.stable == directory.stable_of(replica)
        assert profile.card is directory.live()[replica]
        return profile.name, profile.mode, profile.fits

    assert directory.profiles() is directory.profiles()
    assert seen(A1) == ("w-a/1", Materialization.EXACT, True)
    directory.announce(msgspec.structs.replace(announcement("w-a", 1), materialization="off"))
    assert seen(A1) == ("w-a/1", Materialization.OFF, True)
    directory.serve_as("m", WorkerRole.PREFILL)
    assert seen(A1)[2], "a card that does not say is taken at Dynamo's word"
    directory.update_live({A1: replace(card("w-a"), role=WorkerRole.DECODE), B0: card(None)})
    assert seen(A1) == ("w-a/1", Materialization.OFF, False)
    assert seen(B0) == ("22/0", Materialization.EXACT, True)
    assert set(directory.profiles()) == set(directory.live()) == {A1, B0}
