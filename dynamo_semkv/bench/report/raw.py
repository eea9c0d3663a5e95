"""The raw run as a file, and its figures as a smaller one: what `bench compare` reads.

.run/bench/<time>.json         {"schema": 1, "command", "at", "quick", "repeats", "seed", "machine": {...},
                                "sections": {...}}
docs/benchmarks/latest.json    {"schema": 1, ..., "figures": {"path": {"unit", "better", "median", "values"}}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynamo_semkv.bench.report.readings import all_figures
from dynamo_semkv.bench.report.statistics import Figure, Figures

SCHEMA = 1


class NotARun(ValueError):
    """The file is not one of these two; the text names it and says what is wrong."""


def read(path: Path) -> dict[str, Any]:
    """A file of either form. Raises NotARun, or OSError for a file that cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise NotARun(f"{path}: no JSON ({error})") from error
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != SCHEMA or not ("sections" in found or "figures" in found):
        raise NotARun(f"{path}: schema is {schema!r}; it must be {SCHEMA}, with `sections` or `figures`")
    parsed: dict[str, Any] = found
    return parsed


def figures_of(run: Mapping[str, Any]) -> Figures:
    """The figures of a run of either form. Raises NotARun for figures that `plain` did not write."""
    if "figures" not in run:
        return all_figures(run["sections"])
    try:
        return {path: Figure.from_plain(raw) for path, raw in run["figures"].items()}
    except (KeyError, TypeError, ValueError) as error:
        raise NotARun(f"figures: {error!r}") from error


def small(run: Mapping[str, Any], figures: Figures) -> dict[str, Any]:
    """The run without the records of single requests; numbers with six digits."""
    kept = {name: value for name, value in run.items() if name != "sections"}
    seconds = {name: round(section["seconds"], 1) for name, section in run["sections"].items()}
    return {**kept, "seconds": seconds, "figures": {path: _rounded(figure) for path, figure in sorted(figures.items())}}


def _rounded(figure: Figure) -> dict[str, Any]:
    values = [float(f"{value:.6g}") for value in figure.values]
    return {**figure.plain(), "median": float(f"{figure.median:.6g}"), "values": values}
