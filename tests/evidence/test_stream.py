"""Gaps, restarts, generations and absent workers: each public report about event order has its test here, named after
it."""

from __future__ import annotations

import pytest

from dynamo_semkv.contracts.donor_events import (
    DonorEvent,
)
from dynamo_semkv.evidence.stream import RETIRED_KEPT, Verdict
from dynamo_semkv.testing import EventTape
from tests.evidence.catalogs import NS, TEXT, catalog, creditable, feed, tape_of


def test_kthena_1428_restarted_worker_with_the_same_name_is_not_warm() -> None:
    target, index, _ = catalog()
    tape = tape_of("a", "b")
    feed(target, tape)
    late = tape.register("late", TEXT, NS)
    restarted = tape.restart("g2").register("c", TEXT, NS)
    assert feed(target, [tape.events[-2], restarted]) == [Verdict.APPLIED, Verdict.APPLIED]
    assert creditable(target) == {"c"}
    assert target.apply(late) is Verdict.STALE_GENERATION
    assert creditable(target) == {"c"} == index.creditable()
    assert target.get("a") is None


@pytest.mark.parametrize("announce", [True, False])
def test_a_restart_is_recognised_with_and_without_a_reset(announce: bool) -> None:
    """SemBlend's emitter starts again at 0 with wall-clock milliseconds as generation, and sends no reset."""
    target, _, _ = catalog()
    feed(target, tape_of("a", generation=1_700_000_000_000))
    tape = EventTape().restart(1_700_000_099_999, announce=announce)
    tape.register("b", TEXT, NS)
    feed(target, tape)
    assert creditable(target) == {"b"}


def test_kthena_1550_restart_of_the_router_alone_loses_nothing() -> None:
    """A new catalog replays the same tape and arrives at the same donors."""
    tape = tape_of("a", "b", "c")
    tape.evict("b")
    first, second = catalog()[0], catalog()[0]
    feed(first, tape)
    feed(second, tape)
    assert creditable(first) == creditable(second) == {"a", "c"}


def test_llm_d_router_1737_a_lost_event_quarantines_until_a_reset() -> None:
    target, index, _ = catalog()
    tape = tape_of("a", "b")
    lost = tape.evict("a")
    after = tape.register("c", TEXT, NS)
    feed(target, [event for event in tape if event not in (lost, after)])
    assert target.apply(after) is Verdict.HELD
    assert creditable(target) == set() == index.creditable()
    assert target.counts["held"] == 1
    assert target.snapshot()["streams"][0]["quarantined"] is True
    feed(target, [tape.reset("g2"), tape.register("d", TEXT, NS)])
    assert creditable(target) == {"d"}


def test_llm_d_router_1737_the_missing_event_releases_the_quarantine() -> None:
    target, index, _ = catalog()
    tape = tape_of("a", "b")
    lost = tape.evict("a")
    after = tape.register("c", TEXT, NS)
    feed(target, [event for event in tape if event is not lost])
    assert creditable(target) == set()
    assert target.apply(lost) is Verdict.APPLIED
    assert creditable(target) == {"b", "c"} == index.creditable()
    assert target.apply(after) is Verdict.DUPLICATE


def test_llm_d_router_1737_a_consumer_that_joins_late_trusts_nothing_before_a_reset() -> None:
    target, _, _ = catalog()
    tape = tape_of("a", "b", "c")
    assert feed(target, tape.events[2:]) == [Verdict.HELD, Verdict.HELD]
    assert creditable(target) == set()
    feed(target, [tape.reset("g1"), tape.register("d", TEXT, NS)])
    assert creditable(target) == {"d"}


def test_a_gap_too_wide_to_hold_waits_for_a_reset() -> None:
    target, _, _ = catalog(max_held_per_stream=3)
    tape = tape_of("a")
    lost = tape.evict("nobody")
    for n in range(5):
        tape.register(f"n{n}", TEXT, NS)
    verdicts = feed(target, [event for event in tape if event is not lost])
    assert verdicts[-2:] == [Verdict.LOST, Verdict.LOST]
    target.apply(lost)
    assert creditable(target) == set(), "the held events are gone, so the gap can no longer be filled"
    assert target.snapshot()["held_events"] == 0
    target.apply(tape.reset("g1"))
    target.apply(tape.register("z", TEXT, NS))
    assert creditable(target) == {"z"}


def test_held_events_are_bounded_over_all_streams() -> None:
    target, _, _ = catalog(max_held=10)
    for worker in range(20):
        tape = EventTape(worker)
        tape.skip(5)
        tape.register(f"d{worker}", TEXT, NS)
        feed(target, tape)
    assert target.snapshot()["held_events"] == 10
    assert target.counts["lost"] == 10


def test_a_replayed_tape_changes_nothing() -> None:
    target, index, _ = catalog()
    tape = tape_of("a", "b")
    feed(target, tape)
    told = list(index.told)
    assert set(feed(target, tape)) == {Verdict.DUPLICATE}
    assert index.told == told


def test_tokenspeed_166_a_reset_repeated_in_the_stream_is_idempotent_and_visible() -> None:
    target, _, _ = catalog()
    tape = tape_of("a")
    feed(target, tape)
    feed(target, [tape.reset("g1") for _ in range(5)])
    assert creditable(target) == set()
    assert target.counts["applied"] == 7
    target.apply(tape.register("b", TEXT, NS))
    assert creditable(target) == {"b"}


