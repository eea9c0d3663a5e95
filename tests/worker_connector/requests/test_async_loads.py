"""Asynchronous loads: the engine parks the request, and runs on its pages once `get_finished` has named it, whatever
became of the load."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_semkv.contracts.report import Outcome, Reason
from tests.worker_connector.parking import TOKENS, Parking, finish, warm
from worker_connector.engine_api.geometry import PoolGeometry
from worker_connector.errors import LoadFailed, Refused
from worker_connector.leader.cache_generation import FORGET_AFTER


def test_large_offers_are_asynchronous_and_small_ones_are_not() -> None:
    engine = warm()
    assert engine.leader.ask(engine.request(TOKENS), 0) == (40, True)
    assert engine.leader.ask(engine.request(TOKENS), 36) == (4, False)
    assert engine.leader.ask(engine.request(TOKENS), 40) == (0, False)
    assert engine.leader.ask(engine.request([9] * 41), 0) == (0, False)


@pytest.mark.parametrize(
    "options", [{}, {"flat": True}, {"windows": (None, 9)}, {"by_dict": True, "windows": (None, None)}]
)
def test_parked_request_is_named_once_when_its_copies_have_landed(options: dict[str, Any]) -> None:
    engine = warm(**options)
    request = engine.request(TOKENS)
    assert engine.park(request) == 40
    metadata = engine.iterate()
    assert [order.key.request_id for order in metadata.async_loads] == [request.request_id]
    assert metadata.loads == ()
    engine.idle(3)
    assert engine.named == []
    assert engine.leases == 1
    engine.go()
    engine.idle()
    assert engine.named == [request.request_id]
    assert engine.leases == 0
    assert not [report for report in engine.sink.reports if report.request_id == request.request_id]
    engine.resume(request)
    finish(engine, request)
    report = engine.report_of(request)
    assert (report.outcome, report.confirmed, report.honoured) == (Outcome.MATERIALIZED_EXACT, 40, 40)
    engine.idle(3)
    assert engine.named == [request.request_id]
    assert engine.leader.snapshot()["donors"] >= 1
    engine.check_balance()


def test_other_requests_run_while_one_is_parked() -> None:
    engine = warm()
    request, other = engine.request(TOKENS), engine.request([7] * 21)
    engine.park(request)
    engine.iterate()
    engine.prefill(other)
    engine.decode(other, [1, 2, 3])
    engine.go()
    engine.iterate((other, 0))
    engine.resume(request)
    finish(engine, request)
    finish(engine, other)
    assert engine.report_of(request).confirmed == 40
    engine.check_balance()


def test_nothing_honoured_with_the_async_flag_alive() -> None:
    """NVIDIA/TensorRT-LLM#18762: the engine parks it all the same, then computes the range itself."""
    engine = warm()
    request = engine.request(TOKENS)
    engine.park(request, honoured=0)
    metadata = engine.iterate()
    assert (metadata.async_loads, metadata.nothing_to_load) == ((), (request.request_id,))
    assert engine.named == [request.request_id]
    report = engine.report_of(request)
    assert (report.outcome, report.reason, report.honoured) == (Outcome.DECLINED, Reason.NOT_HONOURED, 0)
    engine.resume(request)
    finish(engine, request)
    engine.check_balance()


