"""A connector without threads, bus or broker, on the reference engine or on nothing at all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from dynamo_semkv.config.schema import BusConfig, ConnectorConfig, Materialization
from dynamo_semkv.contracts.announcement import ReplicaAnnouncement
from dynamo_semkv.contracts.codec import (
    decode_announcement,
    decode_donor_event,
    decode_report,
)
from dynamo_semkv.contracts.donor_events import DonorEvent
from dynamo_semkv.contracts.namespace import DEFAULT_SALT_KEY
from dynamo_semkv.contracts.report import MaterializationReport
from worker_connector.assembly import LeaderParts, assemble_leader_with, assemble_rank_with
from worker_connector.engine_api.settings import Settings
from worker_connector.leader.leader import Leader
from worker_connector.rank.rank import Rank
from worker_connector.reference_engine.engine.config import ConnectorSpec, EngineConfig
from worker_connector.reference_engine.engine.engine import Engine
from worker_connector.reference_engine.models.model_config import LlamaConfig
from worker_connector.reference_engine.models.presets import ModelSource
from worker_connector.scheduler import SemkvConnectorScheduler
from worker_connector.worker import SemkvConnectorWorker

MIB = 1024 * 1024
STABLE_ID = "engine-a"

SMALL = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    max_position_embeddings=4096,
)
"""32 tokens take 16 KiB, so a 1 MiB slab holds 64 blocks."""


def settings(slab_bytes: int = 4 * MIB, **connector: Any) -> Settings:
    config = ConnectorConfig(slab_bytes=slab_bytes, **connector)
    return Settings(config, BusConfig(), "tiny", DEFAULT_SALT_KEY, STABLE_ID, "0" * 16)


def off_settings() -> Settings:
    return settings(materialization=Materialization.OFF)


def prompt(length: int, seed: int = 0, vocabulary: int = 256) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocabulary, length)]


@dataclass
class RecordingSink:
    """A bus that keeps everything."""

    messages: list[tuple[str, bytes, str | None]] = field(default_factory=list)
    accepting: bool = True
    on_loss: Callable[[str], None] | None = None
    largest_payload: int = MIB
    room: int | None = None
    """How many more messages `has_room` lets through; None: any number."""

    def has_room(self, subject: str) -> bool:
        return self.room is None or self.room > 0

    def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        content_type: str | None = None,
        message_id: str | None = None,
        persistent: bool = True,
    ) -> bool:
        if self.room is not None:
            self.room -= 1
        if self.accepting:
            self.messages.append((subject, payload, content_type))
        return self.accepting

    @property
    def reports(self) -> list[MaterializationReport]:
        return [decode_report(payload) for subject, payload, _ in self.messages if subject.startswith("semkv.reports")]

    @property
    def donor_events(self) -> list[DonorEvent]:
        return [
            decode_donor_event(payload, content_type or "")
            for subject, payload, content_type in self.messages
            if subject.startswith("semantic-kv-events")
        ]

    @property
    def announcements(self) -> list[ReplicaAnnouncement]:
        return [
            decode_announcement(payload)
            for subject, payload, _ in self.messages
            if subject.startswith("semkv.announcements")
        ]

    def events(self, kind: type[msgspec.Struct]) -> list[Any]:
        return [event.data for event in self.donor_events if isinstance(event.data, kind)]


@dataclass
class Bench:
    """The connector objects that an engine made, one of each per rank, in rank order."""

    settings: Settings
    clock: Callable[[], float] = time.monotonic
    inline: bool = True
    restarts_failed: bool | None = None
    """As `assemble_rank_with`: True for an engine of dialect B."""
    """False: the rank's own threads seal, scrub and load."""
    sinks: list[RecordingSink] = field(default_factory=list)
    schedulers: list[SemkvConnectorScheduler] = field(default_factory=list)
    workers: list[SemkvConnectorWorker] = field(default_factory=list)

    def spec(
        self,
        scheduler: type[SemkvConnectorScheduler] = SemkvConnectorScheduler,
        worker: type[SemkvConnectorWorker] = SemkvConnectorWorker,
    ) -> ConnectorSpec:
        bench = self

        class Scheduler(scheduler):  # type: ignore[misc, valid-type]
            def _assemble(self, llm_args: Any) -> LeaderParts:
                sink = RecordingSink()
                parts = assemble_leader_with(llm_args, bench.settings, sink, clock=bench.clock)
                bench.sinks.append(sink)
                bench.schedulers.append(self)
                return parts

        class Worker(worker):  # type: ignore[misc, valid-type]
            def _assemble(self, llm_args: Any) -> Rank:
                bench.workers.append(self)
                return assemble_rank_with(
                    llm_args, bench.settings, inline=bench.inline, restarts_failed=bench.restarts_failed
                )

        return ConnectorSpec(Scheduler, Worker)

    @property
    def sink(self) -> RecordingSink:
        return self.sinks[0]

    @property
    def leader(self) -> Leader:
        return self.schedulers[0].leader

    @property
    def rank(self) -> Rank:
        return self.workers[0].rank

    def report_of(self, request_id: int, rank: int = 0) -> MaterializationReport:
        (found,) = [report for report in self.sinks[rank].reports if report.request_id == request_id]
        return found

    def check_balance(self, *, numbers_of_attempts: bool = True) -> None:
        """What must hold whenever no request is running. `numbers_of_attempts`: no request was forgotten and came
        back."""
        for scheduler, sink in zip(self.schedulers, self.sinks, strict=True):
            numbers = scheduler.snapshot()
            assert numbers["leases"] == 0, numbers
            assert numbers["tracked"] == numbers["finishing"] == numbers["attempts"] == numbers["open_saves"] == 0, (
                numbers
            )
            assert not numbers["faults"], numbers
            ledger = numbers["ledger"]
            if ledger is not None:
                assert ledger["free"] + ledger["resident"] == ledger["slots"], ledger
                assert ledger["pending"] == ledger["leased"] == ledger["retired"] == 0, ledger
            keys = [(report.request_id, report.epoch) for report in sink.reports]
            assert len(keys) == len(set(keys)) or not numbers_of_attempts
            assert len(keys) == numbers["attempt_counts"].get("asked", 0) - numbers["attempt_counts"].get(
                "superseded", 0
            )
            ids = [event.event_id for event in sink.donor_events]
            assert ids == list(range(len(ids)))


@contextmanager
def engine(bench: Bench | None, *, spec: ConnectorSpec | None = None, **config: Any) -> Iterator[Engine]:
    """A small poisoned engine; without a bench, without a connector."""
    options: dict[str, Any] = {
        "model": ModelSource(config=SMALL),
        "num_blocks": 64,
        "max_num_tokens": 256,
        "num_threads": 1,
        "poison_pages": True,
        "idle_poll_s": None,
    } | config
    running = Engine(EngineConfig(**options), connector=spec or (bench.spec() if bench is not None else None))
    try:
        yield running
    finally:
        running.shutdown()


def run(running: Engine, tokens: Sequence[int], *, max_new_tokens: int = 4, **options: Any) -> Any:
    """Submit one prompt and wait for its end."""
    handle = running.submit(tokens, max_new_tokens=max_new_tokens, **options)
    generation = handle.result(60)
    return handle.request_id, generation


def wait_for(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    """Until the condition holds; AssertionError when the time is over."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.002)


def ended(bench: Bench) -> None:
    """All requests have ended for the connector too."""
    wait_for(lambda: all(scheduler.snapshot()["tracked"] == 0 for scheduler in bench.schedulers))


def quiet(bench: Bench) -> None:
    ended(bench)
    bench.check_balance()
