"""`python -m dynamo_semkv serve` as a process: frontend -> two router processes -> two scripted workers of two ranks,
over a real bus.

The workers have no engine; announcements and donors come from the test, as a connector would send them.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo_semkv.bus.publisher import BusPublisher
from dynamo_semkv.bus.server import EmbeddedNats
from dynamo_semkv.bus.subscriber import BusSubscriber
from dynamo_semkv.bus.subscription import Message
from dynamo_semkv.config.schema import BusConfig
from dynamo_semkv.contracts import subjects
from dynamo_semkv.contracts.codec import (
    MSGPACK,
    decode_hint_delivery,
    decode_route_event,
    encode_announcement,
    encode_donor_event,
)
from dynamo_semkv.contracts.identity import StableReplica, stable_worker_id
from dynamo_semkv.contracts.route_events import RouteEvent, RouteObserved, RouteOpened
from dynamo_semkv.testing import EventTape
from tests.router.conftest import OpenGraph
from tests.router.fakes import NAMESPACE, announcement
from tests.router.graph.build import TestGraph, http_json
from tests.router.graph.model_dir import prompt
from tests.router.graph.processes import WAIT_SECONDS, Process, wait_until

pytestmark = pytest.mark.graph

WORKERS = ("a", "b")
DONOR_TOKENS = 1024


def serve(g: TestGraph, name: str, config: Path, **env: str) -> Process:
    return g.graph.python(
        name, "-m", "dynamo_semkv", "serve", "--config", str(config), env=g.graph.env(DYN_SYSTEM_PORT="0", **env)
    )


def write_config(g: TestGraph, url: str, **sections: Any) -> Path:
    path = g.graph.directory / "semkv.yaml"
    tree = {
        "bus": {"url": url},
        "dynamo": {"namespace": "test"},
        "model": {"name": "m"},
        "placement": {"mode": "enforce"},
        # A busy machine is not to be taken for a slow provider.
        "evidence": {"deadline_ms": 1000, "exact_deadline_ms": 1000},
        **sections,
    }
    path.write_text(json.dumps(tree))
    return path


class Bus:
    """What a connector publishes, and what routers publish, read back."""

    def __init__(self, url: str) -> None:
        self.config = BusConfig(url=url)
        self.publisher = BusPublisher(self.config, "test")
        self.publisher.start()

    def announce(self) -> None:
        for worker in WORKERS:
            for rank in (0, 1):
                one = announcement(f"stable-{worker}", rank)
                subject = subjects.announcements(StableReplica(one.stable_routing_id, rank))
                assert self.publisher.publish(subject, encode_announcement(one), content_type=MSGPACK)

    def register_donor(self, worker: str, rank: int, start: int) -> str:
        """A donor with the tokens of `prompt(start, DONOR_TOKENS)`."""
        stable = f"stable-{worker}"
        tape = EventTape(worker_id=stable_worker_id(stable), dp_rank=rank, generation="g1")
        tape.reset()
        tokens = np.array([i % 2000 for i in range(start, start + DONOR_TOKENS)], dtype=np.uint32)
        tape.register("d" * 32, tokens, NAMESPACE.for_request(tenant=""))
        for event in tape:
            subject = subjects.donor_events(StableReplica(stable, rank))
            assert self.publisher.publish(subject, encode_donor_event(event, MSGPACK), content_type=MSGPACK)
        return "d" * 32

    def collect(self, until: Callable[[list[RouteEvent], list[Any]], bool], act: Callable[[], None]) -> tuple[Any, Any]:
        """Route events that the stream has and hints that pass by, from before `act` until they are enough."""
        events: list[RouteEvent] = []
        hints: list[Any] = []

        async def run() -> None:
            subscriber = BusSubscriber(self.config, "test")
            subscriber.subscribe_stream(
                subjects.ROUTE_STREAM,
                f"{subjects.ROUTES}.>",
                lambda message: events.append(decode_route_event(message.payload)),
                start="new",
            )

            def on_hint(message: Message) -> None:
                hints.append(decode_hint_delivery(message.payload))

            subscriber.subscribe_core(f"{subjects.HINTS}.>", on_hint)
            await subscriber.start()
            await reached(lambda: subscriber.caught_up(subjects.ROUTE_STREAM))
            await asyncio.to_thread(act)
            await reached(lambda: until(events, hints))
            await subscriber.close()

        async def reached(condition: Callable[[], bool]) -> None:
            deadline = time.monotonic() + WAIT_SECONDS
            while not condition():
                assert time.monotonic() < deadline, (events, hints)
                await asyncio.sleep(0.02)

        asyncio.run(run())
        return events, hints


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedNats]:
    with EmbeddedNats(tmp_path_factory.mktemp("jetstream")) as server:
        yield server


@pytest.fixture(scope="module")
def bus(nats: EmbeddedNats) -> Iterator[Bus]:
    made = Bus(nats.url)
    yield made
    made.publisher.close(2.0)


@pytest.fixture(scope="module")
def g(open_graph: OpenGraph, nats: EmbeddedNats) -> Iterator[TestGraph]:
    with open_graph() as made:
        for worker in WORKERS:
            made.worker(worker, "--delay-s", "0.02")
        config = write_config(made, nats.url)
        for name, page in (("r1", "true"), ("r2", "false")):
            serve(made, name, config, SEMKV_DASHBOARD__ENABLED=page).wait_log("is served by")
        made.frontend(2)
        yield made


def ended(events: list[RouteEvent]) -> bool:
    opened = {e.route_id for e in events if isinstance(e, RouteOpened)}
    return bool(opened) and opened == {e.route_id for e in events if isinstance(e, RouteObserved)}


def hinted(events: list[RouteEvent]) -> bool:
    """A hint is on its way too, which comes on another subject than the route's events."""
    return any(e.hinted_tokens for e in events if isinstance(e, RouteOpened))