def test_etcd_12291_generations_have_no_order_but_the_streams() -> None:
    """A generation made from a wall clock may go backwards; the clock of the consumer does not matter either."""
    target, _, clock = catalog()
    tape = tape_of("a", generation=1_700_000_000_000)
    feed(target, tape)
    clock.advance(3_600)
    assert creditable(target) == {"a"}
    clock.advance(-7_200)
    feed(target, [tape.restart(5).events[-1], tape.register("b", TEXT, NS)])
    assert creditable(target) == {"b"}


def test_integer_and_text_generations_are_one() -> None:
    target, _, _ = catalog()
    tape = tape_of("a", generation=7)
    feed(target, tape)
    tape.generation = "7"
    assert target.apply(tape.evict("a")) is Verdict.APPLIED
    assert len(target) == 0


def test_retired_generations_are_remembered_within_bounds() -> None:
    target, _, _ = catalog()
    tape = EventTape()
    for n in range(RETIRED_KEPT + 20):
        tape.restart(f"g{n}").register(f"d{n}", TEXT, NS)
    feed(target, tape)
    recent = tape.events[-4]
    assert target.apply(recent) is Verdict.STALE_GENERATION
    assert creditable(target) == {f"d{RETIRED_KEPT + 19}"}


def test_llm_d_kv_cache_357_a_rank_is_a_replica_of_its_own() -> None:
    target, _, _ = catalog()
    feed(target, tape_of("a", dp_rank=1))
    assert creditable(target, dp_rank=1) == {"a"}
    assert creditable(target, dp_rank=0) == set()
    assert target.purge_replica(1, 0) == 0
    assert creditable(target, dp_rank=1) == {"a"}


def test_a_worker_that_leaves_takes_its_donors_and_late_events_do_not_bring_them_back() -> None:
    target, index, _ = catalog()
    tape = tape_of("a")
    feed(target, tape)
    assert target.purge_replica(1, 0) == 1
    assert creditable(target) == set()
    assert target.apply(tape.register("late", TEXT, NS)) is Verdict.APPLIED
    assert target.apply(tape.reset("g1")) is Verdict.APPLIED
    assert target.apply(tape.register("later", TEXT, NS)) is Verdict.APPLIED
    assert creditable(target) == set() == index.creditable()
    feed(target, tape.restart("g2").events[-1:])
    target.apply(tape.register("b", TEXT, NS))
    assert creditable(target) == {"b"}


def test_a_worker_that_was_only_out_of_sight_gets_its_credit_back_by_generation() -> None:
    target, _, _ = catalog()
    tape = tape_of("a", "b")
    feed(target, tape)
    target.purge_replica(1, 0)
    target.apply(tape.evict("b"))
    assert target.readmit_replica(1, 0, "another") is False
    assert creditable(target) == set()
    assert target.readmit_replica(1, 0, "g1") is True
    assert creditable(target) == {"a"}
    assert target.readmit_replica(9, 9, "g1") is False


def test_readmission_does_not_lift_a_quarantine() -> None:
    target, _, _ = catalog()
    tape = tape_of("a")
    tape.skip()
    tape.register("b", TEXT, NS)
    feed(target, tape)
    target.purge_replica(1, 0)
    target.readmit_replica(1, 0, "g1")
    assert creditable(target) == set()


def test_an_absent_worker_is_forgotten_after_a_while_and_stays_dead() -> None:
    target, index, clock = catalog(absent_seconds=60)
    tape = tape_of("a", "b")
    feed(target, tape)
    target.purge_replica(1, 0)
    clock.advance(59)
    assert target.forget_absent() == 0
    clock.advance(1)
    assert target.forget_absent() == 1
    assert target.sweep() == 2
    assert len(target) == 0
    assert index.donors == {}
    assert target.apply(tape.register("late", TEXT, NS)) is Verdict.STALE_GENERATION
    assert target.readmit_replica(1, 0, "g1") is False


def test_streams_are_bounded_and_silent_ones_make_room() -> None:
    target, _, _ = catalog(max_streams=3)
    for worker in range(3):
        feed(target, tape_of(*([f"d{worker}"] if worker else []), worker_id=worker))
    assert feed(target, tape_of("d3", worker_id=3)) == [Verdict.APPLIED, Verdict.APPLIED], "0 had no donors"
    assert feed(target, tape_of("d4", worker_id=4)) == [Verdict.TOO_MANY_STREAMS] * 2
    assert creditable(target, 1) == {"d1"}


def test_a_reset_of_a_large_stream_costs_one_step_and_is_swept_in_small_ones() -> None:
    target, index, _ = catalog()
    feed(target, tape_of(*[f"d{n}" for n in range(200)]))
    target.apply(EventTape().restart("g2").events[0])
    assert index.creditable() == set(), "no credit from the moment of the reset"
    assert len(index.donors) > 150, "and no stall either"
    while target.sweep(64):
        pass
    assert index.donors == {}
    assert len(target) == 0


def test_a_donor_registered_again_after_a_reset_survives_the_sweep() -> None:
    target, index, _ = catalog()
    feed(target, tape_of(*[f"d{n}" for n in range(100)]))
    tape = EventTape().restart("g2")
    tape.register("d99", TEXT, NS)
    feed(target, tape)
    while target.sweep(64):
        pass
    assert set(index.donors) == {"d99"}
    assert creditable(target) == {"d99"}


def test_event_ids_at_the_end_of_u64_do_not_overflow() -> None:
    target, _, _ = catalog()
    first = EventTape().reset()
    last = DonorEvent(schema_version=1, event_id=2**64 - 1, worker_id=1, dp_rank=0, data=first.data)
    assert target.apply(last) is Verdict.APPLIED
