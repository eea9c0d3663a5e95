"""What the disk tier may not do: touch a file on the scheduler's thread, wait, thrash the slab, believe one rank alone,
overfill a disk."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dynamo_semkv.contracts.keys import root_key
from tests.worker_connector.disk_books import Books, Store, answered, begin
from tests.worker_connector.harness import MIB, settings, wait_for
from tests.worker_connector.scripted import OPTIONS, ScriptedEngine, llm_args
from tests.worker_connector.scripted_disk import PROMPT, chain_of, crowd, settle, tier_of, with_disk
from worker_connector.assembly import LeaderParts, assemble_rank_with
from worker_connector.background import Background
from worker_connector.disk.block_file import BlockFormat
from worker_connector.disk.messages import Stage
from worker_connector.engine_api.geometry import PoolGeometry
from worker_connector.engine_api.request_view import pack_tokens
from worker_connector.errors import Refused
from worker_connector.leader.event_publisher import EventPublisher
from worker_connector.leader.leader import Leader
from worker_connector.link.channel import leader_channel
from worker_connector.rank.disk import DiskPlace, check_room

# no I/O, no waiting

_watched: set[int] = set()
_seen: list[str] = []
_FILES = ("open", "os.", "shutil.", "pathlib.", "fcntl.", "glob.")


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched and threading.get_ident() in _watched and event.startswith(_FILES):
        _seen.append(event)
        raise AssertionError(f"{event} {arguments} on the scheduler's thread")


sys.addaudithook(_audit)  # cannot be taken away again, and does nothing while no thread is watched


@contextmanager
def no_files_here() -> Iterator[None]:
    _seen.clear()
    _watched.add(threading.get_ident())
    try:
        yield
    finally:
        _watched.clear()


class ThreadedEngine(ScriptedEngine):
    """As in production: the leader's background, the slab's keeper and the disk each have a thread; this one is the
    scheduler's."""

    def __init__(self, path: Path) -> None:
        it = settings(MIB, disk_path=str(path), **OPTIONS)
        super().__init__(it)
        self.rank.close()
        args = llm_args(4)
        background = Background("test", 10_000, 3600.0, lambda: None)
        event_publisher = EventPublisher(self.sink, background, it.connector, lambda: self.now)
        leader = Leader(it, args, leader_channel(args), event_publisher, lambda: self.now)
        self.parts, self.leader = LeaderParts(leader, event_publisher, background, background), leader
        background.start()
        self.rank = assemble_rank_with(args, it)
        self.rank.register(PoolGeometry.from_layout(self.layout()))

    def rest(self) -> None:
        """Everything has been saved, written and told."""
        wait_for(lambda: self.leader.snapshot()["open_saves"] == 0)
        wait_for(lambda: not tier_of(self).snapshot()["waiting_to_spill"] and not tier_of(self).in_flight)
        assert self.parts.background is not None
        assert self.parts.background.drain(10)

    def stop(self) -> None:
        self.parts.close()
        self.rank.close()


@pytest.fixture
def threaded(tmp_path: Path) -> Iterator[ThreadedEngine]:
    engine = ThreadedEngine(tmp_path)
    yield engine
    engine.stop()


def _crowd(engine: ThreadedEngine) -> None:
    for n in range(1, 28):
        engine.serve([1000 * n + i for i in range(41)])
        wait_for(lambda: engine.leader.snapshot()["open_saves"] == 0)
        wait_for(lambda: engine.leader.snapshot()["ledger"]["leased"] == 0)


def test_callbacks_touch_no_file(threaded: ThreadedEngine) -> None:
    threaded.serve([9] * 41)  # what is imported late is imported here
    threaded.rest()
    with no_files_here(), pytest.raises(AssertionError, match="on the scheduler's thread"):
        os.listdir("/")  # the net is there
    with no_files_here():
        threaded.serve(PROMPT)
        threaded.rest()
        _crowd(threaded)
        request = threaded.request(PROMPT)
        assert threaded.ask(request) == 0
        wait_for(lambda: tier_of(threaded).counts["staged"] == 10)
        assert threaded.prefill(request) == 40
        threaded.finish(request)
        threaded.rest()
    assert _seen == []
    assert threaded.leader.snapshot()["counts"].get("result_errors", 0) == 0


