"""Faults injected at each step of a plan, under both dialects: the request ends right, its neighbours do not notice,
the report tells the truth, and nothing leaks.

"Ends right": every forward pass checks the bytes that it reads, so a request that ends was served or computed. Where a
promise cannot be kept and the base dialect (M) knows no way back, `start_load_kv` raises before any forward pass, and
the executor ends; dialect B restarts the request. Of asynchronous loads: test_fault_matrix_parked.py; of several ranks:
test_tensor_parallel.py (a rank lost, late, or failing alone)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import worker_connector.leader.active_requests
import worker_connector.leader.cache_generation
import worker_connector.leader.event_publisher
import worker_connector.leader.leader
import worker_connector.leader.scheduler_output
import worker_connector.ledger.ledger
import worker_connector.memory.slab
import worker_connector.requests.attempts
import worker_connector.requests.prefix_lookup
import worker_connector.requests.save_planner
from dynamo_semkv.contracts.report import MaterializationReport, Outcome
from tests.worker_connector.scripted import Request
from tests.worker_connector.through_callbacks import CallbackEngine
from worker_connector.errors import LoadFailed
from worker_connector.leader.cache_generation import FORGET_AFTER, SWEEP_EVERY
from worker_connector.memory.copy_stream import Blocks, CpuStream

BLOCKS = 10
SERVED = list(range(41))
OTHER = list(range(100, 141))
FRESH = list(range(200, 241))


class InjectedError(RuntimeError):
    """Ours, and nothing that the connector knows."""


class Once:
    """Raises at one call of the real thing, and counts."""

    def __init__(self, real: Callable[..., Any], at: int = 0) -> None:
        self._real = real
        self._at = at
        self.calls = 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        if self.calls == self._at + 1:
            raise InjectedError("injected")
        return self._real(*arguments, **named)

    def __get__(self, instance: object, owner: type) -> Callable[..., Any]:
        return self if instance is None else lambda *arguments, **named: self(instance, *arguments, **named)


class FaultyStream(CpuStream):
    """The copy of one of the coming blocks fails."""

    def __init__(self, at: int) -> None:
        self._at = at
        self.calls = 0

    def to_pages(self, pages: torch.Tensor, rows: torch.Tensor, blocks: Blocks) -> None:
        for block in self._single(blocks):
            super().to_pages(pages, rows, block)

    def to_rows(self, rows: torch.Tensor, pages: torch.Tensor, blocks: Blocks) -> None:
        for block in self._single(blocks):
            super().to_rows(rows, pages, block)

    def _single(self, blocks: Blocks) -> Iterator[Blocks]:
        for at in range(len(blocks)):
            self.calls += 1
            if self.calls == self._at + 1:
                raise InjectedError("the copy failed")
            yield Blocks(blocks.slots[at : at + 1], blocks.pages[at : at + 1])


Inject = Callable[[CallbackEngine, pytest.MonkeyPatch], Any]
"""Puts the fault in; what it returns has `calls`."""


def calling(where: Any, name: str, at: int = 0) -> Inject:
    def inject(engine: CallbackEngine, patch: pytest.MonkeyPatch) -> Once:
        once = Once(getattr(where, name), at)
        patch.setattr(where, name, once)
        return once

    return inject


def copying(at: int, *, into_pages: bool) -> Inject:
    def inject(engine: CallbackEngine, patch: pytest.MonkeyPatch) -> FaultyStream:
        stream = FaultyStream(at)
        patch.setattr(engine.worker.rank, "_stream" if into_pages else "_save_stream", stream)
        return stream

    return inject


def bus_away(engine: CallbackEngine, patch: pytest.MonkeyPatch) -> Any:
    patch.setattr(engine.sink, "accepting", False)
    return None


@dataclass(frozen=True)
class Fault:
    name: str
    inject: Inject
    breaks_a_promise: bool = False
    """The engine relies on tokens that will not be there: M raises, B restarts."""
    restarts: bool = True
    """Under B. False: it is not one request's fault, so nothing less than the batch can be taken back, and B raises as
    well."""
    serves: bool = True
    """Is the victim served all the same?"""
    reports: bool = True
    """Does its report reach the bus?"""


FAULTS = [
    # before the offer
    Fault(
        "reading the request",
        calling(worker_connector.requests.prefix_lookup, "request_tokens"),
        serves=False,
        reports=False,
    ),
    Fault(
        "namespace of the request",
        calling(worker_connector.requests.prefix_lookup, "scope_of"),
        serves=False,
        reports=False,
    ),
    Fault("look-up", calling(worker_connector.ledger.ledger.Ledger, "match"), serves=False, reports=False),
    Fault("check of the bytes", calling(worker_connector.memory.slab.HostSlab, "verify"), serves=False, reports=False),
    Fault("lease", calling(worker_connector.ledger.ledger.Ledger, "lease"), serves=False),
    # after the offer
    Fault("allocation", calling(worker_connector.leader.cache_generation, "served_position")),
    # after the allocation
    Fault("first report", calling(worker_connector.leader.scheduler_output, "begin"), breaks_a_promise=True),
    Fault("order", calling(worker_connector.leader.scheduler_output, "load_order"), breaks_a_promise=True),
    Fault("saves of the batch", calling(worker_connector.requests.save_planner.SavePlanner, "plan")),
    Fault(
        "whole batch",
        calling(worker_connector.leader.scheduler_output.SchedulerOutputReader, "read"),
        breaks_a_promise=True,
        restarts=False,
    ),
    Fault("end of the batch", calling(worker_connector.leader.active_requests.ActiveRequests, "flush")),
    Fault("start of the batch", calling(worker_connector.leader.leader.Leader, "_see_rank")),
    # in the copy
    *(
        Fault(f"copy of {which} block", copying(at, into_pages=True), breaks_a_promise=True)
        for which, at in (("the first", 0), ("a middle", BLOCKS // 2), ("the last", BLOCKS - 1))
    ),
    # in the saves of the same request
    *(
        Fault(f"save of {which} block", copying(at, into_pages=False))
        for which, at in (("the first", 0), ("a middle", BLOCKS // 2), ("the last", BLOCKS - 1))
    ),
    Fault("seal", calling(worker_connector.memory.slab.HostSlab, "seal")),
    # at the end
    Fault("end of the request", calling(worker_connector.leader.active_requests.ActiveRequests, "finish")),
    # in the report
    Fault("bus away", bus_away, reports=False),
    Fault("making the report", calling(worker_connector.leader.event_publisher, "build_report", at=1), reports=False),
]


class IsolatingQueue:
    """What the background thread does with a job that raises, on the caller's thread."""

    failed = 0

    def submit(self, job: Callable[[], None]) -> bool:
        try:
            job()
        except InjectedError:
            self.failed += 1
        return True


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def engine_of(dialect: str) -> CallbackEngine:
    engine = CallbackEngine(by_dict=dialect == "B", restarts_failed=dialect == "B", num_pages=160)
    engine.free[0] = engine.free[0][::2]  # no two neighbours: each block is a copy of its own
    engine.parts.event_publisher._queue = IsolatingQueue()
    for tokens in (SERVED, OTHER):
        engine.serve(tokens)
    return engine


