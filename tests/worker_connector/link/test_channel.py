"""How leader and rank of one process find each other, and what a leader does with what its rank sends."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import msgspec
import pytest

from tests.worker_connector.harness import MIB, RecordingSink, settings
from tests.worker_connector.scripted import ScriptedEngine, llm_args
from worker_connector.assembly import assemble_leader_with, assemble_rank_with
from worker_connector.engine_api.geometry import PoolGeometry
from worker_connector.leader.cache_generation import CacheGeneration
from worker_connector.link.channel import ForwardDone, channel_by_id, leader_channel, rank_channel


def test_both_orders_of_construction_meet() -> None:
    for first, second in ((leader_channel, rank_channel), (rank_channel, leader_channel)):
        args = SimpleNamespace()
        assert first(args) is second(args)


def test_other_engines_are_strangers() -> None:
    one, two = SimpleNamespace(), SimpleNamespace()
    assert leader_channel(one) is not leader_channel(two)
    assert rank_channel(one) is not rank_channel(two)


def test_concurrent_construction_pairs_every_engine_with_itself() -> None:
    """TensorRT-LLM constructs scheduler and worker in two threads, in any order."""
    every = [SimpleNamespace() for _ in range(50)]
    found: dict[tuple[int, str], object] = {}
    gate = threading.Barrier(2)

    def construct(side: str) -> None:
        gate.wait(10)
        for args in every:
            found[(id(args), side)] = leader_channel(args) if side == "leader" else rank_channel(args)

    threads = [threading.Thread(target=construct, args=(side,)) for side in ("leader", "rank")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert all(found[(id(args), "leader")] is found[(id(args), "rank")] for args in every)


def test_results_before_the_leader_listens_are_kept_in_order() -> None:
    channel = leader_channel(SimpleNamespace())
    heard: list[object] = []
    for iteration in range(3):
        channel.post(ForwardDone(0, iteration))
    assert heard == []
    channel.listen(heard.append)
    channel.post(ForwardDone(0, 3))
    assert heard == [ForwardDone(0, iteration) for iteration in range(4)]


def test_result_that_comes_while_the_kept_ones_are_handed_over_is_the_last() -> None:
    channel = leader_channel(SimpleNamespace())
    heard: list[object] = []
    for iteration in range(3):
        channel.post(ForwardDone(0, iteration))

    def hear(result: object) -> None:
        if not heard:
            channel.post(ForwardDone(0, 3))
        heard.append(result)

    channel.listen(hear)
    assert heard == [ForwardDone(0, iteration) for iteration in range(4)]


def test_channel_goes_with_its_owners() -> None:
    channel = leader_channel(SimpleNamespace())
    number = channel.channel_id
    assert channel_by_id(number) is channel
    del channel
    assert channel_by_id(number) is None


def test_two_ranks_that_were_given_one_object_are_sorted_out_by_the_first_metadata() -> None:
    """Construction cannot tell which worker is whose; the metadata names its leader."""
    args = llm_args(4)
    it = settings(MIB, min_offer_tokens=1, min_donor_tokens=4)
    leaders = [assemble_leader_with(args, it, RecordingSink()) for _ in range(2)]
    ranks = [assemble_rank_with(args, it, inline=True) for _ in range(2)]
    pools = [ScriptedEngine(it) for _ in range(2)]
    for rank, pool in zip(ranks, pools, strict=True):
        rank.register(PoolGeometry.from_layout(pool.layout()))
    output = SimpleNamespace(new_requests=[], cached_requests=[], attention_dp_rank=None)
    for parts, rank in zip(leaders, ranks, strict=True):
        rank.meet(parts.leader.batch(output), channel_by_id)
    for parts, rank, pool in zip(leaders, ranks, pools, strict=True):
        pool.leader, pool.rank, pool.sink = parts.leader, rank, parts.event_publisher._sink  # type: ignore[assignment]
        tokens = list(range(41))
        pool.serve(tokens)
        assert pool.prefill(pool.request(tokens)) == 40


def test_rank_without_its_leader_in_the_process_goes_on() -> None:
    engine = ScriptedEngine(settings(MIB))
    metadata = engine.leader.batch(engine.output)
    engine.rank.meet(msgspec.structs.replace(metadata, channel_id=10**9), channel_by_id)
    assert engine.rank.counts["foreign_channel"] == 1


def test_pool_that_is_registered_anew_starts_a_new_cache_generation() -> None:
    engine = ScriptedEngine(settings(MIB, min_offer_tokens=1, min_donor_tokens=4))
    tokens = list(range(41))
    engine.serve(tokens)
    before = engine.leader.snapshot()["generation"]
    engine.rank.register(PoolGeometry.from_layout(engine.layout()))
    assert engine.leader.snapshot()["generation"] != before
    assert engine.leader.snapshot()["donors"] == 0
    again = engine.request(tokens)
    assert engine.prefill(again) == 0
    engine.finish(again)
    assert engine.prefill(engine.request(tokens)) == 40


def test_fault_of_the_books_does_not_reach_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine(settings(MIB))
    monkeypatch.setattr(CacheGeneration, "take", lambda life, result: 1 / 0)
    engine.serve(list(range(41)))
    assert engine.leader.counts["result_errors"] > 0


def test_before_the_pool_is_known_nothing_is_offered_and_nothing_breaks() -> None:
    parts = assemble_leader_with(llm_args(4), settings(MIB), RecordingSink())
    request = SimpleNamespace(request_id=1, get_tokens=lambda beam: list(range(41)))
    assert parts.leader.ask(request, 0).tokens == 0
    parts.leader.allocated(request)
    output = SimpleNamespace(new_requests=[SimpleNamespace(request_id=1)], cached_requests=[], attention_dp_rank=None)
    assert parts.leader.batch(output).loads == ()
    parts.leader.finished(request)
    assert parts.leader.counts["not_ready"] == 1
