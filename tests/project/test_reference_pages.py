"""docs/reference: current, and complete by another way of counting than the one that wrote it."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys
from enum import Enum
from pathlib import Path

import msgspec
import pytest

from dynamo_semkv import contracts
from dynamo_semkv.cli.command import VERBS, _parser
from dynamo_semkv.config.schema import Config, plain
from dynamo_semkv.contracts import codec, subjects

ROOT = Path(__file__).resolve().parents[2]
PAGES = {name: (ROOT / "docs" / "reference" / f"{name}.md").read_text() for name in ("cli", "config", "wire")}


def test_they_are_what_the_script_writes() -> None:
    ran = subprocess.run(
        [sys.executable, "scripts/reference.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def contract_types() -> list[type]:
    names = [found.name for found in pkgutil.iter_modules(contracts.__path__)]
    modules = [importlib.import_module(f"{contracts.__name__}.{name}") for name in names]
    kinds = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    return sorted(
        (
            kind
            for kind in kinds
            if issubclass(kind, (msgspec.Struct, Enum))
            and kind.__module__.startswith(contracts.__name__)
            and not kind.__name__.startswith("_")
        ),
        key=lambda kind: kind.__name__,
    )


def rows(text: str) -> list[list[str]]:
    return [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("| `")]


@pytest.mark.parametrize("kind", contract_types(), ids=lambda kind: kind.__name__)
def test_every_type_and_field_of_the_contracts_is_named_with_its_unit(kind: type) -> None:
    section = PAGES["wire"].partition(f"### `{kind.__name__}`\n")[2].partition("\n### ")[0]
    assert section
    if issubclass(kind, Enum):
        assert {row[0].strip() for row in rows(section)} == {f"`{member.value}`" for member in kind}
        assert all(row[1].strip() for row in rows(section)), "a text under it, or scripts/wire_words.py"
        return
    assert issubclass(kind, msgspec.Struct)
    found = {row[0].strip(" `"): row for row in rows(section)}
    assert list(found) == list(kind.__struct_encode_fields__)
    for name, row in found.items():
        assert row[4].strip(), f"{kind.__name__}.{name} has no meaning: a text under it, or scripts/wire_words.py"
        if re.search(r"\b(int|float|bytes)\b", row[1]):
            assert row[2].strip(), f"{kind.__name__}.{name} has no unit: scripts/reference_wire.py"


def test_every_subject_stream_and_size_is_there() -> None:
    for name in (*vars(subjects), *vars(codec)):
        if name.isupper() and not name.startswith("_"):
            value = getattr(subjects, name, None) or getattr(codec, name)
            if isinstance(value, str) and name not in ("JSON", "MSGPACK"):
                assert value in PAGES["wire"], name
            elif isinstance(value, int) and name.startswith("MAX"):
                assert f"{value:,}" in PAGES["wire"], name


def leaves(value: object, path: str = "") -> list[str]:
    if not isinstance(value, dict):
        return [path]
    return [leaf for key, inner in value.items() for leaf in leaves(inner, f"{path}.{key}" if path else key)]


def test_every_field_of_the_configuration_has_a_meaning() -> None:
    found: dict[str, list[str]] = {}
    for part in PAGES["config"].split("\n## `")[1:]:
        section = part.partition("`")[0]
        found |= {f"{section}.{row[0].strip(' `')}": row for row in rows(part)}
    assert list(found) == leaves(plain(Config()))
    without = [name for name, row in found.items() if not row[4].strip()]
    assert not without, f"a docstring in config/schema.py, or a line in scripts/reference_config.py: {without}"


def test_every_verb_is_there() -> None:
    known = set(re.findall(r"^## `([a-z -]+)`$", PAGES["cli"], re.MULTILINE))
    usage = re.search(r"\{([a-z,-]+)\}", _parser().format_usage())
    assert usage is not None
    verbs = usage[1].split(",")
    assert len(verbs) == len(VERBS)
    assert {name.split()[0] for name in known} == set(verbs)
