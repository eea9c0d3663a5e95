"""What a router does with what it knows while no request comes."""

from __future__ import annotations

from dynamo_semkv.bus.subscription import Message
from dynamo_semkv.config.load import load_config
from dynamo_semkv.contracts import subjects
from dynamo_semkv.contracts.codec import MSGPACK, encode_donor_event
from dynamo_semkv.router.knowledge import Knowledge
from tests.evidence.catalogs import tape_of


def test_donors_that_are_not_said_again_end_at_the_configured_age_by_the_brokers_clock() -> None:
    loaded = load_config(env={"SEMKV_EVIDENCE__MAX_DONOR_AGE": "600"})
    knowledge = Knowledge(loaded, "router-1")
    tape = tape_of("a", "b")

    def stored(at: float, number: int) -> None:
        raw = encode_donor_event(tape.events[number], MSGPACK)
        knowledge.intake.on_donor_event(Message(subjects.DONOR_EVENTS, raw, MSGPACK, number + 1, at))

    stored(1_000.0, 0)
    stored(1_000.0, 1)
    knowledge.tidy()
    assert len(knowledge.catalog) == 1, "the broker's clock is far from ours, and nothing is old by its own"
    stored(1_700.0, 2)
    knowledge.tidy()
    assert [donor.donor_id for donor in knowledge.catalog.donors_of(1, 0)] == ["b"]
