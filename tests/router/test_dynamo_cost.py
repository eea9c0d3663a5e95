"""What we take for the cost of Dynamo's own router, held against its choices while requests run: tokens that wait and
KV blocks in use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from dynamo_semkv.config.load import build
from dynamo_semkv.config.schema import KvRouterOptions, ScoringConfig
from dynamo_semkv.contracts.identity import ReplicaKey
from dynamo_semkv.router.process import edge_settings
from dynamo_semkv.router.sheet_lines import dynamo_choice, dynamo_cost
from dynamo_semkv.scoring.choose import ScoreSheet, choose
from dynamo_semkv.scoring.replica_view import ReplicaView
from tests.router.conftest import OpenGraph
from tests.router.graph.build import TestGraph, http_json
from tests.router.graph.processes import Process, wait_until

pytestmark = pytest.mark.graph

BLOCK = 32
RUNNING_BLOCKS = 8
PROMPT_BLOCKS = 30


@dataclass
class Loaded:
    """One worker with two ranks; a request of RUNNING_BLOCKS is held on rank 0."""

    graph: TestGraph
    worker: Process
    router: Process
    hashes: int = 0
    callers: list[Process] = field(default_factory=list)

    def run(self, annotation: str) -> None:
        """A request on rank 0, and return once Dynamo has booked it and (without a hold) seen its first chunk."""
        worker = self.graph.worker_id("w0")
        request = {
            "model": "m",
            "token_ids": list(range(500_000, 500_000 + RUNNING_BLOCKS * BLOCK)),
            "stop_conditions": {"max_tokens": 10_000},
            "sampling_options": {},
            "output_options": {},
            "annotations": [f"pin:{worker}:0", annotation],
        }
        self.callers.append(
            self.graph.graph.python(
                "caller", "-m", "tests.router.graph.call", "test.semkv.generate", json.dumps(request)
            )
        )
        waits = annotation.startswith("hold")
        wait_until("the running request's load", lambda: self.load()[1] > 0 and (self.load()[0] > 0) == waits)

    def load(self) -> list[int]:
        """[queued prefill tokens, blocks, requests] of rank 0."""
        return list(self.graph.query(self.router, [1])["loads"].get(f"{self.graph.worker_id('w0')}/0", [0, 0, 0]))

    def stored(self, start: int, blocks: int) -> None:
        """The first blocks of the prompt that begins with token `start`, on rank 0's device."""
        self.hashes += 1_000
        event = {
            "type": "BlockStored",
            "block_hashes": [self.hashes + n for n in range(blocks)],
            "parent_block_hash": None,
            "token_ids": list(range(start, start + blocks * BLOCK)),
            "block_size": BLOCK,
            "medium": "GPU",
        }
        body = {"rank": 0, "events": [event]}
        assert http_json(self.graph.status_port(self.worker), "/engine/kv", body)[0] == 200

    def seen(self, prompt: list[int]) -> int:
        """Blocks of the prompt that Dynamo's index has on rank 0's device."""
        return int(self.graph.query(self.router, prompt)["overlap"][f"{self.graph.worker_id('w0')}/0"][0])

    def sheet(self, said: dict[str, Any]) -> ScoreSheet:
        views = []
        for name, (device, host, disk) in said["overlap"].items():
            worker, rank = name.split("/")
            queued, active, _ = said["loads"].get(name, [0, 0, 0])
            views.append(
                ReplicaView(
                    ReplicaKey(int(worker), int(rank)),
                    device_tokens=device * BLOCK,
                    host_tokens=host * BLOCK,
                    disk_tokens=disk * BLOCK,
                    queued_prefill_tokens=queued,
                    active_decode_blocks=active,
                )
            )
        return choose(views, [], PROMPT_BLOCKS * BLOCK, ScoringConfig(), b"seed", block_size=BLOCK)


@pytest.fixture(params=["hold:60", "decodes"])
def loaded(open_graph: OpenGraph, request: pytest.FixtureRequest) -> Iterator[Loaded]:
    options = dict(edge_settings(build({})).kv_router)
    with open_graph() as graph:
        worker = graph.worker("w0", "--delay-s", "1")
        router = graph.router("r0", "--kv-router", json.dumps(options))
        router.wait_log("is served by")
        wait_until("the card of the worker", lambda: len(graph.query(router, [1])["live"]) == 2)
        fake = Loaded(graph, worker, router)
        fake.run(request.param)
        yield fake


def test_a_replica_wins_from_the_block_on_that_outweighs_what_runs_there(loaded: Loaded) -> None:
    """Rank 0 waits or decodes, rank 1 is idle and empty: one block less than the load of rank 0 and Dynamo takes rank
    1, one more and it takes rank 0. At each, our cost names the same rank, so it is right to the block."""
    queued, active, _ = loaded.load()
    even = queued // BLOCK + active
    assert active >= RUNNING_BLOCKS
    assert even + 1 <= PROMPT_BLOCKS, "the prompt is too short to outweigh the load"
    for number, blocks in enumerate((even - 1, even + 1)):
        start = 10_000 * (number + 1)
        prompt = list(range(start, start + PROMPT_BLOCKS * BLOCK))
        loaded.stored(start, blocks)
        wait_until("the blocks in Dynamo's index", lambda prompt=prompt, blocks=blocks: loaded.seen(prompt) == blocks)  # type: ignore[misc]
        said = loaded.graph.query(loaded.router, prompt)
        sheet = loaded.sheet(said)
        ours = dynamo_choice(sheet, KvRouterOptions())
        assert ours is not None
        costs = {row.replica.dp_rank: dynamo_cost(row, KvRouterOptions()) for row in sheet.rows}
        assert said["choice"][1] == ours.replica.dp_rank == number ^ 1, (said["loads"], costs)
