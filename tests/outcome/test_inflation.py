"""Nobody inflates what is not theirs: what a peer says of a route is bounded by the route's own prompt, and nonsense is
refused."""

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
    MAX_TEXT,
    decode_report,
    decode_route_event,
    encode_report,
    encode_route_event,
)
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.location import Tier
from dynamo_semkv.contracts.route_events import MAX_CLIENT_TEXT, RouteEvent, SheetLine
from dynamo_semkv.observe.metrics import Metrics
from dynamo_semkv.observe.snapshot import explain
from dynamo_semkv.outcome.closed import MAX_LOAD_SECONDS, JoinedBy, OrphanReason, OrphanReport, close_route
from dynamo_semkv.outcome.history import History
from tests.outcome.build import Listener, observed, opened, report


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


@pytest.mark.parametrize(
    ("told", "first_token", "believed"),
    [
        (0.25, 0.25, True),
        (0.26, 0.25, False),
        (1e10, 0.25, False),
        (0.0, 0.0, True),
        (MAX_LOAD_SECONDS, None, True),
        (MAX_LOAD_SECONDS + 1.0, None, False),
        (1e10, None, False),
    ],
)
def test_no_load_takes_longer_than_the_first_token(told: float, first_token: float | None, believed: bool) -> None:
    """It would be in the fleet's histogram, and in what is learned of the tier, for ever."""
    metrics, said = Metrics(), report(load_seconds=told, tier=Tier.HOST_PINNED)
    for end in (observed(ttft_seconds=first_token), *([None] if first_token is None else [])):
        route = close_route(opened(), end, said, JoinedBy.ROUTE_ID, 1.0)
        assert route.report is not None
        assert route.report.load_seconds == (told if believed else None)
        assert route.confirmed_tokens == 800, "what it confirmed is another matter"
        metrics.closed(route)
    counted = 0 if not believed else 2 if first_token is None else 1
    assert f'semkv_load_seconds_count{{tier="host_pinned"}} {float(counted)}' in metrics.text()


def test_loads_that_are_not_believed_are_counted() -> None:
    it = Listener()
    for number, seconds in ((1, 0.1), (2, 9.0), (3, None)):
        it.tracker.opened(opened(number), 1.0)
        it.tracker.observed(observed(number), 2.0)
        it.tracker.report(report(number, load_seconds=seconds), 2.0)
    assert [route.report.load_seconds for route in it.closed if route.report is not None] == [0.1, None, None]
    assert it.tracker.stats.implausible_loads == 1


OPENED_TEXTS = ("tenant", "mode", "lookup", "decision_reason", "worker_id", "donor_generation", "provider")
MORE_TEXTS = ("materialization", "config_hash", "traceparent")
CLIENT_TEXTS = ("request_id", "model", "shadow_choice", "dynamo_choice")


def with_text(name: str, text: str) -> RouteEvent:
    if name in ("end", "served_worker_id"):
        return observed(**{name: text})
    if name in ("sheet.replica", "sheet.filtered_by"):
        return opened(sheet=(SheetLine(**{"replica": "w/0", "total": 0, name.removeprefix("sheet."): text}),))
    return opened(**{name: text})


@pytest.mark.parametrize(
    ("name", "most"),
    [
        *((name, MAX_TEXT) for name in (*OPENED_TEXTS, *MORE_TEXTS, "sheet.filtered_by", "end", "served_worker_id")),
        *((name, MAX_CLIENT_TEXT) for name in (*CLIENT_TEXTS, "sheet.replica")),
    ],
)
def test_every_text_of_a_route_event_has_a_bound(name: str, most: int) -> None:
    """Of 100,000 routes that are kept."""
    longest = with_text(name, "x" * most)
    assert decode_route_event(encode_route_event(longest)) == longest
    with pytest.raises(ContractError, match=name.replace(".", r"\.")):
        decode_route_event(encode_route_event(with_text(name, "x" * (most + 1))))


def test_no_text_of_a_route_event_is_without_a_bound() -> None:
    """Each is filled to the size of a message; whatever is taken then has been forgotten."""
    for event in (opened(), observed()):
        for field in msgspec.inspect.type_info(type(event)).fields:  # type: ignore[union-attr]
            kinds = getattr(field.type, "types", (field.type,))
            if any(isinstance(kind, msgspec.inspect.StrType) for kind in kinds):
                with pytest.raises(ContractError):
                    decode_route_event(
                        encode_route_event(msgspec.structs.replace(event, **{field.name: "1." + "0" * 8_000}))
                    )


@pytest.mark.parametrize("name", ["", "a b", "semkv.>", "x" * 129])
def test_a_router_has_a_name_that_can_be_a_subject(name: str) -> None:
    """Whoever compares it with the subject that it came on would raise."""
    with pytest.raises(ContractError, match=r"route_opened\.router"):
        decode_route_event(encode_route_event(opened(router=name)))
