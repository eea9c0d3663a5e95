"""The graph and router tests several times over, on a machine that is kept busy: `make stress ROUNDS=5 HOGS=4`.

A test that waits for time rather than for the state that it needs passes on an idle machine and fails on a busy one.
Every round runs the tests once while `hogs` processes use all the processor time that they can get. Every failure is
printed as soon as its round ends, with the round's log, and the last lines count how often each test failed. The exit
status is 0 only if no test failed in any round.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_TESTS = ("tests/graphs", "tests/router")

# A hog ends by itself when whoever started it is gone.
_HOG = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100_000))\n"


class Round(NamedTuple):
    """What one run of the tests came to."""

    status: int
    """pytest's exit status; 0 when everything passed."""
    passed: int
    failures: dict[str, str]
    """Test -> the last line of its error."""


@contextlib.contextmanager
def hogs(number: int) -> Iterator[list[int]]:
    """`number` processes that each use a processor as much as the system lets them, until the block ends. Yields their
    pids."""
    running = [subprocess.Popen([sys.executable, "-c", _HOG]) for _ in range(number)]
    try:
        yield [process.pid for process in running]
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()


def read_results(junit: Path, status: int) -> Round:
    """The round behind pytest's JUnit file. A run that wrote none (it could not even collect) counts as one failure."""
    if not junit.exists():
        return Round(status, 0, {"pytest": f"ended with status {status} and wrote no results"})
    passed, failures = 0, {}
    for case in ET.parse(junit).getroot().iter("testcase"):
        fault = next((found for kind in ("failure", "error") if (found := case.find(kind)) is not None), None)
        if fault is None:
            passed += case.find("skipped") is None
        else:
            message = (fault.get("message") or "").strip().splitlines() or ["(no message)"]
            failures[f"{case.get('classname')}::{case.get('name')}"] = message[0]
    if status != 0 and not failures:
        failures["pytest"] = f"ended with status {status} though no test failed: see the log"
    return Round(status, passed, failures)


def run_round(tests: Sequence[str], log: Path, processes: int) -> Round:
    """One run of `tests`, shared by `processes` (0: pytest itself runs them all); `log` takes all that pytest
    prints."""
    junit = log.with_suffix(".xml")
    shared = ["--numprocesses", str(processes), "--dist", "loadfile"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junit-xml={junit}", *shared, *tests]
    with log.open("wb") as output:
        status = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    return read_results(junit, status)


def run(rounds: int, number_of_hogs: int, processes: int, tests: Sequence[str], folder: Path) -> Counter[str]:
    """Test -> in how many rounds it failed. Prints a line a round and one a failure."""
    failed: Counter[str] = Counter()
    with hogs(number_of_hogs):
        for number in range(1, rounds + 1):
            log, began = folder / f"round-{number}.log", time.monotonic()
            result = run_round(tests, log, processes)
            print(
                f"round {number} of {rounds}: {result.passed} passed, {len(result.failures)} failed in "
                f"{time.monotonic() - began:.0f} s",
                flush=True,
            )
            for name, message in result.failures.items():
                print(f"  FAILED {name}: {message}\n         log: {log}", flush=True)
            failed.update(result.failures.keys())
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often the tests run (default 5)")
    parser.add_argument("--hogs", type=int, default=2 * (os.cpu_count() or 1), help="default: two for each processor")
    parser.add_argument("--processes", type=int, default=2, help="how many processes share the tests (default 2)")
    parser.add_argument("--logs", type=Path, help="folder for the logs of the rounds (default: a new one)")
    parser.add_argument("tests", nargs="*", default=list(DEFAULT_TESTS), help="arguments for pytest")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1 or arguments.hogs < 0 or arguments.processes < 0:
        given = f"--rounds {arguments.rounds} --hogs {arguments.hogs} --processes {arguments.processes}"
        parser.error(f"{given}: at least 1 round, 0 hogs and 0 processes are needed")
    folder = arguments.logs or Path(tempfile.mkdtemp(prefix="semkv-stress-"))
    folder.mkdir(parents=True, exist_ok=True)
    failed = run(arguments.rounds, arguments.hogs, arguments.processes, arguments.tests, folder)
    for name, times in failed.most_common():
        print(f"{times} of {arguments.rounds} rounds: {name}")
    print(f"{arguments.rounds} rounds beside {arguments.hogs} hogs, {len(failed)} tests failed; logs in {folder}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
