"""`bench` runs the measurements that ship with the package, each a program of its own: `dynamo_semkv bench connector
--json`.

They run as processes: a program that measures the engine side needs packages that a router does not have, and neither
side imports the other.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import Any

PROGRAMS = {
    "connector": ("worker_connector.bench", "the connector: lookup, copies, throughput of an engine that saves"),
    "evidence": (
        "dynamo_semkv.bench.evidence_run",
        "are the right donors found? beside SemBlend, MiniLM, MinHash, Dynamo's index",
    ),
    "evidence-cost": ("dynamo_semkv.bench.evidence_cost", "what adding, finding and removing donors costs"),
    "report": (
        "dynamo_semkv.bench.report",
        "the RFC's scenarios beside Dynamo's own routers, every goal: docs/benchmarks.md",
    ),
    "compare": ("dynamo_semkv.bench.report.compare", "two runs of the report, figure by figure"),
    "router": ("dynamo_semkv.bench.router", "what the router adds to a request, stage by stage and by replicas"),
    "replay": ("dynamo_semkv.bench.replay", "a trace through simulated replicas, under several placements"),
}
"""Name of a program -> its module, and what it measures."""


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Makes the verb's parser, with a sub-command for each program."""
    parser = commands.add_parser("bench", help="measure on this machine", allow_abbrev=False)
    programs = parser.add_subparsers(dest="program", required=True, metavar="{" + ",".join(PROGRAMS) + "}")
    for name, (_, what) in PROGRAMS.items():
        # No character begins an option here, so all arguments that follow, `--help` too, go to the program.
        program = programs.add_parser(name, help=what, add_help=False, prefix_chars="\0")
        program.add_argument("arguments", nargs="*")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the program. Returns its exit status, or 128 plus the signal's number where a signal ended it, as a shell
    does."""
    module, _ = PROGRAMS[arguments.program]
    status = subprocess.run([sys.executable, "-m", module, *arguments.arguments], check=False).returncode
    return status if status >= 0 else 128 - status
