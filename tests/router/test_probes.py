"""The probes of graphs/kubernetes, asked as the kubelet asks them, of real router processes with and without
workers."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from dynamo_semkv.bus.server import EmbeddedNats
from tests.deploy import dynamo_graph_schema as schema
from tests.deploy.kustomize import build
from tests.deploy.test_kubernetes import FOLDER, GRAPHS, container, environment, one
from tests.router.conftest import OpenGraph
from tests.router.graph.build import TestGraph, http_json
from tests.router.graph.processes import Process, wait_until
from tests.router.test_serve import write_config

STATUS_PORT = r"127\.0\.0\.1:(\d+)"
LIVE = ("startupProbe", "livenessProbe")


def router_of(folder: str) -> dict[str, Any]:
    return container(one(build(FOLDER / folder), schema.KIND), "SemkvRouter")


def passes(probe: dict[str, Any], port: int) -> bool:
    """As the kubelet judges an httpGet probe: any status from 200 to 399 is a success."""
    assert probe["httpGet"]["port"] == "system"
    return 200 <= http_json(port, probe["httpGet"]["path"])[0] < 400


@pytest.fixture(scope="module")
def bus_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedNats(tmp_path_factory.mktemp("jetstream")) as server:
        yield server.url


def start_router(g: TestGraph, url: str, container: dict[str, Any]) -> tuple[Process, int]:
    """With the environment of the manifest, but for secrets, and the port of the status server, which the system
    chooses."""
    written = {name: value for name, value in environment(container).items() if isinstance(value, str)}
    env = {**written, "DYN_SYSTEM_PORT": "0"}
    config = write_config(g, url)
    process = g.graph.python("router", "-m", "dynamo_semkv", "serve", "--config", str(config), env=g.graph.env(**env))
    return process, int(process.wait_log(rf"status server bound to: {STATUS_PORT}").group(1))


@pytest.mark.graph
def test_a_router_is_alive_without_workers_and_ready_once_it_serves(open_graph: OpenGraph, bus_url: str) -> None:
    router = router_of("aggregated")
    with open_graph() as g:
        process, port = start_router(g, bus_url, router)
        for name in LIVE:
            wait_until(name, lambda name=name: passes(router[name], port))
        assert not passes(router["readinessProbe"], port), "ready with nothing to serve in front of"
        # What the alert SemkvRouterHasNoReplicas looks at, where Dynamo's PodMonitors scrape.
        assert "\nsemkv_ready 0" in http_json(port, "/metrics")[1]
        worker = g.worker("a")
        wait_until("readiness", lambda: passes(router["readinessProbe"], port))
        g.frontend(1)
        assert g.chat(words=20)[0] == 200
        worker.kill()
        assert all(passes(router[name], port) for name in (*LIVE, "readinessProbe"))
        assert process.terminate(60.0) == 0


@pytest.mark.parametrize("folder", GRAPHS)
def test_every_graph_has_the_probes_that_were_tried(folder: str) -> None:
    tried, here = router_of("aggregated"), router_of(folder)
    for name in (*LIVE, "readinessProbe"):
        assert here[name] == tried[name]
    # A busy router misses a probe now and then, and a restart costs every request that it has.
    assert here["livenessProbe"]["timeoutSeconds"] * here["livenessProbe"]["failureThreshold"] >= 30


class ReadyPodsOnly:
    """A runtime in a cluster: an instance is listed once its pod is ready, as Kubernetes' discovery does it."""

    def __init__(self) -> None:
        self.ready = False
        self.routes: dict[str, Any] = {}
        self.served = asyncio.Event()

    def register_engine_route(self, name: str, callback: Any) -> None:
        self.routes[name] = callback

    def set_health_status(self, ready: bool) -> None:
        self.ready = ready

    def endpoint(self, name: str) -> ReadyPodsOnly:
        return self

    async def client(self) -> ReadyPodsOnly:
        return self

    def connection_id(self) -> int:
        return 7

    def instance_ids(self) -> list[int]:
        return [7] if self.ready and self.served.is_set() else []

    async def serve_endpoint(self, handler: Any, graceful_shutdown: bool = True) -> None:
        self.served.set()


@pytest.mark.skipif(importlib.util.find_spec("dynamo") is None, reason="ai-dynamo is not installed")
async def test_a_router_is_ready_before_kubernetes_discovery_lists_it() -> None:
    from dynamo_semkv.router.runtime import DynamoEdge
    from dynamo_semkv.router.runtime_settings import EdgeSettings

    runtime: Any = ReadyPodsOnly()
    edge = DynamoEdge(runtime, EdgeSettings(offer_model=False))
    assert not runtime.ready
    assert (await runtime.routes["semkv/live"]({})) == {"status": "live"}
    handler: Any = None
    await asyncio.wait_for(edge.serve(handler), 30)
    assert runtime.ready