def test_callbacks_do_not_wait_for_a_disk_that_hangs(threaded: ThreadedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging, goes_on = threading.Event(), threading.Event()
    write = BlockFormat.write

    def hang(*arguments: Any, **options: Any) -> None:
        hanging.set()
        assert goes_on.wait(60)
        write(*arguments, **options)

    monkeypatch.setattr(BlockFormat, "write", hang)
    try:
        threaded.serve(PROMPT)
        assert hanging.wait(30)
        for n in range(1, 40):  # the slab is filled and evicted from all the while, but for what is being written
            threaded.serve([1000 * n + i for i in range(41)])
        assert threaded.prefill(threaded.request(PROMPT)) == 40  # leased by the writing, so still there
    finally:
        goes_on.set()
    threaded.rest()


# not to thrash


def test_staging_takes_no_slot_of_what_was_used_since_the_wish(tmp_path: Path) -> None:
    books = Books(slots=4)
    rank = Store(books, 0, tmp_path)
    begin(books, [rank])
    books.save(list(range(8)))
    answered(books, [rank])
    for n in range(1, 3):
        books.save([100 * n + i for i in range(8)])
        answered(books, [rank])
    assert books.ledger.match(books.digest, pack_tokens(range(8)), 2).path == []
    books.miss(list(range(8)))
    young = [entry for entry in books.ledger.entries() if entry.resident]
    for entry in young:  # somebody uses them before the background comes to the wish
        books.ledger.touch(entry)
    books.run_jobs()
    assert books.tier.counts["no_slot"] == 1
    assert not books.sent
    assert all(entry.resident for entry in young)
    books.miss(list(range(8)))
    books.run_jobs()
    answered(books, [rank])
    assert [entry.ordinal for entry in books.staged] == [0, 1]


def test_staging_takes_no_slot_that_is_leased(tmp_path: Path) -> None:
    books = Books(slots=4)
    rank = Store(books, 0, tmp_path)
    begin(books, [rank])
    books.save(list(range(8)))
    answered(books, [rank])
    for n in range(1, 3):
        books.save([100 * n + i for i in range(8)])
        answered(books, [rank])
    leased = [entry for entry in books.ledger.entries() if entry.resident]
    books.ledger.lease(*leased)
    books.miss(list(range(8)))
    books.run_jobs()
    assert (books.tier.counts["no_slot"], books.sent) == (1, [])


def test_same_miss_asked_twice_is_one_wish(tmp_path: Path) -> None:
    books = Books(slots=2)
    rank = Store(books, 0, tmp_path)
    begin(books, [rank])
    books.save(list(range(8)))
    answered(books, [rank])
    books.save([100 + i for i in range(8)])
    answered(books, [rank])
    for _ in range(5):
        books.miss(list(range(8)))
    assert len(books.jobs) == 1


# several ranks


def test_a_block_counts_only_where_every_rank_has_it(tmp_path: Path) -> None:
    books = Books(ranks=2)
    ranks = [Store(books, number, tmp_path) for number in range(2)]
    begin(books, ranks)
    entries = books.save(list(range(8)))
    orders = list(books.sent)
    books.sent.clear()
    ranks[0].obey(books, orders)
    assert books.tier.index.get(entries[0].key) is None
    assert entries[0].leases == 1  # the other rank still reads the slot
    ranks[1].obey(books, orders)
    assert books.tier.index.get(entries[1].key) is not None
    assert entries[0].leases == 0


@pytest.mark.parametrize("missing", [0, 1])
def test_a_block_that_one_rank_cannot_read_is_offered_by_none(tmp_path: Path, missing: int) -> None:
    books = Books(slots=2, ranks=2)
    ranks = [Store(books, number, tmp_path) for number in range(2)]
    begin(books, ranks)
    chain = books.save(list(range(8)))
    answered(books, ranks)
    books.save([100 + i for i in range(8)])
    answered(books, ranks)
    (tmp_path / "rank-1" / f"{ranks[1].store._name(books.digest, chain[missing].key)}.kv").unlink()
    books.miss(list(range(8)))
    books.run_jobs()
    assert isinstance(books.sent[0], Stage)
    answered(books, ranks)
    path = books.ledger.match(books.digest, pack_tokens(range(8)), 2).path
    assert len(path) == missing
    assert books.tier.index.get(chain[missing].key) is None
    stats = books.ledger.stats()
    assert (stats.pending, stats.leased, stats.retired) == (0, 0, 0)


def test_each_rank_gets_its_own_bytes_back(tmp_path: Path) -> None:
    books = Books(slots=2, ranks=2)
    ranks = [Store(books, number, tmp_path) for number in range(2)]
    begin(books, ranks)
    slots = [entry.slot for entry in books.save(list(range(8)))]
    held = [[int(rank.slab.rows[slot, 0]) for slot in slots] for rank in ranks]
    answered(books, ranks)
    books.save([100 + i for i in range(8)])
    answered(books, ranks)
    for rank in ranks:
        rank.slab.rows.zero_()
    books.miss(list(range(8)))
    books.run_jobs()
    answered(books, ranks)
    path = books.ledger.match(books.digest, pack_tokens(range(8)), 2).path
    assert [[int(rank.slab.rows[entry.slot, 0]) for entry in path] for rank in ranks] == held


@pytest.mark.parametrize("what", ["stage", "spill"])
def test_orders_of_an_earlier_life_are_not_done(tmp_path: Path, what: str) -> None:
    """One rank rebuilt its pool, and the leader's books begin anew: the slots of the others are somebody else's by
    then."""
    books = Books(slots=2)
    rank = Store(books, 0, tmp_path)
    begin(books, [rank])
    books.save(list(range(8)))
    if what == "stage":
        answered(books, [rank])
        books.save([100 + i for i in range(8)])
        answered(books, [rank])
        books.miss(list(range(8)))
        books.run_jobs()
    orders = list(books.sent)
    assert orders
    assert isinstance(orders[0], Stage) is (what == "stage")
    anew = Books(slots=2)
    anew.tier.begin()
    rank.disk.order(anew.sent[0])
    held = rank.slab.rows.clone()
    files = len(list(tmp_path.rglob("*.kv")))
    rank.obey(books, orders)
    assert torch.equal(rank.slab.rows, held)
    assert len(list(tmp_path.rglob("*.kv"))) == files


def test_an_order_in_hand_ends_before_the_books_begin_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    books = Books(slots=2)
    rank = Store(books, 0, tmp_path)
    begin(books, [rank])
    books.save(list(range(8)))
    answered(books, [rank])
    books.save([100 + i for i in range(8)])
    answered(books, [rank])
    books.miss(list(range(8)))
    books.run_jobs()
    reading, goes_on, read = threading.Event(), threading.Event(), BlockFormat.read

    def slowly(*arguments: Any) -> bool:
        reading.set()
        assert goes_on.wait(30)
        return read(*arguments)

    monkeypatch.setattr(BlockFormat, "read", slowly)
    rank.disk.order(books.sent[0])
    worker = threading.Thread(target=rank.disk.run_pending)
    worker.start()
    assert reading.wait(30)
    anew = Books(slots=2)
    anew.tier.begin()
    telling = threading.Thread(target=rank.disk.order, args=(anew.sent[0],))
    telling.start()
    telling.join(0.2)
    assert telling.is_alive()  # the first block is still being read into its slot
    goes_on.set()
    telling.join(30)
    worker.join(30)
    assert rank.store.counts["read"] == 1  # and the second one was not begun


def test_index_keeps_no_block_without_the_one_that_it_continues() -> None:
    books = Books()
    (first, second) = books.save(list(range(8)))
    records = [books.tier._record(entry) for entry in (first, second)]
    assert books.tier.index.add(0, records[1]) is None
    assert books.tier.index.strays == 1
    assert records[0].parent == root_key(books.digest)


# room


def test_more_than_the_file_system_has_is_refused_with_setting_and_remedy(tmp_path: Path) -> None:
    (tmp_path / "a.kv").write_bytes(b"x" * 1000)
    check_room(tmp_path, 5000, lambda path: 4000)  # with what is there already it fits
    with pytest.raises(Refused, match=r"connector.disk_bytes = 5001: .* has 5000 bytes .*at most 5000 .*disk_path"):
        check_room(tmp_path, 5001, lambda path: 4000)


def test_refusal_at_bring_up_leaves_the_directory_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = DiskPlace(tmp_path, MIB)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10))
        with pytest.raises(Refused, match=r"connector.disk_bytes"):
            place.open("layout", 64)
    place.open("layout", 64).close()