def test_without_announcements_requests_are_served_and_recorded_without_advice(g: TestGraph, bus: Bus) -> None:
    answers: list[Any] = []
    events, hints = bus.collect(lambda e, h: ended(e), lambda: answers.append(g.chat(words=100)))
    assert answers[0][0] == 200
    opened = next(e for e in events if isinstance(e, RouteOpened))
    assert (opened.mode, opened.decision_reason) == ("enforce", "namespace_unknown")
    assert hints == []


def test_a_donor_on_one_rank_is_placed_on_hinted_and_recorded_by_both_routers(g: TestGraph, bus: Bus) -> None:
    bus.announce()
    donor = bus.register_donor("b", 1, start=300)
    routers: set[str] = set()

    def placed() -> bool:
        """Both routers place, whichever the frontend picks."""
        events, hints = bus.collect(
            lambda e, h: ended(e) and (bool(h) or not hinted(e)), lambda: g.chat(words=DONOR_TOKENS + 40, start=300)
        )
        opened = next(e for e in events if isinstance(e, RouteOpened))
        if opened.decision_reason != "placed":
            assert opened.decision_reason in ("namespace_unknown", "no_evidence"), opened
            return False
        observed = next(e for e in events if isinstance(e, RouteObserved))
        routers.add(opened.router)
        assert (opened.stable_routing_id, opened.dp_rank, opened.donor_id) == ("stable-b", 1, donor)
        assert opened.worker_id == observed.served_worker_id == g.worker_id("b")
        assert (observed.served_stable_routing_id, observed.served_dp_rank, observed.end) == ("stable-b", 1, "complete")
        assert opened.input_tokens >= opened.evidence_tokens == opened.placed_tokens == opened.hinted_tokens > 900
        delivery = hints[-1]
        assert (delivery.stable_routing_id, delivery.dp_rank) == ("stable-b", 1)
        assert delivery.prompt_key == opened.prompt_key
        request = g.records("workers", "request")[-1]
        assert request["worker"] == "b"
        assert request["request"]["routing"]["dp_rank"] == 1
        carried = request["request"]["extra_args"]["semkv"]
        assert carried["actions"][0]["payload"]["route_id"] == opened.route_id == delivery.envelope.message_id
        return len(routers) == 2

    wait_until("both routers to place on the donor", placed, interval_s=0.1)


