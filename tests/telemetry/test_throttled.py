"""What repeats is told at 1, 2, 4, 8, ... and counted."""

from __future__ import annotations

import ast
import logging
import threading
from pathlib import Path

import pytest

from dynamo_semkv.telemetry.throttled import MAX_KEYS, Throttled

ROOT = Path(__file__).parents[2]
log = logging.getLogger(__name__)


def test_a_line_is_written_at_powers_of_two_and_says_how_often_it_was(caplog: pytest.LogCaptureFixture) -> None:
    throttled = Throttled(log)
    assert [throttled.warning("hint %d refused", number) for number in range(100)] == list(range(1, 101))
    assert [record.getMessage() for record in caplog.records] == [
        f"hint {count - 1} refused ({count} so far)" for count in (1, 2, 4, 8, 16, 32, 64)
    ]


def test_messages_and_keys_are_counted_apart(caplog: pytest.LogCaptureFixture) -> None:
    throttled = Throttled(log)
    for _ in range(3):
        throttled.error("one")
        throttled.error("other")
        for key in ("a", "b"):
            throttled.error("keyed", key=key)
    assert sorted(record.getMessage() for record in caplog.records) == sorted(
        f"{message} ({count} so far)" for message in ("one", "other", "keyed", "keyed") for count in (1, 2)
    )


def test_keys_without_end_are_counted_as_one(caplog: pytest.LogCaptureFixture) -> None:
    throttled = Throttled(log)
    for number in range(3 * MAX_KEYS):
        throttled.warning("from a peer", key=str(number))
    assert len(caplog.records) == MAX_KEYS + 11  # 1, 2, 4, ... 1024 of the other 2,000


def test_an_exception_has_its_traceback_and_the_line_its_place(caplog: pytest.LogCaptureFixture) -> None:
    throttled = Throttled(log)
    try:
        raise KeyError("gone")
    except KeyError as error:
        throttled.exception("failed")
        throttled.warning("late", exc_info=error)
        throttled.log(logging.INFO, "told")
    assert "KeyError: 'gone'" in caplog.text
    assert {record.funcName for record in caplog.records} == {
        "test_an_exception_has_its_traceback_and_the_line_its_place"
    }
    assert all(record.exc_info for record in caplog.records[:2])


def test_no_count_is_lost_between_threads() -> None:
    throttled = Throttled(log)
    threads = [threading.Thread(target=lambda: [throttled.info("beat") for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert throttled.info("beat") == 2001


def _power_of_two_tests(source: str) -> list[int]:
    """Lines with `x & (x - 1)`."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.BitAnd)
        and isinstance(node.right, ast.BinOp)
        and isinstance(node.right.op, ast.Sub)
        and ast.dump(node.right.left) == ast.dump(node.left)
    ]


def test_there_is_one_throttle() -> None:
    found = {
        str(path.relative_to(ROOT))
        for package in ("dynamo_semkv", "worker_connector", "graphs")
        for path in (ROOT / package).rglob("*.py")
        if _power_of_two_tests(path.read_text())
    }
    assert found == {"dynamo_semkv/telemetry/throttled.py"}
