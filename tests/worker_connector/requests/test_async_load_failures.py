"""Parked loads that are late, that fail, or whose bytes are not what was saved: nothing runs on unwritten pages, and
everybody is told."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_semkv.contracts.report import Outcome, Reason
from tests.worker_connector.parking import TOKENS, Parking, finish, warm
from worker_connector.errors import LoadFailed


def test_load_that_is_late_is_done_in_front_of_the_forward_pass() -> None:
    engine = warm()
    request = engine.request(TOKENS)
    engine.park(request)
    engine.iterate()
    engine.seconds = 1.9
    engine.idle()
    assert engine.named == []
    engine.seconds = 2.1
    engine.idle()
    assert engine.named == [request.request_id]
    assert engine.leases == 0  # it was stopped under its lock: whenever the thread comes to it, it copies nothing more
    engine.check(request, 40)
    engine.resume(request)
    engine.go()
    finish(engine, request)
    assert engine.report_of(request).confirmed == 40
    assert engine.leases == 0  # stopped in time, and nothing of it was on its way
    engine.go()
    engine.idle()
    assert engine.rank.counts["loaded_blocks"] == 10
    assert engine.rank.counts["repeated_loads"] == engine.rank.counts["late_loads"] == 1
    engine.check_balance()


def test_late_load_restarts_its_request_where_the_runtime_can() -> None:
    engine = warm(restarts_failed=True)
    request = engine.request(TOKENS)
    engine.park(request)
    engine.iterate()
    engine.seconds = 2.1
    engine.idle()
    assert engine.named == [request.request_id]
    assert engine.failed == {request.request_id}
    engine.restart(request)
    engine.go()
    engine.idle()
    assert engine.leases == 0
    assert engine.leader.ask(request, 0) == (0, False)  # computed now, and not parked for the same blocks again
    engine.allocate(request, 0, 0, 41)
    engine.resume(request)
    finish(engine, request)
    reports = [report for report in engine.sink.reports if report.request_id == request.request_id]
    assert [(r.epoch, r.outcome, r.reason) for r in reports] == [
        (0, Outcome.LOAD_FAILED, Reason.LOAD_TIMEOUT),
        (1, Outcome.DECLINED, Reason.COPY_FAILED),
    ]
    engine.check_balance()


def _break_side(engine: Parking, times: int = 1000) -> None:
    """The first copies of the thread's stream fail."""
    left = [times]
    side = engine.loads._side
    copy = side.to_pages

    def failing(*args: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise RuntimeError("no such device")
        copy(*args)

    side.to_pages = failing


def test_failed_copy_is_done_again_from_host_memory() -> None:
    engine = warm()
    _break_side(engine)
    request = engine.request(TOKENS)
    engine.park(request)
    engine.iterate()
    engine.go()
    engine.idle()
    assert engine.named == [request.request_id]
    engine.resume(request)
    finish(engine, request)
    assert engine.report_of(request).confirmed == 40
    assert engine.rank.counts["repeated_loads"] == 1
    engine.check_balance()


def test_load_that_fails_twice_ends_the_engine_where_it_cannot_be_told() -> None:
    engine = warm()
    _break_side(engine)

    def failing(*args: Any) -> None:
        raise RuntimeError("no such device")

    engine.loads._ahead.to_pages = failing
    request = engine.request(TOKENS)
    engine.park(request)
    engine.iterate()
    engine.go()
    with pytest.raises(LoadFailed, match="once more: no such device"):
        engine.idle()
    assert engine.named == []
    assert engine.leases == 0
    assert engine.report_of(request).reason is Reason.COPY_FAILED


def test_failed_copy_restarts_its_request_where_the_runtime_can() -> None:
    engine = warm(restarts_failed=True)
    _break_side(engine)
    request = engine.request(TOKENS)
    engine.park(request)
    engine.iterate()
    engine.go()
    engine.idle()
    assert (engine.named, engine.failed) == ([request.request_id], {request.request_id})
    assert engine.report_of(request).reason is Reason.COPY_FAILED
    assert engine.leases == 0


def _damage(engine: Parking, ordinal: int) -> None:
    ledger = engine.leader._life.ledger  # type: ignore[union-attr]
    assert ledger is not None
    entry = next(entry for entry in ledger.entries() if entry.ordinal == ordinal)
    engine.rank.slab.rows[entry.slot, 0] ^= 1  # type: ignore[union-attr]


def test_damage_is_found_after_the_wait_and_nothing_runs_on_it() -> None:
    engine = warm()
    request = engine.request(TOKENS)
    engine.park(request)
    engine.iterate()
    _damage(engine, 3)
    engine.go()
    with pytest.raises(LoadFailed, match="do not hold what was saved"):
        engine.idle()
    assert engine.named == []
    assert engine.report_of(request).reason is Reason.CHECKSUM_MISMATCH


def test_damage_restarts_the_request_where_the_runtime_can_and_is_not_offered_again() -> None:
    engine = warm(restarts_failed=True)
    request = engine.request(TOKENS)
    engine.park(request)
    engine.iterate()
    _damage(engine, 3)
    engine.go()
    engine.idle()
    assert engine.failed == {request.request_id}
    assert engine.report_of(request).reason is Reason.CHECKSUM_MISMATCH
    assert engine.leader.ask(engine.request(TOKENS), 0).tokens == 12


def test_damage_between_offer_and_order_is_seen() -> None:
    engine = warm()
    request = engine.request(TOKENS)
    engine.park(request)
    ledger = engine.leader._life.ledger  # type: ignore[union-attr]
    entry = next(entry for entry in ledger.entries() if entry.ordinal == 3)  # type: ignore[union-attr]
    engine.leader._life.damaged(entry.slot, loaded=False)  # type: ignore[union-attr]
    with pytest.raises(LoadFailed, match="damaged after it had been offered"):
        engine.iterate()
