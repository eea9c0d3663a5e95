"""KV cache events of the engine as freshness: all shapes, and the public reports of what went wrong with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_connector.donors.kv_events import MAX_RANKS, MAX_SCOPES, KvFreshness, Scope, Standing, block_hash
from worker_connector.reference_engine.engine.events import KvEventBuffer, StoredBlock

SIZE = 4
FULL = Scope(None, 4096)


def event(number: int, data: dict[str, Any], **scope: Any) -> dict[str, Any]:
    return {"event_id": number, "window_size": 4096, "data": data} | scope


def stored(hashes: Sequence[Any], parent: Any = None, tokens: int = SIZE, level: int | None = 0) -> dict[str, Any]:
    words = [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in range(tokens)]
    blocks = [
        {"type": "stored_block", "block_hash": h, "tokens": words, "cache_level": level, "priority": 35} for h in hashes
    ]
    return {"type": "stored", "parent_hash": parent, "blocks": blocks}


def removed(*hashes: Any) -> dict[str, Any]:
    return {"type": "removed", "block_hashes": list(hashes)}


def updated(value: Any, **differences: Any) -> dict[str, Any]:
    new = {
        name: d if d is None else {"type": "event_diff", "new_value": d, "old_value": 0}
        for name, d in differences.items()
    }
    return {"type": "updated", "block_hash": value, "cache_level": None, "priority": None} | new


CREATED = {"type": "created", "num_blocks_per_cache_level": [64, 0]}


def state(*data: dict[str, Any], **scope: Any) -> KvFreshness:
    """After these events, numbered from 0, on one rank."""
    found = KvFreshness(SIZE)
    found.apply(event(number, it, **scope) for number, it in enumerate(data))
    return found


def test_created_stored_removed() -> None:
    found = state(CREATED, stored([1, 2]), stored([3], parent=2), removed(3))
    assert [found.resident(h) for h in (1, 2, 3)] == [True, True, False]
    assert found.capacity() == {FULL: (64, 0)}
    assert found.standing() is Standing.FRESH


def test_nothing_is_resident_before_the_first_event() -> None:
    assert KvFreshness(SIZE).resident(1) is False


def test_trtllm_4666_event_diff_may_be_none() -> None:
    """NVIDIA/TensorRT-LLM#4666: 'NoneType' object has no attribute 'new_value'."""
    found = state(stored([1]), updated(1, cache_level=None, priority=None), updated(1, priority=80))
    assert (found.level(1, scope=FULL), found.priority(1, scope=FULL)) == (0, 80)
    found = state(stored([1]), {"type": "updated", "block_hash": 1})
    assert found.resident(1)


def test_update_to_another_tier_leaves_the_device() -> None:
    found = state(stored([1]), updated(1, cache_level=1))
    assert (found.resident(1), found.level(1, scope=FULL)) == (False, 1)
    found.apply([event(2, updated(1, cache_level=0))])
    assert found.resident(1)


def test_dynamo_866_partial_blocks_are_passed_over() -> None:
    """ai-dynamo/dynamo#866: "failed to find block to remove", after partial blocks were reported as stored."""
    found = state(stored([1]), stored([2], parent=1, tokens=SIZE - 1), removed(2), removed(1))
    assert found.blocks() == {}
    assert (found.counts["partial"], found.counts["unknown_removed"], found.standing()) == (1, 1, Standing.FRESH)


def test_trtllm_11883_windows_do_not_interfere() -> None:
    """NVIDIA/TensorRT-LLM#11883: a removal in one window took the block of another with it."""
    found = KvFreshness(SIZE)
    found.apply(
        [
            event(0, stored([1]), window_size=512),
            event(1, stored([1]), window_size=4096),
            event(2, removed(1), window_size=512),
        ]
    )
    assert (found.resident(1, window=512), found.resident(1, window=4096)) == (False, True)
    assert found.resident(1) is False  # not in every scope


def test_trtllm_11883_layer_groups_of_one_window_do_not_interfere() -> None:
    found = KvFreshness(SIZE)
    found.apply(
        [
            event(0, stored([1]), layer_group_id=0),
            event(1, stored([1]), layer_group_id=1),
            event(2, removed(1), layer_group_id=1),
        ]
    )
    assert (found.resident(1, layer_group=0), found.resident(1, layer_group=1)) == (True, False)


@pytest.mark.parametrize(
    "names",
    [(-1, 2**64 - 1, "ffffffffffffffff", "0xFFFFFFFFFFFFFFFF"), (-(2**63), 2**63, "8" + "0" * 15), (26, "1a", "0x1A")],
)
def test_trtllm_17023_signed_unsigned_and_hex_are_one_hash(names: tuple[Any, ...]) -> None:
    """NVIDIA/TensorRT-LLM#17023 and ai-dynamo/dynamo#4533: the same 64 bits, read as i64 by one side and u64 by the
    other."""
    assert len({block_hash(name) for name in names}) == 1
    found = state(stored([names[0]]), removed(names[1]))
    assert [found.resident(name) for name in names] == [False] * len(names)


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, True, None, 1.5, "", "0x", "xyz", [1]])
def test_what_is_no_hash_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="block_hash"):
        block_hash(value)


