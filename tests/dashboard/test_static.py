"""Rules of the page's own files, without a browser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dynamo_semkv.advice.decision import DecisionReason
from dynamo_semkv.config.schema import PlacementMode
from dynamo_semkv.contracts.report import Outcome, Reason
from dynamo_semkv.dashboard.files import page_files
from dynamo_semkv.evidence.deadline import LookupStatus
from dynamo_semkv.observe.health import readiness
from dynamo_semkv.outcome.closed import TtftClass
from dynamo_semkv.outcome.totals import STEPS
from dynamo_semkv.router.replicas import Standing
from tests.observe.fake_state import empty_state

STATIC = Path(__file__).resolve().parents[2] / "dynamo_semkv" / "dashboard" / "static"
OWN = sorted(path for path in STATIC.rglob("*") if path.is_file() and "vendor" not in path.parts)
WORDS = (STATIC / "js" / "words.js").read_text()


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_text_never_becomes_markup_or_code(path: Path) -> None:
    source = path.read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc", source)
    assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+\s*=\s*[\"']|style\s*=\s*[\"']|javascript:", source), "inline"


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_no_other_host_is_named(path: Path) -> None:
    hosts = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", path.read_text()))
    assert hosts <= {"http://www.w3.org"}  # the namespace of SVG


def table(name: str) -> set[str]:
    """Keys of one table of words.js."""
    body = re.search(rf"export const {name} = \{{(.*?)\n?\}};", WORDS, re.DOTALL)
    assert body is not None
    return set(re.findall(r"(?:^|[{,\n])\s*(\w+):", body.group(1)))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("OUTCOMES", {outcome.value for outcome in Outcome}),
        ("REASONS", {reason.value for reason in Reason} - {"unknown"}),
        ("DECISIONS", {reason.value for reason in DecisionReason}),
        ("LOOKUPS", {status.value for status in LookupStatus}),
        ("MODES", {mode.value for mode in PlacementMode}),
        ("TTFT", {kind.value for kind in TtftClass}),
        ("STEPS", set(STEPS)),
        ("STANDINGS", {standing.value for standing in Standing}),
        ("CHECKS", {check.name for check in readiness(empty_state()).checks}),
    ],
)
def test_every_value_of_a_closed_set_has_its_words(name: str, values: set[str]) -> None:
    assert table(name) == values


def test_vendored_files_have_their_licence() -> None:
    folder = STATIC / "vendor" / "uplot"
    licence = (folder / "LICENSE").read_text()
    assert licence.startswith("The MIT License")
    assert "uPlot (v1.6.32)" in (folder / "uPlot.iife.min.js").read_text()[:80]


def test_every_file_that_is_linked_is_there() -> None:
    found = page_files()
    page = found[""].body.decode()
    for target in re.findall(r'(?:src|href)="/([^"]+)"', page):
        assert target in found or target.startswith("api/"), target
    for name, file in found.items():
        if name.startswith("js/"):
            for target in re.findall(r'from "\./([\w.]+)"', file.body.decode()):
                assert f"js/{target}" in found
