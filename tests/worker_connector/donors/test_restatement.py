"""A restatement goes at the pace of acknowledgements, completes, and is not begun again at once."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import nats
import pytest

from dynamo_semkv.bus.publisher import BusPublisher
from dynamo_semkv.bus.server import EmbeddedNats
from dynamo_semkv.config.schema import BusConfig
from dynamo_semkv.contracts.codec import decode_donor_event
from dynamo_semkv.contracts.donor_events import DonorRegistered, GenerationReset
from dynamo_semkv.contracts.identity import StableReplica, new_generation
from dynamo_semkv.contracts.subjects import DONOR_EVENTS, DONOR_STREAM
from dynamo_semkv.testing import ManualClock
from tests.worker_connector.donors.test_registry import DIGEST, SIZE, SPACE, Stand
from tests.worker_connector.harness import RecordingSink, wait_for
from worker_connector.background import Background
from worker_connector.donors.donor_stream import DonorStream
from worker_connector.donors.registry import DonorRegistry
from worker_connector.restatement import CALM_SECONDS, FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS, Restatement

HERE = StableReplica("engine-a", 0)


# when


def test_the_first_loss_is_answered_at_once_and_the_next_ones_later_and_later() -> None:
    clock = ManualClock()
    restatement = Restatement(3600.0, clock)
    assert not restatement.answers_a_loss()
    waits = []
    for _ in range(10):
        restatement.lost()
        began = clock()
        restatement.lost()  # of the same outage
        assert restatement.due_at - began <= LAST_BACKOFF_SECONDS
        clock.advance(max(restatement.due_at - clock(), 0.0))
        waits.append(clock() - began)
        assert restatement.answers_a_loss()
        restatement.begun()
        assert restatement.due_at == math.inf
    assert waits[:3] == [0.0, FIRST_BACKOFF_SECONDS, 2 * FIRST_BACKOFF_SECONDS]
    assert waits == sorted(waits)
    assert waits[-1] == LAST_BACKOFF_SECONDS
    clock.advance(CALM_SECONDS + 1)
    restatement.lost()
    assert restatement.answers_a_loss()


# how fast


def registry_on(sink: RecordingSink, donors: int) -> DonorRegistry:
    registry = DonorRegistry(DonorStream(sink, HERE), new_generation(), SIZE, SIZE, donors, ManualClock())
    registry.open()
    fill(registry, donors)
    return registry


def fill(registry: DonorRegistry, donors: int, tokens: int = 2 * SIZE, first: int = 1) -> None:
    for n in range(donors):
        packed = b"".join((first + n * tokens + i).to_bytes(4, "little") for i in range(tokens))
        assert registry.register_computed(SPACE, DIGEST, packed) is not None


def test_no_more_is_said_than_there_is_room_for_and_nothing_is_forgotten() -> None:
    sink = RecordingSink()
    registry = registry_on(sink, 20)
    sink.messages.clear()
    sink.room = 6  # the reset takes one
    registry.reset(new_generation(), resident=True)
    assert len(sink.messages) == 6
    assert registry.due < math.inf
    for _ in range(3):
        sink.room = 5
        registry.tell_due()
    assert registry.due == math.inf
    kinds = [type(event.data) for event in sink.donor_events]
    assert kinds == [GenerationReset] + [DonorRegistered] * 20
    assert len({event.data.donor_id for event in sink.donor_events[1:]}) == 20
    assert [event.event_id for event in sink.donor_events] == list(range(21, 42))


def test_a_donor_that_goes_before_its_turn_is_neither_registered_nor_evicted() -> None:
    bench = Stand()
    first = bench.save([*range(16)])
    bench.registry.register_resident(SPACE, first)
    bench.sink.room = 1
    bench.registry.reset(new_generation(), resident=True)
    bench.lose(first, 4)
    bench.sink.room = None
    bench.registry.tell_due()
    assert bench.consumer() == {}
    assert isinstance(bench.sink.donor_events[-1].data, GenerationReset)


def test_a_donor_larger_than_the_broker_takes_is_withdrawn_and_makes_no_gap() -> None:
    sink = RecordingSink()
    registry = registry_on(sink, 3)
    sink.largest_payload = 10
    registry.reset(new_generation(), resident=True)
    assert len(registry) == 0
    assert registry.counts["unstorable"] == 3
    sink.largest_payload = 1 << 20
    fill(registry, 1)
    ids = [event.event_id for event in sink.donor_events]
    assert ids == sorted(ids)
    assert len(ids) == len(set(ids))
    assert not sink.events(DonorRegistered) or len(registry) == 1


# on a real broker


class OnBus:
    """A registry with a publisher and the background thread that serves it, as in an engine."""

    def __init__(self, url: str, **bus: int) -> None:
        self.generations = 0
        self.publisher = BusPublisher(BusConfig(url=url, **bus), "restates", on_loss=lambda subject: self._lost())
        self.background = Background("restates", 100, 10.0, lambda: None, lambda: self._due(), lambda: self._on_due())
        self.restatement = Restatement(3600.0, time.monotonic)
        self.registry = DonorRegistry(
            DonorStream(self.publisher, HERE), new_generation(), SIZE, SIZE, 100_000, time.monotonic
        )

    def start(self) -> None:
        self.publisher.start()
        self.background.start()
        self.background.submit(self.registry.open)

    def close(self) -> None:
        self.background.close()
        self.publisher.close(0.0)

    def _lost(self) -> None:
        self.background.submit(self.restatement.lost)

    def _due(self) -> float:
        return min(self.restatement.due_at, self.registry.due)

    def _on_due(self) -> None:
        if self.restatement.answers_a_loss():
            self.restatement.begun()
            self.generations += 1
            self.registry.reset(new_generation(), resident=True)
        self.registry.tell_due()

    @property
    def at_rest(self) -> bool:
        return self.publisher.stats().buffered == 0 and self._due() == math.inf and self.background.drain(0.0)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedNats]:
    server = EmbeddedNats(tmp_path / "nats")
    server.start()
    yield server
    server.kill()


async def donors_on(url: str) -> tuple[int, bool]:
    """(donors registered since the last reset, whether event ids have no gap since then), as the stream has them."""
    client = await nats.connect(url)
    try:
        js = client.jetstream()
        messages = (await js.stream_info(DONOR_STREAM)).state.messages
        reader = await js.subscribe(f"{DONOR_EVENTS}.>", ordered_consumer=True)
        donors: set[str] = set()
        ids: list[int] = []
        for _ in range(messages):
            message = await reader.next_msg(30.0)
            event = decode_donor_event(message.data, (message.headers or {}).get("content-type", ""))
            if isinstance(event.data, GenerationReset):
                donors, ids = set(), []
            elif isinstance(event.data, DonorRegistered):
                donors.add(event.data.donor_id)
            else:
                donors.discard(event.data.donor_id)
            ids.append(event.event_id)
        return len(donors), ids == list(range(ids[0], ids[0] + len(ids)))
    finally:
        await client.close()


@pytest.mark.graph
@pytest.mark.parametrize(("donors", "buffered"), [(300, 100), (5_000, 10_000)])
async def test_what_is_here_is_whole_on_the_bus_after_the_buffer_overflowed(
    broker: EmbeddedNats, donors: int, buffered: int
) -> None:
    broker.kill()
    bus = OnBus(broker.url, max_buffered_messages=buffered, max_buffered_bytes=8 << 20)
    bus.start()
    try:
        bus.background.submit(lambda: fill(bus.registry, donors))
        assert bus.background.drain(60.0)
        before = bus.publisher.stats().dropped
        while bus.publisher.stats().dropped == before:  # until the buffer overflows
            bus.publisher.publish("semkv.reports.x.0", bytes(64 * 1024))
        dropped = bus.publisher.stats().dropped
        broker.start()
        wait_for(lambda: bus.generations > 0 or dropped == 0, 60.0)
        wait_for(lambda: bus.at_rest, 60.0)
        assert await donors_on(broker.url) == (donors, True)
        assert bus.generations <= 3
        assert bus.publisher.stats().dropped == dropped, "a restatement pushes nothing out"
    finally:
        bus.close()


@pytest.mark.graph
async def test_a_donor_above_the_brokers_max_payload_is_withdrawn_and_the_others_stay(tmp_path: Path) -> None:
    server = EmbeddedNats(tmp_path / "nats", settings="max_payload: 4096")
    server.start()
    bus = OnBus(server.url)
    bus.start()
    try:
        wait_for(lambda: bus.publisher.stats().connected)
        bus.background.submit(lambda: fill(bus.registry, 50))
        bus.background.submit(lambda: fill(bus.registry, 1, 16 * 1024, first=1_000_000))
        assert bus.background.drain(60.0)
        wait_for(lambda: bus.at_rest, 60.0)
        assert len(bus.registry) == 50
        assert bus.registry.counts["unstorable"] == 1
        assert bus.generations <= 1
        assert await donors_on(server.url) == (50, True)
    finally:
        bus.close()
        server.kill()
