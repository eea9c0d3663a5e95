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


@pytest.mark.parametrize("command", [["check-config"], ["serve", "--config"]])
def test_named_files_that_are_not_there_are_all_told(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    (tmp_path / "short").write_text("abc")
    gone = tmp_path / "gone"
    file.write_text(
        f"bus: {{tls_ca: {gone}, credentials_file: {tmp_path}}}\nsecurity: {{salt_key_file: {gone}}}\n"
        f"dashboard: {{token_file: {tmp_path / 'short'}}}\nmodel: {{path: {gone}}}\n"
        "connector: {materialization: experimental}\n"
    )
    assert main([*command, str(file)]) == REFUSED
    error = capsys.readouterr().err
    assert "6 errors" in error
    for field in (
        "bus.tls_ca",
        "bus.credentials_file",
        "security.salt_key_file",
        "dashboard.token_file",
        "model.path",
        "connector.materialization",
    ):
        assert f"  {field}: got" in error
    assert "Traceback" not in error


def test_a_model_that_dynamo_resolves_itself_is_no_missing_directory(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: {path: Qwen/Qwen3-0.6B}\n")
    assert main(["check-config", str(file)]) == OK
    file.write_text(f"model: {{path: {tmp_path}}}\n")
    assert main(["check-config", str(file)]) == OK


def test_a_variable_that_means_nothing_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEMKV_PLACEMNT", "enforce")
    assert main(["check-config", str(CONFIGS / "placement.yaml")]) == OK
    assert "warning: SEMKV_PLACEMNT is set and means nothing here" in capsys.readouterr().err


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
