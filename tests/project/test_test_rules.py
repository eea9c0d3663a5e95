"""The rules of tests/conftest.py act: other hosts are refused, left processes are seen, skips can be forbidden."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_pytest(folder: Path, test: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest over one test file beside a copy of our conftest.py."""
    (folder / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (folder / "test_it.py").write_text(textwrap.dedent(test))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, str(folder)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize("address", [("0.0.0.0", 0), ("", 0)])
def test_binding_beyond_loopback_is_refused(address: tuple[str, int]) -> None:
    with socket.socket() as listener, pytest.raises(RuntimeError, match="only"):
        listener.bind(address)


def test_connecting_beyond_loopback_is_refused() -> None:
    with socket.socket() as client, pytest.raises(RuntimeError, match="only"):
        client.connect(("192.0.2.1", 9))  # TEST-NET-1: no host has it


def test_loopback_is_allowed() -> None:
    with socket.socket() as listener, socket.socket() as client:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        client.connect(listener.getsockname())


@pytest.mark.parametrize("arguments", [(), ("-n", "2")], ids=["one process", "two processes"])
def test_a_process_left_behind_fails_the_run(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    ran = run_pytest(
        tmp_path,
        """
        import subprocess
        from pathlib import Path

        def test_leaves_a_process():
            left = subprocess.Popen(["sleep", "30"])
            Path(__file__).with_name("pid").write_text(str(left.pid))
        """,
        *arguments,
    )
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert ran.returncode == pytest.ExitCode.TESTS_FAILED
    assert "a test left a process running" in ran.stdout
    assert "sleep 30" in ran.stdout
    assert "1 passed" in ran.stdout.splitlines()[-1]


@pytest.mark.parametrize(("arguments", "status"), [((), 0), (("--no-skips",), 1), (("--no-skips", "-n", "2"), 1)])
def test_skips_can_be_forbidden(tmp_path: Path, arguments: tuple[str, ...], status: int) -> None:
    ran = run_pytest(
        tmp_path,
        """
        import pytest

        def test_passes():
            pass

        @pytest.mark.skip(reason="not here")
        def test_skipped():
            pass
        """,
        *arguments,
    )
    assert ran.returncode == status
    assert ("--no-skips is given: test_it.py::test_skipped" in ran.stdout) == bool(arguments)
