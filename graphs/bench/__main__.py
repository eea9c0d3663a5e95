"""`python -m graphs.bench --json FILE` runs the report's scenarios through real graphs; progress goes to stderr,
figures to FILE."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dynamo_semkv.bench.report.arrivals import CONVERSATION_INTERVALS, trace_intervals
from graphs.bench import contenders, groups
from graphs.bench.exactness import exactness
from graphs.bench.measure import measure
from graphs.local.graph import GraphError

EXACTNESS = "exactness"
TRACE_INTERVALS = 64


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the groups that are asked for and writes the figures after each; returns 1 if a graph did not come up."""
    arguments = _parser().parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    known = groups.quick() if arguments.quick else groups.groups()
    chosen = list(arguments.group or ([*known] if arguments.quick else [*known, EXACTNESS]))
    intervals: Sequence[float] = CONVERSATION_INTERVALS
    if arguments.trace is not None:
        intervals = trace_intervals(arguments.trace, TRACE_INTERVALS)
    found: dict[str, Any] = {"groups": {}, "left_out": {}, EXACTNESS: None}
    found["arrivals"] = "the trace given" if arguments.trace is not None else "the stored sample"
    with tempfile.TemporaryDirectory(prefix="semkv-bench-") as folder:
        for name in chosen:
            if name == EXACTNESS:
                _say("exactness: SmolLM2, log-probabilities of cold, warm and loaded runs")
                found[EXACTNESS] = exactness(quick=arguments.quick)
                continue
            group, left_out = _able(known[name], arguments.contenders)
            group = replace(group, only=tuple(arguments.scenario or ()))
            found["left_out"].update(left_out)
            try:
                found["groups"][name] = measure(
                    group,
                    repeats=_repeats(group, arguments),
                    seed=arguments.seed,
                    intervals=intervals,
                    folder=Path(folder),
                    say=_say,
                )
            except GraphError as error:
                print(f"{name}: a graph did not come up: {error}", file=sys.stderr)
                return 1
            # Written after each group, so that a run that is cut short keeps what it has.
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(found))
    arguments.json.write_text(json.dumps(found))
    return 0


def _repeats(group: groups.Group, arguments: argparse.Namespace) -> int:
    asked: int = arguments.repeats
    return asked if arguments.group or group.default_repeats is None else min(asked, group.default_repeats)


def _able(group: groups.Group, wanted: Sequence[str] | None) -> tuple[groups.Group, dict[str, str]]:
    """(the group without the contenders that cannot run here, why each of those cannot)."""
    left_out = {
        name: f"not installed: {', '.join(gone)}" for name in group.contenders if (gone := contenders.missing(name))
    }
    names = tuple(n for n in group.contenders if n not in left_out and (not wanted or n in wanted))
    return replace(group, contenders=names), left_out


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    names = [*groups.groups(), *groups.quick(), EXACTNESS]
    parser = argparse.ArgumentParser(prog="python -m graphs.bench", description=__doc__, allow_abbrev=False)
    parser.add_argument("--json", type=Path, required=True, help="where the figures go")
    parser.add_argument("--group", nargs="*", choices=names, help="default: all")
    parser.add_argument("--contenders", nargs="*", choices=groups.ALL, help="default: all that are installed")
    parser.add_argument(
        "--scenario", nargs="*", help="names, as the figures have them; the others are left out (default: all)"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--trace", type=Path, help="arrival times of a trace in Mooncake's form")
    parser.add_argument("--quick", action="store_true", help="one small group: does the harness work?")
    return parser


if __name__ == "__main__":
    try:
        status = main()
    except KeyboardInterrupt:
        status = 130
    sys.stderr.flush()
    os._exit(status) if status == 130 else sys.exit(status)
