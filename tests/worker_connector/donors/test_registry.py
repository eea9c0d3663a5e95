"""DonorRegistry: donors are what is resident, and consumers can follow from the events alone."""

from __future__ import annotations

from dynamo_semkv.contracts.donor_events import (
    NAMESPACE_DIGEST_EXTRA,
    DonorEvicted,
    DonorRegistered,
    GenerationReset,
)
from dynamo_semkv.contracts.identity import Generation, StableReplica, stable_worker_id
from dynamo_semkv.contracts.keys import block_keys
from dynamo_semkv.contracts.namespace import CacheNamespace
from dynamo_semkv.contracts.sketch import DonorSketch
from tests.worker_connector.harness import RecordingSink
from worker_connector.donors.donor_stream import DonorStream
from worker_connector.donors.registry import SHRINK_SECONDS, DonorRegistry
from worker_connector.engine_api.request_view import pack_tokens, unpack_tokens
from worker_connector.ledger.block import BlockEntry
from worker_connector.ledger.ledger import Ledger

SIZE = 4
SPACE = CacheNamespace(model="m", tokenizer="t", kv_layout="l", tokens_per_block=SIZE, tenant="")
DIGEST = SPACE.digest()


class Stand:
    def __init__(self, slots: int = 64, max_donors: int = 10) -> None:
        self.sink = RecordingSink()
        self.stream = DonorStream(self.sink, StableReplica("engine-a", 1))
        self.now = 0.0
        self.registry = DonorRegistry(self.stream, Generation("g1"), SIZE, 2 * SIZE, max_donors, lambda: self.now)
        self.registry.open()
        self.ledger = Ledger(slots, SIZE)

    def save(self, tokens: list[int]) -> BlockEntry:
        raw = pack_tokens(tokens)
        entry: BlockEntry | None = None
        for at in range(0, len(raw), 4 * SIZE):
            block = raw[at : at + 4 * SIZE]
            found = self.ledger.child(DIGEST, entry, block)
            if found is None:
                found = self.ledger.enter(DIGEST, entry, block)
                assert found is not None
                self.ledger.landed(found)
                self.ledger.admit(found)
            entry = found
        assert entry is not None
        self.registry.departed(self.ledger.take_departed())
        return entry

    def donate(self, tokens: list[int]) -> str | None:
        return self.registry.register_resident(SPACE, self.save(tokens))

    def lose(self, tip: BlockEntry, blocks: int) -> None:
        chain = tip.chain()
        self.ledger.remove(chain[-blocks])
        self.registry.departed(self.ledger.take_departed())

    def later(self, seconds: float = SHRINK_SECONDS) -> None:
        self.now += seconds
        self.registry.tell_shrunk()

    def consumer(self) -> dict[str, int]:
        """What a router believes: donor id -> tokens."""
        donors: dict[str, int] = {}
        for event in self.sink.donor_events:
            data = event.data
            if isinstance(data, GenerationReset):
                donors.clear()
            elif isinstance(data, DonorRegistered):
                donors[data.donor_id] = data.token_count
            elif isinstance(data, DonorEvicted):
                donors.pop(data.donor_id)  # evicting what was never registered would be our fault
        return donors


