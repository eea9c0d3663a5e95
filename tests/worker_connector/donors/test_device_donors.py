"""An exact deployment knows by the engine's events what the device holds: where its donors are, and which blocks the
slab may give up."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_semkv.contracts.announcement import KvEvents
from tests.worker_connector.donors.test_device_events import TOKENS, Cache, donate, exact
from tests.worker_connector.scripted import ScriptedEngine
from tests.worker_connector.scripted_disk import donors, settle, with_disk
from worker_connector.donors.registry import SHRINK_SECONDS

OTHER = [500 + token for token in TOKENS]


def later(engine: ScriptedEngine) -> None:
    """What waits for its time is told."""
    engine.now += SHRINK_SECONDS
    registry = engine.parts.event_publisher.donors
    assert registry is not None
    registry.tell_due()


def said(engine: ScriptedEngine) -> KvEvents:
    engine.parts.event_publisher.announce()
    return engine.sink.announcements[-1].kv_events


def test_donor_is_of_the_device_tier_while_the_device_holds_it() -> None:
    engine = exact()
    cache = Cache(engine.leader)
    cache.stored(TOKENS)
    donor = donate(engine, TOKENS)
    assert donors(engine.sink) == {donor: (40, "device")}
    cache.removed(TOKENS, 9)
    later(engine)
    assert donors(engine.sink) == {donor: (40, "device")}  # a tenth is tolerated
    cache.removed(TOKENS, *range(9))
    assert donors(engine.sink) == {donor: (40, "device")}
    later(engine)
    assert donors(engine.sink) == {donor: (40, "host_pinned")}
    assert engine.prefill(engine.request([*TOKENS, 1])) == 40
    cache.stored(TOKENS)
    later(engine)
    assert donors(engine.sink) == {donor: (40, "device")}


def test_events_that_come_after_the_donor_count_too() -> None:
    engine = exact()
    cache = Cache(engine.leader)
    donor = donate(engine, TOKENS)
    assert donors(engine.sink) == {donor: (40, "host_pinned")}
    cache.stored(TOKENS)
    later(engine)
    assert donors(engine.sink) == {donor: (40, "device")}


def test_block_that_is_removed_and_stored_again_at_once_is_no_news() -> None:
    engine = exact()
    cache = Cache(engine.leader)
    cache.stored(TOKENS)
    donate(engine, TOKENS)
    before = engine.parts.event_publisher.donors
    assert before is not None
    moved = before.counts["moved"]
    cache.removed(TOKENS, *range(9, -1, -1))
    cache.stored(TOKENS)
    later(engine)
    assert before.counts["moved"] == moved


def test_donor_that_left_the_slab_lives_as_long_as_the_device_has_it() -> None:
    engine = exact(slots=10)
    cache = Cache(engine.leader)
    cache.stored(TOKENS)
    donor = donate(engine, TOKENS)
    other = donate(engine, OTHER)
    later(engine)
    assert donors(engine.sink) == {donor: (40, "device"), other: (40, "host_pinned")}
    cache.removed(TOKENS, 6, 7, 8, 9)
    later(engine)
    assert donors(engine.sink)[donor] == (24, "device")
    cache.removed(TOKENS, 2)
    later(engine)
    assert donors(engine.sink) == {other: (40, "host_pinned")}


def test_without_events_it_goes_with_the_slab() -> None:
    engine = exact(slots=10)
    donate(engine, TOKENS)
    other = donate(engine, OTHER)
    later(engine)
    assert donors(engine.sink) == {other: (40, "host_pinned")}


def test_donor_on_disk_comes_back_to_the_device_tier(tmp_path: Path) -> None:
    engine = with_disk(tmp_path, slots=10)
    cache = Cache(engine.leader)
    donor = donate(engine, TOKENS)
    settle(engine)
    donate(engine, OTHER)
    settle(engine)
    later(engine)
    assert donors(engine.sink)[donor] == (40, "disk")
    cache.stored(TOKENS)
    later(engine)
    assert donors(engine.sink)[donor] == (40, "device")
    cache.removed(TOKENS, 0)
    later(engine)
    assert donors(engine.sink)[donor] == (40, "disk")
    engine.parts.close()


@pytest.mark.parametrize("how", ["gap", "cleared", "noise"])
def test_loss_of_events_leaves_donors_where_our_own_tiers_have_them(how: str) -> None:
    engine = exact(slots=10)
    cache = Cache(engine.leader)
    cache.stored(TOKENS)
    donate(engine, TOKENS)
    cache.stored(OTHER)
    there = donate(engine, OTHER)
    later(engine)
    assert [tier for _, tier in donors(engine.sink).values()] == ["device", "device"]
    if how == "gap":
        cache.number += 2
    cache.send(
        {"gap": {"type": "removed", "block_hashes": []}, "cleared": {"type": "cleared"}, "noise": {"type": "stored"}}[
            how
        ]
    )
    assert donors(engine.sink) == {there: (40, "host_pinned")}
    cache.stored(OTHER)
    later(engine)
    assert donors(engine.sink) == {there: (40, "device")}


def test_wider_group_that_speaks_later_makes_the_narrow_one_s_word_void() -> None:
    engine = exact()
    cache = Cache(engine.leader)
    cache.fields = {"window_size": 16, "layer_group_id": 1}
    cache.stored(TOKENS)
    donor = donate(engine, TOKENS)
    cache.fields = {"window_size": 4096, "layer_group_id": 0}
    cache.stored(OTHER)
    assert donors(engine.sink) == {donor: (40, "host_pinned")}


def test_reset_of_the_cache_forgets_the_device_too() -> None:
    engine = exact()
    cache = Cache(engine.leader)
    cache.stored(TOKENS)
    donate(engine, TOKENS)
    engine.leader.reset_cache()
    assert donors(engine.sink) == {}
    assert engine.leader.snapshot()["kv_events"]["blocks"] == 0
    donor = donate(engine, TOKENS)
    assert donors(engine.sink) == {donor: (40, "host_pinned")}


def test_slab_gives_up_first_what_the_device_holds_too() -> None:
    """Of two old prompts the younger one is on the device: the older one is in the slab alone, and stays."""
    engine = exact(slots=30)
    cache = Cache(engine.leader)
    last = [900 + token for token in TOKENS]
    alone, twin = donate(engine, TOKENS), donate(engine, OTHER)
    cache.stored(OTHER)
    donate(engine, [700 + token for token in TOKENS])
    donate(engine, last)
    later(engine)
    assert engine.prefill(engine.request([*TOKENS, 1])) == 40
    assert engine.prefill(engine.request([*OTHER, 1])) == 0
    assert donors(engine.sink)[alone] == (40, "host_pinned")
    assert donors(engine.sink)[twin] == (40, "device")
    assert engine.leader.snapshot()["ledger"]["on_device"] == 10


def test_connector_says_when_no_event_has_come_though_one_was_due() -> None:
    engine = exact()
    assert said(engine) is KvEvents.WAITING
    for n in range(8):
        donate(engine, [1000 * n + token for token in TOKENS])
    assert said(engine) is KvEvents.SILENT
    Cache(engine.leader).stored(TOKENS)
    assert said(engine) is KvEvents.HEARD
