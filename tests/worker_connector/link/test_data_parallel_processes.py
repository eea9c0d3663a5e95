"""Attention data parallelism with a process for each rank: each has a cache, a leader, donors and reports of its
own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_semkv.bus.server import EmbeddedNats
from dynamo_semkv.contracts.donor_events import DonorRegistered
from dynamo_semkv.contracts.report import Outcome
from tests.worker_connector.harness import prompt, wait_for
from tests.worker_connector.leader.test_on_bus import Router

pytestmark = pytest.mark.graph

RANKS = 2
NAME = "engine-adp"
ROOT = Path(__file__).resolve().parents[3]


class RankProcess:
    def __init__(self, number: int, env: dict[str, str], log: Path) -> None:
        command = [sys.executable, "-m", "tests.worker_connector.data_parallel_rank", str(number), str(RANKS)]
        self.log = log
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("wb"), text=True
        )

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.read()

    def run(self, tokens: list[int]) -> dict[str, Any]:
        return self.ask(json.dumps(tokens))

    def end(self) -> int:
        """Its exit status: the end of its input ends it."""
        try:
            self.process.communicate(timeout=60)
        finally:
            self.process.kill()
        return self.process.wait()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedNats]:
    server = EmbeddedNats(tmp_path / "nats")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def ranks(broker: EmbeddedNats, tmp_path: Path) -> Iterator[list[RankProcess]]:
    file = tmp_path / "semkv.yaml"
    file.write_text(
        f"bus: {{url: '{broker.url}'}}\nmodel: {{name: tiny}}\nconnector: {{slab_bytes: 4194304, "
        "announce_interval_seconds: 0.2, min_donor_tokens: 32}\n"
    )
    env = {**os.environ, "SEMKV_CONFIG": str(file), "DYN_STABLE_ROUTING_ID": NAME}
    started = [RankProcess(number, env, tmp_path / f"rank-{number}.log") for number in range(RANKS)]
    try:
        for number, process in enumerate(started):
            assert process.read() == {"ready": number}
        yield started
    finally:
        assert [process.end() for process in started] == [0] * RANKS, [process.log.read_text() for process in started]


def test_each_rank_is_served_from_its_own_slab_and_speaks_for_itself(
    broker: EmbeddedNats, ranks: list[RankProcess]
) -> None:
    assert len({process.process.pid for process in ranks}) == RANKS
    router = Router(broker.url)
    try:
        prompts = [prompt(200, seed) for seed in range(RANKS)]
        cold = [process.run(tokens) for process, tokens in zip(ranks, prompts, strict=True)]
        assert [found["served"] for found in cold] == [0, 0]

        def donors() -> dict[int, int]:
            found: dict[int, int] = {}
            for event in router.events:
                if isinstance(event.data, DonorRegistered):
                    found[event.dp_rank] = found.get(event.dp_rank, 0) + 1
            return found

        wait_for(lambda: donors() == {0: 1, 1: 1}, 60.0)
        for process in ranks:
            process.ask("forget")
        # A rank holds nothing of what another one computed, though both are one engine.
        strangers = [process.run(tokens) for process, tokens in zip(ranks, reversed(prompts), strict=True)]
        assert [found["served"] for found in strangers] == [0, 0]
        for process in ranks:
            process.ask("forget")
        again = [process.run(tokens) for process, tokens in zip(ranks, prompts, strict=True)]
        assert [found["served"] for found in again] == [192, 192]
        assert [found["tokens"] for found in again] == [found["tokens"] for found in cold]
        wait_for(lambda: len(router.reports) == 3 * RANKS, 60.0)
        for rank in range(RANKS):
            own = [report for report in router.reports if report.dp_rank == rank]
            assert [report.stable_routing_id for report in own] == [NAME] * 3
            assert sorted(report.confirmed for report in own) == [0, 0, 192]
            assert {report.outcome for report in own} == {Outcome.NO_DONOR, Outcome.MATERIALIZED_EXACT}
        wait_for(lambda: {said.dp_rank for said in router.announcements} == {0, 1}, 60.0)
    finally:
        router.close()
