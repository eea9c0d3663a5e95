"""Code of somebody else: refused at the start where it cannot be had, and never able to fail a request."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from dynamo_semkv.config.load import build
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.identity import ReplicaKey
from dynamo_semkv.router.fallback import FallbackReason, Fallbacks
from dynamo_semkv.router.plugins import plugged_providers, plugged_scorers
from dynamo_semkv.router.providers import providers
from dynamo_semkv.scoring.choose import choose
from dynamo_semkv.scoring.extra import BUDGET_SECONDS, GuardedScorer, ScorerSlow
from dynamo_semkv.scoring.replica_view import ReplicaView
from dynamo_semkv.testing import ManualClock

CODE = """
class Provider:
    name = "mine"
    def lookup(self, query):
        return []

class Same(Provider):
    name = "fingerprint"

class Nameless:
    def lookup(self, query):
        return []

class Scorer:
    name = "mine"
    def tokens(self, view, match, at):
        return self.says
    says = 5

class Load(Scorer):
    name = "load"

class Shouting(Scorer):
    name = "MINE"

class Mute:
    name = "mute"

def made():
    it = Scorer()
    it.name = "made"
    return it

def needs(argument):
    return argument

def fails():
    raise KeyError("no such thing")
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plugged.py").write_text(CODE)
    (tmp_path / "script.py").write_text("raise SystemExit(0)\n")
    (tmp_path / "broken.py").write_text("raise RuntimeError('at import')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("plugged", "broken", "script"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def config(**plugins: str) -> Any:
    return build({"plugins": plugins})


def test_a_provider_joins_ours() -> None:
    assert [provider.name for provider in providers(config(providers="plugged:Provider"))] == ["fingerprint", "mine"]


def test_who_is_imported_is_logged_before_an_import_that_may_hang(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with pytest.raises(ContractError):
        providers(config(providers="broken:Provider"))
    assert "plugins.providers: importing broken:Provider" in caplog.text


def test_scorers_in_the_order_of_the_file() -> None:
    found = plugged_scorers(config(scorers="plugged:Scorer , plugged:made"), lambda error: None)
    assert [scorer.name for scorer in found] == ["mine", "made"]


@pytest.mark.parametrize(
    ("field", "text", "says"),
    [
        ("providers", "nowhere:Provider", "No module named 'nowhere'"),
        ("providers", "plugged:Nothing", "Nothing"),
        ("providers", "plugged:Nameless", "a `name`"),
        ("providers", "plugged:Same", "one provider of a name"),
        ("providers", "plugged:needs", "without arguments"),
        ("providers", "broken:Provider", "at import"),
        ("providers", "script:Provider", "SystemExit"),
        ("scorers", "plugged:fails", "no such thing"),
        ("scorers", "plugged:Load", "and not device"),
        ("scorers", "plugged:Shouting", "a-z, 0-9"),
        ("scorers", "plugged:Mute", "method `tokens`"),
        ("scorers", "plugged:Scorer,plugged:Scorer", "one scorer of the name mine"),
    ],
)
def test_what_cannot_be_had_is_refused_by_field_and_cause(field: str, text: str, says: str) -> None:
    with pytest.raises(ContractError) as caught:
        providers(config(**{field: text})) if field == "providers" else plugged_scorers(
            config(**{field: text}), lambda error: None
        )
    assert caught.value.field == f"plugins.{field}"
    assert says in str(caught.value)


@pytest.mark.parametrize("text", ["plugged", "plugged:", ":Provider", "os.system('x'):y", "a b:c", "../x:y"])
def test_the_configuration_refuses_what_is_no_name(text: str) -> None:
    with pytest.raises(ContractError, match=r"plugins\.providers"):
        config(providers=text)


def test_nothing_is_imported_where_nothing_is_named() -> None:
    assert plugged_providers(build({})) == []
    assert plugged_scorers(build({}), lambda error: None) == []
    assert "plugged" not in sys.modules


@pytest.mark.parametrize("says", [None, "many", float("nan"), float("inf"), [], 10**400])
def test_a_fault_counts_for_nothing_and_is_counted(says: object) -> None:
    fallbacks = Fallbacks()
    (scorer,) = plugged_scorers(
        config(scorers="plugged:Scorer"), lambda error: fallbacks.add(FallbackReason.SCORER_ERROR, error), ManualClock()
    )
    sys.modules["plugged"].Scorer.says = says  # type: ignore[attr-defined]
    rows = choose(
        [ReplicaView(ReplicaKey(1, 0), device_tokens=7)], [], 100, build({}).scoring, b"s", None, [scorer]
    ).rows
    assert (rows[0].total, rows[0].part("mine").value) == (7, 0)
    assert fallbacks.counts == {FallbackReason.SCORER_ERROR: 1}


@pytest.mark.parametrize(("says", "counts"), [(1e9, 100), (-1e9, -100), (3, 3), (-0.5, -0.5)])
def test_no_scorer_outweighs_the_prompt(says: float, counts: float) -> None:
    (scorer,) = plugged_scorers(config(scorers="plugged:Scorer"), lambda error: None, ManualClock())
    sys.modules["plugged"].Scorer.says = says  # type: ignore[attr-defined]
    (row,) = choose([ReplicaView(ReplicaKey(1, 0))], [], 100, build({}).scoring, b"s", None, [scorer]).rows
    assert row.total == counts


@pytest.mark.parametrize("error", [SystemExit(1), asyncio.CancelledError(), GeneratorExit()], ids=repr)
def test_what_would_end_the_loop_or_the_request_is_a_fault_like_others(error: BaseException) -> None:
    class Leaving:
        name = "leaving"

        def tokens(self, *_: object) -> float:
            raise error

    faults: list[BaseException] = []
    scorer = GuardedScorer(Leaving(), faults.append, ManualClock())
    (row,) = choose(
        [ReplicaView(ReplicaKey(1, 0), device_tokens=7)], [], 100, build({}).scoring, b"s", None, [scorer]
    ).rows
    assert (row.total, faults) == (7, [error])


def test_a_slow_scorer_says_nothing_of_any_replica_and_is_put_aside_for_longer_and_longer() -> None:
    clock = ManualClock()

    class Slow:
        name = "slow"
        calls = 0
        takes = 2 * BUDGET_SECONDS / 10

        def tokens(self, *_: object) -> float:
            self.calls += 1
            clock.advance(self.takes)
            return 50.0

    faults: list[BaseException] = []
    slow = Slow()
    scorer = GuardedScorer(slow, faults.append, clock)
    views = [ReplicaView(ReplicaKey(n, 0), device_tokens=n) for n in range(10)]

    def totals() -> list[float]:
        rows = choose(views, [], 100, build({}).scoring, b"s", None, [scorer]).rows
        return sorted(row.total for row in rows)

    assert totals() == [float(n) for n in range(10)], "nor of those that it had time for"
    assert (slow.calls, len(faults)) == (6, 1)
    assert isinstance(faults[0], ScorerSlow)
    assert totals() == [float(n) for n in range(10)]
    assert slow.calls == 6, "not asked"
    clock.advance(1.0)
    totals()
    clock.advance(1.0)
    totals()
    assert (slow.calls, len(faults)) == (12, 2), "one trial, and the pause doubled"
    clock.advance(1.0)
    slow.takes = 0.0
    assert totals() == [50.0 + n for n in range(10)]
