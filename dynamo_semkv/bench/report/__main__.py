"""`dynamo_semkv bench report`: runs the sections, writes the page, its plots and the raw figures.

A run can be cut and put together: `--sections scaling --json-in EARLIER.json` measures one section and takes the others
from a file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamo_semkv.bench.report import document, machine, plots
from dynamo_semkv.bench.report.raw import SCHEMA, NotARun, figures_of, read, small
from dynamo_semkv.bench.report.sections import NAMES, Options, Sections
from dynamo_semkv.config.extras import remedy
from dynamo_semkv.config.host_memory import available_memory

COMMAND = "dynamo_semkv bench report"
DONORS = (1_000, 10_000, 100_000)
MILLION = 1_000_000
MILLION_BYTES = 8 << 30
"""Twice the memory that a million donors take."""
PAGE, PICTURES, LATEST = "benchmarks.md", "benchmarks", "latest.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 2 for a `--json-in` that is no run; 1 when a section that was asked for could not be measured (the
    page says why); else 0."""
    arguments = _parser().parse_args(argv)
    try:
        run = _earlier(arguments.json_in)
    except (NotARun, OSError) as error:
        print(f"bench report: {error}", file=sys.stderr)
        return 2
    run |= _about(arguments)
    docs: Path = arguments.docs or (arguments.raw / "quick" if arguments.quick else Path("docs"))
    file: Path = arguments.raw / f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    sections = Sections(_options(arguments))
    for name in arguments.sections:
        measured = sections.run(name)
        if name == "scenarios" and arguments.group:
            measured = _with_groups(run["sections"].get(name, {}), measured)
        run["sections"][name] = measured
        file.write_text(json.dumps(run))  # after each: a run that is cut is not lost
    file.write_text(json.dumps(run))
    _write(run, docs)
    print(f"{docs / PAGE}, raw figures in {file}")
    return 1 if any("missing" in run["sections"][name] for name in arguments.sections if name != "router") else 0


def _earlier(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {"sections": {}}
    run = read(path)
    if "sections" not in run:
        raise NotARun(f"{path}: has figures only; take a raw run from .run/bench")
    return run


def _with_groups(earlier: Mapping[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """Makes one section of groups that were measured one by one: earlier groups stay where they were not measured
    again."""
    if "found" not in earlier or "found" not in measured:
        return measured
    before, now = earlier["found"], measured["found"]
    found = {
        **now,
        "groups": {**before["groups"], **now["groups"]},
        "left_out": {**before["left_out"], **now["left_out"]},
        "exactness": now["exactness"] or before["exactness"],
    }
    return {**measured, "found": found, "seconds": earlier["seconds"] + measured["seconds"]}


def _about(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "command": f"{COMMAND} --quick" if arguments.quick else COMMAND,
        "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "quick": arguments.quick,
        "repeats": arguments.repeats,
        "seed": arguments.seed,
        "machine": machine.describe(),
    }


def _options(arguments: argparse.Namespace) -> Options:
    return Options(
        quick=arguments.quick,
        repeats=arguments.repeats,
        seed=arguments.seed,
        trace=arguments.trace,
        donors=numbers_of_donors(arguments.quick, arguments.million),
        groups=tuple(arguments.group or ()),
        contenders=tuple(arguments.contenders or ()),
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )


def numbers_of_donors(quick: bool, million: bool | None) -> tuple[int, ...]:
    """The index sizes to measure. `million`: whether a million is one; None: where memory allows, with a line that says
    so where not."""
    if million is None and not quick:
        available = available_memory()
        million = available is not None and available.size >= MILLION_BYTES
        if not million:
            print(f"no million donors: {MILLION_BYTES >> 30} GiB of memory are not free", file=sys.stderr, flush=True)
    return (*DONORS, MILLION) if million else DONORS


def _write(run: dict[str, Any], docs: Path) -> None:
    figures = figures_of(run)
    folder = docs / PICTURES
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {}
    if plots.available():
        pictures = {name: f"{PICTURES}/{file}" for name, file in plots.draw(run["sections"], figures, folder).items()}
    else:
        print(f"no plots: matplotlib is not installed ({remedy('report')})", file=sys.stderr)
    (docs / PAGE).write_text(document.page(run, figures, pictures), encoding="utf-8")
    (folder / LATEST).write_text(json.dumps(small(run, figures), indent=1) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--sections", type=_names, default=list(NAMES), metavar=",".join(NAMES), help="default: all")
    parser.add_argument(
        "--json-in", type=Path, help="an earlier raw run; its sections stay where they are not measured again"
    )
    parser.add_argument(
        "--quick", action="store_true", help="does the harness work? Small sizes; no figure means anything"
    )
    parser.add_argument("--repeats", type=int, default=3, help="of everything that is measured by the clock (3)")
    parser.add_argument("--seed", type=int, default=7, help="of workloads and of the order of contenders (7)")
    parser.add_argument("--trace", type=Path, help="a trace in Mooncake's form: arrival times, and the replay")
    parser.add_argument(
        "--million",
        action=argparse.BooleanOptionalAction,
        help="also a million donors, 4 GB and ten minutes (default: where 8 GiB of memory are free)",
    )
    parser.add_argument(
        "--group", nargs="*", help="of the scenarios: rfc, long, longest, disk, language, exactness (all, longest once)"
    )
    parser.add_argument(
        "--contenders",
        nargs="*",
        help="semkv, no_lookup, kv, kv_connector, passing, round_robin, semblend, cold (all that are installed)",
    )
    parser.add_argument(
        "--docs",
        type=Path,
        help=f"where {PAGE} and {PICTURES}/ go (docs; with --quick quick/ beside the raw run, as nothing of it is to "
        f"be kept)",
    )
    parser.add_argument("--raw", type=Path, default=Path(".run/bench"), help="where the raw run goes (.run/bench)")
    return parser


def _names(text: str) -> list[str]:
    """Each section once, in the order in which they run; empty text: none, only the page is made again."""
    asked = [name for name in text.split(",") if name]
    unknown = [name for name in asked if name not in NAMES]
    if unknown:
        raise argparse.ArgumentTypeError(f"section {unknown[0]!r} is none of {', '.join(NAMES)}")
    return [name for name in NAMES if name in asked]


if __name__ == "__main__":
    raise SystemExit(main())
