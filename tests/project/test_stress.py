"""`make stress` reports each failure of each round, keeps the machine busy meanwhile and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import stress


def test_a_failure_is_counted_in_each_round_and_printed_with_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tests = tmp_path / "test_it.py"
    tests.write_text("def test_good(): pass\ndef test_bad(): assert 1 == 2\n")
    logs = tmp_path / "logs"
    assert stress.main(["--rounds", "2", "--hogs", "1", "--logs", str(logs), "--", str(tests)]) == 1
    printed = capsys.readouterr().out
    assert printed.count("1 passed, 1 failed") == 2
    assert "test_it::test_bad: assert 1 == 2" in printed
    assert "2 of 2 rounds: " in printed
    assert "test_bad" in (logs / "round-2.log").read_text()


def test_rounds_without_a_failure_end_with_status_0(tmp_path: Path) -> None:
    tests = tmp_path / "test_it.py"
    tests.write_text("def test_good(): pass\n")
    assert stress.main(["--rounds", "1", "--hogs", "0", "--logs", str(tmp_path / "logs"), "--", str(tests)]) == 0


def test_a_run_that_collects_nothing_is_a_failure(tmp_path: Path) -> None:
    tests = tmp_path / "test_it.py"
    tests.write_text("import a_module_that_is_not_there\n")
    assert stress.main(["--rounds", "1", "--hogs", "0", "--logs", str(tmp_path / "logs"), "--", str(tests)]) == 1


def test_hogs_run_and_are_ended() -> None:
    with stress.hogs(2) as pids:
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_no_rounds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        stress.main(["--rounds", "0"])
    assert "--rounds 0" in capsys.readouterr().err
