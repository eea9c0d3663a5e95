"""`python -m dynamo_semkv.bench.replay`: placement policies on one trace, side by side."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from dynamo_semkv.bench.replay.run import ENGINES, Figures, Fleet, compare
from dynamo_semkv.bench.replay.trace import MOONCAKE_BLOCK_TOKENS, read_mooncake, repeated_share, synthetic
from dynamo_semkv.config.load import build

COLUMNS = (
    "policy",
    "host",
    "device",
    "prefill",
    "mean",
    "p50",
    "p99",
    "regret",
    "spread",
    "placed",
)
WIDTH = 80
"""Columns of the output where stdout is no terminal."""
LEGEND = (
    "host: share of prompt tokens confirmed from host memory; device: found on the device; prefill: tokens computed a "
    "request; mean, p50, p99: TTFT; regret: mean TTFT against the oracle; --json has more"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the command line, replays and prints a table per engine, or JSON."""
    parser = argparse.ArgumentParser(prog="python -m dynamo_semkv.bench.replay", description=__doc__)
    parser.add_argument(
        "--trace", type=Path, help="a trace in Mooncake's form (JSON lines); default: synthetic conversations"
    )
    parser.add_argument("--requests", type=int, default=None, help="at most so many (synthetic: default 4000)")
    parser.add_argument("--speed", type=float, default=1.0, help="how much faster than the trace's own times")
    parser.add_argument("--engine", choices=ENGINES, nargs="+", default=list(ENGINES))
    parser.add_argument("--replicas", type=int, default=Fleet.replicas)
    parser.add_argument("--device-blocks", type=int, default=Fleet.device_blocks, help="of a replica, 512 tokens each")
    parser.add_argument("--host-blocks", type=int, default=Fleet.host_blocks)
    parser.add_argument("--rate", type=float, default=Fleet.rate, help="prefill tokens a second of a replica")
    parser.add_argument(
        "--salted", action="store_true", help="Dynamo's index does not see the host slab: evidence comes from donors"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    if arguments.trace is not None:
        trace = read_mooncake(arguments.trace, limit=arguments.requests, speed=arguments.speed)
    else:
        trace = synthetic(arguments.requests or 4_000, rate=4.0 * arguments.speed)
    fleet = Fleet(
        replicas=arguments.replicas,
        block_tokens=MOONCAKE_BLOCK_TOKENS,
        device_blocks=arguments.device_blocks,
        host_blocks=arguments.host_blocks,
        rate=arguments.rate,
    )
    config = build({})
    found = {
        engine: compare(trace, fleet, config, engine=engine, index_sees_host=not arguments.salted)
        for engine in arguments.engine
    }
    if arguments.json:
        print(json.dumps({engine: [asdict(row) for row in rows] for engine, rows in found.items()}, indent=2))
        return 0
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(
        f"{len(trace)} requests over {trace[-1].at:.0f} s, {sum(r.tokens for r in trace) / len(trace):.0f} tokens on "
        f"average; an endless cache would have {repeated_share(trace):.1%} of the blocks; {fleet}\n{LEGEND}",
        highlight=False,
    )
    for engine, rows in found.items():
        console.print(_table(engine, rows))
    return 0


def _table(engine: str, rows: Sequence[Figures]) -> Table:
    """A table that fits into WIDTH columns."""
    table = Table(title=f"engine: {engine}; TTFT in s", box=box.SIMPLE_HEAD, padding=(0, 0), pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.policy,
            f"{row.confirmed_share:.1%}",
            f"{row.device_share:.1%}",
            f"{row.mean_prefill_tokens:,.0f}",
            *(_seconds(value) for value in (row.mean_ttft, row.p50_ttft, row.p99_ttft)),
            f"{row.regret:+.1%}",
            f"{row.load_spread:.2f}",
            f"{row.placed:,}",
        )
    return table


def _seconds(value: float) -> str:
    """At most five characters below 100,000 s."""
    return f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


if __name__ == "__main__":
    raise SystemExit(main())
