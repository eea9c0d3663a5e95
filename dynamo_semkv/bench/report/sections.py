"""The parts of the report, each a program of its own whose figures come back as JSON: what is run, and what it needs.

Sections(options).run("evidence") -> {"at", "load_before", "seconds", and "found": {...} or "missing": "why"}
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dynamo_semkv.bench.report.machine import commit

NAMES = ("scenarios", "scaling", "connector", "evidence", "replay", "router")
"""The sections in the order in which they run: what is measured by the clock first."""
ROUTER_MODULE = "dynamo_semkv.bench.router"
REPLAY_FLEET = ("--replicas", "8", "--device-blocks", "400", "--host-blocks", "4000", "--rate", "10000")
REPLAY_REQUESTS = 3_000


@dataclass(frozen=True)
class Options:
    """What is measured, and how often."""

    quick: bool = False
    repeats: int = 3
    seed: int = 7
    trace: Path | None = None
    """A trace in Mooncake's form. None: the stored sample of its arrivals, and synthetic conversations for the
    replay."""
    donors: Sequence[int] = (1_000, 10_000, 100_000)
    groups: Sequence[str] = ()
    """Groups of the scenarios; empty: all."""
    contenders: Sequence[str] = ()
    say: Callable[[str], None] = field(default=lambda text: None, compare=False)


class Failed(RuntimeError):
    """A program failed or cannot be run; the text says why."""


class Sections:
    """Runs the programs, one after the other."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def run(self, name: str) -> dict[str, Any]:
        """Runs one section. `found` is that program's own JSON; `missing` says why there is none. KeyError for an
        unknown name."""
        run = {
            "scenarios": self._scenarios,
            "scaling": self._scaling,
            "connector": self._connector,
            "evidence": self._evidence,
            "replay": self._replay,
            "router": self._router,
        }[name]
        self._options.say(f"== {name}")
        began, load = time.monotonic(), os.getloadavg()[0]
        about: dict[str, Any] = {
            "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "commit": commit(),
            "load_before": round(load, 2),
        }
        try:
            about["found"] = run()
        except Failed as failed:
            self._options.say(f"== {name}: {failed}")
            about["missing"] = str(failed)
        return {**about, "seconds": time.monotonic() - began}

    def _scenarios(self) -> Any:
        options = self._options
        if find_spec("graphs") is None:
            raise Failed("the package `graphs` is not installed (extra `local`)")
        arguments = ["--repeats", str(options.repeats), "--seed", str(options.seed)]
        arguments += ["--trace", str(options.trace)] if options.trace else []
        arguments += ["--group", *options.groups] if options.groups else []
        arguments += ["--contenders", *options.contenders] if options.contenders else []
        return self._to_file("graphs.bench", arguments + self._quick())

    def _scaling(self) -> Any:
        donors = ["--donors", *map(str, self._options.donors)]
        repeats = ["--repeats", "1" if self._options.quick else str(self._options.repeats)]
        return self._to_file("dynamo_semkv.bench.report.scaling", donors + repeats + self._quick())

    def _connector(self) -> Any:
        rounds = 1 if self._options.quick else self._options.repeats
        return {
            "runs": [self._from_stdout("worker_connector.bench", ["--json", *self._quick()]) for _ in range(rounds)]
        }

    def _evidence(self) -> Any:
        if self._options.quick:
            arguments = ["--tokens", "512", "--size", "2", "--background", "20", "--negatives", "4"]
            arguments += ["--peers", "fingerprint", "minhash"]
            arguments += ["--peer-tokens", "512", "--peer-size", "2", "--pairs", "2"]
        else:
            arguments = ["--tokens", "2048", "8192", "16384", "32768", "--size", "20", "--background", "500"]
            arguments += ["--peer-tokens", "2048", "--peer-size", "4", "--pairs", "12", "--peer-seconds", "60"]
        return self._to_file("dynamo_semkv.bench.evidence_run", [*arguments, "--donors"])

    def _replay(self) -> Any:
        options = self._options
        requests = 200 if options.quick else REPLAY_REQUESTS
        arguments = [*REPLAY_FLEET, "--requests", str(requests), "--json"]
        arguments += ["--trace", str(options.trace)] if options.trace else []
        return {
            "trace": "given" if options.trace else "synthetic conversations",
            "requests": requests,
            "fleet": " ".join(REPLAY_FLEET),
            "index_sees_host": self._from_stdout("dynamo_semkv.bench.replay", arguments),
            "salted": self._from_stdout("dynamo_semkv.bench.replay", [*arguments, "--salted"]),
        }

    def _router(self) -> Any:
        if find_spec(ROUTER_MODULE) is None:
            raise Failed(f"there is no {ROUTER_MODULE} here")
        return self._from_stdout(ROUTER_MODULE, ["--json", *self._quick()])

    def _quick(self) -> list[str]:
        return ["--quick"] if self._options.quick else []

    def _to_file(self, module: str, arguments: Sequence[str]) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "figures.json"
            # Its progress goes to our stderr; its tables are discarded, since they are in the figures.
            self._program(module, [*arguments, "--json", str(file)], None)
            return json.loads(file.read_text())

    def _from_stdout(self, module: str, arguments: Sequence[str]) -> Any:
        output = self._program(module, arguments, subprocess.PIPE)
        try:
            return json.loads(output[output.index("{") :])
        except ValueError as error:
            raise Failed(f"{module} wrote no JSON: {output[-200:]!r}") from error

    def _program(self, module: str, arguments: Sequence[str], stdout: int | None) -> str:
        command = [sys.executable, "-m", module, *arguments]
        ran = subprocess.run(command, stdout=stdout or subprocess.DEVNULL, text=True, check=False)
        if ran.returncode != 0:
            raise Failed(f"{module} ended with status {ran.returncode}; what it said is above")
        return ran.stdout or ""
