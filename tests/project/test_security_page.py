"""docs/security.md: the bounds it names are there, with the values it says, and so are its fields."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.observe.test_reference import unknown_fields

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "security.md").read_text()
INPUTS = TEXT.partition("\n## What comes in, and how much of it\n")[2].partition("\n## ")[0]
ROWS = [line for line in INPUTS.splitlines() if line.startswith("| ") and "`" in line]
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)(?::(\w+))?`", "\n".join(ROWS))))


def source(path: str) -> str:
    full = ROOT / path if path.startswith("worker_connector/") else ROOT / "dynamo_semkv" / path
    assert full.exists(), path
    return full.read_text()


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_each_bound_is_where_it_says(path: str, name: str) -> None:
    text = source(path)
    assert not name or re.search(rf"^{name}\b.* = ", text, re.MULTILINE), f"{path} has no {name}"


def value(path: str, name: str) -> int:
    found = re.search(rf"^{name}(?:, \w+)* = (.+)$", source(path), re.MULTILINE)
    assert found is not None
    return int(eval(found[1].split(",")[0], {}))  # our own source: a product of numbers


@pytest.mark.parametrize(
    ("path", "name", "said"),
    [
        ("router/gateway_advice.py", "MAX_TOKENS", "1,048,576 tokens"),
        ("router/gateway_advice.py", "LARGE_AT_ONCE", "two large ones"),
        ("router/attempts.py", "MAX_REQUESTS", "16,384 remembered"),
        ("router/announcements.py", "MAX_WAITING", "16,384 of replicas"),
        ("router/runtime_cards.py", "MAX_RANKS", "1,024 ranks"),
        ("outcome/totals.py", "MAX_DECISIONS", "first 64"),
        ("dashboard/server.py", "MAX_WATCHERS", "32 watchers"),
        ("evidence/claims.py", "MAX_CLAIMS", "1,000, of 256 segments"),
        ("config/yaml_text.py", "MAX_NODES", "20,000 nodes"),
        ("worker_connector/donors/device_events.py", "MAX_WAITING", "100,000 waiting"),
        ("worker_connector/link/local_server.py", "MAX_NEW", "32 connections"),
        ("worker_connector/fetch/wire.py", "MAX_KEYS", "256 keys"),
    ],
)
def test_the_numbers_are_those_of_the_code(path: str, name: str, said: str) -> None:
    (row,) = (line for line in ROWS if f"`{path}:{name}`" in line or (path.split("/")[-1] in line and said in line))
    assert said in row
    first = re.search(r"[\d,]+", said)
    assert value(path, name) == (int(first[0].replace(",", "")) if first is not None else 2)


def test_fields_exist() -> None:
    assert unknown_fields(TEXT.replace("bus.stream_*", "")) == set()
    assert len(ROWS) >= 15
