"""Results of several ranks reduced to one: late, twice, in any order, and from ranks that are lost."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_semkv.contracts.report import Reason
from worker_connector.ledger.plan import PlanKey
from worker_connector.link.channel import ForwardDone, LoadDone, RankReady, RankResult, SaveDone, SlotsDamaged
from worker_connector.link.rank_aggregator import ALL_RANKS, MISSING_SECONDS, RankAggregator

KEY = PlanKey(7, 0)


def ready(rank: int, **changes: Any) -> RankReady:
    options: dict[str, Any] = {
        "rank": rank,
        "tokens_per_block": 32,
        "group_ids": (0,),
        "windows": (None,),
        "bytes_per_block": 4096,
        "kv_dtype": "uint8",
        "kv_layout": "a" * 16,
        "slots": 100 + rank,
        "incarnation": f"first-{rank}",
    }
    return RankReady(**options | changes)


def aggregator(world: int = 3) -> RankAggregator:
    made = RankAggregator(world)
    for rank in range(world):
        made.take(ready(rank))
    return made


def test_ready_when_all_are_and_with_the_smallest_slab() -> None:
    made = RankAggregator(3)
    assert made.take(ready(2, slots=50)) == []
    assert made.take(ready(0)) == []
    assert (made.complete, made.missing) == (False, [1])
    (merged,) = made.take(ready(1))
    assert isinstance(merged, RankReady)
    assert (merged.rank, merged.slots, merged.kv_layout) == (ALL_RANKS, 50, "a" * 16)
    assert made.complete
    assert made.take(ready(1)) == []  # the same pool, reported again


def test_pool_registered_anew_by_one_rank_is_a_new_cache_generation() -> None:
    made = aggregator()
    (merged,) = made.take(ready(1, incarnation="second"))
    assert isinstance(merged, RankReady)


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens_per_block": 64},
        {"group_ids": (0, 1), "windows": (None, 9)},
        {"windows": (9,)},
        {"kv_dtype": "float16"},
        {"slots": 0},
    ],
)
def test_ranks_that_do_not_agree_serve_nothing_and_the_reason_is_named(changes: dict[str, Any]) -> None:
    made = RankAggregator(2)
    made.take(ready(0))
    assert made.take(ready(1, **changes)) == []
    assert not made.complete
    assert made.disagreement
    assert made.take(ready(1, incarnation="repaired")) != []
    assert made.complete


def test_layouts_by_rank_make_one_layout() -> None:
    """Heads that do not divide evenly: rank 0 has others than rank 1, and swapped they are another layout."""
    layouts = []
    for pair in (("a" * 16, "b" * 16), ("b" * 16, "a" * 16), ("a" * 16, "a" * 16)):
        made = RankAggregator(2)
        made.take(ready(0, kv_layout=pair[0]))
        (merged,) = made.take(ready(1, kv_layout=pair[1]))
        assert isinstance(merged, RankReady)
        layouts.append(merged.kv_layout)
    assert len(set(layouts)) == 3


def results_of(rank: int, ok: bool = True) -> list[RankResult]:
    return [
        LoadDone(rank, 3, KEY, ok, 0.1 * (rank + 1)),
        ForwardDone(rank, 3),
        SaveDone(rank, 11, ok),
    ]


@given(st.permutations(list(itertools.product(range(3), range(3)))), st.sets(st.integers(0, 2)), st.data())
def test_any_order_and_any_repetition_give_one_answer(
    order: list[tuple[int, int]], failing: set[int], data: st.DataObject
) -> None:
    made = aggregator()
    reduced: list[RankResult] = []
    sent: list[RankResult] = []
    for rank, which in order:
        result = results_of(rank, rank not in failing)[which]
        sent.append(result)
        reduced.extend(made.take(result))
        if data.draw(st.booleans()):
            reduced.extend(made.take(data.draw(st.sampled_from(sent))))
    (load,) = [result for result in reduced if isinstance(result, LoadDone)]
    (save,) = [result for result in reduced if isinstance(result, SaveDone)]
    (forward,) = [result for result in reduced if isinstance(result, ForwardDone)]
    assert (load.ok, save.ok) == (not failing, not failing)
    assert load.seconds == pytest.approx(0.3)
    assert (load.iteration, load.key, save.save_id, forward.iteration) == (3, KEY, 11, 3)


def test_failure_is_reported_when_the_last_copy_has_ended() -> None:
    """Before that a host row may still be read: its lease must hold."""
    made = aggregator()
    assert made.take(LoadDone(1, 3, KEY, False, reason=Reason.CHECKSUM_MISMATCH)) == []
    assert made.take(LoadDone(0, 3, KEY, True)) == []
    (load,) = made.take(LoadDone(2, 3, KEY, True))
    assert isinstance(load, LoadDone)
    assert (load.ok, load.reason) == (False, Reason.CHECKSUM_MISMATCH)


def test_what_waits_for_a_lost_rank_fails_and_its_late_answers_change_nothing() -> None:
    made = aggregator()
    for rank in (0, 1):
        for result in results_of(rank):
            assert made.take(result) == []
    load, save = made.lost(2)
    assert load == LoadDone(ALL_RANKS, 3, KEY, False, pytest.approx(0.2), Reason.WORKER_LOST)
    assert save == SaveDone(ALL_RANKS, 11, False)
    assert (made.complete, made.missing) == (False, [2])
    made.connected(2)
    assert made.complete
    assert [made.take(result) for result in results_of(2)[::2]] == [[], []]
    assert made.counts["late_results"] == 2


def test_orders_that_are_answered_while_a_rank_is_lost_fail() -> None:
    made = aggregator()
    made.lost(2)
    assert made.take(SaveDone(0, 5, True)) == []
    assert made.take(SaveDone(1, 5, True)) == [SaveDone(ALL_RANKS, 5, False)]
    made.connected(2)
    assert made.take(SaveDone(2, 5, True)) == []
    assert [made.take(SaveDone(rank, 6, True)) for rank in (2, 0, 1)] == [[], [], [SaveDone(ALL_RANKS, 6, True)]]


def test_replayed_request_is_another_order() -> None:
    made = aggregator(2)
    assert made.take(LoadDone(0, 3, KEY, True)) == []
    assert made.take(LoadDone(1, 4, KEY, True)) == []
    assert len(made.take(LoadDone(1, 3, KEY, True))) == 1


def test_damage_on_any_rank_is_damage() -> None:
    made = aggregator()
    assert made.take(SlotsDamaged(2, (4, 5))) == [SlotsDamaged(2, (4, 5))]


def test_result_of_an_unknown_rank_is_dropped() -> None:
    made = aggregator(2)
    assert made.take(SlotsDamaged(9, (4,))) == []


def test_one_rank_is_passed_through_untouched() -> None:
    made = RankAggregator(1)
    assert not made.complete
    for result in (ready(3), *results_of(3), *results_of(3)):
        assert made.take(result) == [result]
    assert made.complete


def test_open_orders_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_connector.link.rank_aggregator._MAX_OPEN", 10)
    made = aggregator(2)
    for save_id in range(50):
        made.take(SaveDone(0, save_id, True))
    assert len(made._saves.open) == 10


def test_missing_ranks_are_named_once_in_a_while() -> None:
    now = [0.0]
    made = RankAggregator(2, lambda: now[0])
    made.take(ready(0))
    assert made.overdue() == []
    now[0] = MISSING_SECONDS
    assert [made.overdue(), made.overdue()] == [[1], []]
    made.take(ready(1))
    now[0] += 2 * MISSING_SECONDS
    assert made.overdue() == []
    made.lost(0)
    assert made.overdue() == []  # its time begins with the loss
    now[0] += MISSING_SECONDS
    assert made.overdue() == [0]
    assert RankAggregator(1, lambda: now[0]).overdue() == []


def test_results_survive_the_wire() -> None:
    for result in (
        ready(1),
        *results_of(1),
        SlotsDamaged(1, (1, 2), True),
        LoadDone(1, 1, KEY, False, None, Reason.LOAD_TIMEOUT),
    ):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=RankResult) == result
