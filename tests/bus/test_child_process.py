"""A child ends with its owner: by pid, with its group, and when the owner is killed without a word."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dynamo_semkv.bus.child_process import ChildProcess
from tests.bus.waiting import wait_for


def alive(pid: int) -> bool:
    """Neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def spawn(tmp_path: Path, script: str, name: str = "child") -> ChildProcess:
    return ChildProcess(name, ["sh", "-c", script], env=dict(os.environ), log_path=tmp_path / f"{name}.log")


def written_pid(path: Path) -> int:
    wait_for(f"{path.name} written", lambda: path.exists() and path.read_text().endswith("\n"))
    return int(path.read_text())


def test_output_goes_to_the_log_and_the_status_is_kept(tmp_path: Path) -> None:
    child = spawn(tmp_path, "echo out; echo err >&2; exit 3")
    assert child.wait(20.0)
    assert child.exit_status == 3
    assert child.log_text() == "out\nerr\n"
    child.kill()  # after its end: nothing to do, and no error


def test_they_give_way_by_their_niceness(tmp_path: Path) -> None:
    """Several at once: the kernel takes a session's niceness from ordinary users once in 100 ms."""
    autogroup = Path("/proc/self/autogroup")
    script = "nice" if not autogroup.exists() else f"nice; cat {autogroup}"
    own, *yielding = (
        ChildProcess(f"{n}-{m}", ["sh", "-c", script], env=dict(os.environ), log_path=tmp_path / f"{n}-{m}", niceness=n)
        for n, m in ((0, 0), (4, 1), (4, 2), (4, 3))
    )
    expected = min(19, os.nice(0) + 4)
    assert own.wait(20.0)
    assert int(own.log_text().split()[0]) == os.nice(0)
    for child in yielding:
        assert child.wait(20.0)
        said = child.log_text().split()
        assert int(said[0]) == expected
        assert int(said[-1]) == expected, "other sessions see only the session's niceness"


def test_terminate_lets_it_finish(tmp_path: Path) -> None:
    child = spawn(tmp_path, "trap 'echo bye; exit 0' TERM; echo ready; while :; do sleep 0.01; done")
    wait_for("trap set", lambda: "ready" in child.log_text())
    assert child.terminate(patience_seconds=20.0) == 0
    assert child.log_text().endswith("bye\n")


def test_terminate_kills_what_will_not_end(tmp_path: Path) -> None:
    child = spawn(tmp_path, "trap '' TERM; echo ready; while :; do sleep 0.01; done")
    wait_for("trap set", lambda: "ready" in child.log_text())
    assert child.terminate(patience_seconds=0.05) == -signal.SIGKILL


@pytest.mark.parametrize("leader_ends_first", [False, True])
def test_what_it_forked_ends_with_it(tmp_path: Path, leader_ends_first: bool) -> None:
    script = f"sleep 300 & echo $! > {tmp_path}/grandchild; {'exit 0' if leader_ends_first else 'wait'}"
    child = spawn(tmp_path, script)
    grandchild = written_pid(tmp_path / "grandchild")
    if leader_ends_first:
        assert child.wait(20.0)
    assert alive(grandchild)
    child.terminate()
    wait_for("grandchild gone", lambda: not alive(grandchild))


def test_a_thread_that_ends_takes_no_child_with_it(tmp_path: Path) -> None:
    made: list[ChildProcess] = []
    thread = threading.Thread(target=lambda: made.append(spawn(tmp_path, "echo ready; exec sleep 300")))
    thread.start()
    thread.join()
    wait_for("child up", lambda: "ready" in made[0].log_text())
    assert made[0].running
    made[0].kill()
    assert made[0].exit_status == -signal.SIGKILL


def test_a_killed_parent_takes_the_child_with_it(tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from dynamo_semkv.bus.child_process import ChildProcess
child = ChildProcess("c", ["sh", "-c", "echo $$ > {tmp_path}/pid; exec sleep 300"],
                     env=dict(os.environ), log_path=Path({str(tmp_path / "c.log")!r}))
signal.pause()
"""
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parents[2])
    try:
        pid = written_pid(tmp_path / "pid")
        assert alive(pid)
    finally:
        parent.kill()
        parent.wait()
    wait_for("child gone", lambda: not alive(pid))


def test_a_program_that_is_not_there_is_a_status_and_a_log(tmp_path: Path) -> None:
    child = ChildProcess("none", ["/nonexistent/program"], env=dict(os.environ), log_path=tmp_path / "none.log")
    assert child.wait(20.0)
    assert child.exit_status == 1
    assert "/nonexistent/program" in child.log_text() or "No such file" in child.log_text()
