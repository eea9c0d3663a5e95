"""With JSON logging every line of a router and a worker is JSON: for a client's 400, noise at the page and a refused
start too."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_semkv.bus.server import EmbeddedNats
from tests.router.conftest import OpenGraph
from tests.router.graph.build import TestGraph
from tests.router.graph.processes import LOOPBACK, Process, wait_until
from tests.router.test_serve import write_config

pytestmark = pytest.mark.graph

JSON = {"DYN_LOGGING_JSONL": "1"}


def lines(process: Process) -> list[dict[str, Any]]:
    found, text = [], process.log_path.read_text()
    if process.running:
        text, _, _ = text.rpartition("\n")  # the last one may just be being written
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            raise AssertionError(f"{process.name} wrote a line that is not JSON: {line!r}") from None
    return found


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedNats]:
    with EmbeddedNats(tmp_path_factory.mktemp("jetstream")) as server:
        yield server


@pytest.fixture(scope="module")
def g(open_graph: OpenGraph, nats: EmbeddedNats) -> Iterator[TestGraph]:
    with open_graph() as made:
        config = write_config(made, nats.url)
        worker = ("-m", "worker_connector.reference_engine", "--model", "tiny", "--endpoint", "test.backend.generate")
        env = made.graph.env(
            **JSON,
            DYN_SYSTEM_PORT="0",
            SEMKV_CONFIG=str(config),
            DYN_STABLE_ROUTING_ID="w",
            SEMKV_CONNECTOR__SLAB_BYTES=str(2**22),
        )
        made.graph.python("worker", *worker, env=env)
        router = ("-m", "dynamo_semkv", "serve", "--config", str(config))
        made.graph.python("router", *router, env=made.graph.env(**JSON, DYN_SYSTEM_PORT="0")).wait_log("is served by")
        made.frontend(1)
        yield made


def test_every_line_is_json(g: TestGraph) -> None:
    worker, router = (next(p for p in g.graph.processes if p.name == name) for name in ("worker", "router"))
    assert g.chat(words=20)[0] == 200
    for _ in range(3):
        assert g.chat(words=9_000)[0] == 400
    page = int(router.wait_log(r"dashboard: http://127\.0\.0\.1:(\d+)").group(1))
    with socket.create_connection((LOOPBACK, page)) as noise:
        noise.sendall(b"\x16\x03\x01 no HTTP\r\n\r\n")
        assert noise.recv(64).startswith(b"HTTP/1.")
    for process in (worker, router):
        wait_until("the refusals to be told", lambda process=process: len(refusals(process)) == 2)  # type: ignore[misc]
        assert "(2 so far)" in refusals(process)[-1]["message"]
        assert process.terminate(60.0) == 0
        lines(process)


def test_each_process_says_which_configuration_it_runs(g: TestGraph) -> None:
    file = re.escape(str(g.graph.directory / "semkv.yaml"))
    for name, said in (
        ("router", rf"router semkv-\w+ runs configuration [0-9a-f]{{16}}: file {file}"),
        ("worker", rf"semkv connector: the leader of w runs configuration [0-9a-f]{{16}}: file {file}, changed by "),
        ("worker", "reference worker: model tiny, 2 ranks of 256 blocks of 32 tokens, with the connector"),
    ):
        text = " ".join(line["message"] for line in lines(next(p for p in g.graph.processes if p.name == name)))
        assert re.search(said, text), text


def refusals(process: Process) -> list[dict[str, Any]]:
    """Of three: the first and the second are told."""
    return [line for line in lines(process) if line.get("target") == "dynamo_semkv.telemetry.stderr_lines"]


def test_a_refused_start_is_json_too(g: TestGraph, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("evidence: {deadline_ms: -1, max_matches: 0}\n")
    ended = g.graph.python("refused", "-m", "dynamo_semkv", "serve", "--config", str(file), env=g.graph.env(**JSON))
    wait_until("its end", lambda: not ended.running)
    said = " ".join(line["message"] for line in lines(ended))
    assert "evidence.deadline_ms: got -1" in said
    assert "evidence.max_matches: got 0" in said
