"""A local graph: one call starts it, one ends it with every process.

Everything listens on 127.0.0.1, on ports that the OS chose; each part keeps its ports over a restart, so that clients
and the page find it again. Each process logs to a file of its own in the run directory.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
import socket
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from dynamo_semkv.bus.child_process import ChildProcess, wait_until
from dynamo_semkv.bus.server import LOOPBACK, EmbeddedNats
from graphs.local import observability
from graphs.local.settings import GraphSettings
from worker_connector.reference_engine.models.model_directory import write_model_directory

READY_SECONDS = 120.0
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PORTS = range(10_000, 32_768)
"""Below those that the system gives to outgoing connections, one of which could take a part's port before the part
starts, or while it is away. Dynamo reads DYN_SYSTEM_PORT as an i16 besides."""
_TROUBLE = re.compile(r"\bERROR\b|\bCRITICAL\b|Traceback|panicked")


class GraphError(RuntimeError):
    """A part did not come up; the message ends with the end of its log."""


def _free_port() -> int:
    """A port that nobody listens on now."""
    for port in random.sample(_PORTS, 100):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            return port
    raise GraphError(f"no free port among 100 of {_PORTS.start} to {_PORTS.stop - 1}")


def _tools() -> observability.Tools:
    try:
        return observability.Tools.find()
    except observability.MissingProgram as missing:
        raise GraphError(str(missing)) from missing


class LocalGraph:
    """`with LocalGraph(settings) as graph: ...`; or `up()` and `down()`. Not thread-safe.

    Parts are named `nats`, `worker-0`, ..., `decode-0`, ..., `router-0`, ..., `frontend`: `kill(name)` is kill -9,
    `restart(name)` brings a part back with the same ports, environment and stable id.
    """

    def __init__(self, settings: GraphSettings, run_dir: Path | None = None, model_dir: Path | None = None) -> None:
        self.settings = settings
        self._tools = _tools() if settings.observability else None
        self._owns_run_dir = run_dir is None
        self.run_dir = Path(tempfile.mkdtemp(prefix="semkv-graph-")) if run_dir is None else Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._model_parent = model_dir or self.run_dir / "models"
        self.nats = EmbeddedNats(self.run_dir / "nats")
        self.processes: dict[str, ChildProcess] = {}
        self._beside: dict[str, observability.Part] = {}
        """`prometheus` and `grafana`, where they were asked for and are installed."""
        self._ports: dict[str, int] = {}
        self.worker_names = tuple(f"worker-{i}" for i in range(settings.workers))
        self.decode_names = tuple(f"decode-{i}" for i in range(settings.decode_workers))
        self.router_names = tuple(f"router-{i}" for i in range(0 if settings.router_mode else settings.routers))

    # --- addresses ---------------------------------------------------------------------------------------------------

    @property
    def frontend_url(self) -> str:
        """Dynamo's frontend, without a path."""
        return f"http://{LOOPBACK}:{self._port('frontend.http')}"

    def page_url(self, router: str = "router-0") -> str:
        """The live page of one router."""
        return f"http://{LOOPBACK}:{self._port(f'{router}.page')}"

    @property
    def urls(self) -> dict[str, str]:
        """The address of every part of a running graph: `frontend`, `nats`, the page of each router, and tools beside
        it."""
        urls = {"frontend": self.frontend_url, "nats": self.nats.url}
        urls |= {f"{name} page": self.page_url(name) for name in self.router_names}
        return urls | {name: f"http://{LOOPBACK}:{self._port(f'{name}.http')}" for name in self._beside}

    def status_url(self, part: str) -> str:
        """Dynamo's status server of a worker or router: /health, /metrics, /engine/..."""
        return f"http://{LOOPBACK}:{self._port(f'{part}.status')}"

    def _port(self, name: str) -> int:
        if name not in self._ports:
            self._ports[name] = _free_port()
        return self._ports[name]

    # --- up and down -------------------------------------------------------------------------------------------------

    def up(self, progress: Callable[[str], None] = lambda _: None) -> None:
        """Returns when a chat request would be served. GraphError, and nothing left running, if a part does not come
        up."""
        try:
            progress("nats-server")
            self.nats.start()
            self.model_dir = write_model_directory(self.settings.model_source(), self._model_parent)
            self._write_config()
            for name in (*self.worker_names, *self.decode_names, *self.router_names, "frontend"):
                progress(name)
                self.start(name)
            progress("waiting until the model is served")
            self.wait_ready()
            if self._tools is not None:
                self._observe(self._tools, progress)
        except BaseException:
            self.down(keep_logs=True)
            raise

    def _observe(self, tools: observability.Tools, progress: Callable[[str], None]) -> None:
        status = tuple(self.status_url(name).removeprefix("http://") for name in self.router_names)
        targets = observability.Targets(
            pages=tuple(self.page_url(name).removeprefix("http://") for name in self.router_names),
            routers=status,
            workers=tuple(self.status_url(name).removeprefix("http://") for name in self.worker_names),
        )
        ports = {f"{name}_port": self._port(f"{name}.http") for name in ("prometheus", "grafana")}
        self._beside = observability.write(self.run_dir / "observability", tools, targets, **ports)
        for name, ready in (("prometheus", "/-/ready"), ("grafana", "/api/health")):
            if name in self._beside:
                progress(name)
                self.start(name)
                self._wait_answers(name, self.urls[name] + ready)

    def _wait_answers(self, name: str, url: str) -> None:
        def answers() -> bool:
            self._check_running()
            try:
                with urllib.request.urlopen(url, timeout=5) as response:
                    return bool(response.status == 200)
            except (urllib.error.URLError, OSError):
                return False

        if not wait_until(answers, READY_SECONDS, 0.1):
            raise GraphError(f"{name} did not answer in {READY_SECONDS:.0f} s\n{self._tail(name)}")

    @property
    def notes(self) -> list[str]:
        """What was asked for and does not run, and how to get it."""
        return [observability.HOW_GRAFANA] if self._tools is not None and self._tools.grafana is None else []

    def down(self, *, keep_logs: bool = False) -> None:
        """Ends every process, the last started first. The run directory goes too if it was ours and `keep_logs` is not
        set."""
        for name in reversed(list(self.processes)):
            self.processes[name].terminate()
        self.nats.stop()
        if self._owns_run_dir and not keep_logs:
            shutil.rmtree(self.run_dir, ignore_errors=True)

    def __enter__(self) -> LocalGraph:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    # --- parts -------------------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Start (again) one part other than `nats`; does not wait for it to be ready."""
        command, env = self._command(name)
        self.processes.pop(name, None)
        niceness = self.settings.engine_niceness if name in (*self.worker_names, *self.decode_names) else 0
        log_path = self.run_dir / f"{name}.log"
        self.processes[name] = ChildProcess(name, command, env=env, log_path=log_path, niceness=niceness)

    def kill(self, name: str) -> None:
        """kill -9, as a crash would."""
        if name == "nats":
            self.nats.kill()
        else:
            self.processes[name].kill()

    def restart(self, name: str) -> None:
        """Ends the part if it runs and starts it again; does not wait for it to be ready."""
        if name == "nats":
            self.nats.stop()
            self.nats.start()
            return
        self.processes[name].terminate()
        self.start(name)

    def _command(self, name: str) -> tuple[list[str], dict[str, str]]:
        settings = self.settings
        if name in self._beside:
            return self._beside[name]
        if name in self.worker_names or name in self.decode_names:
            decodes = name in self.decode_names
            arguments = ["-m", "worker_connector.reference_engine", "--model", settings.model]
            arguments += ["--model-dir", str(self.model_dir)]
            if settings.profile is not None:
                arguments += ["--profile", settings.profile, "--slower", str(settings.slower)]
            if settings.blocks_per_rank is not None:
                arguments += ["--blocks-per-rank", str(settings.blocks_per_rank)]
            if settings.max_num_tokens is not None:
                arguments += ["--max-num-tokens", str(settings.max_num_tokens)]
            arguments += ["--data-parallel-size", str(settings.data_parallel_size), "--threads", str(settings.threads)]
            arguments += ["--connector", "on" if settings.connector and not decodes else "off"]
            if decodes:
                arguments += ["--disaggregation-mode", "decode"]
            elif self.decode_names:
                arguments += ["--disaggregation-mode", "prefill"]
                arguments += (
                    [] if settings.offers_model else ["--served-model-name", f"{settings.served_model}-prefill"]
                )
            arguments += ["--offer-model"] if settings.offers_model else []
            env = self.environment(
                DYN_STABLE_ROUTING_ID=name,
                DYN_SYSTEM_PORT=str(self._port(f"{name}.status")),
                SEMKV_CONFIG=str(self.config_path),
                OMP_NUM_THREADS=str(settings.threads),
                # Threads that spin at each matrix product's end starve the other processes of a small machine, and then
                # wait for each other: under load a prefill took 5 times as long.
                OMP_WAIT_POLICY="PASSIVE",
            )
        elif name in self.router_names:
            arguments = ["-m", "dynamo_semkv", "serve", "--config", str(self.config_path)]
            env = self.environment(
                DYN_SYSTEM_PORT=str(self._port(f"{name}.status")),
                SEMKV_DASHBOARD__PORT=str(self._port(f"{name}.page")),
            )
        elif name == "frontend":
            arguments = ["-m", "dynamo.frontend", "--http-port", str(self._port("frontend.http"))]
            arguments += ["--router-mode", settings.frontend_mode]
            arguments += ["--migration-limit", str(settings.migration_limit)]
            env = self.environment()
        else:
            raise GraphError(f"part {name!r} is unknown; known are nats, {', '.join(self.processes)}")
        return [sys.executable, *arguments], env

    def shell_exports(self) -> list[str]:
        """`export` lines with which one more worker, or Dynamo's own tools, find this graph."""
        ours = self.environment(SEMKV_CONFIG=str(self.config_path))
        return [f"export {k}={shlex.quote(v)}" for k, v in sorted(ours.items()) if os.environ.get(k) != v]

    def environment(self, **extra: str) -> dict[str, str]:
        """The environment of every Dynamo process: file discovery, NATS events, loopback only, nothing fetched from
        anywhere."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "NATS_", "OTEL_", "SEMKV_"))}
        env.update(
            DYN_DISCOVERY_BACKEND="file",
            DYN_FILE_KV=str(self.run_dir / "discovery"),
            DYN_REQUEST_PLANE="tcp",
            DYN_EVENT_PLANE="nats",
            NATS_SERVER=self.nats.url,
            DYN_TCP_RPC_HOST=LOOPBACK,
            DYN_TCP_RESPONSE_STREAM_HOST=LOOPBACK,
            DYN_SYSTEM_HOST=LOOPBACK,
            DYN_HTTP_HOST=LOOPBACK,
            DYN_LOG="info",
            HF_HUB_OFFLINE="1",
            TOKENIZERS_PARALLELISM="false",
            PYTHONUNBUFFERED="1",
            **({"DYN_LOGGING_JSONL": "1"} if self.settings.otlp_endpoint is not None else {}),
            PYTHONPATH=os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]),
            **extra,
        )
        return env

    def _write_config(self) -> None:
        (self.run_dir / "discovery").mkdir(exist_ok=True)
        self.config_path = self.run_dir / "semkv.yaml"
        self.config_path.write_text(yaml.safe_dump(self.settings.config(self.nats.url), sort_keys=False))

    # --- readiness and logs ------------------------------------------------------------------------------------------

    def wait_ready(self, timeout_seconds: float = READY_SECONDS) -> None:
        """Waits until the frontend serves the model through every router and every router knows every rank's namespace.
        GraphError with the log's end if that takes longer, or if a process ends."""
        waits = [("frontend", self._frontend_ready), *((name, self._router_ready(name)) for name in self.router_names)]
        for name, ready in waits:

            def settled(ready: Callable[[], bool] = ready) -> bool:
                self._check_running()
                return ready()

            if not wait_until(settled, timeout_seconds, 0.1):
                raise GraphError(f"{name} was not ready in {timeout_seconds:.0f} s\n{self._tail(name)}")

    def _check_running(self) -> None:
        for name, process in self.processes.items():
            if not process.running:
                raise GraphError(f"{name} ended with status {process.exit_status}\n{self._tail(name)}")

    def _frontend_ready(self) -> bool:
        # The model is listed a little before its routes exist, and asking too early would log an ERROR.
        log = self.log_text("frontend")
        if "chat endpoints enabled" not in log:
            return False
        # Until then prompts go to the decode workers directly.
        if self.decode_names and "Prefill router target activated" not in log:
            return False
        health = self._get(f"{self.frontend_url}/health")
        workers = "prefill" if self.decode_names else "backend"
        component, parts = (workers, self.worker_names) if self.settings.offers_model else ("semkv", self.router_names)
        served = [i for i in health.get("instances", ()) if i["component"] == component and i["endpoint"] == "generate"]
        return len(served) == len(parts)

    def _router_ready(self, name: str) -> Callable[[], bool]:
        expected = self.settings.workers * self.settings.data_parallel_size if self.settings.connector else 0

        def ready() -> bool:
            replicas = self._get(f"{self.page_url(name)}/api/snapshot").get("replicas", ())
            return bool(sum(r.get("standing") == "ok" for r in replicas) >= expected)

        return ready

    @staticmethod
    def _get(url: str) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                parsed: dict[str, Any] = json.load(response)
                return parsed
        except (urllib.error.URLError, OSError, ValueError):
            return {}  # not there yet: the caller polls until its own deadline

    def log_text(self, name: str) -> str:
        """All that a part has logged, without colours; empty if it has no log."""
        path = self.nats.log_path if name == "nats" else self.run_dir / f"{name}.log"
        return _COLOUR.sub("", path.read_text(errors="replace")) if path.exists() else ""

    def trouble(self) -> list[str]:
        """Every ERROR line and traceback of any process, with the part's name."""
        names = ("nats", *self.processes)
        return [
            f"{name}: {line}" for name in names for line in self.log_text(name).splitlines() if _TROUBLE.search(line)
        ]

    def _tail(self, name: str) -> str:
        return self.log_text(name)[-4000:]
