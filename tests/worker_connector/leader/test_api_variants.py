"""The variants of TensorRT-LLM's connector API that `worker_connector.leader.api_variants` names, one heading each."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dynamo_semkv.contracts.report import Outcome, Reason
from tests.worker_connector.harness import MIB, Bench, settings
from tests.worker_connector.harness import engine as poisoned_engine
from tests.worker_connector.scripted import OPTIONS, SIZE, Request, ScriptedEngine, make
from worker_connector.connector import SemkvConnectorScheduler, SemkvConnectorWorker
from worker_connector.engine_api.engine import KvCacheConnectorWorker, SchedulerOutput
from worker_connector.engine_api.geometry import PoolGeometry
from worker_connector.errors import LoadFailed
from worker_connector.leader.api_variants import RESERVATION_HOOKS, restarts_failed_loads

PROMPT = list(range(41))


def offered(engine: ScriptedEngine, tokens: Sequence[int] = PROMPT) -> Request:
    """A second request of a served prompt, asked about and allocated with all of its offer honoured."""
    engine.serve(tokens)
    again = engine.request(tokens)
    assert engine.ask(again) == 40
    engine.allocate(again, 0, 40, 41)
    return again


# B: block reports are a dict by layer group


@pytest.mark.parametrize("windows", [(None,), (None, None), (None, 16)])
@pytest.mark.parametrize("chunk", [None, 12])
def test_dialect_b_blocks_by_layer_group_id(windows: tuple[int | None, ...], chunk: int | None) -> None:
    """Ids are keys, not positions; each forward pass checks every byte that it reads."""
    engine = make(windows=windows, group_ids=[7, 3][: len(windows)], by_dict=True)
    first = engine.request(PROMPT)
    engine.prefill(first, chunk=chunk)
    first.tokens.append(1)
    engine.finish(first)
    again = engine.request([*PROMPT, *range(90, 130)])
    assert engine.prefill(again, chunk=chunk) == 40
    engine.finish(again)
    engine.check_balance()


def test_dialect_b_group_that_is_not_registered_costs_reuse_and_nothing_else() -> None:
    engine = make(group_ids=[7], by_dict=True)
    engine.group_ids = [8]
    engine.serve(PROMPT)
    assert engine.ask(engine.request(PROMPT)) == 0


# B: optional hooks


def test_dialect_b_reset_gives_the_lease_back_and_the_replay_is_another_attempt() -> None:
    engine = make()
    again = offered(engine)
    engine.restart(again)
    assert engine.leader.snapshot()["leases"] == 0
    assert engine.report_of(again).outcome is Outcome.CANCELLED
    assert engine.prefill(again) == 40
    reports = [report for report in engine.sink.reports if report.request_id == again.request_id]
    assert [(report.epoch, report.confirmed) for report in reports] == [(0, 0), (1, 40)]
    engine.finish(again)
    engine.check_balance()


def test_dialect_b_replay_is_saved_from_its_new_pages() -> None:
    engine = make()
    first = engine.request(PROMPT)
    engine.ask(first)
    engine.allocate(first, 0, 0, 41)
    engine.iterate((first, 20))
    engine.restart(first)
    numbers = engine.leader.snapshot()
    assert (numbers["tracked"], numbers["ledger"]["resident"], numbers["ledger"]["pending"]) == (0, 0, 0)
    engine.serve(range(200, 241))  # takes the pages that the first allocation had
    engine.prefill(first)
    first.tokens.append(1)
    engine.finish(first)
    assert engine.prefill(engine.request(PROMPT)) == 40  # its forward pass checks the bytes


def test_dialect_b_reset_without_a_new_question_loads_nothing() -> None:
    engine = make()
    again = offered(engine)
    engine.restart(again)
    engine.allocate(again, 0, 0, 41)
    engine.iterate((again, 41))
    assert engine.rank.counts["loaded_blocks"] == 0
    assert engine.leader.counts["unasked_replay"] == 1


def test_dialect_b_hooks_of_unknown_requests_are_no_fault() -> None:
    engine = make()
    stranger = engine.request(PROMPT)
    engine.leader.reset(stranger)
    engine.leader.cancelled(stranger, 0, 8)
    engine.idle()


@pytest.mark.parametrize(("start", "served"), [(40, 40), (16, 16), (0, 0)])
def test_dialect_b_cancel_load_truncates_the_offer(start: int, served: int) -> None:
    """Where the request says no position, what is scheduled says it only for a prompt in one chunk; `cancel_load` says
    it always."""
    engine = make()
    engine.serve(PROMPT)
    again = engine.request(PROMPT)
    engine.ask(again)
    engine.leader.cancelled(again, start, 41)
    engine.allocate(again, 0, served, 41)
    attempt = engine.leader._life.attempts.get(again.request_id)  # type: ignore[union-attr]
    assert attempt is not None
    attempt.position = None  # a version that does not say it
    assert attempt.plan is not None
    attempt.plan.position = None
    engine.iterate((again, 1))  # the first chunk is one token long
    assert engine.rank.counts["loaded_blocks"] == served // SIZE


def test_dialect_b_cancelled_head_leaves_the_rest_of_the_offer() -> None:
    """The engine's own cache overtook the beginning of the offer while the request waited."""
    engine = make()
    engine.serve(PROMPT)
    again = engine.request(PROMPT)
    engine.ask(again)
    engine.leader.cancelled(again, 0, 8)
    engine.allocate(again, 0, 0, 41)
    engine.write(again, 0, 8)
    again.context_current_position, again.external = 40, 32
    engine.leader.allocated(again)
    engine.iterate((again, 1))
    assert engine.rank.counts["loaded_blocks"] == 8