def test_another_prompt_is_a_negative_control(g: TestGraph, bus: Bus) -> None:
    events, hints = bus.collect(lambda e, h: ended(e), lambda: g.chat(words=600, start=1350))
    opened = next(e for e in events if isinstance(e, RouteOpened))
    assert (opened.decision_reason, opened.evidence_tokens, opened.placed_tokens) == ("no_evidence", 0, 0)
    assert hints == []


def test_another_tenant_finds_nothing(g: TestGraph, bus: Bus) -> None:
    def act() -> None:
        status, _ = g.chat(words=DONOR_TOKENS, start=300, nvext={"cache_salt": "tenant-a"})
        assert status == 200

    events, hints = bus.collect(lambda e, h: ended(e), act)
    opened = next(e for e in events if isinstance(e, RouteOpened))
    assert (opened.decision_reason, opened.evidence_tokens, opened.placed_tokens) == ("no_evidence", 0, 0)
    assert hints == []


@pytest.mark.parametrize(
    ("how", "headers"),
    [({"nvext": {"cache_salt": ""}}, {}), ({"cache_salt": ""}, {}), ({}, {"x-tenant-id": ""})],
    ids=["nvext", "body", "header"],
)
def test_dynamos_frontend_takes_an_empty_salt_for_none_before_we_see_the_request(
    g: TestGraph, bus: Bus, how: dict[str, Any], headers: dict[str, str]
) -> None:
    events, _ = bus.collect(lambda e, h: ended(e), lambda: g.chat(headers, words=DONOR_TOKENS + 40, start=300, **how))
    opened = next(e for e in events if isinstance(e, RouteOpened))
    request = g.records("workers", "request")[-1]["request"]
    assert (opened.tenant, opened.decision_reason) == ("", "placed")
    assert "cache_salt" not in json.dumps(request)


def test_requests_of_two_tenants_with_one_chosen_id_are_first_attempts_both(g: TestGraph, bus: Bus) -> None:
    chosen = "11111111-2222-3333-4444-555555555555"

    def act() -> None:
        for tenant in ("tenant-a", "tenant-b"):
            status, _ = g.chat({"x-dynamo-request-id": chosen}, words=100, nvext={"cache_salt": tenant})
            assert status == 200

    events, _ = bus.collect(lambda e, h: len(e) >= 4 and ended(e), act)
    opened = [e for e in events if isinstance(e, RouteOpened)]
    assert [(e.request_id, e.attempt) for e in opened] == [(chosen, 0)] * 2
    assert len({e.tenant for e in opened} | {"", None}) == 4


def test_page_and_metrics_show_replicas_and_decisions(g: TestGraph) -> None:
    router = next(p for p in g.graph.processes if p.name == "r1")
    page = router.wait_log(r"dashboard: http://127\.0\.0\.1:(\d+)").group(1)
    status, snapshot = http_json(int(page), "/api/snapshot")
    assert status == 200
    assert len(snapshot["replicas"]) == 4
    assert snapshot["mode"] == "enforce"
    assert http_json(int(page), "/readyz")[0] == 200
    for port in (int(page), g.status_port(router)):
        status, text = http_json(port, "/metrics")
        assert status == 200
        assert 'semkv_placement_total{mode="enforce",result="placed"}' in text


def test_router_without_a_page_explains_at_dynamos_status_server(g: TestGraph) -> None:
    with_page, without = (g.status_port(p) for p in g.graph.processes if p.name in ("r1", "r2"))

    def explained() -> Any:
        status, said = http_json(without, "/engine/semkv/explain", {"last": 100})
        assert status == 200
        return [route for route in said["routes"] if route["decision"] == "placed"]

    (route, *_) = wait_until("a placed route to close", explained)
    assert route["opened"]["quality_signals"]["verified_tokens"] >= route["tokens"]["evidence"] - 64
    one = http_json(without, "/engine/semkv/explain", {"request_id": f"chatcmpl-{route['opened']['request_id']}"})
    assert route["route_id"] in [attempt["route_id"] for attempt in one[1]["routes"]]
    assert "allowed" in http_json(without, "/engine/semkv/explain", {"prompt": "x"})[1]["error"]
    assert http_json(with_page, "/engine/semkv/explain", {"last": 1})[0] == 404


