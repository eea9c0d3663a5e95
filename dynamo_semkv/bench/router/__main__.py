"""`dynamo_semkv bench router`: what our router adds to a request, and how many requests a second it takes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from dynamo_semkv.bench.router.scene import Scene
from dynamo_semkv.bench.router.stages import GOAL_P50_MS, GOAL_P99_MS, Cost, Decision, decisions, stages

PARTS = ("stages", "decisions")
WIDTH = 80
"""Of what is printed where stdout is no terminal."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.quick:
        arguments.donors, arguments.requests, arguments.replicas = 50, 20, [1, 32]
    found: dict[str, Any] = {"donors": arguments.donors, "tokens": arguments.tokens, "requests": arguments.requests}
    if "stages" in arguments.part:
        scene = Scene(donors=arguments.donors, tokens=arguments.tokens, replicas=arguments.ranks)
        try:
            found["stages"] = stages(scene, arguments.requests)
        finally:
            scene.close()
    if "decisions" in arguments.part:
        few = min(arguments.donors, 1_000)  # how many donors there are is measured above; here, how many replicas
        found["decisions"] = decisions(
            arguments.replicas, donors=few, tokens=arguments.tokens, requests=arguments.requests
        )
    if arguments.json:
        print(json.dumps({name: _plain(value) for name, value in found.items()}, indent=2))
    else:
        _show(found, arguments.ranks)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dynamo_semkv bench router", description=__doc__)
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--donors", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=8_192, help="of a prompt, and of a donor")
    parser.add_argument("--ranks", type=int, default=8, help="replicas while stages are measured")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--requests", type=int, default=400, help="measured in each row")
    parser.add_argument("--quick", action="store_true", help="only shows that it runs")
    parser.add_argument("--json", action="store_true")
    return parser


def _plain(value: Any) -> Any:
    return [asdict(row) for row in value] if isinstance(value, list) else value


def _show(found: dict[str, Any], ranks: int) -> None:
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    if "stages" in found:
        console.print(
            f"{found['donors']:,} donors, prompts of {found['tokens']:,} tokens (every second one with a donor), {ranks} replicas, "
            f"{found['requests']} requests. Goal of `whole`: p50 {GOAL_P50_MS:g}, p99 {GOAL_P99_MS:g} ms.",
            highlight=False,
        )
        console.print(_stages_table(found["stages"]))
    if "decisions" in found:
        console.print(_decisions_table(found["decisions"]))
    console.print(
        "own: processor time (of all threads for `lookup` and `whole`); wall is larger on a busy machine. `exact` is our side of Dynamo's "
        "answers; what Dynamo itself takes is not in it.",
        highlight=False,
    )


def _stages_table(rows: Sequence[Cost]) -> Table:
    table = _table("ms a request", "stage", "own p50", "own p99", "wall p50", "wall p99")
    for row in rows:
        table.add_row(row.stage, *(f"{value:.3f}" for value in (row.own_p50, row.own_p99, row.wall_p50, row.wall_p99)))
    return table


def _decisions_table(rows: Sequence[Decision]) -> Table:
    table = _table("decision by replicas, ms", "replicas", "weigh p50", "weigh p99", "whole p50", "whole p99")
    for row in rows:
        values = (row.weigh.own_p50, row.weigh.own_p99, row.whole.own_p50, row.whole.own_p99)
        table.add_row(f"{row.replicas:,}", *(f"{value:.3f}" for value in values))
    return table


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


if __name__ == "__main__":
    raise SystemExit(main())
