"""What others write to stderr is a line of the log."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dynamo_semkv.telemetry import logs
from dynamo_semkv.telemetry.stderr_lines import stderr_lines


@contextmanager
def configured(monkeypatch: pytest.MonkeyPatch, *, json: bool) -> Iterator[io.StringIO]:
    """What reaches the real stderr of a process with this logging. Not a fixture: a test's own capture begins after
    those."""
    real = io.StringIO()
    monkeypatch.setattr(sys, "stderr", real)
    root = logging.getLogger()
    before = root.level, root.handlers[:]
    logs.configure({"DYN_LOGGING_JSONL": "1"} if json else {})
    try:
        with stderr_lines(json=json):
            yield real
    finally:
        logging.captureWarnings(False)
        root.level, root.handlers[:] = before


def fail(text: str) -> None:
    try:
        raise RuntimeError(text)
    except RuntimeError:
        traceback.print_exc()


def test_text_and_tracebacks_are_lines_of_json(monkeypatch: pytest.MonkeyPatch) -> None:
    with configured(monkeypatch, json=True) as real:
        print("plain\ntext", file=sys.stderr)
        fail("boom")
        sys.stderr.write("no end")
    messages = [json.loads(line)["message"] for line in real.getvalue().splitlines()]
    assert messages[0] == "plain\ntext"
    assert "RuntimeError: boom" in messages[1]
    assert messages[2:] == ["no end"]


def test_readable_text_stays_as_it_is_and_tracebacks_are_throttled(monkeypatch: pytest.MonkeyPatch) -> None:
    with configured(monkeypatch, json=False) as real:
        print("plain", file=sys.stderr)
        for number in range(100):
            fail(f"boom {number}")
    assert real.getvalue().startswith("plain\n")
    assert real.getvalue().count("Traceback") == 7  # 1, 2, 4, ... 64
    assert sys.stderr is real


def test_of_dynamos_typed_failures_the_last_line_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with configured(monkeypatch, json=True) as real:
        sys.stderr.write("Traceback (most recent call last):\n  File x, line 1, in _push\n    raise it\n")
        sys.stderr.write("dynamo._core.InvalidArgument: prompt too long\n")
    (line,) = [json.loads(line) for line in real.getvalue().splitlines()]
    assert line["level"] == "INFO"
    assert line["message"] == "a request failed with dynamo._core.InvalidArgument: prompt too long (1 so far)"


def test_a_line_that_cannot_be_formatted_is_told_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    with configured(monkeypatch, json=True) as real:
        logging.getLogger("a").warning("%d", "no number")
    (line,) = [json.loads(line) for line in real.getvalue().splitlines()]
    assert "could not be written: TypeError" in line["message"]


def test_the_last_words_of_a_process_are_json() -> None:
    code = (
        "import threading, warnings\n"
        "from dynamo_semkv.telemetry import logs\n"
        "from dynamo_semkv.telemetry.stderr_lines import stderr_lines\n"
        "logs.configure({'DYN_LOGGING_JSONL': '1'})\n"
        "taken = stderr_lines(json=True)\n"
        "taken.__enter__()\n"
        "warnings.warn('old')\n"
        "thread = threading.Thread(target=lambda: 1 / 0, name='unlucky')\n"
        "thread.start()\n"
        "thread.join()\n"
        "raise KeyError('the end')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    said = [json.loads(line)["message"] for line in ended.stderr.splitlines()]
    assert len(said) == 3
    assert "UserWarning: old" in said[0]
    assert "Exception in thread unlucky" in said[1]
    assert "ZeroDivisionError" in said[1]
    assert "KeyError: 'the end'" in said[2]
