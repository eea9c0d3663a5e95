"""The demo's table says what the page said, a row per scenario."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from dynamo_semkv.bench.scenarios import ChatRequest, Scenario
from dynamo_semkv.bench.table import RouteFacts, rows
from graphs.local.table_view import print_tables, summary


def route(outcome: str, reason: str, ttft: float, ttft_class: str | None, **report: int) -> dict[str, Any]:
    tokens = {"input": 900, "evidence": 800, "placed": 800, "hinted": 800, "materialized": report.get("confirmed", 0)}
    return {
        "tokens": tokens,
        "report": report or None,
        "decision": "placed",
        "outcome": outcome,
        "reason": reason,
        "ttft_seconds": ttft,
        "ttft_class": ttft_class,
    }


FACTS = [
    RouteFacts.from_page("a", route("materialized_exact", "ok", 0.2, "loaded", confirmed=800)),
    RouteFacts.from_page("a", route("declined", "not_identical", 3.0, "cold", local_tokens=32)),
    RouteFacts.from_page("a", route("unconfirmed", "no_report", 5.0, None)),
    RouteFacts.from_page("negative", route("no_donor", "not_resident", 4.0, "cold", confirmed=0)),
]
UNPLACED = {
    "tokens": {"input": 900, "evidence": 0, "placed": 0, "hinted": 0, "materialized": 0},
    "decision": "no_evidence",
}


def test_only_confirmed_tokens_are_materialized() -> None:
    first, negative, everything = rows(["a", "negative"], FACTS, {"a": 1})
    assert (first.requests, first.failed, first.input, first.placed, first.materialized) == (4, 1, 2700, 2400, 800)
    assert first.local == 32
    assert dict(first.declines) == {"not_identical": 1, "unconfirmed": 1}
    assert (first.ttft_cold, first.ttft_warm, first.ttft_loaded) == (3.0, None, 0.2)
    assert negative.declines == (("no_donor", 1),)  # it was placed, so it has to be accounted for
    assert negative.left == ()
    assert (everything.requests, everything.materialized, everything.ttft_cold) == (5, 800, 3.5)


def test_evidence_that_was_left_to_dynamo_says_why() -> None:
    tokens = {"input": 900, "evidence": 800, "placed": 0, "hinted": 0, "materialized": 0}
    left = route("no_donor", "not_resident", 3.0, "cold", confirmed=0) | {"tokens": tokens, "decision": "below_minimum"}
    (row, _) = rows(["a"], [RouteFacts.from_page("a", left)] * 2, {})
    assert row.left == (("below_minimum", 2),)


@pytest.mark.parametrize(
    "outcome", ["local_exact", "no_donor", "unconfirmed", "load_failed", "cancelled", "stale_donor"]
)
def test_every_placed_route_is_materialized_or_accounted_for(outcome: str) -> None:
    (row, _) = rows(["a"], [RouteFacts.from_page("a", route(outcome, "a_reason", 3.0, "cold", confirmed=0))], {})
    named = outcome in ("local_exact", "no_donor", "unconfirmed")
    assert row.declines == ((outcome if named else "a_reason", 1),)


@pytest.mark.parametrize("outcome", ["local_exact", "no_donor"])
def test_nothing_is_missing_of_a_route_that_was_not_placed(outcome: str) -> None:
    (row, _) = rows(["a"], [RouteFacts.from_page("a", route(outcome, "none", 3.0, "cold", confirmed=0) | UNPLACED)], {})
    assert row.declines == ()


def test_a_scenario_without_a_route_has_a_row_and_an_unknown_one_is_an_error() -> None:
    assert [row.requests for row in rows(["none"], [], {})] == [0, 0]
    with pytest.raises(KeyError):
        rows(["b"], FACTS, {})


def test_tables_fit_eighty_columns_and_summary_gives_ratios() -> None:
    table = rows(["a", "negative"], FACTS, {})
    out = io.StringIO()
    scenarios = [Scenario(n, f"a scenario called {n}", (ChatRequest(()),)) for n in ("a", "negative")]
    print_tables(Console(file=out, width=80), table, scenarios)
    text = out.getvalue()
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "materialized" in text
    assert "not_identical 1" in text
    assert summary(table)[0] == "TTFT loaded from host / cold: 0.06"
    assert "Negative controls: 800 tokens placed, 0 materialized" in summary(table)
