"""A child process that cannot outlive this one.

Three measures, because each alone leaves cases out: the owner ends it by pid; it runs in a process group of its own,
so that what it forked ends with it; and the kernel kills it when this process is killed (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

# Runs in the child before the program itself: asks for SIGKILL at the parent's death, checks that the parent did not
# die first, takes its niceness, then becomes the program. An exec of its own, and not a preexec_fn, because running
# Python between fork and exec can deadlock a parent with threads. Where Linux groups processes by session
# (sched_autogroup), a process's own niceness counts within its session only, so the session's is set too; the kernel
# takes that from ordinary users once in 100 ms. Where it cannot be set the program runs as it is.
_LAUNCHER = (
    "import ctypes, os, sys, time\n"
    "ctypes.CDLL(None, use_errno=True).prctl(1, 9, 0, 0, 0)\n"
    "if os.getppid() != int(sys.argv[1]): sys.exit(125)\n"
    "nice = os.nice(int(sys.argv[2]))\n"
    "for _ in range(50 if int(sys.argv[2]) else 0):\n"
    "    try: os.write(os.open('/proc/self/autogroup', os.O_WRONLY), b'%d' % nice)\n"
    "    except BlockingIOError: time.sleep(0.1)\n"
    "    except OSError: break\n"
    "    else: break\n"
    "os.execvp(sys.argv[3], sys.argv[3:])\n"
)

_requests: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
_spawner_lock = threading.Lock()
_spawner_pid = 0


def _spawner() -> None:
    while True:
        _requests.get()()


def _spawn_on_lasting_thread(make: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """PR_SET_PDEATHSIG fires when the *thread* that forked ends, so every child is forked by one daemon thread that
    never does."""
    global _spawner_pid
    with _spawner_lock:
        if _spawner_pid != os.getpid():
            threading.Thread(target=_spawner, name="semkv-spawner", daemon=True).start()
            _spawner_pid = os.getpid()
    done = threading.Event()
    made: list[subprocess.Popen[bytes]] = []
    failed: list[BaseException] = []

    def task() -> None:
        try:
            made.append(make())
        except BaseException as error:  # noqa: BLE001 - carried to the caller's thread and raised there
            failed.append(error)
        finally:
            done.set()

    _requests.put(task)
    done.wait()
    if failed:
        raise failed[0]
    return made[0]


class ChildProcess:
    """One program with its log file (appended), its process group and its end. `niceness`, 0 to 19, is added to that
    of this process: the program gives way to others that want the processor."""

    def __init__(
        self, name: str, command: Sequence[str], *, env: Mapping[str, str], log_path: Path, niceness: int = 0
    ) -> None:
        self.name = name
        self.command = tuple(command)
        self.log_path = log_path
        launch = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), str(niceness), *command]
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self._popen = _spawn_on_lasting_thread(
                lambda: subprocess.Popen(
                    launch,
                    env=dict(env),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    @property
    def pid(self) -> int:
        """Process id of the program, and of its process group."""
        return self._popen.pid

    @property
    def exit_status(self) -> int | None:
        """`None` while it runs; negative for the signal that ended it."""
        return self._popen.poll()

    @property
    def running(self) -> bool:
        """Whether the program itself has not ended yet."""
        return self.exit_status is None

    def signal(self, number: int) -> None:
        """Sends the signal to the program only; does nothing when it has ended."""
        self._popen.send_signal(number)

    def wait(self, timeout_seconds: float) -> bool:
        """True once it has ended."""
        try:
            self._popen.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """Sends SIGKILL to the whole group and reaps the program."""
        self._kill_group()
        self._popen.wait()

    def terminate(self, patience_seconds: float = 10.0) -> int:
        """SIGTERM to the program, SIGKILL to whatever of its group is left after `patience_seconds`. The exit
        status."""
        if self.running:
            self._popen.send_signal(signal.SIGTERM)
            self.wait(patience_seconds)
        self.kill()
        status = self.exit_status
        assert status is not None
        return status

    def _kill_group(self) -> None:
        # The group id is the leader's pid, and the kernel does not give that pid to another process while the group
        # has members. Once the leader is reaped and the group is empty it could; so signal before reaping, and after
        # it only if members are left.
        if self._popen.returncode is None or _group_alive(self.pid):
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # nobody is left, which is what was asked for

    def log_text(self) -> str:
        """The whole log file; bytes that are no UTF-8 are replaced."""
        return self.log_path.read_text(errors="replace")


def _group_alive(group: int) -> bool:
    """Whether a process of ours is in session `group` (each child leads a session of its own): a recycled pid is no
    such session."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue  # it ended while we looked
        if int(fields[2]) == group and int(fields[3]) == group:
            return True
    return False


def wait_until(condition: Callable[[], bool], timeout_seconds: float, interval_seconds: float = 0.02) -> bool:
    """Poll until `condition()` holds (True) or the time is over (False)."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(interval_seconds)
    return True
