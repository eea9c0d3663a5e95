"""Nobody inflates what is not theirs: what a peer says of a route is bounded by the route's own prompt, and nonsense is refused."""

from __future__ import annotations

import io
import json
from typing import Any

import msgspec
import pytest
from rich.console import Console

from dynamo_semkv.cli.explain_view import render
from dynamo_semkv.contracts.codec import (
    MAX_COUNT,
    MAX_CREDIT,
    decode_report,
    decode_route_event,
    encode_report,
    encode_route_event,
)
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.route_events import SheetLine
from dynamo_semkv.observe.snapshot import explain
from dynamo_semkv.outcome.closed import JoinedBy, OrphanReason, OrphanReport, close_route
from dynamo_semkv.outcome.history import History
from tests.outcome.build import observed, opened, report


def absurd(tokens: int, **changes: Any) -> Any:
    return report(prompt_tokens=tokens, offered=tokens, honoured=tokens, copied=tokens, confirmed=tokens, **changes)


def test_a_count_beyond_any_prompt_is_refused() -> None:
    with pytest.raises(ContractError, match=r"report\.prompt_tokens"):
        decode_report(encode_report(absurd(2**63)))
    assert decode_report(encode_report(absurd(MAX_COUNT))).confirmed == MAX_COUNT


def test_a_report_is_worth_at_most_the_prompt_of_its_route() -> None:
    history = History(10)
    start = opened(input_tokens=1_238, evidence_tokens=800, placed_tokens=800, hinted_tokens=800)
    route = close_route(start, observed(), absurd(MAX_COUNT), JoinedBy.ROUTE_ID, 1.0)
    history.add(route)
    totals = history.totals()
    assert route.report is not None
    assert (route.report.confirmed, route.report.offered, route.report.prompt_tokens) == (1_238, 1_238, 1_238)
    assert totals.confirmed_tokens == 1_238
    assert totals.funnel.tokens["materialized"] + totals.unhinted_tokens == 1_238
    assert totals.replicas["w-a/0"].confirmed_tokens == 1_238


@pytest.mark.parametrize(
    ("local", "offered", "confirmed"), [(0, 5_000, 4_000), (900, 4_000, 4_000), (5_000, 0, 0), (1_238, 1_238, 0)]
)
def test_what_is_left_of_it_keeps_its_order(local: int, offered: int, confirmed: int) -> None:
    said = report(
        prompt_tokens=local + offered,
        local_tokens=local,
        offered=offered,
        honoured=offered,
        copied=confirmed,
        confirmed=confirmed,
    )
    kept = close_route(opened(input_tokens=1_238), observed(), said, JoinedBy.ROUTE_ID, 1.0).report
    assert kept is not None  # and its own check of the order of its counts held
    assert kept.local_tokens + kept.offered <= 1_238
    assert kept.confirmed <= confirmed


@pytest.mark.parametrize("reason", list(OrphanReason))
def test_the_tokens_of_an_orphan_are_in_no_sum(reason: OrphanReason) -> None:
    history = History(10)
    before = msgspec.to_builtins(history.totals().funnel.tokens), history.totals().confirmed_tokens
    history.add_orphan(OrphanReport(absurd(MAX_COUNT), reason, 5.0))
    totals = history.totals()
    assert (msgspec.to_builtins(totals.funnel.tokens), totals.confirmed_tokens) == before
    assert totals.replicas == {}
    assert totals.orphans == {reason.value: 1}


def test_what_the_stream_is_said_to_have_cached_is_at_most_the_prompt() -> None:
    history = History(10)
    start = opened(input_tokens=1_000, exact_device_tokens=MAX_COUNT, exact_host_tokens=MAX_COUNT)
    end = observed(engine_cached_tokens=MAX_COUNT)
    history.add(close_route(start, end, None, JoinedBy.NONE, 1.0))
    totals = history.totals()
    assert (totals.engine_cached_tokens, totals.exact_device_tokens, totals.exact_host_tokens) == (1_000,) * 3


@pytest.mark.parametrize("name", ["input_tokens", "evidence_tokens", "placed_tokens", "sheet_rows", "attempt"])
def test_route_events_beyond_any_prompt_are_refused(name: str) -> None:
    with pytest.raises(ContractError, match=name):
        decode_route_event(encode_route_event(opened(**{name: MAX_COUNT + 1})))


@pytest.mark.parametrize("name", ["total", "load", "decode", "donor", "extra"])
@pytest.mark.parametrize("value", [2**60, -(2**60), 2**63, MAX_CREDIT + 1])
def test_a_forged_score_sheet_is_refused(name: str, value: int) -> None:
    """JSON carries numbers beyond 2**53 as text, on which `explain` ended with a traceback."""
    line = SheetLine(**{"replica": "w/0", "total": 0, name: value})
    with pytest.raises(ContractError, match=f"route_opened.sheet.{name}"):
        decode_route_event(encode_route_event(opened(sheet=(line,))))


@pytest.mark.parametrize("value", [MAX_CREDIT, -MAX_CREDIT])
def test_the_largest_numbers_that_are_taken_can_be_shown(value: int) -> None:
    line = SheetLine(replica="w/0", total=value, load=value)
    event = decode_route_event(encode_route_event(opened(sheet=(line,), expected_tokens=value)))
    route = close_route(event, observed(), report(), JoinedBy.ROUTE_ID, 1.0)
    shown = Console(width=200, file=io.StringIO())
    shown.print(render(json.loads(json.dumps(explain(route)))))
    assert f"{value:,}" in shown.file.getvalue()  # type: ignore[attr-defined]
