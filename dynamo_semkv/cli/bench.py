"""`bench evidence`: measure the evidence stage on this machine."""

from __future__ import annotations

import argparse
import sys

from dynamo_semkv.bench.evidence_arguments import add_arguments
from dynamo_semkv.cli.exit_status import OK, REFUSED


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("bench", help="measure on this machine", allow_abbrev=False)
    benches = parser.add_subparsers(dest="bench", required=True)
    evidence = benches.add_parser(
        "evidence",
        help="the labelled evidence workload: recall, false positives, estimates, times, side by side with other methods",
        description="Donors and prompts of real text with known truth, through our providers and through other methods.",
        allow_abbrev=False,
    )
    add_arguments(evidence)
    evidence.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        from dynamo_semkv.bench.evidence_run import run as measure

        measure(arguments)
    except ImportError as error:
        return _refuse(f"{error}; pip install dynamo-semkv[router], and [peers] for the other methods")
    except ValueError as error:  # the installed text does not hold as many documents as were asked for
        return _refuse(str(error))
    return OK


def _refuse(why: str) -> int:
    print(f"bench evidence: {why}", file=sys.stderr)
    return REFUSED
