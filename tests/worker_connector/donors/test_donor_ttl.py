"""What a connector says of its donors holds for a while: it says them again in time, and they end when it is silent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dynamo_semkv.bus.publisher import BusPublisher
from dynamo_semkv.bus.server import EmbeddedNats
from dynamo_semkv.bus.subscriber import BusSubscriber
from dynamo_semkv.config.schema import BusConfig
from dynamo_semkv.contracts.donor_events import DonorRegistered
from dynamo_semkv.contracts.identity import StableReplica, new_generation
from dynamo_semkv.evidence.catalog import DonorCatalog
from dynamo_semkv.evidence.limits import CatalogLimits
from dynamo_semkv.outcome.intake import Intake
from dynamo_semkv.testing import ManualClock
from tests.bus.waiting import until
from tests.outcome.build import Listener
from tests.worker_connector.donors.test_registry import SIZE
from tests.worker_connector.donors.test_restatement import fill
from tests.worker_connector.harness import Bench, RecordingSink, engine, prompt, run, settings
from worker_connector.donors.donor_stream import DonorStream
from worker_connector.donors.registry import DonorRegistry
from worker_connector.engine_api.settings import Settings, load_settings
from worker_connector.restatement import RESTATES_PER_TTL, Restatement

HERE = StableReplica("engine-a", 0)


def with_age(max_age: float, **bus: float) -> Settings:
    return replace(settings(), max_donor_age=max_age, bus=BusConfig(**bus))


@pytest.mark.parametrize(
    ("it", "ttl"),
    [
        (settings(), 10_800.0),
        (with_age(600.0), 600.0),
        (with_age(1e6), 10_800.0),  # the bus would forget how the generation began
        (with_age(60.0, stream_max_age_seconds=60.0), 30.0),  # nothing is said again more often than announcements are
    ],
)
def test_the_time_to_live_is_three_restatements(it: Settings, ttl: float) -> None:
    assert it.donor_ttl == ttl == RESTATES_PER_TTL * it.restate_seconds


def test_the_age_is_read_from_the_file_that_routers_read(tmp_path: Path) -> None:
    file = tmp_path / "semkv.yaml"
    file.write_text("evidence: {max_donor_age: 600}\nconnector: {materialization: 'off'}\n")
    found = load_settings(SimpleNamespace(), {"SEMKV_CONFIG": str(file), "DYN_STABLE_ROUTING_ID": "engine-a"})
    assert found.donor_ttl == 600.0


def test_donors_outlive_their_time_to_live_while_the_connector_beats_and_end_when_it_falls_silent() -> None:
    clock = ManualClock()
    bench = Bench(with_age(600.0), clock=clock)
    catalog = DonorCatalog([], clock=clock, limits=CatalogLimits(max_age_seconds=600.0))
    with engine(bench) as running:
        for seed in range(3):
            run(running, prompt(100, seed))
        heard = 0
        for _ in range(200):
            for event in bench.sink.donor_events[heard:]:
                catalog.apply(event)
            heard = len(bench.sink.donor_events)
            catalog.expire()
            assert len([d for d in catalog.donors_of(*stream_of(bench)) if d.creditable]) == 3
            clock.advance(bench.settings.connector.announce_interval_seconds)
            bench.leader.restate_if_due()
        assert {event.ttl for event in bench.sink.events(DonorRegistered)} == {600.0}
        clock.advance(602.0)
        catalog.expire()
        assert catalog.donors_of(*stream_of(bench)) == []


def stream_of(bench: Bench) -> tuple[int, int]:
    event = bench.sink.donor_events[0]
    return event.worker_id, event.dp_rank


def test_no_routine_restatement_begins_while_one_is_being_said() -> None:
    clock = ManualClock()
    sink = RecordingSink()
    registry = DonorRegistry(DonorStream(sink, HERE, 600.0), new_generation(), SIZE, SIZE, 20, clock)
    registry.open()
    fill(registry, 20)
    restatement = Restatement(10.0, clock)
    sink.room = 5
    registry.reset(new_generation(), resident=True)
    clock.advance(100.0)
    assert not restatement.is_routine(registry.events_beyond_donors)
    sink.room = None
    registry.tell_due()
    assert restatement.is_routine(registry.events_beyond_donors)


@pytest.mark.graph
async def test_a_router_on_a_real_broker_ends_the_donors_of_a_connector_that_is_gone(tmp_path: Path) -> None:
    server = EmbeddedNats(tmp_path / "nats")
    server.start()
    bus = BusConfig(url=server.url)
    publisher, subscriber = BusPublisher(bus, "connector"), BusSubscriber(bus, "router")
    clock = ManualClock()
    catalog = DonorCatalog([], clock=clock)
    intake = Intake(
        subscriber,
        Listener(ttl_seconds=30.0).tracker,
        apply_donor_event=catalog.apply,
        announce=lambda said: None,
        monotonic=clock,
    )
    try:
        publisher.start()
        registry = DonorRegistry(DonorStream(publisher, HERE, 600.0), new_generation(), SIZE, SIZE, 20, ManualClock())
        registry.open()
        fill(registry, 3)
        await intake.start()
        await subscriber.start()
        await until("donors", lambda: len(catalog) == 3)
        clock.advance(500.0)
        assert catalog.expire(intake.clock.now()) == 0
        clock.advance(102.0)
        assert catalog.expire(intake.clock.now()) == 3
    finally:
        await intake.close()
        await subscriber.close()
        publisher.close(0.0)
        server.kill()
