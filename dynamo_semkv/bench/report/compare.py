"""`dynamo_semkv bench compare A B`: two runs, figure by figure.

A ratio is B's median over A's. It is marked when every value of B lies outside the spread of A's (and so the other way
round): `better` or `worse` where the figure has a good direction, else `differs`. Figures that only one run has are
counted.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dynamo_semkv.bench.report.raw import NotARun, figures_of, read
from dynamo_semkv.bench.report.statistics import Figure, Figures


@dataclass(frozen=True)
class Difference:
    """One figure in two runs, by its medians."""

    path: str
    before: float
    after: float
    ratio: float | None
    """None where `before` is 0."""
    mark: str
    """`better`, `worse` or `differs`; empty within the spreads, or where one of the runs has one value only."""


def differences(before: Figures, after: Figures) -> list[Difference]:
    """The figures that both runs have, in A's order."""
    return [_difference(path, before[path], after[path]) for path in before if path in after]


def _difference(path: str, a: Figure, b: Figure) -> Difference:
    ratio = b.median / a.median if a.median else None
    return Difference(path, a.median, b.median, ratio, _mark(a, b))


def _mark(a: Figure, b: Figure) -> str:
    if min(len(a.values), len(b.values)) < 2 or (a.low <= b.high and b.low <= a.high):
        return ""
    if not a.better:
        return "differs"
    return "better" if (b.median < a.median) == (a.better == "lower") else "worse"


def lines(found: Iterable[Difference]) -> list[str]:
    """The differences as aligned text, a head line first."""
    rows = [
        (d.path, f"{d.before:.6g}", f"{d.after:.6g}", "-" if d.ratio is None else f"{d.ratio:.3f}", d.mark)
        for d in found
    ]
    head = ("figure", "A", "B", "B / A", "")
    widths = [max(len(row[n]) for row in [head, *rows]) for n in range(5)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(row[n].rjust(widths[n]) for n in (1, 2, 3)), row[4]]).rstrip()
        for row in [head, *rows]
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 2, with the reason, for a file that is no run; else 0."""
    parser = argparse.ArgumentParser(
        prog="dynamo_semkv bench compare", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "a", type=Path, metavar="A", help="a run's JSON: .run/bench/*.json or docs/benchmarks/latest.json"
    )
    parser.add_argument("b", type=Path, metavar="B")
    parser.add_argument("--only", default="", help="figures whose path contains this")
    parser.add_argument("--marked", action="store_true", help="only what lies beyond both spreads")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    try:
        before, after = (figures_of(read(path)) for path in (arguments.a, arguments.b))
    except (NotARun, OSError) as error:
        print(f"bench compare: {error}", file=sys.stderr)
        return 2
    found = [d for d in differences(before, after) if arguments.only in d.path and (d.mark or not arguments.marked)]
    if arguments.json:
        print(json.dumps([asdict(difference) for difference in found], indent=2))
        return 0
    print("\n".join(lines(found)))
    alone = len(before.keys() ^ after.keys())
    marked = sum(bool(d.mark) for d in found)
    print(f"{len(found)} figures, {marked} beyond both spreads; {alone} are in one of the runs only")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it quietly; it has started nothing
    raise SystemExit(main())
