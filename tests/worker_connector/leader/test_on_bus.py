"""The connector with its threads, on a real broker: what routers see, and what an outage costs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_semkv.bus.publisher import BusPublisher
from dynamo_semkv.bus.server import EmbeddedNats
from dynamo_semkv.bus.subscriber import BusSubscriber
from dynamo_semkv.bus.subscription import Message
from dynamo_semkv.config.schema import BusConfig
from dynamo_semkv.contracts.announcement import ReplicaAnnouncement
from dynamo_semkv.contracts.codec import (
    MSGPACK,
    decode_announcement,
    decode_donor_event,
    decode_report,
    donor_action,
    encode_hint_delivery,
)
from dynamo_semkv.contracts.donor_events import DonorRegistered, GenerationReset
from dynamo_semkv.contracts.evidence import Bucket
from dynamo_semkv.contracts.hints import HINT_DELIVERY_VERSION, DonorHint, HintDelivery, KvHintsEnvelope
from dynamo_semkv.contracts.identity import StableReplica, new_route_id
from dynamo_semkv.contracts.keys import as_tokens, prompt_key
from dynamo_semkv.contracts.load_plan import ExpectedMode
from dynamo_semkv.contracts.namespace import tenant_scope
from dynamo_semkv.contracts.report import MaterializationReport, Outcome, Reason
from dynamo_semkv.contracts.subjects import ANNOUNCEMENT_STREAM, DONOR_STREAM, REPORT_STREAM, hints
from tests.worker_connector.harness import SMALL, prompt, run, wait_for
from worker_connector.assembly import LeaderParts
from worker_connector.reference_engine.engine.config import ConnectorSpec, EngineConfig
from worker_connector.reference_engine.engine.engine import Engine
from worker_connector.reference_engine.models.presets import ModelSource
from worker_connector.scheduler import SemkvConnectorScheduler
from worker_connector.worker import SemkvConnectorWorker

HERE = StableReplica("engine-b", 0)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedNats]:
    server = EmbeddedNats(tmp_path / "nats")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def environment(
    broker: EmbeddedNats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A test that is given another parameter has its connector announce itself that often."""
    interval = getattr(request, "param", 0.2)
    file = tmp_path / "semkv.yaml"
    file.write_text(
        f"bus: {{url: '{broker.url}'}}\nmodel: {{name: tiny}}\nconnector: {{slab_bytes: 4194304, "
        f"announce_interval_seconds: {interval}}}\n"
    )
    monkeypatch.setenv("SEMKV_CONFIG", str(file))
    monkeypatch.setenv("DYN_STABLE_ROUTING_ID", HERE.stable_routing_id)


class Router:
    """Reads the streams from their start, as a router does, on a loop of its own."""

    def __init__(self, url: str) -> None:
        self.reports: list[MaterializationReport] = []
        self.events: list[Any] = []
        self.announcements: list[ReplicaAnnouncement] = []
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._url = url
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._read()), daemon=True)
        self._thread.start()

    async def _read(self) -> None:
        subscriber = BusSubscriber(BusConfig(url=self._url), "test-router")

        def event(message: Message) -> None:
            self.events.append(decode_donor_event(message.payload, message.content_type or ""))

        subscriber.subscribe_stream(DONOR_STREAM, "semantic-kv-events.>", event, start="all")
        subscriber.subscribe_stream(
            REPORT_STREAM, "semkv.reports.>", lambda m: self.reports.append(decode_report(m.payload)), start="all"
        )
        subscriber.subscribe_stream(
            ANNOUNCEMENT_STREAM,
            "semkv.announcements.>",
            lambda m: self.announcements.append(decode_announcement(m.payload)),
            start="last_per_subject",
        )
        await subscriber.start()
        await self._stop.wait()
        await subscriber.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        self._loop.close()


@pytest.fixture
def router(broker: EmbeddedNats) -> Iterator[Router]:
    reader = Router(broker.url)
    yield reader
    reader.close()


@pytest.fixture
def running(environment: None) -> Iterator[Engine]:
    config = EngineConfig(
        model=ModelSource(config=SMALL), num_blocks=64, max_num_tokens=256, num_threads=1, poison_pages=True
    )
    engine = Engine(config, connector=ConnectorSpec(SemkvConnectorScheduler, SemkvConnectorWorker))
    yield engine
    engine.shutdown()


