"""What holds for every test: loopback only, nothing fetched from a hub, no process left behind, no skip unseen.

Nothing here knows the packages under test.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Before any test imports these libraries: they read the environment at import.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")


# A busy machine makes any example slow, and no test asserts a time. `fixed` draws the same examples each time, so that
# a failure is told to whoever made the change; `random` draws others each time: it looks for what nobody has met.
settings.register_profile("fixed", settings(), deadline=None, derandomize=True)
settings.register_profile("random", settings(), deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A command that sets up its process's logging would leave a handler on this test's captured stream to all later
    tests."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def leaves_loopback(address: object) -> bool:
    """True for an internet address other than this host's own; names count as foreign unless they are `localhost`."""
    if not isinstance(address, tuple) or not isinstance(address[0], str):
        return False  # AF_UNIX has a path, AF_NETLINK a pair of numbers
    host = address[0]
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def _refuse_other_hosts(event: str, arguments: tuple[object, ...]) -> None:
    if event in ("socket.connect", "socket.bind") and leaves_loopback(arguments[1]):
        raise RuntimeError(f"{event} {arguments[1]!r}: tests talk to 127.0.0.1 and ::1 only")


sys.addaudithook(_refuse_other_hosts)


def living_children() -> list[str]:
    """`pid command` of each direct child of this process, zombies included, multiprocessing's own tracker left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # "pid (name) state ppid ...": the name may hold spaces and parentheses.
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == os.getpid() and "multiprocessing.resource_tracker" not in command:
            found.append(f"{entry.name} {command or '(zombie)'}")
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a skipped test fails the run (what CI uses)")


@pytest.fixture(autouse=True)
def _log_of_its_own() -> None:
    """Else a line is missing from a test's log because another test has caused it three times before."""
    throttled = sys.modules.get("dynamo_semkv.telemetry.throttled")
    if throttled is not None:
        throttled.forget()


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """A folder with a short path: that of a Unix-domain socket has at most 107 bytes, and `tmp_path` may be too long
    for one in it."""
    with tempfile.TemporaryDirectory(prefix="semkv-") as folder:
        yield Path(folder)


_complaints: list[str] = []


@pytest.hookimpl(trylast=True)  # pytest-xdist ends its processes in this hook too: none of them is one that a test left
def pytest_sessionfinish(session: pytest.Session) -> None:
    _complaints.extend(f"a test left a process running: {child}" for child in living_children())
    of_a_part = getattr(session.config, "workeroutput", None)
    if of_a_part is not None:  # one of several processes that share the tests: whoever started it tells them
        of_a_part["complaints"] = _complaints
        return
    if session.config.getoption("--no-skips"):
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        skipped = reporter.stats.get("skipped", []) if reporter else []
        _complaints.extend(f"skipped, and --no-skips is given: {report.nodeid}" for report in skipped)
    if _complaints and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A process of pytest-xdist has ended: what its part of the run left is a fault of the whole run."""
    _complaints.extend(getattr(node, "workeroutput", {}).get("complaints", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _complaints:
        terminalreporter.section("faults of the run as a whole", red=True)
        for complaint in _complaints:
            terminalreporter.write_line(complaint)
