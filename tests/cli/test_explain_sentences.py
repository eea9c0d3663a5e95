"""What `explain` says of one route: a count of the engine's own that differs is shown, and so is what a load saved."""

from __future__ import annotations

import io
import random
from dataclasses import replace

import msgspec
import pytest
from rich.console import Console

from dynamo_semkv.cli.explain_view import render
from dynamo_semkv.contracts.report import Outcome
from dynamo_semkv.contracts.route_events import SheetLine
from dynamo_semkv.observe.snapshot import explain
from dynamo_semkv.outcome.closed import ClosedRoute, CrossCheck
from dynamo_semkv.outcome.saving import Saving
from tests.observe.fake_state import NOW, fake_route


def loaded() -> ClosedRoute:
    rng = random.Random(3)
    routes = (fake_route(number, NOW, rng) for number in range(1, 500))
    return next(r for r in routes if r.outcome is Outcome.MATERIALIZED_EXACT and r.observed and r.saving)


def told(route: ClosedRoute) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(render(explain(route)))
    return console.export_text()


def test_an_engine_that_counts_something_else_is_not_hidden() -> None:
    route = loaded()
    assert route.observed is not None
    assert route.observed.engine_cached_tokens is not None
    other = route.observed.engine_cached_tokens - 32
    route = replace(route, observed=msgspec.structs.replace(route.observed, engine_cached_tokens=other))
    assert route.cross_check is CrossCheck.DIFFERS
    assert f"The engine counts {other:,} cached tokens: not what the report says" in told(route)


@pytest.mark.parametrize(("saved", "word"), [(0.25, "250 ms saved"), (-0.5, "500 ms lost")])
def test_what_a_load_saved_against_the_replicas_own_cold_rate(saved: float, word: str) -> None:
    route = replace(loaded(), saving=Saving(1 / 2_000, 1.0, saved, 0.5))
    text = told(route)
    assert "At this replica's cold rate (2,000 tokens a second) it would have taken 1.00 s" in text
    assert word in text
    assert "cold rate" not in told(replace(route, saving=None))


def test_the_sheet_is_shown_with_what_dynamo_would_have_chosen_and_what_was_left_out() -> None:
    route = loaded()
    lines = (
        SheetLine(replica="pod-a/0", total=1_900, donor=2_000, load=-100),
        SheetLine(replica="pod-b/1", total=512, device=512),
        SheetLine(replica="pod-c/0", total=0, filtered_by="overloaded"),
    )
    opened = msgspec.structs.replace(route.opened, sheet=lines, dynamo_choice="pod-b/1", sheet_rows=5)
    text = told(replace(route, opened=opened))
    rows = {words[0]: words[1:] for words in map(str.split, text.splitlines()) if words and words[0].startswith("pod-")}
    assert rows["pod-a/0"] == ["0", "2,000", "-100", "1,900"]
    assert rows["pod-b/1"][:4] == ["512", "0", "0", "512"]
    assert "what Dynamo's router would choose" in text
    assert "might not be chosen: overloaded" in text
    assert "and 2 more" in text
    assert " host " not in next(line for line in text.splitlines() if "tokens expected to be saved" in line)
    assert "tokens expected to be saved" not in told(replace(route, opened=msgspec.structs.replace(opened, sheet=())))


def test_signals_of_the_provider_are_shown_by_their_own_names() -> None:
    route = loaded()
    opened = msgspec.structs.replace(route.opened, quality_signals={"similarity": 0.8712, "win\x1bdows": 4.0})
    text = told(replace(route, opened=opened))
    assert "The provider's signals: similarity 0.8712, win\\x1bdows 4.0." in text
    assert "signals" not in told(replace(route, opened=msgspec.structs.replace(opened, quality_signals={})))
