"""Two workers behind Dynamo's own KvRouter, and behind ours: a prompt that one of them holds is served by the others
from blocks that they pulled, because Dynamo's `kv.fetch` hint said where they are."""

from __future__ import annotations

import re
import secrets
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from graphs.local.graph import LocalGraph
from graphs.local.settings import GraphSettings
from tests.graphs.traffic import ask, get, post, prompt, send, wait_until

pytestmark = [pytest.mark.graph, pytest.mark.slow]

BLOCK = 32


def pulling(directory: Path, model_dir: Path, **options: Any) -> LocalGraph:
    secret = directory / "fetch-secret"
    secret.write_text(secrets.token_hex(32))
    fetch = {"enabled": True, "secret_file": str(secret), "wait_ms": 20_000.0, "deadline_ms": 20_000.0}
    overrides = {"connector": {"fetch": fetch}, **options.pop("overrides", {})}
    settings = GraphSettings(model="tiny", threads=1, blocks_per_rank=160, overrides=overrides, **options)
    return LocalGraph(settings, run_dir=directory, model_dir=model_dir)


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[LocalGraph]:
    with pulling(tmp_path_factory.mktemp("graph"), model_dir, router_mode="kv") as started:
        yield started


def instance_of(graph: LocalGraph, worker: str) -> int:
    """Dynamo's id of a worker: a label of its own metrics, in hex."""
    with urllib.request.urlopen(f"{graph.status_url(worker)}/metrics", timeout=30) as response:
        found = re.search(r'semkv_connector_info\{[^}]*worker_id="([0-9a-f]+)"', response.read().decode())
    assert found is not None
    return int(found[1], 16)


def chat(graph: LocalGraph, seed: int, worker: str, rank: int, salt: str | None = None) -> tuple[str, int, int]:
    """(text, prompt tokens, cached tokens) of a prompt that is sent to this rank."""
    nvext: dict[str, Any] = {"backend_instance_id": instance_of(graph, worker), "dp_rank": rank}
    if salt is not None:
        nvext["cache_salt"] = salt
    body = {
        "model": graph.settings.served_model,
        "messages": [{"role": "user", "content": prompt(seed)}],
        "max_tokens": 8,
        "temperature": 0,
        "nvext": nvext,
    }
    answer = post(f"{graph.frontend_url}/v1/chat/completions", body)
    usage = answer["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return answer["choices"][0]["message"]["content"], usage["prompt_tokens"], cached


def rank_of(graph: LocalGraph, worker: str, rank: int) -> dict[str, Any]:
    return dict(get(f"{graph.status_url(worker)}/engine/semkv")["ranks"][rank])


def fetched(graph: LocalGraph, worker: str, rank: int) -> int:
    connector = rank_of(graph, worker, rank)["connector"]
    return int(connector["attempt_counts"].get("fetched_tokens", 0))


def settled(graph: LocalGraph, worker: str, rank: int, blocks: int) -> bool:
    """The rank's slab has so many blocks, and Dynamo was told of them."""
    numbers = rank_of(graph, worker, rank)
    return numbers["connector"]["ledger"]["resident"] >= blocks and numbers["connector"]["open_saves"] == 0


def pulls(graph: LocalGraph, worker: str, rank: int) -> dict[str, int]:
    return dict(rank_of(graph, worker, rank)["connector"]["fetch"]["pulls"])


def held_by(graph: LocalGraph, worker: str, rank: int, seed: int, salt: str | None = None) -> tuple[str, int]:
    """Text and whole blocks of a prompt, which this rank holds from now on."""
    before = rank_of(graph, worker, rank)["connector"]["ledger"]["resident"]
    text, size, cached = chat(graph, seed, worker, rank, salt)
    assert cached == 0
    blocks = (size - 1) // BLOCK
    wait_until("blocks are resident", lambda: settled(graph, worker, rank, before + blocks))
    return text, blocks


def test_a_prompt_that_one_worker_holds_is_materialized_on_the_other(graph: LocalGraph) -> None:
    for seed in range(1, 20):
        text, blocks = held_by(graph, "worker-0", 1, seed)
        again, _, cached = chat(graph, seed, "worker-1", 0)
        assert again == text
        if pulls(graph, "worker-1", 0):
            break
        assert cached == 0  # Dynamo had not learned of the blocks yet, so there was no hint: another prompt
    assert pulls(graph, "worker-1", 0) == {"complete": 1}
    sent = rank_of(graph, "worker-0", 1)["connector"]["fetch"]["serving"]["sent_blocks"]
    assert 0 < cached == sent * BLOCK <= blocks * BLOCK
    wait_until("the materialization is confirmed", lambda: fetched(graph, "worker-1", 0) == cached)
    assert rank_of(graph, "worker-1", 0)["connector"]["hints"]["fetch"] == 1


def test_another_tenants_blocks_are_not_pulled(graph: LocalGraph) -> None:
    for seed in range(20, 40):
        text, blocks = held_by(graph, "worker-0", 0, seed, "tenant-a")
        for salt in ("tenant-b", None):
            other, _, cached = chat(graph, seed, "worker-1", 1, salt)
            assert (other, cached) == (text, 0)
        assert pulls(graph, "worker-1", 1) == {}
        own, _, cached = chat(graph, seed, "worker-1", 0, "tenant-a")
        assert own == text
        if cached:
            assert cached <= blocks * BLOCK
            return
    raise AssertionError("Dynamo never hinted at the tenant's own blocks")


def test_behind_our_router_a_prompt_that_one_rank_holds_is_warm_on_those_that_dynamo_spreads_it_to(
    tmp_path: Path, model_dir: Path
) -> None:
    """Dynamo's KvRouter works inside our router. Its choice is made nearly at random here, as an even load would."""
    spread = {"dynamo": {"kv_router": {"router_temperature": 100.0}}}
    with pulling(tmp_path, model_dir, mode="shadow", overrides=spread) as started:
        ranks = [(worker, rank) for worker in started.worker_names for rank in range(2)]
        for seed in range(50, 60):
            first = send(started, ask(seed, 4))
            assert first.cached_tokens == 0
            with ThreadPoolExecutor(8) as clients:
                answers = list(clients.map(lambda _, seed=seed: send(started, ask(seed, 4)), range(8)))  # type: ignore[misc]
            assert {answer.text for answer in answers} == {first.text}
            if any(pulls(started, *rank).get("complete") for rank in ranks):
                break  # else Dynamo had not learned of the blocks in time: another prompt
        results = {name for rank in ranks for name in pulls(started, *rank)}
        assert "complete" in results
        assert results <= {"complete", "short", "joined", "nothing_missing"}
        wait_until("materializations are confirmed", lambda: sum(fetched(started, *rank) for rank in ranks) > 0)
