"""The names file: no name twice, none that is another one's namespace, and nothing but ours and what the conventions
define."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dynamo_semkv.telemetry import names

ROOT = Path(__file__).resolve().parents[2]
NAMES = {key: value for key, value in vars(names).items() if key.isupper() and isinstance(value, str)}
SPANS = {"ROUTE", "EXACT", "LOOKUP", "SCORE", "HINT", "DISPATCH", "OUTCOME", "MATERIALIZE", "OFFER", "LOAD", "REPORT"}
EVENTS = {"FIRST_CHUNK", "PIN_GIVEN_UP"}
ATTRIBUTES = {value for key, value in NAMES.items() if key not in SPANS | EVENTS | {"SCOPE"}}
# Of open-telemetry/semantic-conventions-genai and open-telemetry/semantic-conventions.
FOREIGN = {
    "gen_ai.request.model",
    "gen_ai.usage.input_tokens",
    "gen_ai.usage.output_tokens",
    "gen_ai.usage.cache_read.input_tokens",
    "error.type",
    "service.name",
    "service.instance.id",
    "service.version",
}


def test_every_name_is_ours_or_a_convention() -> None:
    assert {name for name in ATTRIBUTES if not name.startswith("semkv.")} == FOREIGN
    for name in NAMES.values():
        assert re.fullmatch(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*", name)


def test_no_name_is_given_twice_or_is_a_namespace_of_another() -> None:
    assert len(set(NAMES.values())) == len(NAMES)
    for name in ATTRIBUTES:
        assert not [other for other in ATTRIBUTES if other.startswith(f"{name}.")], name


@pytest.mark.parametrize("folder", ["dynamo_semkv", "worker_connector"])
def test_names_are_written_in_one_file_only(folder: str) -> None:
    written = re.compile(r'"(?:semkv|gen_ai)\.(?!donor"|reports"|announcements"|hints"|routes"|%)[a-z_.]+"')
    for path in sorted((ROOT / folder).rglob("*.py")):
        if path.name != "names.py":
            found = [text for text in written.findall(path.read_text()) if text.strip('"') in NAMES.values()]
            assert found == [], path
