"""Prometheus and, where it is installed, Grafana beside a local graph, with our own files and the ports of this graph.

    tools = Tools.find()                                  the programs, or what to do to have them
    written = write(folder, tools, targets, ports)        configuration of both -> {part: (command, environment)}

Everything that is written is a copy of deploy/observability; nothing there is changed, and neither program asks another
host for anything.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dynamo_semkv.bus.server import LOOPBACK

SOURCE = Path(__file__).parents[2] / "deploy" / "observability"
SCRAPE_INTERVAL = "2s"
_GRAFANA_HOMES = ("/usr/share/grafana", "/opt/grafana", "/usr/local/share/grafana", "/opt/homebrew/share/grafana")
HOW_PROMETHEUS = (
    "Prometheus is not on PATH: on Debian `apt install prometheus`, elsewhere the binary of a release of "
    "prometheus/prometheus"
)
HOW_GRAFANA = (
    "Grafana is not on PATH, so its dashboard is not up. Debian does not have it: install it from Grafana Labs' own "
    "packages, and it is provisioned here by itself. The same numbers are on the page and in Prometheus."
)


class MissingProgram(RuntimeError):
    """A program or file is missing; the message says how to get it."""


@dataclass(frozen=True)
class Tools:
    """Where the programs are."""

    prometheus: str
    grafana: tuple[str, ...] | None = None
    """The command that serves, without its options. None: Grafana is not installed."""
    grafana_home: str | None = None

    @classmethod
    def find(cls, path: str | None = None) -> Tools:
        """Looks on `path` (default: PATH). Raises MissingProgram without Prometheus, or without the files of a source
        checkout."""
        prometheus = shutil.which("prometheus", path=path)
        if prometheus is None:
            raise MissingProgram(f"--observability: {HOW_PROMETHEUS}")
        if not SOURCE.is_dir():
            raise MissingProgram(f"--observability: {SOURCE} is not there; run it from a source checkout")
        for name, verb in (("grafana", ("server",)), ("grafana-server", ())):
            program = shutil.which(name, path=path)
            if program is not None:
                return cls(prometheus, (program, *verb), _grafana_home(program))
        return cls(prometheus)


@dataclass(frozen=True)
class Targets:
    """HOST:PORT of each router's page, and of Dynamo's status server of each router and worker."""

    pages: tuple[str, ...]
    routers: tuple[str, ...]
    workers: tuple[str, ...]


Part = tuple[list[str], dict[str, str]]
"""Command and environment of a process."""


def write(folder: Path, tools: Tools, targets: Targets, *, prometheus_port: int, grafana_port: int) -> dict[str, Part]:
    """Writes the configuration below `folder`; returns a part for `prometheus`, and for `grafana` where it is
    installed."""
    parts = {"prometheus": _prometheus(folder, tools.prometheus, targets, prometheus_port)}
    if tools.grafana is not None:
        parts["grafana"] = _grafana(folder, tools, prometheus_port, grafana_port)
    return parts


def _prometheus(folder: Path, program: str, targets: Targets, port: int) -> Part:
    files = folder / "prometheus"
    shutil.copytree(SOURCE / "prometheus", files, dirs_exist_ok=True)
    config = _read(files / "prometheus.yml")
    config["global"]["scrape_interval"] = SCRAPE_INTERVAL
    _write(files / "prometheus.yml", config)
    for name, addresses in (("routers", targets.pages), ("dynamo", targets.routers), ("workers", targets.workers)):
        _write(files / "targets" / f"{name}.yml", [{"targets": list(addresses)}])
    command = [
        program,
        f"--config.file={files / 'prometheus.yml'}",
        f"--web.listen-address={LOOPBACK}:{port}",
        f"--storage.tsdb.path={folder / 'prometheus-data'}",
    ]
    # One thread, to leave a small machine's cores to the engine.
    return command, {**os.environ, "GOMAXPROCS": "1"}


def _grafana(folder: Path, tools: Tools, prometheus_port: int, port: int) -> Part:
    assert tools.grafana is not None
    provisioning = folder / "grafana" / "provisioning"
    shutil.copytree(SOURCE / "grafana" / "provisioning", provisioning, dirs_exist_ok=True)
    source = provisioning / "datasources" / "prometheus.yml"
    config = _read(source)
    config["datasources"][0]["url"] = f"http://{LOOPBACK}:{prometheus_port}"
    config["datasources"][0]["jsonData"]["timeInterval"] = SCRAPE_INTERVAL
    _write(source, config)
    data = folder / "grafana" / "data"
    data.mkdir(parents=True, exist_ok=True)
    ini = folder / "grafana" / "grafana.ini"
    ini.write_text(_INI.format(host=LOOPBACK, port=port, data=data, provisioning=provisioning))
    command = [*tools.grafana, f"--config={ini}"]
    if tools.grafana_home is not None:
        command.append(f"--homepath={tools.grafana_home}")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GF_")}
    return command, {**environment, "SEMKV_GRAFANA_DASHBOARDS": str(SOURCE / "grafana" / "dashboards")}


_INI = """\
[server]
http_addr = {host}
http_port = {port}
[paths]
data = {data}
logs = {data}
plugins = {data}/plugins
provisioning = {provisioning}
[auth.anonymous]
enabled = true
org_role = Viewer
[analytics]
enabled = false
reporting_enabled = false
check_for_updates = false
check_for_plugin_updates = false
[news]
news_feed_enabled = false
[plugins]
preinstall_disabled = true
"""


def _grafana_home(program: str) -> str | None:
    """The folder that has `conf/defaults.ini`. None: Grafana finds it by itself, or complains in its log."""
    homes = (os.environ.get("GF_PATHS_HOME"), str(Path(program).resolve().parents[1]), *_GRAFANA_HOMES)
    return next((home for home in homes if home and (Path(home) / "conf" / "defaults.ini").is_file()), None)


def _read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def _write(path: Path, value: object) -> None:
    path.write_text(yaml.safe_dump(value, sort_keys=False))