@pytest.mark.parametrize(("caught_up", "honoured"), [(8, 32), (36, 4), (40, 0)])
@pytest.mark.parametrize("subtracts", [True, False])
def test_dialect_b_overtaken_tokens_are_no_reuse(caught_up: int, honoured: int, subtracts: bool) -> None:
    """What the engine's own cache took over from the head of an offer was not materialized by us, and is not loaded;
    also where the first report counts what is served as computed."""
    engine = make()
    engine.serve(PROMPT)
    again = engine.request(PROMPT)
    engine.ask(again)
    engine.leader.cancelled(again, 0, caught_up)
    engine.allocate(again, 0, 40, 41)
    engine.write(again, 0, caught_up)
    again.external = honoured if subtracts else 0
    engine.iterate((again, 1))
    report = engine.report_of(again)
    assert (report.offered, report.honoured, report.confirmed) == (40, honoured, honoured)
    assert engine.rank.counts["loaded_blocks"] == honoured // SIZE


# B: a failed load restarts its request


@pytest.mark.parametrize("page", [-1, 64])
def test_dialect_b_failed_load_is_not_passed_to_the_forward(page: int) -> None:
    """A page that the leader misses, and one that the rank refuses: the request leaves the batch, the other one in it
    is served."""
    engine = ScriptedEngine(settings(MIB, **OPTIONS), flat=True, restarts_failed=True)
    again = offered(engine)
    good = engine.request(PROMPT)
    engine.ask(good)
    engine.allocate(good, 0, 40, 41)
    real, again.pages[0][3] = again.pages[0][3], page
    broken = list(again.pages[0])
    engine.schedule(again, 1)
    engine.schedule(good, 1)
    metadata = engine.build()
    engine.rank.start_load(metadata, None)
    assert engine.rank.take_failed() == {again.request_id}
    assert engine.rank.take_failed() == set()
    engine.check(good, 40)
    engine.write(good, 40, 41)
    good.context_current_position = 41
    engine.rank.forward_done(metadata, None)
    again.pages[0] = [real if slot == page else slot for slot in broken]
    engine.restart(again)
    assert engine.report_of(good).confirmed == 40
    assert engine.report_of(again).outcome is Outcome.LOAD_FAILED
    # admitted again: not offered the same blocks, so it cannot fail for ever
    assert engine.prefill(again) == 0
    last = [report for report in engine.sink.reports if report.request_id == again.request_id][-1]
    assert (last.epoch, last.reason) == (1, Reason.COPY_FAILED)
    for request in (again, good):
        request.tokens.append(1)
        engine.finish(request)
    engine.check_balance()


def test_dialect_b_misread_report_of_an_offer_restarts_its_request() -> None:
    """Whatever our own fault is, what was promised is not written; and it may not come back with the next question."""
    engine = ScriptedEngine(settings(MIB, **OPTIONS), flat=True, restarts_failed=True)
    again = offered(engine)
    engine.schedule(again, 1)
    engine.output.new_requests[0].new_tokens = [-1]  # no token id
    metadata = engine.build()
    engine.rank.start_load(metadata, None)
    assert engine.rank.take_failed() == {again.request_id}
    engine.restart(again)
    assert engine.report_of(again).reason is Reason.COPY_FAILED
    assert engine.prefill(again) == 0


def test_dialect_b_saves_of_a_failed_request_are_dropped() -> None:
    engine = ScriptedEngine(settings(MIB, **OPTIONS), flat=True, restarts_failed=True)
    engine.serve(PROMPT)
    longer = engine.request([*PROMPT, *range(90, 130)])
    engine.ask(longer)
    engine.allocate(longer, 0, 40, 81)
    longer.pages[0][3] = 64
    engine.schedule(longer, 41)
    metadata = engine.build()
    assert metadata.saves
    saved = engine.rank.counts["saved_blocks"]
    engine.rank.start_load(metadata, None)
    assert engine.rank.take_failed() == {longer.request_id}
    engine.rank.forward_done(metadata, None)
    assert engine.rank.counts["saved_blocks"] == saved
    assert engine.leader.snapshot()["open_saves"] == 0