def test_shards_and_layouts_do_not_read_each_other_s_files(tmp_path: Path) -> None:
    one = DiskPlace(tmp_path, MIB, "0/2").open("layout", 64)
    one.close()
    names = set()
    for shard, layout in (("0/2", "layout"), ("1/2", "layout"), ("0/2", "other")):
        store = DiskPlace(tmp_path, MIB, shard).open(layout, 64)
        names.add(store._name(b"n" * 32, b"k" * 16))
        store.close()
    assert len(names) == 3


def test_ranks_that_share_a_path_have_a_store_each_and_find_them_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = DiskPlace(tmp_path, MIB)
    first, second = place.open("layout", 64), place.open("layout", 64)
    assert first.directory != second.directory
    first.close()
    assert place.open("layout", 64).directory == first.directory  # whoever comes next
    caplog.set_level("INFO")
    other = place.open("other", 64)
    assert len(list(tmp_path.iterdir())) == 3
    assert "1 stores of other layouts" not in caplog.text
    assert "2 stores of other layouts or shards" in caplog.text
    other.close()


def test_more_stores_than_a_path_may_have_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_connector.rank.disk._STORES", 1)
    held = DiskPlace(tmp_path, MIB).open("layout", 64)
    with pytest.raises(Refused, match=r"connector.disk_path.*all of its 1 stores are in use"):
        DiskPlace(tmp_path, MIB).open("layout", 64)
    held.close()


def test_leader_s_index_follows_the_store(tmp_path: Path) -> None:
    engine = with_disk(tmp_path)
    engine.serve(PROMPT)
    settle(engine)
    crowd(engine, 3)
    assert [block.ordinal for block in chain_of(engine)] == list(range(10))
