"""Code of somebody else: refused at the start where it cannot be had, and never able to fail a request."""

from __future__ import annotations

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
from dynamo_semkv.scoring.candidate import ReplicaView
from dynamo_semkv.scoring.choose import choose

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
    (tmp_path / "broken.py").write_text("raise RuntimeError('at import')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("plugged", "broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def config(**plugins: str) -> Any:
    return build({"plugins": plugins})


def test_a_provider_joins_ours() -> None:
    assert [provider.name for provider in providers(config(providers="plugged:Provider"))] == ["fingerprint", "mine"]


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
        config(scorers="plugged:Scorer"), lambda error: fallbacks.add(FallbackReason.SCORER_ERROR, error)
    )
    sys.modules["plugged"].Scorer.says = says  # type: ignore[attr-defined]
    rows = choose(
        [ReplicaView(ReplicaKey(1, 0), device_tokens=7)], [], 100, build({}).scoring, b"s", None, [scorer]
    ).rows
    assert (rows[0].total, rows[0].part("mine").value) == (7, 0)
    assert fallbacks.counts == {FallbackReason.SCORER_ERROR: 1}


@pytest.mark.parametrize(("says", "counts"), [(1e9, 100), (-1e9, -100), (3, 3), (-0.5, -0.5)])
def test_no_scorer_outweighs_the_prompt(says: float, counts: float) -> None:
    (scorer,) = plugged_scorers(config(scorers="plugged:Scorer"), lambda error: None)
    sys.modules["plugged"].Scorer.says = says  # type: ignore[attr-defined]
    (row,) = choose([ReplicaView(ReplicaKey(1, 0))], [], 100, build({}).scoring, b"s", None, [scorer]).rows
    assert row.total == counts
