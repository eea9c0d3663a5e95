"""`python -m worker_connector.bench [lookup] [copy] [throughput] [pull] [--json]`: measures what the connector costs on
this machine.

lookup      get_num_new_matched_tokens, by length of the prompt and number of resident prompts
            (goal: p99 below 1 ms for 32k tokens)
copy        slab <-> pages, as a ratio to a plain copy of as many bytes (goal: 0.8)
throughput  prefill and decode of the reference engine with the connector saving, over without (goal: 0.97)
pull        blocks of another worker over loopback, as a ratio to a bare socket (only if named)

The exit status is 0 whatever the figures are: a machine that does other things misses goals that the code meets.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from worker_connector.bench import copying, lookup, pulling

DEFAULT = ("lookup", "copy", "throughput")
PARTS = (*DEFAULT, "pull")


def main(argv: Sequence[str] | None = None) -> int:
    """Measures the parts that are named and prints tables, or one JSON object; always returns 0."""
    parser = argparse.ArgumentParser(
        prog="python -m worker_connector.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: the first three)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--quick", action="store_true", help="few rounds of small sizes: does it run at all?")
    parser.add_argument("--device", help="of the pages for `copy`: cpu or cuda (default: cuda where there is one)")
    arguments = parser.parse_args(argv)
    unknown = [part for part in arguments.parts if part not in PARTS]
    if unknown:
        parser.error(f"part {unknown[0]!r} is none of {', '.join(PARTS)}")
    found: dict[str, list[dict[str, Any]]] = {}
    for part in arguments.parts or DEFAULT:
        rows = _measure(part, arguments.quick, arguments.device)
        found[part] = [asdict(row) for row in rows]
        if not arguments.json:
            print(_text(part, rows), flush=True)
    if arguments.json:
        print(json.dumps({"goals": GOALS, **found}, indent=2))
    return 0


GOALS = {"lookup_p99_seconds": lookup.GOAL_SECONDS, "copy_ratio": copying.GOAL, "throughput_ratio": 0.97}


def _measure(part: str, quick: bool, device: str | None) -> list[Any]:
    if part == "lookup":
        sizes = [(1_024, 2)] if quick else [(1_024, 8), (8_192, 8), (32_768, 1), (32_768, 8)]
        options = {"questions": 20, "row_bytes": 4_096} if quick else {}
        return [cost for tokens, resident in sizes for cost in lookup.measure(tokens, resident, **options)]
    if part == "copy":
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        total, rounds = (copying.MIB, 5) if quick else (64 * copying.MIB, 9)
        return [rate for size in copying.SIZES for rate in copying.measure(where, size, total=total, rounds=rounds)]
    if part == "pull":
        if quick:
            return [pulling.measure(4_096, total=pulling.MIB, rounds=1)]
        return [pulling.measure(size) for size in pulling.SIZES]
    # Imported here, because the reference engine needs more than the connector does (the extra `local`).
    from worker_connector.bench import throughput

    if quick:
        return throughput.measure("tiny", rounds=1, prompt_tokens=128, generated=40)
    return [one for model in throughput.MODELS for one in throughput.measure(model)]


Columns = dict[str, Callable[[Any], object]]
"""Head of each column -> what stands in it, from a row of the part."""

_COLUMNS: dict[str, Columns] = {
    "lookup": {
        "tokens": lambda r: r.tokens,
        "resident": lambda r: r.resident_prompts,
        "tokens as": lambda r: r.tokens_as,
        "p50 us": lambda r: f"{r.p50 * 1e6:.0f}",
        "p99 us": lambda r: f"{r.p99 * 1e6:.0f}",
        "own p50": lambda r: f"{r.own_p50 * 1e6:.0f}",
        "own p99": lambda r: f"{r.own_p99 * 1e6:.0f}",
    },
    "copy": {
        "device": lambda r: r.device,
        "block KiB": lambda r: r.block_bytes // 1024,
        "pattern": lambda r: r.pattern,
        "plain GB/s": lambda r: f"{r.plain_gb_per_s:.1f}",
        "load": lambda r: f"{r.load_ratio:.2f}",
        "save": lambda r: f"{r.save_ratio:.2f}",
    },
    "pull": {
        "block KiB": lambda r: r.block_bytes // 1024,
        "MiB/s": lambda r: f"{r.mib_per_s:.0f}",
        "MiB/s of a core": lambda r: f"{r.mib_per_cpu_s:.0f}",
        "to a bare socket": lambda r: f"{r.ratio:.2f}",
    },
    "throughput": {
        "model": lambda r: r.model,
        "phase": lambda r: r.phase,
        "pass ms": lambda r: f"{r.pass_seconds * 1e3:.1f}",
        "tokens/s without": lambda r: f"{r.tokens_per_second:.0f}",
        "with / without": lambda r: f"{r.ratio:.3f}",
        "by CPU time": lambda r: f"{r.cpu_ratio:.3f}",
        "engine's thread": lambda r: f"{r.engine_ratio:.3f}",
        "blocks saved": lambda r: r.saved_blocks,
    },
}


def _text(part: str, rows: Sequence[Any]) -> str:
    columns = _COLUMNS[part]
    return _table(part, tuple(columns), [tuple(cell(row) for cell in columns.values()) for row in rows])


def _table(title: str, head: Sequence[str], cells: Sequence[Sequence[object]]) -> str:
    lines = [[str(cell) for cell in row] for row in [head, *cells]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = [title] + ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