def test_a_client_cannot_bring_hints(g: TestGraph) -> None:
    status, _ = http_json(
        g.frontend_port,
        "/v1/chat/completions",
        {"model": "m", "messages": [{"role": "user", "content": prompt(0, 64)}], "extra_args": {"semkv": {}}},
    )
    assert status == 400


def test_a_stream_whose_worker_is_killed_goes_on_as_another_attempt(g: TestGraph, bus: Bus) -> None:
    answers: list[Any] = []

    def act() -> None:
        seen = len(g.records("workers", "request"))
        client = threading.Thread(target=lambda: answers.append(g.stream(words=100, max_tokens=60)))
        client.start()
        wait_until("a worker to have the request", lambda: len(g.records("workers", "request")) > seen)
        name = g.records("workers", "request")[-1]["worker"]
        next(p for p in reversed(g.graph.processes) if p.name == name).kill()
        client.join(WAIT_SECONDS)
        assert not client.is_alive()
        g.worker(name, "--delay-s", "0.02")

    events, _ = bus.collect(lambda e, h: len(e) >= 4 and ended(e), act)
    assert answers[0].error is None
    assert answers[0].tokens == list(range(100, 160))
    # Events of two routers are two subjects: stored side by side.
    opened = sorted((e for e in events if isinstance(e, RouteOpened)), key=lambda e: e.opened_at)
    ends = {e.route_id: e.end for e in events if isinstance(e, RouteObserved)}
    assert len({e.request_id for e in opened}) == 1
    # Whichever routers it came to, the attempts count on. (It may be sent to the dead worker once more before discovery
    # knows; two attempts within one message's time on the bus may carry one number.)
    assert opened[0].attempt == 0
    assert all(e.attempt >= 1 for e in opened[1:])
    assert len({e.route_id for e in opened}) == len(opened)
    assert [ends[e.route_id] for e in opened] == ["worker_lost"] * (len(opened) - 1) + ["complete"]


def test_kill_9_of_the_broker_costs_nothing_but_evidence(g: TestGraph, nats: EmbeddedNats) -> None:
    nats.kill()
    try:
        for start in (0, 500):
            status, _ = g.chat(words=200, start=start)
            assert status == 200
    finally:
        nats.start()


def test_the_routers_leave_without_a_lost_request_and_without_an_error_line(g: TestGraph) -> None:
    first, second = (p for p in g.graph.processes if p.name in ("r1", "r2"))
    assert first.terminate(60.0) == 0
    g.wait_routers(1)
    status, _ = g.chat(words=100)
    assert status == 200
    assert second.running
    # What Dynamo's discovery watcher logs while its channels close is not ours.
    logs = [process.log_text().partition("stopping: ")[0] for process in (first, second)]
    assert [line for log in logs for line in log.splitlines() if " ERROR " in line or " CRITICAL " in line] == []


def test_serves_with_no_broker_at_all(open_graph: OpenGraph) -> None:
    with open_graph() as g:
        g.worker("a")
        router = serve(g, "r1", write_config(g, "nats://127.0.0.1:1"))
        router.wait_log("serving without evidence until it is")
        g.frontend(1)
        status, _ = g.chat(words=100)
        assert status == 200
        assert router.terminate(60.0) == 0


def test_sigterm_while_waiting_for_workers_ends_it(open_graph: OpenGraph) -> None:
    with open_graph() as g:
        router = serve(g, "r1", write_config(g, "nats://127.0.0.1:1"))
        router.wait_log("configuration ")
        assert router.terminate(60.0) == 0
