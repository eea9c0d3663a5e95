"""A real Prometheus, with our configuration, against a page that counts: every panel and every recorded series has
data."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import socket
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from dynamo_semkv.bus.child_process import ChildProcess
from dynamo_semkv.config.schema import DashboardConfig
from dynamo_semkv.dashboard.server import DashboardServer
from dynamo_semkv.evidence.deadline import LookupStatus
from dynamo_semkv.observe.dynamo_counters import SERIES
from dynamo_semkv.observe.health import readiness
from dynamo_semkv.observe.metrics import Metrics
from dynamo_semkv.observe.snapshot import build_snapshot
from dynamo_semkv.outcome.closed import OrphanReason, OrphanReport
from tests.observe.fake_state import fake_history, fake_state
from tests.observe.test_alerting import PROMETHEUS, RECORDED, filled, panels
from tests.outcome.build import opened, report

DEADLINE = 60.0


class CountingRouter:
    """Counts the next of 400 routes with each scrape, as a router under traffic would."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.metrics.watch(fake_state)
        self._tokens = 0
        self._routes = itertools.cycle(fake_history(400).recent(400))

    def text(self) -> str:
        for route in itertools.islice(self._routes, 100):
            self.metrics.opened(route.opened)
            self.metrics.closed(route)
        self.metrics.opened(opened(lookup="hit", lookup_seconds=0.002))
        self.metrics.provider_answered("fingerprint", LookupStatus.HIT, 0.001)
        self.metrics.orphan(OrphanReport(report(), OrphanReason.LATE, 1.0))
        self._tokens += 1_000
        return self.metrics.text() + "".join(f'{name}{{model="m"}} {self._tokens}\n' for name in SERIES)


def configuration(folder: Path, target: str) -> Path:
    """Ours, word for word, but with this target and a scrape and an evaluation a second."""
    shutil.copytree(PROMETHEUS, folder)
    for path, old, new in (
        (folder / "prometheus.yml", "scrape_interval: 5s", "scrape_interval: 1s"),
        (folder / "rules" / "recording.yml", "interval: 15s", "interval: 1s"),
        (folder / "targets" / "routers.yml", "127.0.0.1:9700", target),
    ):
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
    return folder / "prometheus.yml"


def start(config: Path, folder: Path) -> tuple[ChildProcess, str]:
    program = shutil.which("prometheus")
    assert program is not None, "prometheus is missing: apt install prometheus (.ci/run does it)"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [
        program,
        f"--config.file={config}",
        f"--web.listen-address={address}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
    ]
    environment = {**os.environ, "GOMAXPROCS": "1"}
    return ChildProcess("prometheus", command, env=environment, log_path=folder / "prometheus.log"), f"http://{address}"


def ask(url: str, path: str, **query: str) -> Any:
    """The `data` of an answer, None while Prometheus is not up."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
            return json.load(answer)["data"]
    except ConnectionError:
        return None
    except urllib.error.HTTPError as error:
        if error.code == 503:
            return None  # it reads its storage first
        raise
    except urllib.error.URLError as error:
        if isinstance(error.reason, ConnectionError):
            return None
        raise


def without_data(url: str, queries: dict[str, str]) -> list[str]:
    """Names of the queries that return nothing, or nothing but NaN."""
    empty = []
    for name, query in queries.items():
        found = ask(url, "query", query=query)
        values = [sample["value"][1] for sample in found["result"]] if found else []
        if not [value for value in values if value != "NaN"]:
            empty.append(name)
    return empty


@pytest.mark.slow
async def test_every_panel_and_every_recorded_series_has_data(tmp_path: Path) -> None:
    router = CountingRouter()
    state = fake_state()
    page = DashboardServer(
        DashboardConfig(),
        lambda: build_snapshot(state),
        fake_history(1),
        metrics=router.text,
        readiness=lambda: readiness(state),
    )
    queries = {f"{p['title']}: {t['expr']}": filled(t["expr"]) for p in panels() for t in p["targets"]}
    queries |= {name: name for name in RECORDED}
    # Of the connectors a running graph is asked: tests/graphs/test_beside.py.
    queries = {name: query for name, query in queries.items() if "semkv_connector_" not in query}
    config = configuration(tmp_path / "config", (await page.start()).removeprefix("http://"))
    try:
        prometheus, url = start(config, tmp_path)
        try:
            loop = asyncio.get_running_loop()
            until = loop.time() + DEADLINE
            while True:
                empty = await asyncio.to_thread(without_data, url, queries)
                rules = await asyncio.to_thread(ask, url, "rules")
                unwell = faults_of(rules)
                if not empty and not unwell:
                    break
                if not prometheus.running or loop.time() > until:
                    pytest.fail("\n".join([*empty, *unwell, prometheus.log_text()[-2_000:]]))
                await asyncio.sleep(0.25)
        finally:
            prometheus.terminate()
    finally:
        await page.close()


def faults_of(rules: Any) -> list[str]:
    """Rules that were not evaluated, or with an error."""
    if rules is None or len(rules["groups"]) != 8:
        return ["rules are not loaded"]
    return [
        f"{rule['name']}: {rule['health']} {rule.get('lastError', '')}"
        for group in rules["groups"]
        for rule in group["rules"]
        if rule["health"] != "ok" and group["interval"] == 1
    ]