@pytest.mark.parametrize("honoured", [4, 20, 18])
def test_short_honour_loads_what_is_honoured_and_no_more(honoured: int) -> None:
    engine = warm()
    request = engine.request(TOKENS)
    engine.park(request, honoured=honoured)
    (order,) = engine.iterate().async_loads
    assert len(order.moves) == -(-honoured // 4)
    engine.go()
    engine.idle()
    engine.resume(request)
    finish(engine, request)
    assert engine.report_of(request).confirmed == honoured
    engine.check_balance()


@pytest.mark.parametrize(
    ("at", "confirmed", "reason"), [(0, 0, Reason.NOT_SCHEDULED), (12, 12, Reason.OK), (40, 40, Reason.OK)]
)
def test_trtllm_18762_only_the_position_after_the_resume_counts(at: int, confirmed: int, reason: Reason) -> None:
    engine = warm()
    request = engine.request(TOKENS)
    engine.park(request)
    engine.iterate()
    engine.go()
    engine.idle()
    engine.resume(request, at=at)
    finish(engine, request)
    report = engine.report_of(request)
    assert (report.copied, report.confirmed, report.reason) == (40, confirmed, reason)
    engine.check_balance()


def test_cancelled_while_parked_and_its_pages_given_away() -> None:
    """TensorRT-LLM's cancellation may free the pages under a load: the new owner's bytes stay its own."""
    engine = warm(num_pages=24)
    request = engine.request(TOKENS)
    engine.park(request)
    engine.iterate()
    job = engine.jobs.pop()
    pages = list(request.pages[0])
    engine.release(request)  # cancelled without a word
    other = engine.request([7] * 41)
    engine.prefill(other)
    assert set(pages) & set(other.pages[0])
    job()  # the thread comes to it only now
    engine.check(other, 41)
    engine.idle(2)
    assert engine.named == [request.request_id]  # whoever still waits for it is released
    report = engine.report_of(request)
    assert (report.outcome, report.confirmed) == (Outcome.CANCELLED, 0)
    assert engine.leases == 0
    assert engine.leader.snapshot()["counts"]["pages_reassigned"] == 1
    finish(engine, other)
    engine.check_balance()


def test_copies_on_their_way_land_before_the_next_forward_pass_after_a_stop() -> None:
    engine = warm(num_pages=24)
    log: list[str] = []
    engine.loads._side.before = lambda stream: log.append("fence")
    request = engine.request(TOKENS)
    engine.park(request)
    engine.iterate()
    engine.release(request)
    other = engine.request([7] * 41)
    engine.ask(other)
    engine.allocate(other, 0, 0, 41)
    engine.schedule(other, 41)
    engine.rank.start_load(engine.build(), None)
    assert log == ["fence"]


@pytest.mark.parametrize("finished", [True, False])
def test_request_that_ends_while_parked_donates_nothing(finished: bool) -> None:
    engine = warm()
    donors = engine.leader.snapshot()["donors"]
    request = engine.request(TOKENS, is_finished_due_to_cancellation=True)
    engine.park(request)
    engine.iterate()
    if finished:
        engine.finish(request)
        engine.idle()
        engine.go()
    else:
        engine.go()
        engine.release(request)
        engine.idle(FORGET_AFTER + 32)
    engine.idle(2)
    assert engine.named == [request.request_id]
    assert engine.leader.snapshot()["donors"] == donors
    assert engine.report_of(request).outcome is Outcome.CANCELLED
    engine.check_balance()


def test_parked_request_is_not_taken_for_vanished_while_its_copies_run() -> None:
    engine = warm()
    request = engine.request(TOKENS)
    engine.park(request)
    engine.iterate()
    engine.idle(FORGET_AFTER + 64)
    assert engine.leases == 1
    engine.go()
    engine.idle(FORGET_AFTER - 32)
    engine.resume(request)
    finish(engine, request)
    assert engine.report_of(request).confirmed == 40
    engine.check_balance()


def test_replay_while_parked_is_another_epoch() -> None:
    engine = warm()
    request = engine.request(TOKENS)
    engine.park(request)
    engine.iterate()
    engine.restart(request)
    assert engine.park(request) == 40
    engine.iterate()
    engine.go()
    engine.idle()
    assert engine.named == [request.request_id]
    engine.resume(request)
    finish(engine, request)
    reports = [report for report in engine.sink.reports if report.request_id == request.request_id]
    assert [(r.epoch, r.outcome, r.confirmed) for r in reports] == [
        (0, Outcome.CANCELLED, 0),
        (1, Outcome.MATERIALIZED_EXACT, 40),
    ]
    engine.check_balance()


def test_replay_that_is_not_asked_about_relies_on_nothing_that_was_loaded_before() -> None:
    """Its pages went between the end of the load and its first batch; the engine holds all of it itself by then."""
    engine = warm()
    request = engine.request(TOKENS)
    engine.park(request)
    engine.iterate()
    engine.go()
    engine.idle()
    assert engine.named == [request.request_id]
    engine.restart(request)
    engine.allocate(request, 40, 0, 41)
    engine.write(request, 0, 40)
    engine.iterate((request, 1))
    assert engine.leader.counts["unasked_replay"] == 1
    assert engine.report_of(request).confirmed == 0
    finish(engine, request)
    engine.check_balance()


def test_cache_that_is_reset_while_a_request_is_parked() -> None:
    """What it was served is of the old weights: it is no reuse, and nothing of it is kept or offered."""
    engine = warm()
    request = engine.request(TOKENS)
    engine.park(request)
    engine.iterate()
    engine.leader.reset_cache()
    engine.go()
    engine.idle()
    engine.resume(request)
    finish(engine, request)
    report = engine.report_of(request)
    assert (report.outcome, report.reason, report.confirmed) == (Outcome.STALE_DONOR, Reason.GENERATION_STALE, 0)
    assert engine.leader.snapshot()["donors"] == 0
    assert engine.leader.snapshot()["ledger"]["resident"] == 0
    engine.check_balance()


def test_engine_that_does_not_wait_for_the_load_is_stopped() -> None:
    engine = warm()
    request = engine.request(TOKENS)
    engine.park(request)
    engine.iterate()
    with pytest.raises(LoadFailed, match="not completed"):
        engine.resume(request)


def test_parked_without_an_order_fails_loudly() -> None:
    engine = warm()
    engine.newly_parked.append(77)
    with pytest.raises(LoadFailed, match="never ordered"):
        engine.iterate()
    restarting = warm(restarts_failed=True)
    restarting.newly_parked.append(77)
    restarting.iterate()
    assert (restarting.named, restarting.failed) == ([77], {77})


def test_cache_manager_that_frees_pages_under_a_load_is_refused() -> None:
    engine = Parking()
    with pytest.raises(Refused, match="async_load_min_tokens"):
        engine.rank.register(PoolGeometry.from_layout(engine.layout()), keeps_pages=False)


def test_thread_of_its_own_copies_and_ends() -> None:
    engine = warm()
    engine.loads._run = engine.loads._enqueue
    request = engine.request(TOKENS)
    engine.park(request)
    engine.iterate()
    for _ in range(2000):
        if engine.named:
            break
        engine.loads._thread.join(0.002)
        engine.idle()
    assert engine.named == [request.request_id]
    engine.resume(request)
    finish(engine, request)
    assert engine.report_of(request).confirmed == 40
    thread = engine.loads._thread
    engine.rank.close()
    assert not thread.is_alive()


@pytest.mark.parametrize("says_what_it_honours", [True, False])
def test_pages_of_the_engine_s_own_beyond_a_whole_offer_are_shared(says_what_it_honours: bool) -> None:
    """The engine's cache has come to reach further than what was offered: nobody who has those pages too took them
    away."""
    engine = Parking()
    engine.serve(TOKENS[:9])
    pages = [engine.free[0].pop() for _ in range(18)]
    parked = [engine.request(TOKENS), engine.request(TOKENS)]
    for request, own in zip(parked, (pages[4:11], pages[11:]), strict=True):
        assert engine.leader.ask(request, 0) == (8, True)
        engine.leader.cancelled(request, 0, 8)
        request.context_current_position, request.pages = 16, [[*pages[:4], *own]]
        if says_what_it_honours:
            vars(request)["py_num_connector_matched_tokens"] = 0
        engine.leader.allocated(request, (), request.pages)
        engine.newly_parked.append(request.request_id)
    metadata = engine.iterate()
    assert set(metadata.nothing_to_load) == {request.request_id for request in parked}
    for request in parked:
        engine.write(request, 0, 16)
        engine.resume(request)
        assert engine.metadata.unloadable == ()
        finish(engine, request)
    assert not any(engine.leader.counts.values())
