"""Everything in this folder, one after the other: `python -m tests.gpu.run_all [--out DIR] [--only NAME ...]`

Each script is a process of its own, so that a fault of the device in one does not spoil the next, and has a time limit.
Prints one JSON object and a short table; with `--out` the object goes to `DIR/results.json` and what the scripts had to
say to `DIR/messages.log`, after each of them. Exit status: 0 when all that ran passed, 1 when one failed, 2 when there
is no CUDA here. What could not be run is named with its reason, and is no failure.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.gpu.bench import NO_CUDA, cuda_or_exit

LIMITS = {
    "poisoned_pages": 60,
    "races": 80,
    "engine_exactness": 100,
    "load_times": 60,
    "slab_copy": 60,
    "overlap": 40,
    "seal_rate": 30,
    "trtllm_smoke": 600,
}
"""Seconds, by script, in the order in which they run: what proves before what measures."""
CANNOT_RUN = 3
"""Exit status of a script that lacks something other than CUDA; the reason is the last line of its messages."""


@dataclass(frozen=True)
class Ran:
    script: str
    verdict: str
    """`passed`, `failed` or `not run`."""
    seconds: float
    note: str
    result: dict[str, Any] | None
    messages: str = ""


def run(script: str, limit: float, command: Sequence[str] | None = None) -> Ran:
    started = time.monotonic()
    arguments = command or [sys.executable, "-m", f"tests.gpu.{script}"]
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=limit, check=False)
        status, printed, said = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as over:
        status, printed, said = None, _text(over.stdout), _text(over.stderr)
    took = time.monotonic() - started
    verdict, note, result = _judged(status, printed, said, limit)
    if result is None and printed.strip():
        said = f"{said}\n{printed}"
    return Ran(script, verdict, took, note, result, said)


def _judged(status: int | None, printed: str, said: str, limit: float) -> tuple[str, str, dict[str, Any] | None]:
    result = _parsed(printed)
    lines = [line for line in said.splitlines() if line.strip()]
    if status is None:
        return "failed", f"not done after {limit:.0f} s", result
    if status in (NO_CUDA, CANNOT_RUN):
        return "not run", lines[-1] if lines else "", result
    if status == 0 and result is not None and result.get("passed") is True:
        return "passed", "", result
    return "failed", _why(result) or (lines[-1] if lines else f"exit status {status}"), result


def _parsed(printed: str) -> dict[str, Any] | None:
    try:
        found = json.loads(printed)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _why(result: dict[str, Any] | None) -> str:
    """The lists of what was wrong, and a goal that was missed."""
    if result is None:
        return ""
    lists = [
        f"{name}: {', '.join(map(str, value))}"
        for name in ("unsound", "missed_mutations")
        if (value := result.get(name))
    ]
    if "worst" in result:
        lists.append(f"goal {result.get('goal')}, worst {result['worst']}")
    return "; ".join(lists)


def as_json(ran: Sequence[Ran]) -> str:
    results = {one.script: {name: value for name, value in asdict(one).items() if name != "messages"} for one in ran}
    return json.dumps(results, indent=1)


def keep(ran: Sequence[Ran], folder: Path) -> None:
    (folder / "results.json").write_text(as_json(ran))
    (folder / "messages.log").write_text("".join(f"=== {one.script}\n{one.messages}\n" for one in ran))


def table(ran: Sequence[Ran]) -> str:
    width = max(len(one.script) for one in ran)
    return "\n".join(
        f"{one.script:<{width}}  {one.verdict:<7}  {one.seconds:6.1f} s  {one.note}".rstrip() for one in ran
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for each script's output")
    parser.add_argument("--only", nargs="+", choices=list(LIMITS), default=list(LIMITS), metavar="NAME")
    options = parser.parse_args()
    cuda_or_exit()
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    ran = []
    for script, limit in LIMITS.items():
        if script in options.only:
            ran.append(run(script, limit))
            print(table(ran[-1:]), file=sys.stderr, flush=True)
            if options.out is not None:
                keep(ran, options.out)
    print(as_json(ran))
    print(table(ran))
    raise SystemExit(1 if any(one.verdict == "failed" for one in ran) else 0)


if __name__ == "__main__":
    main()
