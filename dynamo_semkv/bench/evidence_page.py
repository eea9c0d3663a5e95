"""The tables of docs/evidence.md from the figures of one run: `python -m dynamo_semkv.bench.evidence_page FIGURES.json
docs/evidence.md`.

FIGURES.json is what `dynamo_semkv bench evidence --json` wrote. What stands between the two marks of the page is
replaced, and no more.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamo_semkv.bench.report import other_pages
from dynamo_semkv.bench.report.markdown import table

BEGIN, END = "<!-- measured: written by bench.evidence_page -->", "<!-- /measured -->"
_COST = [
    "donors",
    "add, of its own: filling / at capacity",
    "longest add or eviction, of its own",
    "hit p50 / p99",
    "miss p50 / p99",
    "evict p50",
    "hit beside adds p50 / p99 / max",
    "add beside hits p99 / max",
    "bytes a donor",
]


def page(text: str, figures: Mapping[str, Any]) -> str:
    """The page with the run's tables in it. Raises ValueError for a page without the marks."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"page: it has no {BEGIN} ... {END}")
    parts = [other_pages.evidence(figures)]
    if figures["cost"]:
        parts += [
            f"What it costs, donors of {figures['cost'][0]['tokens']:,} random tokens, milliseconds; of its own: "
            "processor time of the thread, the rest by the clock:",
            table(_COST, [_cost(row) for row in figures["cost"]]),
        ]
    return f"{head}{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}{tail}"


def _cost(row: Mapping[str, Any]) -> list[str]:
    def ms(*names: str) -> str:
        return " / ".join(f"{row[name] / 1e3:.2f}" for name in names)

    return [
        f"{row['donors']:,}",
        f"{row['registers_per_second']:,.0f}/s / {row['at_capacity_per_second']:,.0f}/s",
        ms("longest_own"),
        ms("hit_p50", "hit_p99"),
        ms("miss_p50", "miss_p99"),
        ms("evict_p50"),
        ms("beside_p50", "beside_p99", "beside_max"),
        ms("stall_p99", "stall_max"),
        f"{row['bytes_per_donor']:,.0f}",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the command line and rewrites the page."""
    parser = argparse.ArgumentParser(prog="python -m dynamo_semkv.bench.evidence_page", description=__doc__)
    parser.add_argument("figures", type=Path)
    parser.add_argument("page", type=Path)
    arguments = parser.parse_args(argv)
    arguments.page.write_text(page(arguments.page.read_text(), json.loads(arguments.figures.read_text())))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
