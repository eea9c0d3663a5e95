"""Chains that are to come up from disk: who goes first, who waits for what, and that nobody waits for what cannot come
any more."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.worker_connector.disk_books import Books, Store, answered, begin
from worker_connector.disk import read_queue as disk_wishes
from worker_connector.disk import tier as disk_tier
from worker_connector.disk.index import DiskBlock
from worker_connector.disk.messages import Stage
from worker_connector.disk.read_queue import StageTimes

TOKENS = list(range(16))
"""Four blocks."""


def below(books: Books, rank: Store, *prompts: list[int]) -> list[list[DiskBlock]]:
    """The prompts on disk, and nothing in the slab."""
    begin(books, [rank])
    paths = []
    for tokens in prompts:
        entries = books.save(tokens)
        answered(books, [rank])
        paths.append([block for entry in entries if (block := books.tier.index.get(entry.key)) is not None])
        books.ledger.clear()
        books.ledger.take_departed()
    return paths


def hold(books: Books, path: list[DiskBlock]) -> Future[int]:
    done = books.tier.hold(path, books.ledger.tick)
    assert done is not None
    return done


def other(number: int, blocks: int = 4) -> list[int]:
    return [1_000 * number + i for i in range(4 * blocks)]


def staged(books: Books) -> list[bytes]:
    """Keys in the order in which they are asked from the disk."""
    return [placed.block.key for order in books.sent if isinstance(order, Stage) for placed in order.blocks]


def test_it_is_told_when_all_of_it_is_in_the_slab(tmp_path: Path) -> None:
    books = Books()
    rank = Store(books, 0, tmp_path)
    (path,) = below(books, rank, TOKENS)
    done = hold(books, path)
    assert not done.done()
    answered(books, [rank])
    assert done.result(0) == 4
    assert [entry.ordinal for entry in books.staged] == [0, 1, 2, 3]


def test_what_is_in_the_slab_already_is_told_at_once(tmp_path: Path) -> None:
    books = Books()
    rank = Store(books, 0, tmp_path)
    (path,) = below(books, rank, TOKENS)
    hold(books, path)
    answered(books, [rank])
    assert hold(books, path).result(0) == 4
    assert books.sent == []


def test_several_orders_are_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "_ORDER_BLOCKS", 1)
    monkeypatch.setattr(disk_tier, "_BLOCKS_IN_FLIGHT", 2)
    books = Books()
    rank = Store(books, 0, tmp_path)
    (path,) = below(books, rank, TOKENS)
    done = hold(books, path)
    for orders in range(3):
        assert not done.done(), orders
        (order, *rest), books.sent[:] = list(books.sent), []
        rank.obey(books, [order])
        books.sent[:0] = rest
    assert not done.done()
    answered(books, [rank])
    assert done.result(0) == 4


def test_chain_that_is_on_its_way_for_a_hint_is_awaited_and_read_once(tmp_path: Path) -> None:
    books = Books()
    rank = Store(books, 0, tmp_path)
    (path,) = below(books, rank, TOKENS)
    books.tier.hinted(path[-1])
    done = hold(books, path)
    second = hold(books, path)
    assert not done.done()
    assert not second.done()
    answered(books, [rank])
    assert (done.result(0), second.result(0)) == (4, 4)
    assert rank.store.counts["read"] == 4


def test_those_that_are_held_go_before_those_that_nobody_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "_ORDER_BLOCKS", 2)
    monkeypatch.setattr(disk_tier, "_BLOCKS_IN_FLIGHT", 2)
    books = Books(slots=16)
    rank = Store(books, 0, tmp_path)
    hinted, first, second = below(books, rank, TOKENS, other(1), other(2))
    books.tier.hinted(hinted[-1])
    held = [hold(books, first), hold(books, second)]
    order: list[bytes] = []
    while books.sent:
        order += staged(books)
        orders, books.sent[:] = list(books.sent), []
        rank.obey(books, orders)
    expected = [*hinted[:2], *first, *second, *hinted[2:]]  # two blocks were on their way before anybody waited
    assert order == [block.key for block in expected]
    assert [done.result(0) for done in held] == [4, 4]


def test_who_gives_up_does_not_stand_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "_ORDER_BLOCKS", 2)
    monkeypatch.setattr(disk_tier, "_BLOCKS_IN_FLIGHT", 2)
    books = Books(slots=16)
    rank = Store(books, 0, tmp_path)
    first, second = below(books, rank, TOKENS, other(1))
    slow, quick = hold(books, first), hold(books, second)
    books.tier.give_up(slow)
    order: list[bytes] = []
    while books.sent:
        order += staged(books)
        orders, books.sent[:] = list(books.sent), []
        rank.obey(books, orders)
    assert order == [
        block.key for block in [*first[:2], *second, *first[2:]]
    ]  # it comes all the same, for the next one
    assert quick.result(0) == 4
    assert not slow.done()  # nobody looks at it any more
    books.tier.give_up(slow)


@pytest.mark.parametrize("missing", range(4))
def test_a_block_that_cannot_be_read_ends_the_wait(tmp_path: Path, missing: int) -> None:
    books = Books()
    rank = Store(books, 0, tmp_path)
    (path,) = below(books, rank, TOKENS)
    rank.store._path(rank.store._name(path[missing].digest, path[missing].key)).unlink()
    done = hold(books, path)
    answered(books, [rank])
    assert done.result(0) == missing
    stats = books.ledger.stats()
    assert (stats.resident, stats.pending, stats.retired) == (missing, 0, 0)


def test_no_slot_ends_the_wait(tmp_path: Path) -> None:
    books = Books(slots=4)
    rank = Store(books, 0, tmp_path)
    (path,) = below(books, rank, TOKENS)
    leased = books.save(other(1, 3))
    answered(books, [rank])
    books.ledger.lease(*leased)
    done = hold(books, path)
    answered(books, [rank])
    assert done.result(0) == 1
    assert books.tier.counts["no_slot"] == 1
    books.ledger.release(*leased)


def test_a_block_that_a_request_is_just_saving_ends_the_wait(tmp_path: Path) -> None:
    books = Books()
    rank = Store(books, 0, tmp_path)
    (path,) = below(books, rank, TOKENS)
    assert books.ledger.enter(books.digest, None, path[0].tokens) is not None
    assert hold(books, path).result(0) == 0
    assert books.sent == []


@pytest.mark.parametrize("when", ["waiting", "on its way"])
def test_a_reset_ends_the_wait(tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    books = Books()
    rank = Store(books, 0, tmp_path)
    (path,) = below(books, rank, TOKENS)
    if when == "waiting":
        monkeypatch.setattr(disk_tier, "_BLOCKS_IN_FLIGHT", 0)
    done = hold(books, path)
    assert (done.done(), len(books.sent)) == (False, when == "on its way")
    books.ledger.clear()
    books.tier.clear()
    assert done.result(0) == 0
    answered(books, [rank])
    assert books.ledger.match(books.digest, b"".join(block.tokens for block in path), 4).path == []


def test_end_of_the_books_ends_the_wait_and_begins_no_other(tmp_path: Path) -> None:
    books = Books()
    rank = Store(books, 0, tmp_path)
    (path,) = below(books, rank, TOKENS)
    done = hold(books, path)
    books.tier.close()
    assert done.result(0) == 0
    assert books.tier.hold(path, books.ledger.tick) is None
    answered(books, [rank])  # what was on its way lands, and nobody is told twice


def test_who_waits_for_nothing_is_told_at_once() -> None:
    assert hold(Books(), []).result(0) == 0


def test_more_than_so_many_are_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_wishes, "MOST_HELD", 2)
    books = Books()
    rank = Store(books, 0, tmp_path)
    (path,) = below(books, rank, TOKENS)
    held = [hold(books, path), hold(books, path)]
    assert books.tier.hold(path, books.ledger.tick) is None
    books.tier.give_up(held[0])
    assert books.tier.hold(path, books.ledger.tick) is not None


def test_whoever_waits_cannot_take_it_back(tmp_path: Path) -> None:
    """A caller that cancels its future may not make the disk's thread fail when it answers."""
    books = Books()
    rank = Store(books, 0, tmp_path)
    (path,) = below(books, rank, TOKENS)
    done = hold(books, path)
    assert not done.cancel()
    answered(books, [rank])
    assert done.result(0) == 4


