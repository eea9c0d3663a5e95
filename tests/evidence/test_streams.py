"""No worker takes the room of the others' streams, held events and donors, whatever ranks and namespaces it invents."""

from __future__ import annotations

from dynamo_semkv.contracts.identity import ReplicaKey, stable_worker_id
from dynamo_semkv.evidence.catalog import DonorCatalog
from dynamo_semkv.evidence.stream import Verdict
from dynamo_semkv.router.replicas import ReplicaDirectory
from dynamo_semkv.testing import EventTape
from tests.evidence.catalogs import TEXT, catalog, creditable, feed, tape_of
from tests.evidence.documents import namespace
from tests.router.fakes import card

HOSTILE = 9


def invent(target: DonorCatalog, ranks: range) -> list[Verdict]:
    """A generation and a donor on each rank."""
    return [v for rank in ranks for v in feed(target, tape_of(f"h{rank}", worker_id=HOSTILE, dp_rank=rank))]


def test_5_000_invented_ranks_take_no_stream_from_others_and_none_that_comes_later() -> None:
    target, _, _ = catalog()
    feed(target, tape_of("d1", worker_id=1))
    assert set(invent(target, range(5_000))) == {Verdict.APPLIED}
    assert creditable(target, 1) == {"d1"}
    for worker in range(2, HOSTILE):
        assert feed(target, tape_of(f"d{worker}", worker_id=worker)) == [Verdict.APPLIED] * 2
        assert creditable(target, worker) == {f"d{worker}"}
    assert creditable(target, HOSTILE, 4_999) == {"h4999"}, "it pushed out its own"
    assert creditable(target, HOSTILE, 0) == set()


def test_a_live_worker_has_the_ranks_of_its_card_and_no_other() -> None:
    target, index, _ = catalog()
    directory = ReplicaDirectory(target.purge_replica, target.readmit_replica, target.set_ranks)
    wire = stable_worker_id("w-a")
    for rank in range(3):  # before anybody knows the worker
        feed(target, tape_of(f"d{rank}", worker_id=wire, dp_rank=rank))
    directory.update_live({ReplicaKey(11, 0): card("w-a"), ReplicaKey(11, 1): card("w-a")})
    assert index.creditable() == {"d0", "d1"}
    assert feed(target, tape_of("x", worker_id=wire, dp_rank=2)) == [Verdict.UNLISTED_RANK] * 2
    assert feed(target, tape_of("x", worker_id=11, dp_rank=2)) == [Verdict.UNLISTED_RANK] * 2
    while target.sweep():
        pass
    assert set(index.donors) == {"d0", "d1"}
    directory.update_live({ReplicaKey(11, rank): card("w-a") for rank in range(3)})
    assert feed(target, tape_of("d2", worker_id=wire, dp_rank=2)) == [Verdict.APPLIED] * 2
    assert target.snapshot()["counts"]["unlisted_rank"] == 4


def test_a_worker_that_went_and_comes_back_with_other_ranks_may_have_them() -> None:
    target, _, _ = catalog()
    target.set_ranks(1, frozenset({0}))
    target.set_ranks(1, frozenset())
    assert feed(target, tape_of("d", worker_id=1, dp_rank=1)) == [Verdict.APPLIED] * 2
    target.set_ranks(1, frozenset({1}))
    assert creditable(target, 1, 1) == {"d"}


def test_gaps_of_invented_ranks_take_no_room_from_a_gap_of_others() -> None:
    """Events that came too early are held until the missing ones come; without room a stream is lost until its next
    generation."""
    target, _, _ = catalog(max_held=40, max_held_per_stream=20)
    for rank in range(40):
        tape = tape_of("a", "b", worker_id=HOSTILE, dp_rank=rank)
        feed(target, tape.events[2:])
    assert target.snapshot()["held_events"] == 40
    tape = tape_of("d1", "d2", "d3", worker_id=1)
    assert feed(target, tape.events[2:]) == [Verdict.HELD] * 2
    assert feed(target, tape.events[:2])[-1] is Verdict.APPLIED
    assert creditable(target, 1) == {"d1", "d2", "d3"}
    assert target.snapshot()["held_events"] < 40


def test_donors_of_one_worker_push_out_its_own_whatever_namespaces_it_invents() -> None:
    target, index, _ = catalog(max_donors=20)
    feed(target, tape_of(*(f"d{n}" for n in range(5)), worker_id=1))
    tape = EventTape(HOSTILE, 0, "g1")
    tape.reset()
    for number in range(100):
        tape.register(f"h{number}", TEXT, namespace(f"tenant-{number}"))
    feed(target, tape)
    assert {f"d{n}" for n in range(5)} < set(index.donors)
    feed(target, tape_of(*(f"e{n}" for n in range(8)), worker_id=2))
    assert {f"d{n}" for n in range(5)} | {f"e{n}" for n in range(8)} < set(index.donors)
    assert len(target) == 20
