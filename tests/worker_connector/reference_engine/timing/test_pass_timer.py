"""When a pass ends, on a clock that only sleeping and working move."""

from __future__ import annotations

import pytest

from tests.worker_connector.reference_engine.timing.test_cost_model import ROUND
from worker_connector.reference_engine.models.model import Segment
from worker_connector.reference_engine.timing.bus import Bus
from worker_connector.reference_engine.timing.cost_model import CostModel, Rows
from worker_connector.reference_engine.timing.pass_timer import PassTimer

COST = CostModel(ROUND)
PREFILL = Segment([0] * 100, 0, [range(100)])
TAKES = COST.pass_seconds([Rows(0, 100)])


class Clock:
    """Seconds, moved by whoever works or sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def timed() -> tuple[PassTimer, Clock]:
    clock = Clock()
    return PassTimer(COST, clock, clock.pass_by), clock


def one_pass(timer: PassTimer, clock: Clock, *, before: float, during: float = 0.0, goes_on: bool = False) -> float:
    """Seconds from the start of the iteration to the end of its pass; the host works `before` it and `during` it."""
    began = clock.now
    timer.iterate(goes_on=goes_on)
    clock.pass_by(before)
    timer.begin()
    clock.pass_by(during)
    timer.finish([PREFILL], 0.0)
    return clock.now - began


def test_host_work_is_the_fixed_part_of_a_pass_up_to_its_length() -> None:
    timer, clock = timed()
    for before, during in ((0.0, 0.0), (0.0004, 0.0), (0.001, TAKES / 2)):
        assert one_pass(timer, clock, before=before, during=during) == pytest.approx(TAKES)
    assert one_pass(timer, clock, before=0.006) == pytest.approx(TAKES + 0.005)


def test_host_work_behind_a_pass_counts_where_the_next_one_goes_on() -> None:
    timer, clock = timed()
    one_pass(timer, clock, before=0.0)
    began = clock.now
    clock.pass_by(0.0004)
    one_pass(timer, clock, before=0.0002, goes_on=True)
    assert clock.now - began == pytest.approx(TAKES)


def test_waiting_for_a_request_is_no_host_work() -> None:
    timer, clock = timed()
    one_pass(timer, clock, before=0.0)
    clock.pass_by(5.0)
    assert one_pass(timer, clock, before=0.0) == pytest.approx(TAKES)


def test_a_pass_ends_when_what_it_reads_has_arrived() -> None:
    timer, clock = timed()
    loaded = timer.bus.copy(5_000)
    timer.iterate(goes_on=False)
    timer.begin()
    timer.finish([PREFILL], loaded)
    assert clock.now - 100.0 == pytest.approx(COST.copy_seconds(5_000))


def test_copies_follow_each_other_on_the_bus() -> None:
    clock = Clock()
    bus = Bus(COST, clock)
    first, second = bus.copy(100), bus.copy(50)
    assert first == pytest.approx(100.0 + COST.copy_seconds(100))
    assert second == pytest.approx(first + COST.copy_seconds(50))
    assert not bus.has_arrived(first)
    clock.now = second
    assert bus.has_arrived(second)
    clock.pass_by(60.0)
    assert bus.copy(100) == pytest.approx(clock.now + COST.copy_seconds(100))