def numbers(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def test_donor_event_says_where_what_and_in_which_namespace() -> None:
    stand = Stand()
    tokens = numbers(40)
    donor_id = stand.donate(tokens)
    (event,) = stand.sink.events(DonorRegistered)
    assert event.donor_id == donor_id
    assert (event.location.worker_id, event.location.dp_rank) == (stable_worker_id("engine-a"), 1)
    assert event.location.tier.value == "host_pinned"
    assert event.namespace.extra[NAMESPACE_DIGEST_EXTRA] == DIGEST.hex()
    assert (event.namespace.model, event.namespace.block_size) == ("m", SIZE)
    sketch = DonorSketch.from_bytes(event.segments[0].provider_metadata)
    expected = DonorSketch.of(unpack_tokens(pack_tokens(tokens)), DIGEST, block_keys(DIGEST, tokens, SIZE))
    assert sketch.to_bytes() == expected.to_bytes()
    assert stand.consumer() == {donor_id: 40}


def test_events_are_numbered_from_a_reset_without_a_gap() -> None:
    stand = Stand()
    stand.donate(numbers(40))
    stand.donate(numbers(40, 100))
    events = stand.sink.donor_events
    assert [event.event_id for event in events] == [0, 1, 2]
    assert isinstance(events[0].data, GenerationReset)


def test_same_prompt_again_is_the_same_donor() -> None:
    stand = Stand()
    assert stand.donate(numbers(40)) == stand.donate(numbers(40))
    assert len(stand.sink.events(DonorRegistered)) == 1
    assert stand.registry.counts["repeated"] == 1


def test_next_turn_supersedes_the_one_before() -> None:
    stand = Stand()
    stand.donate(numbers(16))
    second = stand.donate(numbers(40))
    assert stand.consumer() == {second: 40}
    assert stand.registry.counts["superseded"] == 1


def test_short_prompts_are_no_donors() -> None:
    stand = Stand()
    assert stand.donate(numbers(4)) is None
    assert stand.consumer() == {}


def test_donor_shrinks_by_eighths_and_goes_at_half() -> None:
    stand = Stand()
    tip = stand.save(numbers(64))  # 16 blocks
    donor_id = stand.registry.register_resident(SPACE, tip)
    chain = tip.chain()
    stand.lose(chain[15], 2)
    assert stand.consumer() == {donor_id: 64}  # an eighth is missing
    stand.lose(chain[13], 1)
    assert stand.consumer() == {donor_id: 64}, "a second may pass"
    stand.later()
    assert stand.consumer() == {donor_id: 52}
    assert stand.registry.get(str(donor_id)).tokens == 52  # type: ignore[union-attr]
    stand.lose(chain[12], 7)
    assert stand.consumer() == {}
    assert stand.registry.get(str(donor_id)) is None
    assert len(stand.registry) == 0


def test_shrunk_donor_has_the_sketch_of_what_is_left() -> None:
    stand = Stand()
    tip = stand.save(numbers(64))
    stand.registry.register_resident(SPACE, tip)
    stand.lose(tip, 4)
    stand.later()
    event = stand.sink.events(DonorRegistered)[-1]
    sketch = DonorSketch.from_bytes(event.segments[0].provider_metadata)
    assert sketch.token_count == 48
    assert sketch.checkpoints[-1] == (11, block_keys(DIGEST, numbers(48), SIZE)[-1])


def test_a_chain_that_leaves_bit_by_bit_says_so_once() -> None:
    stand = Stand()
    tip = stand.save(numbers(64))
    stand.registry.register_resident(SPACE, tip)
    chain = tip.chain()
    for last in range(15, 0, -4):
        stand.lose(chain[last], 4)
        stand.later(SHRINK_SECONDS / 8)
    assert len(stand.sink.events(DonorRegistered)) == 1
    assert len(stand.sink.events(DonorEvicted)) == 1
    assert (stand.consumer(), stand.registry.counts["shrunk"]) == ({}, 0)


def test_a_donor_that_goes_on_to_shrink_is_told_a_second_after_it_began() -> None:
    stand = Stand()
    tip = stand.save(numbers(64))
    donor_id = stand.registry.register_resident(SPACE, tip)
    chain = tip.chain()
    stand.lose(chain[15], 3)
    stand.later(SHRINK_SECONDS * 0.9)
    stand.lose(chain[12], 3)  # does not begin the second anew
    assert stand.consumer() == {donor_id: 64}
    stand.later(SHRINK_SECONDS * 0.1)
    assert stand.consumer() == {donor_id: 40}
    assert stand.registry.counts["shrunk"] == 1


def test_donors_that_shrink_to_the_same_prefix_become_one() -> None:
    stand = Stand()
    shared = numbers(40)
    first = stand.save([*shared, *numbers(4, 900)])
    second = stand.save([*shared, *numbers(4, 800)])
    stand.registry.register_resident(SPACE, first)
    stand.registry.register_resident(SPACE, second)
    stand.lose(first, 1)
    stand.lose(second, 1)
    assert len(stand.registry) == 1
    assert len(stand.consumer()) == 1


def test_block_in_the_middle_takes_all_donors_behind_it() -> None:
    stand = Stand()
    shared = numbers(16)
    for other in (800, 900):
        stand.donate([*shared, *numbers(24, other)])
    stand.lose(stand.save(shared), 4)
    assert stand.consumer() == {}


def test_tip_that_left_before_it_was_registered() -> None:
    """The registration runs later than the end of its request: blocks may have gone meanwhile."""
    stand = Stand()
    tip = stand.save(numbers(40))
    stand.ledger.remove(tip)
    departed = stand.ledger.take_departed()
    donor_id = stand.registry.register_resident(SPACE, tip)
    stand.registry.departed(departed)
    assert stand.consumer() == {donor_id: 36}
    gone = stand.save(numbers(40, 500))
    stand.ledger.remove(gone.chain()[0])
    assert stand.registry.register_resident(SPACE, gone) is None


def test_pressure_keeps_consumers_exact_to_an_eighth() -> None:
    """Whatever leaves, a consumer knows no donor that is gone, overstates none by more than half, and a second later by
    an eighth."""
    stand = Stand(slots=40, max_donors=100)
    for n in range(30):
        stand.donate(numbers(4 * (4 + n % 7), 1000 * n))
        believed = stand.consumer()
        assert set(believed) == set(stand.registry._donors)
        for donor in stand.registry._donors.values():
            assert believed[donor.donor_id] <= donor.blocks * SIZE * 2
        stand.later()
        believed = stand.consumer()
        assert set(believed) == set(stand.registry._donors)
        for donor in stand.registry._donors.values():
            assert donor.tip is not None
            assert not donor.tip.removed
            assert donor.blocks == donor.tip.ordinal + 1
            assert believed[donor.donor_id] * 7 <= donor.blocks * SIZE * 8


def test_registry_is_bounded_and_says_who_went() -> None:
    stand = Stand(slots=200, max_donors=3)
    ids = [stand.donate(numbers(8, 1000 * n)) for n in range(5)]
    assert list(stand.consumer()) == ids[2:]
    assert stand.registry.counts["crowded_out"] == 2
    stand.donate(numbers(8, 2000))  # repeated: the youngest now
    stand.donate(numbers(8, 9000))
    assert ids[2] in stand.consumer()
    assert ids[3] not in stand.consumer()


def test_lost_events_are_made_good() -> None:
    """llm-d-router#1737: after a gap a consumer is complete again only by a reset and everything that is still here."""
    stand = Stand()
    kept = stand.donate(numbers(40))
    stand.sink.accepting = False
    lost = stand.donate(numbers(40, 500))
    stand.sink.accepting = True
    assert stand.stream.lost == 1
    assert stand.registry.counts["unsent"] == 1
    stand.registry.reset(Generation("g2"), resident=True)
    assert stand.consumer() == {kept: 40, lost: 40}
    assert [event.event_id for event in stand.sink.donor_events] == [0, 1, 3, 4, 5]
    assert {event.provider_generation for event in stand.sink.events(DonorRegistered)[-2:]} == {"g2"}


def test_events_that_a_reset_would_make_needless_are_counted() -> None:
    stand = Stand(slots=200, max_donors=3)
    for n in range(5):
        stand.donate(numbers(8, 1000 * n))
    assert stand.registry.events_beyond_donors == 4  # two donors that went, said twice each
    stand.registry.reset(Generation("g2"), resident=True)
    assert stand.registry.events_beyond_donors == 0


def test_reset_of_the_cache_leaves_nothing() -> None:
    stand = Stand()
    stand.donate(numbers(40))
    stand.registry.reset(Generation("g2"), resident=False)
    assert stand.consumer() == {}
    assert len(stand.registry) == 0
    assert stand.donate(numbers(40)) is not None


def test_donor_of_the_device_tier_has_full_blocks_only() -> None:
    stand = Stand()
    stand.registry.register_computed(SPACE, DIGEST, pack_tokens(numbers(43)))
    (event,) = stand.sink.events(DonorRegistered)
    assert (event.token_count, event.location.tier.value) == (40, "device")
