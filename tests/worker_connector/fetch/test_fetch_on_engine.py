"""Two real engines and TCP between them: KV that one computed serves the other, and its logits are those of a cold run,
bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from dynamo_semkv.config.fetch import FetchConfig
from dynamo_semkv.contracts.hints import FetchHint
from dynamo_semkv.contracts.location import Tier
from dynamo_semkv.contracts.report import Outcome
from tests.worker_connector.harness import MIB, Bench, ended, engine, prompt, run, settings
from worker_connector.fetch.peer_fetch import PeerFetch
from worker_connector.reference_engine.engine.engine import Engine
from worker_connector.reference_engine.models.sampling import SamplingParams

torch.set_num_threads(1)
WITH_LOGITS = SamplingParams(return_generation_logits=True)


def bench(slab_bytes: int) -> Bench:
    config = FetchConfig(enabled=True, secret_file="of no matter here", deadline_ms=20_000.0)
    it = dataclasses.replace(settings(slab_bytes, fetch=config), fetch_secret=b"a secret of the fleet")
    return Bench(it)


def desks(it: Bench) -> list[PeerFetch]:
    found = [scheduler.peer_fetch for scheduler in it.schedulers]
    return [desk for desk in found if desk is not None]


@contextmanager
def pair(
    manager: str = "v2", ranks: int = 1, slabs: tuple[int, int] = (4 * MIB, 4 * MIB), **config: Any
) -> Iterator[tuple[Bench, Engine, Bench, Engine]]:
    benches = bench(slabs[0]), bench(slabs[1])
    with ExitStack() as stack:
        engines = [
            stack.enter_context(engine(it, kv_cache_manager=manager, data_parallel_size=ranks, **config))
            for it in benches
        ]
        for it in benches:
            for rank, desk in enumerate(desks(it)):
                desk.open(rank)
        yield benches[0], engines[0], benches[1], engines[1]


def pull(source: Bench, target: Bench, tokens: list[int], *, ranks: tuple[int, int] = (0, 0), **options: Any) -> int:
    endpoint = desks(source)[ranks[0]].endpoint
    assert endpoint is not None
    hint = FetchHint(source_control_endpoint=endpoint, block_hashes=[0] * (len(tokens) // 32))
    desk = desks(target)[ranks[1]]
    future = desk.fetch(tokens, hint, **options)
    assert future is not None
    desk.fetcher.run_pending()
    return future.result(20)


@pytest.mark.parametrize("manager", ["v1", "v2"])
@pytest.mark.parametrize("length", [33, 200, 1000])
def test_logits_from_pulled_blocks_are_those_of_a_warm_engine(manager: str, length: int) -> None:
    tokens = prompt(length)
    with pair(manager) as (one, first, other, second):
        _, cold = run(first, tokens, sampling=WITH_LOGITS)
        _, warm = run(first, tokens, sampling=WITH_LOGITS)
        ended(one)
        assert pull(one, other, tokens) == (length - 1) // 32
        request_id, pulled = run(second, tokens, sampling=WITH_LOGITS)
        ended(other)
        whole = (length - 1) // 32 * 32
        assert pulled.stats.connector_served_tokens == warm.stats.device_reused_tokens == whole
        assert all(
            torch.equal(a, b) for a, b in zip(warm.stats.generation_logits, pulled.stats.generation_logits, strict=True)
        )
        assert cold.token_ids == pulled.token_ids
        report = other.report_of(request_id)
        assert (report.outcome, report.confirmed, report.tier) == (
            Outcome.MATERIALIZED_EXACT,
            whole,
            Tier.EXTERNAL,
        )
        assert other.schedulers[0].snapshot()["attempt_counts"]["fetched_tokens"] == whole
        for it in (one, other):
            it.check_balance()


def test_ranks_of_attention_data_parallelism_pull_each_for_itself() -> None:
    tokens = prompt(200)
    with pair(ranks=2) as (one, first, other, second):
        _, cold = run(first, tokens, dp_rank=1)
        ended(one)
        assert pull(one, other, tokens, ranks=(0, 0)) == 0  # rank 0 of the source has nothing
        assert pull(one, other, tokens, ranks=(1, 0)) == 6
        _, there = run(second, tokens, dp_rank=0)
        _, beside = run(second, tokens, dp_rank=1)
        ended(other)
        assert (there.stats.connector_served_tokens, beside.stats.connector_served_tokens) == (192, 0)
        assert cold.token_ids == there.token_ids == beside.token_ids
        other.check_balance()


def test_another_tenants_prompt_is_computed() -> None:
    tokens = prompt(200)
    with pair() as (one, first, other, second):
        run(first, tokens, cache_salt="a")
        ended(one)
        assert pull(one, other, tokens) == pull(one, other, tokens, salt="b") == 0
        _, computed = run(second, tokens, cache_salt="b")
        assert computed.stats.cached_tokens == 0
        assert pull(one, other, tokens, salt="a") == 6
        _, own = run(second, tokens, cache_salt="a")
        ended(other)
        assert own.stats.connector_served_tokens == 192


def test_a_chain_is_continued_where_it_was_pulled_to_and_pulled_on_from_there() -> None:
    """Three turns of a conversation over two engines: each computes what neither had."""
    turns = prompt(420)
    with pair() as (one, first, other, second):
        run(first, turns[:150])
        ended(one)
        assert pull(one, other, turns[:300]) == 4
        _, middle = run(second, turns[:300])
        ended(other)
        assert middle.stats.connector_served_tokens == 128
        assert pull(other, one, turns) == 5
        _, last = run(first, turns)
        ended(one)
        assert last.stats.cached_tokens == 288
    with engine(None) as cold:
        assert run(cold, turns)[1].token_ids == last.token_ids


def test_a_small_slab_takes_what_it_has_room_for() -> None:
    tokens = prompt(2500)
    with pair(slabs=(4 * MIB, MIB), num_blocks=120) as (one, first, other, second):
        _, cold = run(first, tokens)
        ended(one)
        assert pull(one, other, tokens) == 64
        assert desks(other)[0].fetcher.counts == {"no_slot": 1}
        _, warm = run(second, tokens)
        ended(other)
        assert warm.token_ids == cold.token_ids
        assert warm.stats.connector_served_tokens == 64 * 32
        other.check_balance()
