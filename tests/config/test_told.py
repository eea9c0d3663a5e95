"""Which configuration a process runs, in the words of its first line."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from dynamo_semkv.config.load import load_config
from tests.worker_connector.scripted import llm_args
from worker_connector.engine_api.settings import load_settings, tell_settings

ENV = {"DYN_STABLE_ROUTING_ID": "w1"}


def test_file_hash_and_overrides_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("placement: {mode: off}\n")
    loaded = load_config("c.yaml", {})
    assert loaded.told == f"configuration {loaded.hash}: file {tmp_path}/c.yaml"
    env = {"SEMKV_SCORING__SEED": "1", "NATS_SERVER": "nats://a:1", "SEMKV_CONFIG": "c.yaml"}
    loaded = load_config("c.yaml", env)
    assert loaded.told == (
        f"configuration {loaded.hash}: file {tmp_path}/c.yaml, changed by SEMKV_SCORING__SEED, NATS_SERVER"
    )


def test_none_is_told_plainly() -> None:
    loaded = load_config(None, {})
    assert loaded.told == f"configuration {loaded.hash}: no file and no variable, so every value is its default"
    loaded = load_config(None, {"SEMKV_SCORING__SEED": "1"})
    assert loaded.told == f"configuration {loaded.hash}: no file, changed by SEMKV_SCORING__SEED"


def test_a_connector_tells_its_own_where_nobody_configured_logging_too(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python alone shows warnings only, and the process of TensorRT-LLM's executor configures nothing."""
    settings = load_settings(llm_args(32), ENV)
    with caplog.at_level(logging.INFO):
        tell_settings("the leader", settings)
        monkeypatch.setattr(logging.Logger, "hasHandlers", lambda self: False)
        tell_settings("a rank", settings)
    said = r"semkv connector: (the leader|a rank) of w1 runs configuration [0-9a-f]{16}: no file and no variable"
    assert all(re.match(said, record.getMessage()) for record in caplog.records)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
