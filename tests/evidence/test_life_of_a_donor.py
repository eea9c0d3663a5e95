"""From the bus to the score sheet: an event that cannot be read costs its own stream its credit until a reset, and a
donor is worth less on a slower tier, and nothing once it is evicted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dynamo_semkv.bus.subscription import Message
from dynamo_semkv.config.schema import ScoringConfig
from dynamo_semkv.contracts import subjects
from dynamo_semkv.contracts.codec import MSGPACK, encode_donor_event
from dynamo_semkv.contracts.donor_events import MAX_EVENT_BYTES, DonorEvent
from dynamo_semkv.contracts.identity import ReplicaKey
from dynamo_semkv.contracts.location import Tier, WorkerLocation
from dynamo_semkv.evidence.catalog import DonorCatalog
from dynamo_semkv.evidence.fingerprint import FingerprintProvider
from dynamo_semkv.outcome.intake import Intake
from dynamo_semkv.scoring.choose import choose
from dynamo_semkv.scoring.replica_view import ReplicaView
from dynamo_semkv.testing import EventTape, ManualClock
from tests.evidence.documents import document, joined, namespace, query_of
from tests.outcome.build import Listener
from tests.outcome.fakes import FakeBroker, FakeSubscriber

NS = namespace()
TEXTS = [document(n, 1_500) for n in range(4)]
A, B = ReplicaKey(1, 0), ReplicaKey(2, 0)


class Router:
    def __init__(self) -> None:
        self.provider = FingerprintProvider()
        self.catalog = DonorCatalog([self.provider], clock=ManualClock())
        self.intake = Intake(
            FakeSubscriber(FakeBroker(ManualClock())),
            Listener(ttl_seconds=30.0, settle_seconds=1.0).tracker,
            apply_donor_event=self.catalog.apply,
            announce=lambda announcement: None,
            monotonic=lambda: 0.0,
            wall=lambda: 0.0,
        )

    def hear(self, raw: bytes, content_type: str = MSGPACK) -> None:
        self.intake.on_donor_event(Message(subjects.DONOR_EVENTS, raw, content_type, 1, 0.0))

    def told(self, *events: DonorEvent) -> None:
        for event in events:
            self.hear(encode_donor_event(event, MSGPACK))

    def finds(self, n: int) -> set[str]:
        prompt = joined(document(90, 50), TEXTS[n])
        return {match.donor_id for match in self.provider.lookup(query_of(prompt, NS))}


POISON: dict[str, Callable[[bytes], tuple[bytes, str]]] = {
    "cut": lambda raw: (raw[: len(raw) // 2], MSGPACK),
    "oversized": lambda raw: (raw + bytes(MAX_EVENT_BYTES), MSGPACK),
    "noise": lambda raw: (b"\xff" * 64, MSGPACK),
    "another content": lambda raw: (raw, "application/json"),
    "not a number": lambda raw: (
        b'{"schema_version": 1, "event_id": NaN, "worker_id": 1, "dp_rank": 0}',
        "application/json",
    ),
}


@pytest.mark.parametrize("poison", POISON)
def test_an_event_that_cannot_be_read_quarantines_its_own_stream_until_a_reset(poison: str) -> None:
    router, one, other = Router(), EventTape(worker_id=1), EventTape(worker_id=2)
    router.told(one.reset(), other.reset(), one.register("a", TEXTS[0], NS), other.register("b", TEXTS[1], NS))
    assert (router.finds(0), router.finds(1)) == ({"a"}, {"b"})
    router.hear(*POISON[poison](encode_donor_event(one.evict("a"), MSGPACK)))
    assert sum(count for name, count in router.intake.counts.items() if name != "donors.messages") == 1
    router.told(one.register("c", TEXTS[2], NS))
    assert (router.finds(0), router.finds(2)) == (set(), set()), "what was lost may have been any of them going"
    assert router.finds(1) == {"b"}, "nobody else pays for it"
    router.told(one.reset("g2"), one.register("c", TEXTS[2], NS))
    assert (router.finds(0), router.finds(2), router.finds(1)) == (set(), {"c"}, {"b"})


def test_a_donor_keeps_its_credit_on_a_slower_tier_and_at_less() -> None:
    router, tape = Router(), EventTape(worker_id=1)
    router.told(tape.reset(), tape.register("a", TEXTS[0], NS))
    prompt = query_of(joined(TEXTS[0], document(91, 50)), NS)
    worth = []
    for tier in (Tier.DEVICE, Tier.HOST_PINNED, Tier.DISK):
        router.told(tape.relocate("a", WorkerLocation(1, 0, tier)))
        (match,) = router.provider.lookup(prompt)
        assert match.location == WorkerLocation(1, 0, tier)
        views = [ReplicaView(replica, queued_prefill_tokens=0) for replica in (A, B)]
        sheet = choose(views, [(match, A)], len(prompt.tokens), ScoringConfig(), b"seed")
        assert sheet.rows[0].replica == A
        worth.append({row.replica: row.evidence for row in sheet.rows}[A])
    assert worth[0] > worth[1] > worth[2] > 0
    router.told(tape.evict("a"))
    assert not router.provider.lookup(prompt)
