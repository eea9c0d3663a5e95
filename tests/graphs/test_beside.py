"""Prometheus and Grafana beside the local graph: provisioned with its ports, ended with it, and a clear word when they
are not there."""

from __future__ import annotations

import configparser
import os
import signal
import stat
import subprocess
import sys
import time
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynamo_semkv.observe import dynamo_counters
from graphs.local import observability
from graphs.local.graph import GraphError, LocalGraph
from graphs.local.observability import MissingProgram, Targets, Tools, write
from graphs.local.settings import LOW_GATE, GraphSettings
from tests.graphs.test_lifecycle import children, gone
from tests.graphs.traffic import PATIENT, ask, get, send, wait_until
from tests.observe.test_alerting import RECORDED, filled, panels

ROOT = Path(__file__).parents[2]
FAKE_GRAFANA = """\
#!{python}
import configparser, http.server, os, sys
config = configparser.ConfigParser()
config.read(next(a for a in sys.argv if a.startswith("--config=")).partition("=")[2])
assert sys.argv[1] == "server" and os.path.isdir(os.environ["SEMKV_GRAFANA_DASHBOARDS"])
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/api/health" else 404)
        self.end_headers()
http.server.HTTPServer((config["server"]["http_addr"], int(config["server"]["http_port"])), Health).serve_forever()
"""


def program(folder: Path, name: str, text: str = "#!/bin/sh\nexit 0\n") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_what_is_missing_is_named_with_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingProgram, match="Prometheus is not on PATH: on Debian `apt install prometheus`"):
        Tools.find(str(tmp_path))
    program(tmp_path, "prometheus")
    assert Tools.find(str(tmp_path)).grafana is None
    server = program(tmp_path, "grafana-server")
    assert Tools.find(str(tmp_path)).grafana == (server,)
    newer = program(tmp_path, "grafana")
    assert Tools.find(str(tmp_path)).grafana == (newer, "server")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(GraphError, match="apt install prometheus"):
        LocalGraph(GraphSettings(model="tiny", observability=True))