def hint(announced: ReplicaAnnouncement, tokens: list[int], donor: DonorRegistered, route_id: str) -> HintDelivery:
    """What a router sends just before it dispatches."""
    namespace = announced.namespace.for_request(tenant=tenant_scope(None))
    payload = DonorHint(
        route_id=route_id,
        donor_id=donor.donor_id,
        expected_mode=ExpectedMode.EXACT_EQUIVALENT,
        generation=announced.generation,
        namespace=namespace.digest().hex(),
        token_count=donor.token_count,
        exact_prefix_tokens=donor.token_count,
        score_bucket=Bucket.FULL,
    )
    return HintDelivery(
        version=HINT_DELIVERY_VERSION,
        stable_routing_id=HERE.stable_routing_id,
        dp_rank=HERE.dp_rank,
        prompt_key=prompt_key(namespace.digest(), as_tokens(tokens)),
        envelope=KvHintsEnvelope(protocol_version="0.1", message_id="m", actions=[donor_action("1", payload)]),
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    )


@pytest.mark.graph
def test_announced_donated_hinted_loaded_and_reported(running: Engine, router: Router, broker: EmbeddedNats) -> None:
    """The whole loop as a router sees it, before the first request and after."""
    wait_for(lambda: bool(router.announcements and router.events))
    announced = router.announcements[0]
    assert (announced.model, announced.materialization, announced.slab_blocks) == ("tiny", "exact", 256)
    assert isinstance(router.events[0].data, GenerationReset)

    tokens = prompt(200)
    run(running, tokens)
    wait_for(lambda: len(router.events) >= 2)
    donor = router.events[1].data
    assert isinstance(donor, DonorRegistered)
    running.reset_prefix_cache()

    sender = BusPublisher(BusConfig(url=broker.url), "test-sender")
    sender.start()
    try:
        route_id = new_route_id()
        payload = encode_hint_delivery(hint(announced, tokens, donor, route_id))
        wait_for(lambda: sender.stats().connected)
        table = running_table(running)
        wait_for(
            lambda: sender.publish(hints(HERE), payload, content_type=MSGPACK, persistent=False) and len(table) > 0
        )
        _, loaded = run(running, tokens)
        assert loaded.stats.connector_served_tokens == 192
        wait_for(lambda: len(router.reports) == 2)
    finally:
        sender.close()
    report = router.reports[1]
    assert (report.route_id, report.donor_id, report.confirmed) == (route_id, donor.donor_id, 192)
    assert (report.outcome, report.reason) == (Outcome.MATERIALIZED_EXACT, Reason.OK)
    assert report.traceparent is not None
    assert report.generation == announced.generation


def running_table(engine: Engine) -> Any:
    return running_parts(engine).event_publisher.table


def running_parts(engine: Engine) -> LeaderParts:
    scheduler = engine._ranks[0].connector.scheduler  # type: ignore[union-attr]
    assert isinstance(scheduler, SemkvConnectorScheduler)
    parts: LeaderParts = scheduler._parts
    return parts


@pytest.mark.graph
def test_broker_away_costs_no_request_and_nothing_is_lost(
    running: Engine, router: Router, broker: EmbeddedNats
) -> None:
    tokens = prompt(200)
    run(running, tokens)
    wait_for(lambda: len(router.reports) == 1 and len(router.events) == 2)
    broker.kill()
    running.reset_prefix_cache()
    _, loaded = run(running, tokens)
    run(running, prompt(200, 5))
    assert loaded.stats.connector_served_tokens == 192
    broker.start()
    wait_for(lambda: len(router.reports) == 3 and len(router.events) == 3, timeout=30.0)
    assert [event.event_id for event in router.events] == [0, 1, 2]
    assert [report.confirmed for report in router.reports] == [0, 192, 0]


@pytest.mark.graph
@pytest.mark.parametrize("environment", [3600.0], indirect=True)
def test_a_donor_that_shrank_is_told_though_nothing_else_happens(running: Engine, router: Router) -> None:
    """However seldom the connector announces itself: an engine that nobody asks for anything has no other occasion."""
    run(running, prompt(200))
    wait_for(lambda: len(router.events) == 2 and len(router.reports) == 1)
    parts = running_parts(running)
    registry = parts.event_publisher.donors
    assert registry is not None
    (donor,) = registry._donors.values()
    assert donor.tip is not None
    left = donor.tip.chain()[-2:]
    assert parts.queue.submit(lambda: registry.departed(left[::-1]))
    wait_for(lambda: len(router.events) == 3)
    told = router.events[2].data
    assert isinstance(told, DonorRegistered)
    assert (told.donor_id, told.token_count) == (donor.donor_id, router.events[1].data.token_count // 6 * 4)
