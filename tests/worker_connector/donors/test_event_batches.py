"""Batches of the streaming publisher, in the serializer's shape: what was stored, removed, cleared, and what was lost
on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker_connector.stream_publisher import CLEARED, payload, removed, stored
from worker_connector.donors.event_batches import EventBatches
from worker_connector.donors.kv_events import KvFreshness, Scope, Standing

SIZE = 4
HIGH = 2**63 + 5


def freshness(*batches: tuple[int, bytes]) -> KvFreshness:
    reader, known = EventBatches(), KvFreshness(SIZE)
    for number, raw in batches:
        known.apply(reader.read(number, raw))
    return known


def names(known: KvFreshness) -> set[str]:
    return set().union(*known.blocks().values()) if known.blocks() else set()


def test_stored_and_removed_blocks_have_one_name_however_it_is_signed() -> None:
    first = payload(stored(None, [HIGH - 2**64, 7], range(8), SIZE), stored(7, [8], range(4), SIZE))
    assert names(freshness((0, first))) == {f"{HIGH:016x}", f"{7:016x}", f"{8:016x}"}
    assert names(freshness((0, first), (1, payload(removed(8, HIGH - 2**64))))) == {f"{7:016x}"}


def test_tokens_of_each_block_are_its_own() -> None:
    (event,) = EventBatches().read(0, payload(stored(None, [1, 2], range(8), SIZE, lora_id=3)))
    assert [block["tokens"] for block in event["data"]["blocks"]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert {block["lora_id"] for block in event["data"]["blocks"]} == {3}


def test_clear_empties_all_groups() -> None:
    known = freshness(
        (0, payload(stored(None, [1], range(4), SIZE), stored(None, [2], range(4), SIZE, group_idx=1))),
        (1, payload(CLEARED)),
    )
    assert names(known) == set()
    assert known.standing() is Standing.FRESH
    assert known.counts["cleared"] == 1


@pytest.mark.parametrize("medium", ["CPU", "DISK", "somewhere else"])
def test_block_below_the_device_is_not_on_it(medium: str) -> None:
    known = freshness((0, payload(stored(None, [1], range(4), SIZE, medium=medium))))
    assert known.resident(1) is False
    assert known.level(1, scope=Scope(None, None)) != 0


def test_missing_batch_is_a_gap_and_a_repeated_one_nothing() -> None:
    first, second = payload(stored(None, [1], range(4), SIZE)), payload(stored(None, [2], range(4), SIZE))
    assert freshness((0, first), (1, second), (0, first)).standing() is Standing.FRESH
    assert freshness((0, first), (2, second)).standing() is Standing.QUARANTINED


def test_first_event_says_whether_anything_came_before() -> None:
    first = payload(stored(None, [1], range(4), SIZE))
    assert EventBatches().read(0, first)[0]["event_id"] == 0
    assert EventBatches().read(3, first)[0]["event_id"] == 1


def test_heartbeat_without_events_is_no_loss() -> None:
    first = payload(stored(None, [1], range(4), SIZE))
    assert names(freshness((0, first), (1, payload()), (2, payload(removed(2))))) == {f"{1:016x}"}


def test_publisher_that_starts_over_clears_what_the_one_before_said() -> None:
    reader, known = EventBatches(), KvFreshness(SIZE)
    known.apply(reader.read(0, payload(stored(None, [1], range(4), SIZE))))
    known.apply(reader.read(1, payload(stored(None, [2], range(4), SIZE))))
    known.apply(reader.restarted())
    known.apply(reader.read(0, payload(stored(None, [3], range(4), SIZE))))
    assert names(known) == {f"{3:016x}"}
    assert known.standing() is Standing.FRESH


def test_pool_of_another_block_size_stores_nothing_that_counts() -> None:
    known = freshness((0, payload(stored(None, [1], range(8), 8))))
    assert (names(known), known.counts["partial"]) == (set(), 1)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({}),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, None, 0]),
        msgspec.msgpack.encode([1.0, [["BlockStored"]], 0]),
        payload({"block_hashes": [1]}),
        payload(stored(None, [1, 2], range(4), SIZE)),
        payload(stored(None, [1], range(4), 0)),
        payload(stored(None, [1], range(4), SIZE, mm_keys=[[], []])),
    ],
    ids=range(10),
)
def test_what_cannot_be_read_is_a_loss_and_nothing_worse(raw: bytes) -> None:
    assert freshness((0, payload(stored(None, [1], range(4), SIZE))), (1, raw)).standing() is Standing.QUARANTINED


def test_kind_that_is_not_known_yet_costs_nothing() -> None:
    known = freshness((0, payload(stored(None, [1], range(4), SIZE), {"type": "BlockPinned"})))
    assert (names(known), known.counts["unknown_type"]) == ({f"{1:016x}"}, 1)


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "block_hashes", "token_ids"]), inner)
    ),
    max_leaves=8,
)


@given(st.lists(st.tuples(st.integers(0, 5), st.binary(max_size=40) | _json.map(msgspec.msgpack.encode)), max_size=6))
def test_any_bytes_of_batches(batches: Sequence[tuple[int, bytes]]) -> None:
    reader, known = EventBatches(), KvFreshness(SIZE)
    for number, raw in batches:
        events = reader.read(number, raw)
        assert all(isinstance(event, Mapping) for event in events)
        known.apply(events)


def test_ids_go_on_whatever_comes() -> None:
    reader = EventBatches()
    events: list[dict[str, Any]] = []
    for number in range(4):
        events += reader.read(number, payload(removed(number), removed(number)))
    assert [event["event_id"] for event in events] == list(range(8))
