"""The example configurations of deploy/nats, run by a real nats-server on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_semkv.bus.child_process import ChildProcess
from dynamo_semkv.bus.server import LOOPBACK, find_nats_server
from dynamo_semkv.config.schema import BusConfig
from tests.bus.waiting import wait_for

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "nats"
OLDEST_SERVER = Path(sys.prefix) / "oldest-nats" / "bin" / "nats-server"
"""Put there by scripts/setup_env.py."""
SERVERS = {"newest": find_nats_server, "oldest": lambda: str(OLDEST_SERVER)}
USERS = {"semkv-setup": "setup", "semkv-router": "router", "worker-0": "worker-0", "worker-1": "worker-1"}
"""User -> the token behind `_INBOX_`."""


def password(user: str) -> str:
    return f"secret-of-{user}"


@dataclass(frozen=True)
class Broker:
    port: int
    scheme: str = "nats"

    def settings(self, user: str, **changes: Any) -> BusConfig:
        values = {
            "url": f"{self.scheme}://{user}:{password(user)}@{LOOPBACK}:{self.port}",
            "inbox_prefix": f"_INBOX_{USERS[user]}",
            "manage_streams": False,
            "stream_max_bytes": 16 * 2**20,
        }
        return BusConfig(**{**values, **changes})


@contextmanager
def running(config: Path, folder: Path, scheme: str = "nats", server: str = "newest", **env: str) -> Iterator[Broker]:
    """`server`: a key of SERVERS."""
    names = {
        f"SEMKV_{user.removeprefix('semkv-').replace('-', '_').upper()}_PASSWORD": password(user) for user in USERS
    }
    process = ChildProcess(
        "nats-server",
        [SERVERS[server](), "-c", str(config), "-a", LOOPBACK, "-p", "-1", "--ports_file_dir", str(folder)],
        env={**os.environ, "SEMKV_NATS_STORE": str(folder / "store"), **names, **env},
        log_path=folder / "log",
    )
    ports = folder / f"nats-server_{process.pid}.ports"
    try:
        wait_for("ports", lambda: not process.running or (ports.exists() and ports.read_text().endswith("}")))
        assert process.running, (folder / "log").read_text()
        url = json.loads(ports.read_text())["nats"][0]
        yield Broker(int(url.rpartition(":")[2]), scheme)
    finally:
        process.kill()


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for loopback, which is its own authority, and its key."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    command += ["-subj", "/CN=semkv-test", "-addext", f"subjectAltName=IP:{LOOPBACK}"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    return certificate, key
