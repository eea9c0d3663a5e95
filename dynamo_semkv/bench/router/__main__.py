"""`dynamo_semkv bench router`: what our router adds to a request, and how many requests a second it takes."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from dynamo_semkv.bench.router.drive import Throughput, throughput
from dynamo_semkv.bench.router.graph import BARE, OURS, RUST
from dynamo_semkv.bench.router.scene import Scene
from dynamo_semkv.bench.router.stages import GOAL_P50_MS, GOAL_P99_MS, Cost, Decision, decisions, stages

PARTS = ("stages", "decisions", "throughput")
GOAL_RATIO = 0.9
WIDTH = 80
"""Columns of the output where stdout is no terminal."""


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the command line, measures the parts asked for and prints tables, or JSON."""
    arguments = _parser().parse_args(argv)
    if arguments.quick:
        arguments.donors, arguments.repeats, arguments.requests, arguments.replicas = [50, 100], 1, 20, [1, 32]
        arguments.rounds, arguments.seconds = 1, 1.0
    fewest = min(arguments.donors)
    found: dict[str, Any] = {"donors": fewest, "tokens": arguments.tokens, "requests": arguments.requests}
    if "stages" in arguments.part:
        costs = {donors: _repeated(arguments, donors) for donors in arguments.donors}
        found["stages"] = costs[fewest][0]
        found["scales"] = {str(donors): _whole(repeats) for donors, repeats in costs.items()}
    if "decisions" in arguments.part:
        few = min(fewest, 1_000)  # how many donors there are is measured above; here, how many replicas
        found["decisions"] = decisions(
            arguments.replicas, donors=few, tokens=arguments.tokens, requests=arguments.requests
        )
    if "throughput" in arguments.part:
        found["throughput"] = [
            throughput(
                ranks=ranks,
                donors=min(fewest, 2_000),
                tokens=arguments.tokens,
                max_tokens=arguments.max_tokens,
                concurrency=arguments.concurrency,
                rounds=arguments.rounds,
                seconds=arguments.seconds,
            )
            for ranks in arguments.graph_ranks
        ]
    if arguments.json:
        print(json.dumps({name: _plain(value) for name, value in found.items()}, indent=2))
    else:
        _show(found, arguments.ranks)
    return 0


def _repeated(arguments: argparse.Namespace, donors: int) -> list[list[Cost]]:
    """The stages, once per repeat, in front of one index."""
    scene = Scene(donors=donors, tokens=arguments.tokens, replicas=arguments.ranks)
    try:
        return [stages(scene, arguments.requests) for _ in range(arguments.repeats)]
    finally:
        scene.close()


def _whole(repeats: Sequence[Sequence[Cost]]) -> dict[str, list[float]]:
    """All stages together: each figure has one value per repeat."""
    whole = [asdict(cost) for costs in repeats for cost in costs if cost.stage == "whole"]
    return {name: [cost[name] for cost in whole] for name in whole[0] if name != "stage"}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dynamo_semkv bench router", description=__doc__)
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument(
        "--donors", type=int, nargs="+", default=[10_000, 100_000], help="the stages are measured with each"
    )
    parser.add_argument("--repeats", type=int, default=3, help="of the stages; the worst is judged")
    parser.add_argument("--tokens", type=int, default=8_192, help="of a prompt, and of a donor")
    parser.add_argument("--ranks", type=int, default=8, help="replicas while stages are measured")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--requests", type=int, default=400, help="measured in each row")
    parser.add_argument("--graph-ranks", type=int, nargs="+", default=[8], help="ranks of the mocker; a graph for each")
    parser.add_argument("--max-tokens", type=int, default=16, help="streamed for each request of the graph")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=6, help="slices of each router, in turn")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a slice")
    parser.add_argument("--quick", action="store_true", help="only shows that it runs")
    parser.add_argument("--json", action="store_true")
    return parser


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(row) for row in value]
    if isinstance(value, Throughput):
        return {
            **asdict(value),
            "ours_over_bare": value.ratio(OURS, BARE),
            "ours_over_rust": value.ratio(OURS, RUST),
            "bare_over_rust": value.ratio(BARE, RUST),
        }
    return asdict(value) if isinstance(value, (Cost, Decision)) else value


def _show(found: dict[str, Any], ranks: int) -> None:
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    if "stages" in found:
        console.print(
            f"{found['donors']:,} donors, prompts of {found['tokens']:,} tokens (every second one with a donor), "
            f"{ranks} replicas, {found['requests']} requests. Goal of `whole`: p50 {GOAL_P50_MS:g}, p99 "
            f"{GOAL_P99_MS:g} ms.",
            highlight=False,
        )
        console.print(_stages_table(found["stages"]))
        console.print(_scales_table(found["scales"]))
    if "decisions" in found:
        console.print(_decisions_table(found["decisions"]))
    for result in found.get("throughput", ()):
        console.print(_throughput_table(result))
        console.print(
            f"ours over bare {result.ratio(OURS, BARE):.2f} (goal {GOAL_RATIO:g}), ours over Rust "
            f"{result.ratio(OURS, RUST):.2f}, bare over Rust {result.ratio(BARE, RUST):.2f}: medians over "
            f"{result.rounds} rounds of alternating slices. processor: of the process that routes; Rust routes inside "
            "the frontend, so its figure is the frontend's.",
            highlight=False,
        )
    console.print(
        "own: processor time (of all threads for `lookup` and `whole`); wall is larger on a busy machine. `exact` is "
        "our side of Dynamo's answers; what Dynamo itself takes is not in it.",
        highlight=False,
    )


def _stages_table(rows: Sequence[Cost]) -> Table:
    table = _table("ms a request", "stage", "own p50", "own p99", "wall p50", "wall p99")
    for row in rows:
        table.add_row(row.stage, *(f"{value:.3f}" for value in (row.own_p50, row.own_p99, row.wall_p50, row.wall_p99)))
    return table


def _scales_table(scales: dict[str, dict[str, list[float]]]) -> Table:
    table = _table("whole, ms, the worst repeat", "donors", "own p50", "own p99", "wall p50", "wall p99")
    for donors, whole in scales.items():
        values = (max(whole[name]) for name in ("own_p50", "own_p99", "wall_p50", "wall_p99"))
        table.add_row(f"{int(donors):,}", *(f"{value:.3f}" for value in values))
    return table


def _decisions_table(rows: Sequence[Decision]) -> Table:
    table = _table("decision by replicas, ms", "replicas", "weigh p50", "weigh p99", "whole p50", "whole p99")
    for row in rows:
        values = (row.weigh.own_p50, row.weigh.own_p99, row.whole.own_p50, row.whole.own_p99)
        table.add_row(f"{row.replicas:,}", *(f"{value:.3f}" for value in values))
    return table


def _throughput_table(result: Throughput) -> Table:
    title = f"{result.concurrency} clients, {result.tokens:,} tokens in, {result.max_tokens} out, {result.ranks} ranks"
    table = _table(title, "router", "requests/s", "ttft p50 ms", "processor ms", "failed")
    for name, row in result.contenders.items():
        values = (f"{statistics.median(of):.1f}" for of in (row.per_second, row.ttft_p50_ms, row.processor_ms))
        table.add_row(
            {RUST: "Dynamo (Rust)", BARE: "bare Python", OURS: "dynamo_semkv"}[name], *values, str(row.failed)
        )
    return table


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


if __name__ == "__main__":
    raise SystemExit(main())