def test_the_command_says_it_and_starts_nothing(tmp_path: Path) -> None:
    empty = tmp_path / "bin"
    empty.mkdir()
    ran = subprocess.run(
        [sys.executable, "-m", "graphs.local", "--observability", "--model", "tiny", "--run-dir", tmp_path / "run"],
        cwd=ROOT,
        env={**os.environ, "PATH": str(empty)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 1
    assert "apt install prometheus" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not (tmp_path / "run").exists()


def test_the_files_have_this_graphs_ports(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "conf").mkdir(parents=True)
    (home / "conf" / "defaults.ini").write_text("")
    tools = Tools("/usr/bin/prometheus", ("/usr/bin/grafana", "server"), str(home))
    targets = Targets(pages=("127.0.0.1:1", "127.0.0.1:2"), routers=("127.0.0.1:3",), workers=("127.0.0.1:4",))
    parts = write(tmp_path, tools, targets, prometheus_port=9, grafana_port=10)
    config = yaml.safe_load((tmp_path / "prometheus" / "prometheus.yml").read_text())
    files = {job["job_name"]: job["file_sd_configs"][0]["files"][0] for job in config["scrape_configs"]}
    found = {
        job: yaml.safe_load((tmp_path / "prometheus" / file).read_text())[0]["targets"] for job, file in files.items()
    }
    assert found == {
        "semkv-router": list(targets.pages),
        "semkv-router-dynamo": list(targets.routers),
        "semkv-worker": list(targets.workers),
    }
    assert "--web.listen-address=127.0.0.1:9" in parts["prometheus"][0]
    command, environment = parts["grafana"]
    assert command[:2] == ["/usr/bin/grafana", "server"]
    assert f"--homepath={home}" in command
    assert (Path(environment["SEMKV_GRAFANA_DASHBOARDS"]) / "semkv.json").is_file()
    ini = configparser.ConfigParser()
    ini.read(next(part for part in command if part.startswith("--config=")).partition("=")[2])
    assert (ini["server"]["http_addr"], ini["server"]["http_port"]) == ("127.0.0.1", "10")
    assert not ini["analytics"].getboolean("reporting_enabled")
    assert not ini["analytics"].getboolean("check_for_updates")
    provisioning = Path(ini["paths"]["provisioning"])
    source = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"][0]
    assert source["url"] == "http://127.0.0.1:9"
    assert source["uid"] == "semkv-prometheus"
    assert (provisioning / "dashboards" / "semkv.yml").is_file()
    assert observability.SOURCE.is_dir()


def ask_prometheus(url: str, path: str, **query: str) -> Any:
    return get(f"{url}/api/v1/{path}?{urllib.parse.urlencode(query)}").get("data", {})


def without_data(url: str, queries: dict[str, str]) -> list[str]:
    """Names of the queries that return nothing, or nothing but NaN."""
    empty = []
    for name, query in queries.items():
        values = [sample["value"][1] for sample in ask_prometheus(url, "query", query=query).get("result", ())]
        if not [value for value in values if value != "NaN"]:
            empty.append(name)
    return empty


@pytest.mark.graph
@pytest.mark.slow
def test_every_panel_has_data_of_a_running_graph(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fresh graph under a workload that does not fit on the devices: no series is made up, and none is missing.
    Grafana is a stand-in that only answers for its health: what Debian does not have is no part of the test run."""
    program(tmp_path / "bin", "grafana", FAKE_GRAFANA.format(python=sys.executable))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    settings = GraphSettings(
        model="tiny",
        threads=1,
        workers=2,
        data_parallel_size=1,
        blocks_per_rank=48,
        observability=True,
        overrides={
            **LOW_GATE,
            **PATIENT,
            "connector": {"announce_interval_seconds": 1.0},
        },
    )
    queries = {f"{p['title']}: {t['expr']}": filled(t["expr"]) for p in panels() for t in p["targets"]}
    queries |= {name: name for name in RECORDED}
    with LocalGraph(settings, run_dir=tmp_path / "run", model_dir=model_dir) as graph:
        prometheus = graph.urls["prometheus"]
        assert get(f"{graph.urls['grafana']}/api/health") == {}  # 200, and no JSON
        assert graph.notes == []
        pids = [*children(os.getpid())]
        seed, deadline = 0, time.monotonic() + 300.0
        while empty := without_data(prometheus, queries):
            assert time.monotonic() < deadline, empty
            for _ in range(4):  # one new, and one that only host memory still has
                for this in (seed, max(0, seed - 16)):
                    assert send(graph, ask(this, max_tokens=4)).ok
                seed += 1
        targets = ask_prometheus(prometheus, "targets")["activeTargets"]
        assert {(t["scrapePool"], t["health"]) for t in targets} == {
            ("semkv-router", "up"),
            ("semkv-router-dynamo", "up"),
            ("semkv-worker", "up"),
        }
        doubled = ask_prometheus(
            prometheus, "query", query="count by (__name__) ({__name__=~'semkv_input_tokens_total|semkv_ready'})"
        )
        assert {row["value"][1] for row in doubled["result"]} == {"1"}, (
            "scraped once, not at the page and at the status server"
        )
        unwell = [
            rule["name"]
            for group in ask_prometheus(prometheus, "rules")["groups"]
            for rule in group["rules"]
            if rule.get("lastError")
        ]
        assert unwell == []
        read = dynamo_counters.read(graph.status_url("router-0"))
        shown = wait_until(
            "Dynamo's counters on the page", lambda: get(f"{graph.page_url()}/api/snapshot").get("dynamo")
        )
        assert read is not None
        assert 0 < shown["input_tokens"] <= read.input_tokens
        assert read.best_eligible_tokens > 0
    assert gone(pids)


@pytest.mark.graph
@pytest.mark.slow
def test_one_command_up_and_ctrl_c_down(tmp_path: Path, model_dir: Path) -> None:
    log = tmp_path / "output.log"
    options = ["--model", "tiny", "--workers", "1", "--run-dir", str(tmp_path / "run"), "--model-dir", str(model_dir)]
    options += ["--engine-niceness", "0"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "graphs.local", "--observability", *options],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(
            "up", lambda: "Prometheus: http://127.0.0.1:" in log.read_text() or process.poll() is not None, 120.0
        )
        assert process.poll() is None, log.read_text()
        pids = children(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, 130)
        assert gone(pids)
        assert "Traceback" not in log.read_text()
    finally:
        process.kill()
        process.wait()
