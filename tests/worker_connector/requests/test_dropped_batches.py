"""Copied is not confirmed: a batch may be dropped behind the copy, and its pass come later, or never."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_semkv.contracts.report import Reason
from tests.worker_connector.scripted import Request, ScriptedEngine, make
from worker_connector.leader.cache_generation import FORGET_AFTER, SWEEP_EVERY
from worker_connector.link.channel import LoadDone


def offered(*more: int) -> tuple[ScriptedEngine, Request]:
    """A request whose first 40 tokens are resident, with pages for all of it, and `more` tokens behind the 41 that were
    served."""
    engine = make()
    engine.serve(list(range(41)))
    again = engine.request([*range(41), *more])
    engine.ask(again)
    engine.allocate(again, 0, 40, again.prompt_len)
    return engine, again


def test_load_without_forward_pass_is_not_confirmed() -> None:
    """Copied is not confirmed: the forward pass has to start from there."""
    engine, again = offered()
    engine.iterate((again, 1), forward=False)
    engine.idle(2)
    assert not [report for report in engine.sink.reports if report.request_id == again.request_id]
    engine.idle(FORGET_AFTER + SWEEP_EVERY)
    report = engine.report_of(again)
    assert (report.copied, report.confirmed, report.reason) == (40, 0, Reason.CANCELLED)


@pytest.mark.parametrize("meanwhile", [0, 1, 3, 20])
def test_request_that_ends_behind_a_dropped_batch_confirms_nothing(meanwhile: int) -> None:
    """The engine failed it (`request_finished` does not say so): no pass ran behind the copy."""
    engine, again = offered()
    engine.iterate((again, 1), forward=False)
    engine.idle(meanwhile)
    engine.finish(again)
    report = engine.report_of(again)
    assert (report.copied, report.confirmed, report.reason) == (40, 0, Reason.NOT_SCHEDULED)
    engine.check_balance()


def test_copy_that_lands_behind_a_dropped_batch_is_confirmed_by_the_pass_that_comes() -> None:
    """Also of a request that ends with that pass."""
    engine, again = offered()
    rank: Any = engine.rank
    post: Any = rank._link.post
    held: list[LoadDone] = []
    rank._link.post = lambda result: held.append(result) if isinstance(result, LoadDone) else post(result)
    engine.iterate((again, 1), forward=False)
    engine.iterate((again, 1))
    again.tokens.append(1)
    engine.finish(again)
    for result in held:
        post(result)
    assert engine.report_of(again).confirmed == 40
    engine.check_balance()


@pytest.mark.parametrize(("progress", "confirmed"), [(1, 40), (0, 0)])
def test_later_report_settles_a_load_whose_pass_was_not_seen(progress: int, confirmed: int) -> None:
    """Without `wait_for_save` the next report says whether the position moved past what was loaded."""
    engine, again = offered(*range(60, 80))
    engine.iterate((again, 1), forward=False)
    again.context_current_position += progress
    engine.iterate((again, 5), forward=False)
    engine.idle(0 if progress else FORGET_AFTER + SWEEP_EVERY)
    report = engine.report_of(again)
    assert (report.copied, report.confirmed) == (40, confirmed)
    assert report.reason is (Reason.OK if confirmed else Reason.CANCELLED)


@pytest.mark.parametrize("meanwhile", [0, 3])
@pytest.mark.parametrize("passes", [1, 3])
def test_load_whose_batch_was_dropped_is_confirmed_by_the_pass_that_comes(passes: int, meanwhile: int) -> None:
    """Where another data-parallel rank has nothing to run the batch is dropped behind the copy; it comes back from the
    same position, once the engine has tokens left for it."""
    engine, again = offered()
    for _ in range(passes):
        engine.iterate((again, 1), forward=False)
    engine.idle(meanwhile)
    assert not [report for report in engine.sink.reports if report.request_id == again.request_id]
    engine.iterate((again, 1))
    assert engine.report_of(again).confirmed == 40
