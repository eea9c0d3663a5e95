"""Faults injected at each step of an asynchronous load, under both dialects, on the reference engine over a model that
knows every page: the request ends right, its neighbours do not notice, the report tells the truth, nothing leaks. The
matrix of synchronous loads is test_fault_matrix.py; that of several ranks test_tensor_parallel.py (a rank lost, late,
or failing alone)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import worker_connector.leader.cache_generation
import worker_connector.leader.scheduler_output
import worker_connector.memory.slab
import worker_connector.requests.async_loads
from dynamo_semkv.contracts.report import Outcome
from tests.worker_connector.requests.test_fault_matrix import Inject, InjectedError, calling
from tests.worker_connector.schedules.tape import Tape
from tests.worker_connector.schedules.world import SIZE, World
from worker_connector.errors import LoadFailed
from worker_connector.memory.copy_stream import Blocks, CpuStream
from worker_connector.reference_engine import Behaviours

BLOCKS = 6
SERVED = [0, 1, 2, 3] * BLOCKS + [5]
OTHER = [4, 5, 6, 7] * BLOCKS + [5]
FRESH = [8, 9, 10, 11] * BLOCKS + [5]


class FailsAt(CpuStream):
    """One copy into pages fails, or every one from it on (`for_good`)."""

    def __init__(self, at: int, *, for_good: bool = False) -> None:
        self._at, self._for_good = at, for_good
        self.calls = 0

    def to_pages(self, pages: torch.Tensor, rows: torch.Tensor, blocks: Blocks) -> None:
        self.calls += 1
        if self.calls == self._at + 1 or (self._for_good and self.calls > self._at):
            raise InjectedError("the copy failed")
        super().to_pages(pages, rows, blocks)


def copying(at: int, *, for_good: bool = False) -> Inject:
    """In steps of one block."""

    def inject(world: Any, patch: pytest.MonkeyPatch) -> FailsAt:
        loads, stream = world.bench.rank._loads, FailsAt(at, for_good=for_good)
        patch.setattr(loads, "_side", stream)
        if for_good:
            patch.setattr(loads, "_ahead", stream)
        return stream

    return inject


def late(world: Any, patch: pytest.MonkeyPatch) -> None:
    """The thread does not come to it before the deadline."""
    patch.setattr(world, "copy", lambda: None)
    patch.setattr(world.bench.rank._loads, "_deadline", -1.0)


@dataclass(frozen=True)
class Fault:
    name: str
    inject: Callable[[Any, pytest.MonkeyPatch], Any]
    served: tuple[bool, bool] = (True, False)
    """Under M, where a load is repeated in front of the pass, and under B, where its request is restarted."""
    ends_the_engine: bool = False
    """Under M: nothing else is left."""


FAULTS = [
    Fault(
        "allocation",
        calling(worker_connector.leader.cache_generation, "served_position"),
        served=(False, True),
        ends_the_engine=True,
    ),
    Fault("order", calling(worker_connector.requests.async_loads, "load_order"), ends_the_engine=True),
    *(
        Fault(f"copy of {which} block", copying(at))
        for which, at in (("the first", 0), ("a middle", BLOCKS // 2), ("the last", BLOCKS - 1))
    ),
    Fault("every copy", copying(0, for_good=True), ends_the_engine=True),
    Fault("late", late),
    Fault("return", calling(worker_connector.requests.async_loads.AsyncLoads, "resume"), ends_the_engine=True),
    Fault("first report", calling(worker_connector.leader.scheduler_output, "begin", at=1), ends_the_engine=True),
]


@pytest.fixture(autouse=True)
def quiet_log() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def world_of(dialect: str) -> World:
    world = World(
        Tape(b""),
        slots=40,
        max_leases=9,
        async_load_min_tokens=SIZE,
        behaviours=Behaviours(dialect=dialect),
        num_blocks=64,
    )
    for tokens in (SERVED, OTHER):
        world.submit(tokens, 1)
    world.run()
    world.engine.reset_prefix_cache()
    return world


def run(world: World) -> None:
    """Without `World.check`, which takes a load that fails for a fault of the connector."""
    for _ in range(200):
        if world.engine.is_idle:
            return
        world.copy()
        world.engine.step()
        assert not world.engine.faults
    raise AssertionError("requests never end")


@pytest.mark.parametrize("dialect", ["M", "B"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))
def test_fault_at_each_step_of_a_parked_load(fault: Fault, dialect: str) -> None:
    world = world_of(dialect)
    with pytest.MonkeyPatch.context() as patch:
        injected = fault.inject(world, patch)
        victim, neighbour, fresh = (world.submit(tokens, 2) for tokens in (SERVED, OTHER, FRESH))
        if fault.ends_the_engine and dialect == "M":
            with pytest.raises(LoadFailed):
                run(world)
        else:
            run(world)
        assert injected is None or injected.calls > 0, "the fault was never reached"
    reports = {
        of: [report for report in world.bench.sink.reports if report.request_id == of]
        for of in (victim, neighbour, fresh)
    }
    for report in world.bench.sink.reports:
        assert report.confirmed <= report.copied <= report.honoured <= report.offered
        assert (report.outcome is Outcome.MATERIALIZED_EXACT) == (report.confirmed > 0)
    assert all(report.confirmed == 0 for report in reports[fresh])
    if world.engine.fatal_error is not None:
        assert not world.engine.faults  # no pass ran on what was not filled
        assert all(report.confirmed == 0 for report in reports[victim])
        return
    served = fault.served[dialect == "B"]
    assert reports[victim][-1].confirmed == (BLOCKS * SIZE if served else 0)
    if dialect == "B" and not served:
        assert reports[victim][0].outcome in (Outcome.LOAD_FAILED, Outcome.CANCELLED)
    assert [world.engine.ended[of].finish_reason for of in (victim, neighbour, fresh)] == ["length"] * 3
    # afterwards it works as before
    world.engine.reset_prefix_cache()
    again = [world.submit(tokens, 2) for tokens in (SERVED, OTHER, FRESH)]
    run(world)
    world.pass_time()
    world.bench.schedulers[0].faults.clear()  # the one that was injected
    world.bench.check_balance()
    last = [report for report in world.bench.sink.reports if report.request_id in again]
    assert [report.confirmed for report in last] == [BLOCKS * SIZE] * 3
