"""KV events of a worker, relayed by Dynamo's own publisher, as Dynamo's own router sees them: tiers, ranks and cache
salts.

The rule under test for whoever publishes: a salted block carries its salt in every event, under Dynamo's name for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from dynamo_semkv.config.schema import KvRouterOptions, ScoringConfig
from dynamo_semkv.contracts.identity import ReplicaKey
from dynamo_semkv.router.sheet_lines import dynamo_choice
from dynamo_semkv.scoring.choose import choose
from dynamo_semkv.scoring.replica_view import ReplicaView
from tests.router.conftest import OpenGraph
from tests.router.graph.build import TestGraph, http_json
from tests.router.graph.processes import Process, wait_until

pytestmark = pytest.mark.graph

BLOCK = 32
MARKER = 1_000_000
"""Tokens of the block that tells that everything published before it has been applied."""


@dataclass
class Tiers:
    graph: TestGraph
    worker: Process
    router: Process
    markers: int = 0

    def publish(self, *events: Any, rank: int = 0) -> None:
        """Send events of one rank, in order, and return once the router has applied them."""
        self.markers += 1
        salt = f"fence-{self.markers}"
        first_hash = 900_000 + 10 * self.markers
        # One fence a tier: Dynamo applies the events of one tier in order, but the tiers each in their own time.
        fences = [
            stored([first_hash + number], MARKER + number * BLOCK, medium=medium, cache_salt=salt)
            for number, medium in enumerate(("GPU", "CPU_PINNED", "DISK"))
        ]
        body = {"rank": rank, "events": [*events, *fences]}
        assert http_json(self.graph.status_port(self.worker), "/engine/kv", body)[0] == 200
        for number in range(3):
            start = MARKER + number * BLOCK
            wait_until("the events to be applied", lambda start=start: sum(self.rank(start, 1, salt, rank)) == 1)

    def rank(self, start: int, blocks: int, salt: str | None, rank: int = 0, lora: str | None = None) -> list[int]:
        """[device, host extension, disk extension] that the router sees of a prompt on one rank."""
        overlap = self.graph.query(self.router, tokens(start, blocks), salt, lora)["overlap"]
        return list(overlap[f"{self.graph.worker_id('w0')}/{rank}"])


@pytest.fixture(scope="module")
def tiers(open_graph: OpenGraph) -> Iterator[Tiers]:
    with open_graph() as graph:
        worker = graph.worker("w0")
        router = graph.router("r0")
        router.wait_log("is served by")
        yield Tiers(graph, worker, router)


def tokens(start: int, blocks: int) -> list[int]:
    return list(range(start, start + blocks * BLOCK))


def stored(hashes: list[int], start: int, parent: int | None = None, **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens(start, len(hashes)),
        "block_size": BLOCK,
        **more,
    }


def removed(hashes: list[int], medium: str | None = None) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}


def test_tiers_extend_each_other(tiers: Tiers) -> None:
    hashes = list(range(100, 110))
    tiers.publish(stored(hashes[:4], 0, medium="GPU"))
    assert tiers.rank(0, 10, None) == [4, 0, 0]
    tiers.publish(stored(hashes[:8], 0, medium="CPU_PINNED"), stored(hashes, 0, medium="DISK"))
    assert tiers.rank(0, 10, None) == [4, 4, 2]
    tiers.publish(removed(hashes[:4], "GPU"))
    assert tiers.rank(0, 10, None) == [0, 8, 2]
    tiers.publish(removed(hashes[2:8], "CPU_PINNED"))
    assert tiers.rank(0, 10, None) == [0, 2, 8]
    assert tiers.rank(0, 10, None, rank=1) == [0, 0, 0]


def test_a_host_block_may_follow_a_device_block(tiers: Tiers) -> None:
    tiers.publish(stored([200, 201], 400, medium="GPU"))
    tiers.publish(stored([202], 400 + 2 * BLOCK, parent=201, medium="CPU_PINNED"))
    assert tiers.rank(400, 3, None) == [2, 1, 0]


def test_no_medium_is_the_device(tiers: Tiers) -> None:
    tiers.publish(stored([210], 500))
    assert tiers.rank(500, 1, None) == [1, 0, 0]


def test_the_positional_form_carries_the_tier_too(tiers: Tiers) -> None:
    tiers.publish(["BlockStored", [220, 221], None, tokens(600, 2), BLOCK, None, "CPU_PINNED"])
    assert tiers.rank(600, 2, None) == [0, 2, 0]
    tiers.publish(["BlockRemoved", [220, 221], "CPU_PINNED"])
    assert tiers.rank(600, 2, None) == [0, 0, 0]


def test_ranks_have_their_own_blocks(tiers: Tiers) -> None:
    for rank in (0, 1):
        tiers.publish(stored([230, 231], 700, medium="CPU_PINNED"), rank=rank)
    tiers.publish(removed([230, 231], "CPU_PINNED"), rank=1)
    assert tiers.rank(700, 2, None, rank=0) == [0, 2, 0]
    assert tiers.rank(700, 2, None, rank=1) == [0, 0, 0]


def test_what_is_stored_twice_must_be_removed_twice(tiers: Tiers) -> None:
    """So a publisher announces a block of one tier once, however often it is written there."""
    tiers.publish(stored([240], 800), stored([240], 800), removed([240]))
    assert tiers.rank(800, 1, None) == [1, 0, 0]
    tiers.publish(removed([240]))
    assert tiers.rank(800, 1, None) == [0, 0, 0]


SALTED = {
    "named": lambda hashes, start, medium: stored(hashes, start, medium=medium, cache_salt="t1"),
    "positional, tagged": lambda hashes, start, medium: [
        "BlockStored",
        hashes,
        None,
        tokens(start, len(hashes)),
        BLOCK,
        None,
        medium,
        None,
        [["dynamo-cache-salt:t1"], *[None] * (len(hashes) - 1)],
    ],
}


@pytest.mark.parametrize("medium", ["GPU", "CPU_PINNED"])
@pytest.mark.parametrize("form", sorted(SALTED))
def test_a_salted_block_is_seen_with_its_salt_only(tiers: Tiers, form: str, medium: str) -> None:
    first = 300 + 10 * (sorted(SALTED).index(form) * 2 + (medium == "GPU"))
    start = 10_000 + first * 100
    hashes = list(range(first, first + 3))
    tiers.publish(SALTED[form](hashes, start, medium))
    seen = [3, 0, 0] if medium == "GPU" else [0, 3, 0]
    assert tiers.rank(start, 3, "t1") == seen
    for other in (None, "", "t2"):
        assert tiers.rank(start, 3, other) == [0, 0, 0], f"salt {other!r}"
    tiers.publish(removed(hashes, medium))
    assert tiers.rank(start, 3, "t1") == [0, 0, 0]


@pytest.mark.parametrize("medium", ["GPU", "CPU_PINNED"])
def test_a_continuation_never_leaves_its_parents_salt(tiers: Tiers, medium: str) -> None:
    first = 400 if medium == "GPU" else 420
    start = 20_000 if medium == "GPU" else 21_000
    tiers.publish(stored([first, first + 1], start, medium=medium, cache_salt="t1"))
    # No salt, and another salt: neither may show without "t1" or under "t2".
    tiers.publish(stored([first + 2], start + 2 * BLOCK, parent=first + 1, medium=medium))
    tiers.publish(stored([first + 3], start + 3 * BLOCK, parent=first + 2, medium=medium, cache_salt="t2"))
    for other in (None, "", "t2"):
        assert tiers.rank(start, 4, other) == [0, 0, 0], f"salt {other!r}"
        assert tiers.rank(start + 2 * BLOCK, 2, other) == [0, 0, 0], f"salt {other!r}"
    assert sum(tiers.rank(start, 4, "t1")) in (2, 3)


def test_salt_and_adapter_are_both_needed(tiers: Tiers) -> None:
    tiers.publish(stored([500, 501], 1400, cache_salt="t1", lora_name="adapter"))
    assert tiers.rank(1400, 2, "t1", lora="adapter") == [2, 0, 0]
    assert tiers.rank(1400, 2, "t1") == [0, 0, 0]
    assert tiers.rank(1400, 2, None, lora="adapter") == [0, 0, 0]


def test_the_form_that_leaks_is_known(tiers: Tiers) -> None:
    """An untagged salt in the extra keys of a positional event is dropped by Dynamo: the block counts as everybody's.

    Not ours to send. If this ever fails, Dynamo has learned to read it and the rule above may be relaxed.
    """
    tiers.publish(["BlockStored", [510], None, tokens(1500, 1), BLOCK, None, "GPU", None, [["t1"]]])
    assert tiers.rank(1500, 1, None) == [1, 0, 0]
    assert tiers.rank(1500, 1, "t1") == [0, 0, 0]


def test_a_block_of_another_size_is_not_published(tiers: Tiers) -> None:
    tiers.publish({**stored([520], 1600), "token_ids": tokens(1600, 1)[:16], "block_size": 16})
    assert tiers.rank(1600, 1, None) == [0, 0, 0]


@pytest.mark.parametrize(
    ("start", "first", "second", "chosen"),
    [
        (5_000, ("CPU_PINNED", 28), ("GPU", 10), 0),
        (6_000, ("CPU_PINNED", 12), ("GPU", 10), 1),
        (7_000, ("DISK", 28), ("GPU", 10), 1),
        (8_000, ("DISK", 28), ("CPU_PINNED", 8), 0),
        (9_000, ("GPU", 3), ("CPU_PINNED", 5), 1),
    ],
)
def test_what_we_take_for_dynamo_s_choice_is_dynamo_s(
    tiers: Tiers, start: int, first: tuple[str, int], second: tuple[str, int], chosen: int
) -> None:
    """Host and disk tier have the weights that Dynamo's router was given (0.75 and 0.25)."""
    for rank, (medium, blocks) in enumerate((first, second)):
        hashes = [start * 10 + rank * 1_000 + n for n in range(blocks)]
        tiers.publish(stored(hashes, start, medium=medium), rank=rank)
    prompt = tokens(start, 30)
    said = tiers.graph.query(tiers.router, prompt)
    views = []
    for name, (device, host, disk) in said["overlap"].items():
        worker, rank = name.split("/")
        replica = ReplicaKey(int(worker), int(rank))
        views.append(
            ReplicaView(
                replica,
                device_tokens=device * BLOCK,
                host_tokens=host * BLOCK,
                disk_tokens=disk * BLOCK,
                queued_prefill_tokens=said["loads"].get(name, [0, 0, 0])[0],
                active_decode_blocks=said["loads"].get(name, [0, 0, 0])[1],
            )
        )
    sheet = choose(views, [], len(prompt), ScoringConfig(), b"seed", block_size=BLOCK)
    ours = dynamo_choice(sheet, KvRouterOptions())
    assert ours is not None
    worker, rank, _ = said["choice"]
    assert (str(ours.replica.worker_id), ours.replica.dp_rank) == (worker, rank)
    assert rank == chosen