# how long it takes


def test_time_of_a_block_is_what_the_last_orders_took_by_block() -> None:
    times = StageTimes()
    assert times.seconds_per_block is None
    times.add(10.0, 12.0, 4)
    assert times.seconds_per_block == 0.5
    times.add(10.0, 16.0, 4)  # sent together with the first, and begun when that was done
    assert times.seconds_per_block == 0.75
    times.add(20.0, 20.0, 8)
    assert times.seconds_per_block == 0.375
    times.add(20.0, 90.0, 0)  # nothing came of it
    assert (times.seconds_per_block, times.last) == (0.375, 90.0)
    for n in range(100, 116):
        times.add(float(n), n + 0.5, 1)
    assert times.seconds_per_block == 0.5  # the first ones are forgotten


def test_it_hangs_when_it_has_answered_nothing_for_a_second() -> None:
    times = StageTimes()
    assert not times.hanging([], 100.0)
    assert not times.hanging([99.5, 99.1], 100.0)
    assert times.hanging([99.5, 99.0], 100.0)
    times.add(99.0, 99.9, 0)  # whatever the answer
    assert not times.hanging([99.0], 100.8)
    assert times.hanging([99.0], 100.9)
    assert not times.hanging([], 100.9)


def test_what_is_expected_is_for_the_blocks_that_do_not_come_yet_and_what_goes_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    books = Books(slots=16)
    rank = Store(books, 0, tmp_path)
    first, second = below(books, rank, TOKENS, other(1))
    assert books.tier.expected_seconds(first) is None
    books.tier.times.add(0.0, 2.0, 1)
    assert books.tier.expected_seconds(first) == 8.0
    monkeypatch.setattr(disk_tier, "_BLOCKS_IN_FLIGHT", 3)
    done = hold(books, first)
    assert (
        books.tier.expected_seconds(first) == 10.0
    )  # three are on their way, and this one is held for the last as well
    assert books.tier.expected_seconds(second) == 16.0
    answered(books, [rank])
    assert done.result(0) == 4
    assert books.tier.expected_seconds(first) == 0.0
