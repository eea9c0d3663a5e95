"""`check-config` and the refusals of the command line, in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynamo_semkv.cli import OK, REFUSED, main
from dynamo_semkv.config.load import load_config

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def _no_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SEMKV_CONFIG", "SEMKV_EVIDENCE__DEADLINE_MS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", ["off", "discovery-only", "exact", "placement", "reference"])
def test_presets_are_accepted(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-config", str(CONFIGS / f"{name}.yaml")]) == OK
    assert load_config(CONFIGS / f"{name}.yaml", {}).hash in capsys.readouterr().out


@pytest.mark.parametrize("command", [["check-config"], ["serve", "--config"]])
def test_experimental_is_refused_with_its_reason(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, str(CONFIGS / "experimental.yaml")]) == REFUSED
    error = capsys.readouterr().err
    assert "connector.materialization: got 'experimental'" in error
    assert "request-local KV" in error


@pytest.mark.parametrize("command", [["check-config"], ["serve", "--config"]])
def test_llm_d_router_1068_misspelt_field_stops_before_anything_starts(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("evidence:\n  fingerprint:\n    max_donor: 3\n")
    assert main([*command, str(file)]) == REFUSED
    error = capsys.readouterr().err
    assert str(file) in error
    assert "evidence.fingerprint.max_donor: got 3" in error
    assert "max_donors (did you mean that?)" in error


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-config", str(tmp_path / "none.yaml")]) == REFUSED
    assert "none.yaml" in capsys.readouterr().err


def test_a_salt_key_file_that_is_not_there_is_found_before_serving(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"security: {{salt_key_file: {tmp_path / 'key'}}}\n")
    assert main(["check-config", str(file)]) == REFUSED
    assert "key" in capsys.readouterr().err


def test_show_prints_what_is_in_force_with_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEMKV_EVIDENCE__DEADLINE_MS", "7.5")
    monkeypatch.setenv("SEMKV_CONFIG", str(CONFIGS / "placement.yaml"))
    assert main(["check-config", "--show"]) == OK
    first, _, rest = capsys.readouterr().out.partition("\n")
    assert "placement enforce" in first
    assert "SEMKV_EVIDENCE__DEADLINE_MS" in first
    assert json.loads(rest)["evidence"]["deadline_ms"] == 7.5
