"""A worker whose slab is smaller than what it is asked for: the very request that comes again is served from its disk,
as it was held at the door. Nobody hinted (shadow mode), so nothing was on its way before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graphs.local.graph import LocalGraph
from graphs.local.settings import GraphSettings
from tests.graphs.traffic import ask, forget_device, get, routes, send, wait_until

pytestmark = [pytest.mark.graph, pytest.mark.slow]

BLOCK = 32
SLAB_BYTES = 3 * 2**20
"""Fewer blocks than three prompts have."""


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[LocalGraph]:
    directory = tmp_path_factory.mktemp("graph")
    disk = {"disk_path": str(directory / "disk"), "disk_bytes": 64 * 2**20, "disk_wait_ms": 60_000.0}
    settings = GraphSettings(
        model="tiny",
        threads=1,
        workers=1,
        data_parallel_size=1,
        mode="shadow",
        blocks_per_rank=64,
        overrides={"connector": {"slab_bytes": SLAB_BYTES, **disk}},
    )
    with LocalGraph(settings, run_dir=directory, model_dir=model_dir) as started:
        yield started


def connector(graph: LocalGraph) -> dict[str, Any]:
    return dict(get(f"{graph.status_url('worker-0')}/engine/semkv")["ranks"][0]["connector"])


def at_rest(graph: LocalGraph) -> bool:
    """Everything is saved and written behind."""
    numbers = connector(graph)
    disk = numbers["disk"]
    return not (numbers["open_saves"] or numbers["tracked"] or disk["waiting_to_spill"] or disk["in_flight"])


def test_a_prompt_that_is_on_disk_only_is_served_to_the_request_that_asks(graph: LocalGraph) -> None:
    first = {seed: send(graph, ask(seed, 4)) for seed in (1, 2, 3)}
    wait_until("blocks are on disk", lambda: at_rest(graph))
    assert connector(graph)["ledger"]["evicted"] > 0
    for seed in (1, 2, 3):
        _empty_device(graph)
        before = connector(graph)
        again = send(graph, ask(seed, 4))
        blocks = (again.prompt_tokens - 1) // BLOCK
        assert (again.text, again.cached_tokens) == (first[seed].text, blocks * BLOCK)
        route = wait_until("the route is closed", lambda again=again: routes(graph, "router-0", again.request_id))[-1]  # type: ignore[misc]
        assert route["report"]["confirmed"] == blocks * BLOCK
        assert route["report"]["tier"] == "disk"
        assert connector(graph)["disk"]["staged"] > before["disk"].get("staged", 0)
    assert connector(graph)["disk_holds"]["results"] == {"arrived": 3}
    assert not graph.trouble()


def _empty_device(graph: LocalGraph) -> None:
    """The slab evicts first what the device holds too, by the engine's events. So it has heard of all of it, and that
    it is gone: then the oldest goes first."""
    wait_until("the connector knows what the device holds", lambda: _heard(graph) == _cached(graph) > 0)
    forget_device(graph)
    wait_until("the device is empty", lambda: _heard(graph) == _cached(graph) == 0)


def _heard(graph: LocalGraph) -> int:
    return int(connector(graph)["kv_events"]["blocks"])


def _cached(graph: LocalGraph) -> int:
    return int(get(f"{graph.status_url('worker-0')}/engine/semkv")["ranks"][0]["engine"]["cached_blocks"])