def test_sha256_names_are_not_cut() -> None:
    a, b = "0" * 48 + "1" * 16, "1" * 16
    assert block_hash(a) != block_hash(b)


@pytest.mark.parametrize("report", ["2241", "4533"])
def test_dynamo_2241_4533_vswa_reports_a_block_once_per_group(report: str) -> None:
    """ai-dynamo/dynamo#2241: duplicates from layer groups; #4533: the duplicate is signed."""
    block = 2**63 + 7
    twin = block if report == "2241" else block - 2**64
    found = state(stored([block]), stored([twin]), removed(block))
    assert found.resident(block) is False
    assert found.counts["already_stored"] == 1


def test_dynamo_711_a_gap_quarantines_its_rank_until_resync() -> None:
    """ai-dynamo/dynamo#711: the queue was full and events were dropped; what was removed in the gap would look resident
    for ever."""
    found = KvFreshness(SIZE)
    found.apply([event(0, stored([1]), attention_dp_rank=0), event(0, stored([1]), attention_dp_rank=1)])
    found.apply([event(2, stored([2]), attention_dp_rank=1)])
    assert (found.resident(1, rank=0), found.resident(1, rank=1), found.resident(2, rank=1)) == (True, None, None)
    assert found.standing(1) is Standing.QUARANTINED
    found.apply([event(3, stored([3]), attention_dp_rank=1)])
    assert found.resident(3, rank=1) is None
    found.resync(1)
    found.apply([event(4, stored([4]), attention_dp_rank=1)])
    assert (found.resident(4, rank=1), found.resident(1, rank=1)) == (True, False)


def test_dynamo_711_the_reference_engines_overflow_is_a_gap() -> None:
    buffer = KvEventBuffer(rank=0, window_size=4096, max_size=2)
    found = KvFreshness(SIZE)
    block = [StoredBlock(number, (1, 2, 3, 4), 35, None, None) for number in range(5)]
    buffer.stored(None, block[:1])
    found.apply(buffer.drain())
    assert found.resident(0)
    for number in range(1, 5):
        buffer.stored(None, block[number : number + 1])
    assert buffer.dropped_event_count == 2
    found.apply(buffer.drain())
    assert found.standing() is Standing.QUARANTINED


def test_told_of_a_loss_without_a_gap() -> None:
    found = state(stored([1]))
    found.lost()
    assert found.resident(1) is None


def test_events_of_before_a_resync_are_passed_over() -> None:
    found = state(stored([1]), stored([2]))
    found.resync(after=5)
    found.apply([event(4, stored([3])), event(5, stored([4])), event(6, stored([5]))])
    assert [found.resident(h) for h in (3, 4, 5)] == [False, False, True]


def test_engine_that_counts_from_zero_again_is_noticed() -> None:
    found = state(CREATED, stored([1]), stored([2]))
    found.apply([event(0, CREATED)])
    assert found.resident(1) is None
    assert found.counts["restarted"] == 1


def test_llm_d_kv_cache_680_removing_twice_is_removing() -> None:
    """llm-d/llm-d-kv-cache#680: duplicate removes drove reference counts below zero; one store after them must be
    enough."""
    found = state(stored([1]), removed(1, 1), removed(1), stored([1]))
    assert found.resident(1)
    found = state(stored([1]), stored([1]), removed(1))
    assert found.resident(1) is False


@pytest.mark.parametrize("report", ["NVIDIA/TensorRT-LLM#3543", "vllm-project/vllm#58119"])
def test_unknown_parent_keeps_its_chain_out(report: str) -> None:
    """A wrong or unreported parent: the chain cannot be reached from a prompt's start, so it is nobody's prefix."""
    found = state(stored([5, 6], parent=4), removed(5), stored([7], parent=6))
    assert found.blocks() == {}
    assert found.counts["unknown_parent"] == 3


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"type": "stored"},
        {"type": "stored", "blocks": [{"tokens": [1] * SIZE}]},
        stored(["no hash"]),
        removed(None),
        {"type": "updated", "block_hash": 1, "priority": {"old_value": 3}},
        None,
    ],
)
def test_malformed_event_quarantines_and_does_not_raise(data: Any) -> None:
    found = state(stored([1]))
    found.apply([event(1, data)])
    assert found.resident(1) is None
    assert found.counts["malformed"] == 1


def test_not_even_an_event() -> None:
    found = state(stored([1]))
    found.apply([None, {}])  # type: ignore[list-item]
    assert found.counts["malformed"] == 2


def test_unknown_type_of_a_newer_engine_is_counted() -> None:
    found = state(stored([1]), {"type": "pinned"}, stored([2]))
    assert found.resident(2)
    assert found.counts["unknown_type"] == 1


