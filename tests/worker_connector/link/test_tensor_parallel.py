"""Tensor parallelism with a process for each rank: one leader decides, a block is resident when all ranks hold it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from dynamo_semkv.contracts.report import Outcome, Reason
from tests.worker_connector.harness import MIB, wait_for
from tests.worker_connector.scripted import Request
from tests.worker_connector.tensor_engine import TensorEngine
from tests.worker_connector.tensor_rank import RankError, RankHandle
from worker_connector.link.remote_channel import CAPACITY

TOKENS = list(range(41))


@pytest.fixture(scope="module")
def processes() -> Iterator[list[RankHandle]]:
    handles: list[RankHandle] = []
    yield handles
    for handle in handles:
        if handle.alive:
            handle.kill()


@pytest.fixture
def make(processes: list[RankHandle]) -> Iterator[Callable[..., TensorEngine]]:
    """Engines of two ranks, or more; processes that a test has killed are replaced."""
    made: list[TensorEngine] = []

    def build(world: int = 2, **options: object) -> TensorEngine:
        processes[:] = [handle for handle in processes if handle.alive]
        while len(processes) < world - 1:
            processes.append(RankHandle())
        made.append(TensorEngine(processes[: world - 1], **options))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for engine in made:
        engine.close()


def finish(engine: TensorEngine, request: Request) -> None:
    request.tokens.append(1)
    engine.finish(request)


def saved(engine: TensorEngine) -> TensorEngine:
    """Ranks met, one prompt served and resident on all of them."""
    engine.meet()
    engine.serve(TOKENS)
    wait_for(lambda: engine.resident() == 10)
    return engine


def report(engine: TensorEngine, request: Request) -> tuple[Outcome, Reason, int]:
    wait_for(lambda: any(r.request_id == request.request_id for r in engine.sink.reports))
    found = engine.report_of(request)
    return found.outcome, found.reason, found.confirmed


@pytest.mark.parametrize("world", [2, 3])
def test_saved_offered_and_loaded_on_every_rank(make: Callable[..., TensorEngine], world: int) -> None:
    engine = saved(make(world))
    request = engine.request(TOKENS)
    assert engine.prefill(request) == 40  # every forward pass checks the shards of all ranks
    finish(engine, request)
    assert report(engine, request) == (Outcome.MATERIALIZED_EXACT, Reason.OK, 40)
    wait_for(lambda: engine.leader.snapshot()["leases"] == 0)
    engine.check_balance()


def test_nothing_is_offered_before_all_ranks_are_there(make: Callable[..., TensorEngine]) -> None:
    engine = make()
    assert engine.missing == [1]
    assert engine.ask(engine.request(TOKENS)) == 0
    assert engine.leader.snapshot()["counts"]["not_ready"] == 1
    engine.meet()
    request = engine.serve(TOKENS)
    assert engine.report_of(request).outcome is Outcome.NO_DONOR


def test_smallest_slab_decides_how_many_blocks_there_are(make: Callable[..., TensorEngine]) -> None:
    engine = make(slabs=[2 * MIB])
    engine.meet()
    assert engine.leader.snapshot()["ledger"]["slots"] == MIB // 4096


def test_save_is_resident_when_every_rank_has_it(make: Callable[..., TensorEngine]) -> None:
    engine = make()
    engine.meet()
    (other,) = engine.others
    other.shrink_buffer(10_000)
    other.hold_results(True)
    wait_for(lambda: engine.missing == [1])
    engine.serve(TOKENS)
    assert engine.resident() == 0
    other.hold_results(False)
    wait_for(lambda: engine.missing == [])
    engine.serve(TOKENS)
    wait_for(lambda: engine.resident() == 10)
    assert engine.prefill(engine.request(TOKENS)) == 40


def test_killed_rank_costs_reuse_and_nothing_else(make: Callable[..., TensorEngine]) -> None:
    engine = saved(make())
    running = engine.request([5] * 41)
    engine.prefill(running)
    engine.others[0].kill()
    wait_for(lambda: engine.missing == [1])
    finish(engine, running)
    wait_for(lambda: engine.leader.snapshot()["open_saves"] == 0)
    request = engine.request(TOKENS)
    assert engine.ask(request) == 0
    engine.allocate(request, 0, 0, 41)
    engine.iterate((request, 41))
    finish(engine, request)
    assert report(engine, request)[:2] in {
        (Outcome.NO_DONOR, Reason.WORKER_LOST),
        (Outcome.DECLINED, Reason.WORKER_LOST),
    }
    assert engine.leader.snapshot()["ranks"]["ranks_lost"] == 1
    engine.check_balance()


def test_rank_that_is_lost_in_the_middle_of_a_load(make: Callable[..., TensorEngine]) -> None:
    engine = saved(make())
    request = engine.request(TOKENS)
    offered = engine.ask(request)
    engine.allocate(request, 0, offered, 41)
    engine.others[0].kill()
    engine.iterate((request, 1))
    wait_for(lambda: engine.leader.snapshot()["leases"] == 0)
    finish(engine, request)
    outcome, reason, confirmed = report(engine, request)
    assert (outcome, reason, confirmed) == (Outcome.LOAD_FAILED, Reason.WORKER_LOST, 0)
    engine.check_balance()


def test_damage_on_one_rank_kills_the_block(make: Callable[..., TensorEngine]) -> None:
    engine = saved(make())
    ledger = engine.leader._life.ledger  # type: ignore[union-attr]
    slot = next(entry.slot for entry in ledger.entries() if entry.ordinal == 6)  # type: ignore[union-attr]
    (other,) = engine.others
    other.damage(slot)
    other.scrub()
    wait_for(lambda: engine.resident() == 6)
    request = engine.request(TOKENS)
    assert engine.prefill(request) == 24
    finish(engine, request)
    assert report(engine, request)[2] == 24


def test_damage_that_only_the_load_finds_fails_the_pass_of_that_rank(make: Callable[..., TensorEngine]) -> None:
    """The leader could not see it when it offered: the pass may not run."""
    engine = saved(make())
    ledger = engine.leader._life.ledger  # type: ignore[union-attr]
    slot = next(entry.slot for entry in ledger.entries() if entry.ordinal == 6)  # type: ignore[union-attr]
    engine.others[0].damage(slot)
    request = engine.request(TOKENS)
    engine.allocate(request, 0, engine.ask(request), 41)
    with pytest.raises(RankError, match=r"LoadFailed.*do not hold what was saved"):
        engine.iterate((request, 1))
    assert report(engine, request) == (Outcome.LOAD_FAILED, Reason.COPY_FAILED, 0)
    wait_for(lambda: engine.resident() == 6)


def test_failed_copy_on_one_rank_raises_there_and_is_reported(make: Callable[..., TensorEngine]) -> None:
    """Also where the runtime could restart a request: the ranks would have to agree on which
    (NVIDIA/TensorRT-LLM#18676)."""
    engine = saved(make(restarts_failed=True))
    engine.others[0].fail_copies()
    request = engine.request(TOKENS)
    engine.allocate(request, 0, engine.ask(request), 41)
    with pytest.raises(RankError, match=r"LoadFailed.*injected"):
        engine.iterate((request, 1))
    assert report(engine, request) == (Outcome.LOAD_FAILED, Reason.COPY_FAILED, 0)
    wait_for(lambda: engine.leader.snapshot()["leases"] == 0)


def test_connection_that_is_lost_and_back_loses_no_result(make: Callable[..., TensorEngine]) -> None:
    engine = saved(make())
    (other,) = engine.others
    other.hold_results(True)
    wait_for(lambda: engine.missing == [1])
    engine.idle(3)
    other.hold_results(False)
    wait_for(lambda: engine.missing == [])
    assert engine.resident() == 10
    assert engine.leader.snapshot()["counts"].get("pool_changed", 0) == 0
    request = engine.request(TOKENS)
    assert engine.prefill(request) == 40
    finish(engine, request)
    assert report(engine, request)[2] == 40


def test_rank_whose_results_were_lost_begins_anew(make: Callable[..., TensorEngine]) -> None:
    engine = saved(make())
    (other,) = engine.others
    other.shrink_buffer(3)
    other.hold_results(True)
    wait_for(lambda: engine.missing == [1])
    request = engine.request([9] * 41)
    engine.prefill(request)
    engine.decode(request, [1] * 16)  # three results for each block
    other.shrink_buffer(CAPACITY)  # or a leader that is slow to take what comes now would lose results again
    other.hold_results(False)
    wait_for(lambda: engine.missing == [])
    wait_for(lambda: engine.leader.snapshot()["counts"].get("pool_changed", 0) == 1)
    assert engine.resident() == 0
    assert other.counts()["new_sessions"] >= 1
    engine.finish(request)
    engine.serve(TOKENS)
    wait_for(lambda: engine.resident() == 10)


def test_late_results_of_a_rank_confirm_late(make: Callable[..., TensorEngine]) -> None:
    """The other rank's answers come behind the request's end: it is confirmed by them, and its lease is held until
    then."""
    engine = saved(make())
    (other,) = engine.others
    aggregator = engine.leader._aggregator
    held: list[object] = []
    take = aggregator.take
    aggregator.take = lambda result: held.append(result) or [] if result.rank == 1 else take(result)  # type: ignore[func-returns-value, method-assign]
    request = engine.request(TOKENS)
    assert engine.prefill(request) == 40
    finish(engine, request)
    assert engine.leader.snapshot()["leases"] == 1
    assert not [r for r in engine.sink.reports if r.request_id == request.request_id]
    wait_for(lambda: len(held) >= 2)
    aggregator.take = take  # type: ignore[method-assign]
    for result in [*reversed(held), *held]:
        engine.leader.on_result(result)  # type: ignore[arg-type]
    assert report(engine, request) == (Outcome.MATERIALIZED_EXACT, Reason.OK, 40)
    assert engine.leader.snapshot()["leases"] == 0
    assert other.alive


def test_socket_is_this_user_s_alone_and_goes_with_the_leader(make: Callable[..., TensorEngine]) -> None:
    engine = make()
    assert engine.parts.endpoint is not None
    path = engine.parts.endpoint.address.path
    assert os.stat(os.path.dirname(path)).st_mode & 0o777 == 0o700
    assert os.stat(path).st_mode & 0o777 == 0o600
    engine.parts.close()
    assert not os.path.exists(os.path.dirname(path))
