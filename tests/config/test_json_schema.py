"""The schema that editors get says what the loader says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from dynamo_semkv.cli import main
from dynamo_semkv.config.json_schema import json_schema
from dynamo_semkv.config.load import build, parse_yaml
from dynamo_semkv.contracts.errors import ContractError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FILES = sorted(CONFIGS.glob("*.yaml"))
VALIDATOR = jsonschema.Draft202012Validator(json_schema())

WRONG: list[dict[str, Any]] = [
    {"placement": {"mode": "always"}},
    {"placement": {"mod": "off"}},
    {"evidence": {"deadline_ms": -1}},
    {"evidence": {"fingerprint": {"max_donors": "many"}}},
    {"bus": {"replicas": 9}},
    {"security": {"salt_key_file": 5}},
    {"nonsense": {}},
    {"dynamo": {"namespace": "a b"}},
]


def test_the_file_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-config", "--schema"]) == 0
    printed = capsys.readouterr().out
    assert (CONFIGS / "semkv.schema.json").read_text() == printed, (
        "run: python -m dynamo_semkv check-config --schema > configs/semkv.schema.json"
    )
    assert json.loads(printed) == json_schema()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_we_ship_names_the_schema_and_fits_it(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# yaml-language-server: $schema=semkv.schema.json\n")
    VALIDATOR.validate(parse_yaml(text))


@pytest.mark.parametrize("tree", WRONG, ids=str)
def test_what_the_loader_refuses_the_schema_refuses(tree: dict[str, Any]) -> None:
    assert not VALIDATOR.is_valid(tree)
    with pytest.raises(ContractError):
        build(tree)