def test_memory_is_bounded() -> None:
    found = KvFreshness(SIZE, max_blocks=3)
    found.apply([event(0, stored([1, 2, 3])), event(1, removed(1)), event(2, stored([4]))])
    assert found.resident(4)
    found.apply([event(3, stored([5]))])
    assert (found.standing(), found.counts["overflow"]) == (Standing.QUARANTINED, 1)
    assert found.blocks() == {}


def test_block_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="tokens_per_block = 0"):
        KvFreshness(0)


# A model of one cache, whose events are dropped, doubled and written in different ways

HASHES = st.integers(0, 7)
STEPS = st.lists(
    st.tuples(st.sampled_from(["store", "partial", "remove", "update"]), st.integers(0, 1), st.integers(0, 1), HASHES),
    max_size=20,
)


def spelled(value: int, form: int) -> Any:
    word = (value * 0x9E3779B97F4A7C15 + 1) & (2**64 - 1)
    return (word, word - 2**64 if word >= 2**63 else word, f"{word:016x}", f"0x{word:X}")[form]


@given(STEPS, st.data())
def test_state_equals_a_set_or_is_unknown(steps: list[tuple[str, int, int, int]], data: st.DataObject) -> None:
    """Whatever is lost or doubled: a rank that is not quarantined knows exactly the blocks that its cache holds."""
    truth: dict[tuple[int, int], set[int]] = {}
    numbers, found, gone = [0, 0], KvFreshness(SIZE), [False, False]
    for kind, rank, group, value in steps:
        name = spelled(value, data.draw(st.integers(0, 3)))
        here = truth.setdefault((rank, group), set())
        if kind == "store":
            here.add(value)
            body = stored([name])
        elif kind == "partial":
            body = stored([name], tokens=data.draw(st.integers(0, SIZE - 1)))
        elif kind == "remove":
            here.discard(value)
            body = removed(*[name] * data.draw(st.integers(1, 2)))
        else:
            body = updated(name, priority=data.draw(st.none() | st.integers(0, 100)))
        it = event(numbers[rank], body, attention_dp_rank=rank, layer_group_id=group)
        fate = data.draw(st.sampled_from(["arrives", "arrives", "arrives", "doubled", "lost", "resync"]))
        if fate == "lost" and numbers[rank] > 0:
            gone[rank] = True
        elif fate == "resync":
            found.resync(rank, after=numbers[rank])
            gone[rank] = False
            for (other, _), blocks in truth.items():
                if other == rank:
                    blocks.clear()  # the cache was reset
        else:
            found.apply([it] * (2 if fate == "doubled" else 1))
        numbers[rank] += 1
        for (other, scope), blocks in truth.items():
            knows = [found.resident(spelled(h, 0), rank=other, layer_group=scope) for h in range(8)]
            if found.standing(other) is Standing.FRESH and not gone[other]:
                assert knows == [h in blocks for h in range(8)]
            elif found.standing(other) is Standing.QUARANTINED:
                assert knows == [None] * 8
    for rank in (0, 1):  # a loss is noticed with the next event
        if gone[rank]:
            found.apply([event(numbers[rank], removed(), attention_dp_rank=rank)])
            assert found.standing(rank) is Standing.QUARANTINED


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("name", ["event_id", "attention_dp_rank"])
def test_number_that_is_none_is_malformed(name: str, number: float) -> None:
    found = state(CREATED, stored([1]))
    found.apply([event(2, removed(1)) | {name: number}])
    assert (found.counts["malformed"], found.standing()) == (1, Standing.QUARANTINED)


def test_scopes_of_a_rank_are_bounded() -> None:
    found = KvFreshness(SIZE)
    found.apply(event(n, CREATED, window_size=n) for n in range(MAX_SCOPES))
    assert (found.standing(), len(found.capacity())) == (Standing.FRESH, MAX_SCOPES)
    found.apply([event(MAX_SCOPES, CREATED, window_size=MAX_SCOPES)])
    assert (found.standing(), found.counts["overflow"]) == (Standing.QUARANTINED, 1)
    assert len(found.capacity()) == MAX_SCOPES
    found.resync()
    found.apply(event(n, stored([n]), layer_group_id=n) for n in range(MAX_SCOPES + 1))
    assert found.standing() is Standing.QUARANTINED


def test_ranks_are_bounded_and_one_too_many_is_unknown() -> None:
    found = KvFreshness(SIZE)
    found.apply(event(0, stored([1]), attention_dp_rank=rank) for rank in range(MAX_RANKS + 1))
    assert found.counts["too_many_ranks"] == 1
    assert found.resident(1, rank=MAX_RANKS - 1) is True
    assert found.resident(1, rank=MAX_RANKS) is None
    assert found.standing(MAX_RANKS) is Standing.QUARANTINED
    found.resync(MAX_RANKS)
    found.lost(MAX_RANKS)
    assert len(found._ranks) == MAX_RANKS
