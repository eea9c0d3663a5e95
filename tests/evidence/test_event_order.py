"""Any order in which live and replayed events can arrive ends in the state that the tape in order gives (Mooncake
P#4159)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamo_semkv.contracts.donor_events import DonorEvent, PurgeAll
from dynamo_semkv.contracts.location import Tier
from dynamo_semkv.evidence.catalog import DonorCatalog
from dynamo_semkv.testing import EventTape, ManualClock
from tests.evidence.documents import document, namespace

TEXT = document(1, 120)
NS = namespace()
STEPS = ["register", "evict", "relocate", "purge"]


@st.composite
def tapes(draw: st.DrawFn, generations: int = 1) -> EventTape:
    tape = EventTape()
    for generation in range(generations):
        tape.restart(f"g{generation}")
        for step in draw(st.lists(st.sampled_from(STEPS), max_size=12)):
            donor = draw(st.sampled_from("abc"))
            if step == "register":
                tape.register(donor, TEXT, NS)
            elif step == "evict":
                tape.evict(donor)
            elif step == "relocate":
                tape.relocate(donor, tape.here(draw(st.sampled_from(list(Tier)))))
            else:
                tape.purge(PurgeAll())
    return tape


def state(events: list[DonorEvent]) -> dict[str, tuple[str, object]]:
    catalog = DonorCatalog(clock=ManualClock())
    for event in events:
        catalog.apply(event)
    return {d.donor_id: (d.generation, d.location) for d in catalog.donors_of(1, 0) if d.creditable}


@given(tapes(), st.data())
def test_mooncake_4159_any_permutation_with_duplicates_converges(tape: EventTape, data: st.DataObject) -> None:
    again = data.draw(st.lists(st.sampled_from(tape.events), max_size=6))
    arrived = data.draw(st.permutations([*tape.events, *again]))
    assert state(arrived) == state(tape.events)


@given(tapes(generations=3), st.data())
def test_mooncake_4159_a_replay_mixed_with_live_events_brings_nothing_back(
    tape: EventTape, data: st.DataObject
) -> None:
    """The consumer followed the stream, lost its connection, and gets a replay from some point while live events go
    on."""
    seen = data.draw(st.integers(0, len(tape.events)))
    replayed_from = data.draw(st.integers(0, seen))
    live, replay = tape.events[seen:], tape.events[replayed_from:]
    mixed: list[DonorEvent] = []
    while live or replay:
        source = live if live and (not replay or data.draw(st.booleans())) else replay
        mixed.append(source.pop(0))
    assert state([*tape.events[:seen], *mixed]) == state(tape.events)


@given(tapes(generations=2), st.data())
def test_a_stream_with_holes_never_credits_what_the_whole_tape_does_not(tape: EventTape, data: st.DataObject) -> None:
    """Losing events costs credit. It may never leave a donor credited that the whole tape removed, once a later event
    shows the gap."""
    lost = data.draw(st.sets(st.integers(0, len(tape.events) - 1)))
    arrived = [event for n, event in enumerate(tape.events) if n not in lost or n == len(tape.events) - 1]
    assert state(arrived).items() <= state(tape.events).items()
