"""Whoever reads what a verb prints may go away early (`doctor | head -2`): no traceback, whatever was buffered."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_semkv.cli.exit_status import OK, PIPE_CLOSED

LATEST = str(Path(__file__).parents[2] / "docs" / "benchmarks" / "latest.json")


@pytest.mark.parametrize(
    "verb", [["--help"], ["check-config"], ["check-config", "--schema"], ["bench", "compare", LATEST, LATEST]]
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_ends_a_verb_quietly(verb: list[str], unbuffered: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "dynamo_semkv", *verb],
            stdout=writing,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            timeout=60,
            check=False,
        )
    finally:
        os.close(writing)
    assert ended.stderr.decode() == ""
    # argparse of newer Pythons itself drops what it cannot print of a help that is written at once
    assert ended.returncode in ((OK, PIPE_CLOSED) if verb == ["--help"] and unbuffered else (PIPE_CLOSED,))


def test_both_pipes_closed() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [sys.executable, "-m", "dynamo_semkv", "status", "--url", "http://127.0.0.1:9"]
        ended = subprocess.run(command, stdout=writing, stderr=writing, timeout=60, check=False)
    finally:
        os.close(writing)
    assert ended.returncode == PIPE_CLOSED