def start(engine: CallbackEngine, *prompts: list[int]) -> tuple[list[Request], bool]:
    """Asks for all, allocates, runs one batch of all; and whether that batch came to its forward pass."""
    requests = [engine.request(tokens) for tokens in prompts]
    offers = [engine.ask(request) for request in requests]
    for request, offered in zip(requests, offers, strict=True):
        engine.allocate(request, 0, offered, 41)
    try:
        engine.iterate(*((request, 41 - offered) for request, offered in zip(requests, offers, strict=True)))
    except LoadFailed:
        return requests, False
    return requests, True


def complete(engine: CallbackEngine, requests: list[Request]) -> None:
    for request in requests:
        if request.is_new:  # restarted
            engine.prefill(request)
        engine.decode(request, [7])
        request.tokens.append(8)
        engine.finish(request)


def check(engine: CallbackEngine) -> None:
    """Long after: nothing is held, and no count says more than the one before it."""
    engine.idle(FORGET_AFTER + 2 * SWEEP_EVERY)
    engine.check_balance()
    assert engine.scheduler.leader.snapshot()["attempts"] == 0
    for report in engine.sink.reports:
        assert report.confirmed <= report.copied <= report.honoured <= report.offered
        assert (report.outcome is Outcome.MATERIALIZED_EXACT) == (report.confirmed > 0)
    keys = [(report.request_id, report.epoch) for report in engine.sink.reports]
    assert len(keys) == len(set(keys))


def reports_of(engine: CallbackEngine, request: Request) -> list[MaterializationReport]:
    return [report for report in engine.sink.reports if report.request_id == request.request_id]


@pytest.mark.parametrize("dialect", ["M", "B"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))
def test_fault_at_each_step(fault: Fault, dialect: str, patch: pytest.MonkeyPatch) -> None:
    engine = engine_of(dialect)
    injected = fault.inject(engine, patch)
    (victim, neighbour, fresh), ran = start(engine, SERVED, OTHER, FRESH)
    assert ran is not (fault.breaks_a_promise and not (dialect == "B" and fault.restarts))
    if ran:
        complete(engine, [victim, neighbour, fresh])
    else:  # the executor is gone, and says nothing more
        for request in (victim, neighbour, fresh):
            engine.release(request)
    assert injected is None or injected.calls > 0, "the fault was never reached"
    patch.undo()
    check(engine)
    said = reports_of(engine, victim)
    assert bool(said) is (fault.reports or fault.breaks_a_promise)
    if not ran:
        assert sum(report.confirmed for report in engine.sink.reports if report.request_id >= victim.request_id) == 0
        return
    for report in said:
        served = fault.serves and not fault.breaks_a_promise
        assert report.confirmed == (40 if served else 0)
    if fault.breaks_a_promise:
        assert said[0].outcome in (Outcome.LOAD_FAILED, Outcome.CANCELLED)
        assert [report.epoch for report in said] == [0, 1]
    for report in reports_of(engine, fresh):
        assert report.confirmed == 0
    # afterwards it works as before: what was there is served, and what the fault cost is saved anew
    for tokens in (SERVED, OTHER, FRESH):
        engine.serve(tokens)
    again, ran = start(engine, SERVED, OTHER, FRESH)
    assert ran
    complete(engine, again)
    check(engine)
    assert [report.confirmed for request in again for report in reports_of(engine, request)] == [40] * 3