def test_dialect_b_failed_request_that_stays_in_the_batch_fails_closed() -> None:
    engine = ScriptedEngine(settings(MIB, **OPTIONS), flat=True, restarts_failed=True)
    again = offered(engine)
    again.pages[0][3] = 64
    engine.schedule(again, 1)
    metadata = engine.build()
    engine.rank.start_load(metadata, None)
    with pytest.raises(LoadFailed, match="did not take requests"):
        engine.rank.forward_done(metadata, None)


def test_dialect_b_engine_drops_bound_saves() -> None:
    engine = make()
    first = engine.request(PROMPT)
    engine.ask(first)
    engine.allocate(first, 0, 0, 41)
    engine.schedule(first, 41)
    metadata = engine.build()
    engine.rank.start_load(metadata, None)
    engine.rank.drop_saves_of({first.request_id})
    engine.rank.forward_done(metadata, None)
    assert engine.rank.counts["saved_blocks"] == 0
    assert engine.leader.snapshot()["ledger"]["pending"] == 0


def test_dialect_b_is_known_by_the_engines_own_base_class() -> None:
    """Ours has the hook in any case; a runtime that does not know it must get an exception instead."""

    class Theirs(KvCacheConnectorWorker):
        def take_failed_load_requests(self) -> set[int]:
            return set()

    assert restarts_failed_loads(Theirs)
    assert restarts_failed_loads(SemkvConnectorWorker)
    assert not restarts_failed_loads()  # the local classes are those of the base variant


# B: its layout types


def test_dialect_b_layout_without_helpers_and_with_replicated_regions() -> None:
    """No `dtype`, `slot_tensor` or `valid_page_slots`. Replicated regions hold bytes of the page as well: left out, a
    loaded page would keep what was there before."""
    memory = torch.arange(8 * 24, dtype=torch.uint8).view(8, 24)

    def region(start: int, size: int) -> SimpleNamespace:
        buffer = SimpleNamespace(layer_id=0, role=f"r{start}")
        return SimpleNamespace(size=size, buffers=(buffer,), as_tensor=lambda dtype: memory[:, start : start + size])

    def layout(replicated: tuple[Any, ...]) -> PoolGeometry:
        group = SimpleNamespace(
            layer_group_id=2, layer_ids=(0,), regions=(region(0, 16),), replicated_regions=replicated
        )
        return PoolGeometry.from_layout(SimpleNamespace(tokens_per_block=4, groups=(group,)))

    geometry = layout((region(16, 8),))
    assert (geometry.bytes_per_block, geometry.group_ids, geometry.dtype) == (24, (2,), "uint8")
    assert torch.cat([plane.pages[3] for plane in geometry.planes]).tolist() == memory[3].tolist()
    assert layout(()).bytes_per_block == 16
    assert layout(()).fingerprint != geometry.fingerprint


# R: prefix reservations


def test_dialect_r_none_of_the_reservation_hooks_is_there() -> None:
    """All or none: with none the runtime asks as before, with some it refuses the connector."""
    for cls in (SemkvConnectorScheduler, SemkvConnectorWorker):
        assert not [name for name in RESERVATION_HOOKS if any(name in base.__dict__ for base in cls.__mro__)]


@pytest.mark.parametrize("restarts_failed", [False, True])
def test_dialect_r_reserved_loads_that_nobody_promised_fail_closed(restarts_failed: bool) -> None:
    engine = make(restarts_failed=restarts_failed)
    output = SchedulerOutput()
    output.prefix_loads = [SimpleNamespace(request_id=5, start=0, end=32)]  # type: ignore[attr-defined]
    engine.output = output
    with pytest.raises(LoadFailed, match=r"request 5: .*enable_prefix_aware_scheduling"):
        engine.iterate()


def test_dialect_r_without_reservations_the_existing_methods_are_asked() -> None:
    engine = make()
    engine.output.prefix_loads = []  # type: ignore[attr-defined]
    engine.serve(PROMPT)
    assert engine.prefill(engine.request(PROMPT)) == 40


# the classes that the engine calls


def test_optional_hooks_reach_leader_and_rank_and_never_raise() -> None:
    bench = Bench(settings())
    with poisoned_engine(bench):
        scheduler, worker = bench.schedulers[0], bench.workers[0]
        known = SimpleNamespace(request_id=1)
        scheduler.request_reset(known)
        scheduler.cancel_load(known, 0, 32)
        assert not scheduler.faults
        scheduler.request_reset(SimpleNamespace())
        scheduler.cancel_load(SimpleNamespace(), 0, 32)
        assert scheduler.faults == {"request_reset": 1, "cancel_load": 1}
        worker.drop_bound_saves([1])
        assert worker.take_failed_load_requests() == set()
        worker.shutdown()
        worker.shutdown()
        scheduler.shutdown()
        scheduler.shutdown()
