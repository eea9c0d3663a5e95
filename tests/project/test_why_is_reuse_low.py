"""docs/why-is-reuse-low.md: five steps, and every card, table, panel, command and field that they send a newcomer to is
there."""

from __future__ import annotations

import io
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from dynamo_semkv.cli.command import _parser
from dynamo_semkv.cli.status_view import render
from dynamo_semkv.contracts.report import Outcome, Reason
from dynamo_semkv.observe.snapshot import build_snapshot
from tests.observe.fake_state import fake_history, fake_state
from tests.observe.test_reference import unknown_fields

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "why-is-reuse-low.md").read_text()
STATIC = ROOT / "dynamo_semkv" / "dashboard" / "static"
STEPS = re.split(r"^## \d\. ", TEXT, flags=re.MULTILINE)[1:]


def named(kind: str, text: str = TEXT) -> set[str]:
    """What stands in quotes behind `kind`, one or several with `and`."""
    found: set[str] = set()
    for several in re.findall(rf'\b{kind}s? ("[^"]+"(?:(?:,| and) "[^"]+")*)', text, re.IGNORECASE):
        found |= set(re.findall(r'"([^"]+)"', several))
    return found


def commands() -> Iterator[str]:
    yield from re.findall(r"`((?:python -m|make) [^`]+)`", TEXT)


def test_there_are_five_steps_and_each_shows_where() -> None:
    assert len(STEPS) == 5
    for step in STEPS:
        assert named("card", step), step[:40]
        assert named("panel", step), step[:40]
        assert "python -m dynamo_semkv " in step, step[:40]


def test_every_card_is_on_the_page() -> None:
    page = (STATIC / "index.html").read_text()
    titles = {title.strip() for title in re.findall(r"<h2[^>]*>([^<]+)</h2>", page)}
    assert named("card") <= titles
    scripts = "".join(path.read_text() for path in (STATIC / "js").glob("*.js")) + page
    for row in re.findall(r"(?:row|list|table) \*([^*]+)\*", TEXT):
        assert row in scripts, row


def test_every_panel_is_in_the_dashboard() -> None:
    dashboard = json.loads((ROOT / "deploy/observability/grafana/dashboards/semkv.json").read_text())
    assert named("panel") <= {panel["title"] for panel in dashboard["panels"]}
    assert len(named("panel")) > 12


def test_every_table_is_in_what_status_prints() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(render(build_snapshot(fake_state(fake_history(50)))))
    lines = {line.strip() for line in console.file.getvalue().splitlines()}  # type: ignore[attr-defined]
    assert named("table")
    assert named("table") <= lines


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_every_command_exists(command: str) -> None:
    words = shlex.split(command)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}: ", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    assert words[:3] == ["python", "-m", "dynamo_semkv"]
    parsed = _parser().parse_args([word.replace("$PAGE", "http://127.0.0.1:9700") for word in words[3:]])
    assert callable(parsed.run)


def test_reasons_fields_and_links_exist() -> None:
    assert unknown_fields(TEXT) == set()
    known = {value.value for value in (*Reason, *Outcome)}
    last = set(re.findall(r"^- ((?:`\w+`,? ?)+)", STEPS[4], re.MULTILINE))
    assert {name for names in last for name in re.findall(r"`(\w+)`", names)} <= known
    for target, anchor in re.findall(r"\]\(([\w./-]+)#?([\w-]*)\)", TEXT):
        text = (ROOT / "docs" / target).read_text()
        assert not anchor or anchor in {
            re.sub(r"[^\w-]", "", h.lower().replace(" ", "-")) for h in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        }
    assert "docs/why-is-reuse-low.md" in (ROOT / "README.md").read_text()
