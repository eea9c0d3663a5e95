"""`bench`: each program is there and gets its own arguments."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_semkv.cli import bench, main


@pytest.mark.parametrize("program", bench.PROGRAMS)
def test_every_program_can_be_run(program: str) -> None:
    module, _ = bench.PROGRAMS[program]
    found = find_spec(module)
    assert found is not None
    assert found.submodule_search_locations is None or find_spec(f"{module}.__main__") is not None


def test_arguments_and_exit_status_are_the_program_s(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        ran.append(command)
        return SimpleNamespace(returncode=7)

    monkeypatch.setattr(bench.subprocess, "run", run)
    assert main(["bench", "connector", "copy", "--json", "--device", "cpu"]) == 7
    assert main(["bench", "evidence", "--help"]) == 7
    assert ran == [
        [sys.executable, "-m", "worker_connector.bench", "copy", "--json", "--device", "cpu"],
        [sys.executable, "-m", "dynamo_semkv.bench.evidence_run", "--help"],
    ]


def test_without_or_with_an_unknown_program_it_says_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["bench"], ["bench", "everything"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        assert "evidence-cost" in capsys.readouterr().err


def test_connector_runs_from_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dynamo_semkv", "bench", "connector", "lookup", "--quick", "--json"],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    rows = json.loads(done.stdout)["lookup"]
    assert [row["tokens_as"] for row in rows] == ["array", "list"]
    assert all(0 < row["p50"] <= row["p99"] for row in rows)
