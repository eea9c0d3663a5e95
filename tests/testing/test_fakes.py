"""The fakes that users get do what they say, and go through the real codec."""

from __future__ import annotations

import threading

import pytest

from dynamo_semkv.contracts.codec import JSON, MSGPACK, decode_donor_event, encode_donor_event
from dynamo_semkv.contracts.donor_events import PurgeAll
from dynamo_semkv.contracts.location import Tier
from dynamo_semkv.evidence.provider import EvidenceProvider
from dynamo_semkv.testing import EventTape, ManualClock, ScriptedProvider
from tests.evidence.documents import document, namespace, query_of

NS = namespace()
QUERY = query_of(document(1, 64), NS)


def test_the_clock_moves_when_told_and_backwards_too() -> None:
    clock = ManualClock(5.0)
    clock.advance(2.5)
    clock.advance(-4.0)
    assert clock() == 3.5 == clock.now


def test_the_script_is_followed_and_its_last_step_repeated() -> None:
    provider: EvidenceProvider = ScriptedProvider(ValueError("x"), (), lambda query: [] if query is QUERY else ())
    with pytest.raises(ValueError, match="x"):
        provider.lookup(QUERY)
    assert provider.lookup(QUERY) == ()
    assert provider.lookup(QUERY) == []
    assert provider.lookup(QUERY) == []


def test_a_hanging_step_ends_when_released() -> None:
    provider = ScriptedProvider(()).then()
    provider.then(provider.hang)
    provider.lookup(QUERY)
    thread = threading.Thread(target=provider.lookup, args=(QUERY,), name="asker")
    thread.start()
    assert provider.entered.wait(10)
    provider.release()
    thread.join(10)
    assert not thread.is_alive()
    assert provider.threads[-1] == "asker"


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
def test_every_event_of_a_tape_survives_the_wire(content_type: str) -> None:
    tape = EventTape(worker_id=2**64 - 1, dp_rank=3, generation=17)
    tape.reset()
    tape.register("a", document(1, 600), NS, cuts=(128,))
    tape.relocate("a", tape.here(Tier.DISK))
    tape.evict("a", [0])
    tape.evict("a")
    tape.purge(PurgeAll())
    tape.restart("next").register("b", document(2, 100), NS)
    for event in tape:
        assert decode_donor_event(encode_donor_event(event, content_type), content_type) == event


def test_a_tape_counts_as_an_emitter_does() -> None:
    tape = EventTape()
    tape.reset()
    tape.evict("x")
    tape.skip(3)
    tape.evict("y")
    tape.restart("g2")
    assert [event.event_id for event in tape] == [0, 1, 5, 0]
