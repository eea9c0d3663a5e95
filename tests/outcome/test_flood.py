"""One worker's flood of reports costs its own reports their place, and nobody a second."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_semkv.contracts.codec import MAX_TEXT, decode_report, encode_report
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.outcome.closed import OrphanReason
from dynamo_semkv.outcome.join import Match
from dynamo_semkv.outcome.route_tracker import TrackerLimits
from tests.outcome.build import Listener, observed, opened, report


def test_many_reports_of_one_prompt_are_matched_once_and_not_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand of them, which take seconds to send, kept every router's loop for 40 s when their time was over."""
    it = Listener()
    it.tracker.opened(opened(1), 0.0)
    for number in range(2, 302):
        it.tracker.report(report(number, named=False), 0.0)
    real, calls = it.tracker._match, []

    def counted(prompt_key: bytes) -> dict[str, Match]:
        calls.append(prompt_key)
        return real(prompt_key)

    monkeypatch.setattr(it.tracker, "_match", counted)
    it.tracker.expire(1_000.0)
    assert len(calls) <= 3
    assert it.tracker.held_reports == 0


def test_the_worker_with_most_reports_gives_up_its_own() -> None:
    it = Listener(limits=TrackerLimits(held_reports=10))
    it.tracker.opened(opened(1), 0.0)
    it.tracker.report(report(1), 1.0)
    for number in range(2, 50):
        it.tracker.report(report(number, stable_routing_id="w-flood", prompt_key=number.to_bytes(16, "big")), 2.0)
    assert it.tracker.held_reports <= 10
    assert {o.report.stable_routing_id for o in it.orphans if o.reason is OrphanReason.EVICTED} == {"w-flood"}
    it.tracker.observed(observed(1), 3.0)
    it.tracker.expire(10.0)
    (route,) = it.closed
    assert route.confirmed_tokens == 800


@pytest.mark.parametrize("name", ["report_id", "namespace", "differing_field", "traceparent", "generation"])
def test_no_text_of_a_report_is_as_long_as_a_message_may_be(name: str) -> None:
    longest: dict[str, Any] = {name: "x" * MAX_TEXT}
    assert getattr(decode_report(encode_report(report(**longest))), name) == longest[name]
    longer: dict[str, Any] = {name: "x" * (MAX_TEXT + 1)}
    with pytest.raises(ContractError, match=f"report.{name}"):
        decode_report(encode_report(report(**longer)))
