"""A donor ends when it was not registered again in time, whatever became of whoever registered it."""

from __future__ import annotations

import math

import pytest

from dynamo_semkv.contracts.codec import MSGPACK, decode_donor_event, encode_donor_event
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.location import Tier
from dynamo_semkv.evidence.chains import Slots
from dynamo_semkv.evidence.expiry import Expiry
from dynamo_semkv.evidence.fingerprint import FingerprintProvider
from dynamo_semkv.testing import EventTape
from tests.evidence.catalogs import NS, TEXT, catalog, creditable, feed, tape_of
from tests.evidence.documents import query_of

HOUR = 3_600.0


def test_donors_of_a_silent_emitter_end_and_are_no_evidence_any_more() -> None:
    provider = FingerprintProvider()
    target, index, clock = catalog(provider, max_age_seconds=3 * HOUR)
    feed(target, tape_of("a", "b"))
    clock.advance(3 * HOUR - 1)
    assert target.expire() == 0
    assert {match.donor_id for match in provider.lookup(query_of(TEXT, NS))} == {"a", "b"}
    clock.advance(3)
    assert target.expire() == 2
    assert len(target) == 0
    assert index.donors == {}
    assert not provider.lookup(query_of(TEXT, NS))
    assert target.counts["expired"] == 2


def test_a_donor_that_is_registered_again_in_time_stays() -> None:
    target, _, clock = catalog(max_age_seconds=3 * HOUR)
    tape = tape_of("a", "b")
    feed(target, tape)
    for _ in range(6):
        clock.advance(HOUR)
        target.apply(tape.register("a", TEXT, NS))
        target.expire()
    assert creditable(target) == {"a"}


def test_a_restatement_in_a_new_generation_counts_from_then() -> None:
    target, _, clock = catalog(max_age_seconds=3 * HOUR)
    feed(target, tape_of("a", "b"))
    clock.advance(2 * HOUR)
    again = EventTape(generation="g2")
    again.reset()
    again.register("a", TEXT, NS)
    feed(target, again)
    clock.advance(2 * HOUR)
    target.expire()
    assert creditable(target) == {"a"}


@pytest.mark.parametrize(
    ("ttl", "max_age", "seconds"),
    [
        (60.0, 3 * HOUR, 60.0),
        (1e10, 3 * HOUR, 3 * HOUR),
        (None, 3 * HOUR, 3 * HOUR),
        (60.0, math.inf, 60.0),
        (0.0, HOUR, 0.0),
    ],
)
def test_the_time_to_live_is_the_emitters_and_at_most_ours(ttl: float | None, max_age: float, seconds: float) -> None:
    target, _, clock = catalog(max_age_seconds=max_age)
    tape = EventTape()
    tape.reset()
    tape.register("a", TEXT, NS, ttl=ttl)
    feed(target, tape)
    if seconds:
        clock.advance(seconds - 1)
        target.expire()
        assert creditable(target) == {"a"}
    clock.advance(4)
    target.expire()
    assert creditable(target) == set()


def test_an_emitter_that_says_nothing_of_it_has_donors_for_ever_where_nothing_bounds_them() -> None:
    target, _, clock = catalog()
    feed(target, tape_of("a"))
    clock.advance(1e9)
    assert target.expire() == 0


def test_what_is_read_back_later_is_as_old_as_the_bus_says() -> None:
    target, _, _ = catalog(max_age_seconds=HOUR)
    tape = tape_of("old", "young")
    for event, stored_at in zip(tape, (0.0, 10.0, 3_000.0), strict=True):
        target.apply(event, stored_at)
    assert target.expire(3_700.0) == 1
    assert creditable(target) == {"young"}


def test_moving_or_losing_a_part_of_a_donor_does_not_make_it_younger() -> None:
    target, _, clock = catalog(max_age_seconds=HOUR)
    tape = tape_of()
    tape.register("moved", TEXT, NS)
    tape.register("cut", TEXT, NS, cuts=(320,))
    feed(target, tape)
    clock.advance(HOUR / 2)
    feed(target, [tape.relocate("moved", tape.here(Tier.DISK)), tape.evict("cut", [1])])
    assert creditable(target) == {"moved", "cut"}
    clock.advance(HOUR / 2 + 2)
    assert target.expire() == 2


def test_many_that_end_at_once_leave_in_steps() -> None:
    target, index, clock = catalog(max_age_seconds=HOUR)
    feed(target, tape_of(*[f"d{n}" for n in range(100)]))
    clock.advance(HOUR + 2)
    steps = []
    while gone := target.expire(limit=30):
        steps.append(gone)
    assert steps == [30, 30, 30, 10]
    assert index.donors == {}


def test_donors_that_went_otherwise_are_not_expired_again() -> None:
    target, _, clock = catalog(max_age_seconds=HOUR)
    tape = tape_of("a", "b")
    feed(target, tape)
    target.apply(tape.evict("a"))
    target.apply(EventTape(generation="g2").reset())
    target.sweep()
    clock.advance(2 * HOUR)
    assert target.expire() == 0


def test_spans_are_few_however_long_donors_may_live() -> None:
    slots = Slots()
    expiry = Expiry(slots, 30 * 86_400.0)
    for n in range(20_000):
        member = slots.take()
        expiry.add(member, n * 129.0)
        expiry.discard(member)
    assert len(expiry._spans) <= 4_097
    assert expiry.due(math.inf) is None


@pytest.mark.parametrize("ttl", [-1.0, math.nan, math.inf])
def test_a_time_to_live_that_is_none_is_refused_with_its_name(ttl: float) -> None:
    tape = EventTape()
    raw = encode_donor_event(tape.register("a", TEXT, NS, ttl=ttl), MSGPACK)
    with pytest.raises(ContractError, match=r"donor_registered\.ttl"):
        decode_donor_event(raw, MSGPACK)
