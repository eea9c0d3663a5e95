"""docs/metrics.md says what the catalogue says, for every metric and every label."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_semkv.config.schema import Config, plain
from dynamo_semkv.evidence import catalog as catalog_module
from dynamo_semkv.observe.catalogue import CATALOG_NOTES, FALLBACK_REASONS, STANDINGS
from dynamo_semkv.observe.reference import EVERYTHING, SECTIONS, label_values, markdown
from dynamo_semkv.router.fallback import FallbackReason
from dynamo_semkv.router.replicas import Standing

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "metrics.md"
COMMAND = [sys.executable, "-m", "dynamo_semkv.observe.reference"]


def test_the_document_is_what_the_command_prints() -> None:
    printed = subprocess.run(COMMAND, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60).stdout
    assert printed == markdown()
    assert DOCUMENT.read_text() == printed, "run: python -m dynamo_semkv.observe.reference > docs/metrics.md"


def test_every_metric_has_one_place() -> None:
    placed = [spec.name for specs in SECTIONS.values() for spec in specs]
    assert sorted(placed) == sorted(spec.name for spec in EVERYTHING)


@pytest.mark.parametrize("spec", EVERYTHING, ids=lambda spec: spec.name)
def test_every_metric_says_what_it_is_and_what_to_do(spec) -> None:
    entry = markdown().partition(f"### `{spec.name}`\n")[2].partition("\n##")[0]
    assert spec.meaning in entry
    assert f"- when it moves: {spec.usage}" in entry
    assert spec.kind in entry
    for label in spec.labels:
        assert f"- `{label}`: {label_values(spec, label)}" in entry


def test_label_values_of_the_layer_above_are_current() -> None:
    assert tuple(reason.value for reason in FallbackReason) == FALLBACK_REASONS
    assert tuple(standing.value for standing in Standing) == STANDINGS
    counted = set(re.findall(r'self\.counts\["(\w+)"\] \+= \w+', Path(catalog_module.__file__).read_text()))
    assert counted == set(CATALOG_NOTES)


def fields(value: object, path: str = "") -> set[str]:
    """Dotted names of every section and field."""
    if not isinstance(value, dict):
        return {path}
    return {path} | {name for key, part in value.items() for name in fields(part, f"{path}.{key}" if path else key)}


def unknown_fields(text: str) -> set[str]:
    """What looks like a field of the configuration and is none: a section's name, a dot, a name."""
    known = fields(plain(Config()))
    sections = "|".join(sorted(plain(Config())))
    named = set(re.findall(rf"(?<![\w./-])((?:{sections})(?:\.[a-z_]+)+)\b(?![/-])", text))
    return {name for name in named if name not in known and not name.endswith((".md", ".yaml", ".yml", ".py"))}


def test_advice_names_fields_that_exist() -> None:
    assert unknown_fields("raise bus.max_bufered, not outcome.max_open_routes") == {"bus.max_bufered"}
    assert unknown_fields(markdown()) == set()
