"""Real processes: a mocker, a frontend with Dynamo's own KV router, a round-robin frontend, a bare Python router, and
ours.

Everything listens on loopback and ends with the `with` block. Our router knows `donors` documents, on the ranks of the
mocker, from the bus, as it would in service; that the mocker loads nothing does not change what routing costs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

import numpy as np
import yaml

from dynamo_semkv.bench.router.model_dir import WORDS, write_model_dir
from dynamo_semkv.bench.router.scene import BLOCK, announced_namespace
from dynamo_semkv.bus.child_process import ChildProcess, wait_until
from dynamo_semkv.bus.publisher import BusPublisher
from dynamo_semkv.bus.server import LOOPBACK, EmbeddedNats, free_port
from dynamo_semkv.config.schema import BusConfig
from dynamo_semkv.contracts import subjects
from dynamo_semkv.contracts.announcement import ANNOUNCEMENT_VERSION, ReplicaAnnouncement
from dynamo_semkv.contracts.codec import MSGPACK, encode_announcement, encode_donor_event
from dynamo_semkv.contracts.identity import StableReplica, stable_worker_id
from dynamo_semkv.contracts.keys import TokenArray
from dynamo_semkv.testing import EventTape

NAMESPACE, WORKER = "bench", "mock"
RUST, BARE, OURS = "mock", "bare", "ours"
"""Names of the model, one for each router that serves it."""
READY_SECONDS = 120.0


class GraphError(RuntimeError):
    """A process did not come up; the message ends with its log."""


def document(seed: int, tokens: int) -> TokenArray:
    """Random token ids below WORDS, u32 of shape [tokens]; the same for the same seed."""
    return np.random.default_rng(seed).integers(0, WORDS, tokens).astype(np.uint32)


class RouterGraph:
    """The processes, from `__enter__` to `__exit__`. GraphError where one does not come up."""

    def __init__(self, *, ranks: int, donors: int, tokens: int) -> None:
        self.ranks, self.donors, self.tokens = ranks, donors, tokens
        self._folder = tempfile.TemporaryDirectory(prefix="semkv-bench-router-")
        self._path = Path(self._folder.name)
        self._nats = EmbeddedNats(self._path / "nats")
        self._processes: dict[str, ChildProcess] = {}
        self.ports: dict[str, int] = {}

    def __enter__(self) -> RouterGraph:
        try:
            self._up()
        except BaseException:
            self._down()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._down()

    def url(self, model: str) -> str:
        """The chat endpoint of the frontend that serves this model."""
        return f"http://{LOOPBACK}:{self.ports['kv' if model == RUST else 'round-robin']}/v1/chat/completions"

    def processor_seconds(self, model: str) -> float:
        """Processor time that the process which routes this model has used so far; for Rust that is the frontend, which
        does more than route."""
        pid = self._processes["frontend-kv" if model == RUST else model].pid
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def errors(self) -> int:
        """How many lines at ERROR all logs have."""
        return sum(
            " ERROR " in line for process in self._processes.values() for line in process.log_text().splitlines()
        )

    def _up(self) -> None:
        self._nats.start()
        model_dir = write_model_dir(self._path / "model")
        mocker = ["-m", "dynamo.mocker", "--model-path", str(model_dir), "--model-name", RUST]
        mocker += ["--endpoint", f"dyn://{NAMESPACE}.backend.generate", "--block-size", str(BLOCK)]
        mocker += ["--speedup-ratio", "1000000", "--data-parallel-size", str(self.ranks)]
        mocker += ["--num-gpu-blocks-override", "65536"]
        self._start("mocker", mocker, DYN_STABLE_ROUTING_ID=WORKER)
        settings = {
            "model": {"name": OURS},
            "dynamo": {
                "namespace": NAMESPACE,
                "worker_component": "backend",
                "router_component": OURS,
                # As with the other two, which are one router each: no other router would receive what it publishes.
                "kv_router": {"router_replica_sync": False},
            },
            "bus": {"url": self._nats.url},
            "placement": {"mode": "enforce"},
            "dashboard": {"enabled": False},
        }
        config = self._path / "semkv.yaml"
        config.write_text(yaml.safe_dump(settings))
        self._know()
        self._start(OURS, ["-m", "dynamo_semkv", "serve", "--config", str(config)])
        endpoints = (f"{NAMESPACE}.backend.generate", f"{NAMESPACE}.{BARE}.generate")
        self._start(BARE, ["-m", "dynamo_semkv.bench.router.bare", *endpoints, BARE, str(BLOCK), str(model_dir)])
        for mode in ("kv", "round-robin"):
            port = self.ports[mode] = free_port()
            self._start(
                f"frontend-{mode}",
                ["-m", "dynamo.frontend", "--http-port", str(port), "--namespace", NAMESPACE, "--router-mode", mode],
            )
        for model in (RUST, BARE, OURS):
            self._wait_served(model)

    def _start(self, name: str, arguments: list[str], **extra: str) -> None:
        env = {
            key: value for key, value in os.environ.items() if not key.startswith(("DYN_", "NATS_", "OTEL_", "SEMKV_"))
        }
        env |= {
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(self._path / "discovery"),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "nats",
            "NATS_SERVER": self._nats.url,
            "DYN_TCP_RPC_HOST": LOOPBACK,
            "DYN_TCP_RESPONSE_STREAM_HOST": LOOPBACK,
            "DYN_SYSTEM_HOST": LOOPBACK,
            "DYN_HTTP_HOST": LOOPBACK,
            "DYN_LOG": "warn",
            "HF_HUB_OFFLINE": "1",
            **extra,
        }
        command = [sys.executable, *arguments]
        self._processes[name] = ChildProcess(name, command, env=env, log_path=self._path / f"{name}.log")

    def _know(self) -> None:
        """Publishes announcements and donors on the bus."""
        namespace = announced_namespace()
        publisher = BusPublisher(
            BusConfig(
                url=self._nats.url, max_buffered_messages=self.donors + self.ranks + 100, max_buffered_bytes=2**30
            ),
            "semkv-bench",
        )
        publisher.start()
        try:
            for rank in range(self.ranks):
                announcement = ReplicaAnnouncement(
                    version=ANNOUNCEMENT_VERSION,
                    stable_routing_id=WORKER,
                    dp_rank=rank,
                    generation="g1",
                    model=OURS,
                    namespace=namespace,
                    materialization="exact",
                )
                subject = subjects.announcements(StableReplica(WORKER, rank))
                publisher.publish(subject, encode_announcement(announcement), content_type=MSGPACK)
            tapes = [EventTape(worker_id=stable_worker_id(WORKER), dp_rank=rank) for rank in range(self.ranks)]
            events = [tape.reset() for tape in tapes]
            for event in events:
                publisher.publish(subjects.DONOR_EVENTS, encode_donor_event(event, MSGPACK), content_type=MSGPACK)
            narrowed = namespace.for_request(tenant="")
            for number in range(self.donors):
                tape = tapes[number % self.ranks]
                event = tape.register(f"{number:032x}", document(number, self.tokens), narrowed)
                publisher.publish(subjects.DONOR_EVENTS, encode_donor_event(event, MSGPACK), content_type=MSGPACK)
                tape.events.clear()
        finally:
            if not publisher.close(READY_SECONDS):
                raise GraphError(f"donors were not published: {publisher.stats()}")

    def _wait_served(self, model: str) -> None:
        body = json.dumps(
            {"model": model, "messages": [{"role": "user", "content": "w1 w2"}], "max_tokens": 1}
        ).encode()

        def served() -> bool:
            for process in self._processes.values():
                if not process.running:
                    raise GraphError(f"{process.name} ended:\n{process.log_text()[-2_000:]}")
            request = urllib.request.Request(self.url(model), body, {"content-type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    return bool(answer.status == 200)
            except (urllib.error.URLError, OSError):
                return False

        if not wait_until(served, READY_SECONDS, 0.2):
            logs = "\n".join(f"--- {name}\n{process.log_text()[-1_000:]}" for name, process in self._processes.items())
            raise GraphError(f"model {model} was not served within {READY_SECONDS:g} s\n{logs}")

    def _down(self) -> None:
        for process in reversed(list(self._processes.values())):
            process.kill()
        self._nats.stop()
        self._folder.cleanup()
