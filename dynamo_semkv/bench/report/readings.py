"""Turns the JSON of other benchmarks into figures under paths, so that goals, tables and `bench compare` read all
sections alike.

    all_figures(sections) -> {"scenarios/rfc/negative/semkv/ttft_mean": Figure,
                              "connector/lookup/32768/array/p99": ..., ...}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dynamo_semkv.bench.report.figures import figures as scenario_figures
from dynamo_semkv.bench.report.statistics import Figure, Figures

_LOWER = ("p50", "p99", "seconds", "ttft", "longest", "max", "bytes", "error", "regret", "prefill")
_HIGHER = ("ratio", "recall", "per_second", "share", "rps")


def all_figures(sections: Mapping[str, Any]) -> Figures:
    """The figures of the sections that were measured; what a section lacks is left out."""
    readers = {
        "scenarios": _scenarios,
        "scaling": _scaling,
        "connector": _connector,
        "evidence": _evidence,
        "replay": _replay,
        "router": _router,
    }
    found: Figures = {}
    for name, read in readers.items():
        measured = sections.get(name, {}).get("found")
        if measured is not None:
            found |= {f"{name}/{path}": figure for path, figure in read(measured).items()}
    return found


def _scenarios(found: Mapping[str, Any]) -> Figures:
    made: Figures = {}
    for name, group in found["groups"].items():
        made |= {f"{name}/{path}": figure for path, figure in scenario_figures(group).items()}
    for row in found.get("exactness") or ():
        path = f"exactness/{row['model']}/{row['prompt']}"
        made |= _numbers(path, [row], skip=("tokens", "same_tokens"))
    return made


def _scaling(found: Mapping[str, Any]) -> Figures:
    made: Figures = {}
    for donors in sorted({row["donors"] for row in found["donors"]}):
        made |= _numbers(
            f"donors/{donors}", [r for r in found["donors"] if r["donors"] == donors], skip=("donors", "tokens")
        )
    for replicas in sorted({row["replicas"] for row in found["replicas"]}):
        made |= _numbers(
            f"replicas/{replicas}", [r for r in found["replicas"] if r["replicas"] == replicas], skip=("replicas",)
        )
    return made | _numbers("limits", [found["limits"]])


def _connector(found: Mapping[str, Any]) -> Figures:
    """Keys of a row name what was measured; the same rows of all runs are the repeats."""
    keys = {
        "lookup": ("tokens", "resident_prompts", "tokens_as"),
        "copy": ("device", "block_bytes", "pattern"),
        "throughput": ("model", "phase"),
    }
    made: Figures = {}
    for part, names in keys.items():
        rows: dict[str, list[Mapping[str, Any]]] = {}
        for run in found["runs"]:
            for row in run.get(part, ()):
                rows.setdefault("/".join(str(row[name]).replace("/", " ") for name in names), []).append(row)
        for path, same in rows.items():
            made |= _numbers(f"{part}/{path}", same, skip=names)
    return made


def _evidence(found: Mapping[str, Any]) -> Figures:
    made: Figures = {}
    for report in found["reports"]:
        made |= _numbers(f"{report['tokens']}", [report], skip=("tokens", "donors"))
        for score in report["scores"]:
            made |= _numbers(f"{report['tokens']}/{_name(score['scenario'])}", [score])
    peers = [(f"peers {one['tokens']}", one["standings"]) for one in found["side_by_side"]]
    if found.get("paraphrase"):
        peers.append(("paraphrase", found["paraphrase"]["standings"]))
    for path, standings in peers:
        for standing in standings:
            where = f"{path}/{_name(standing['method'])}"
            made |= _numbers(where, [standing])
            for line in standing["lines"]:
                made |= _numbers(f"{where}/{_name(line['scenario'])}", [line])
    return made


def _replay(found: Mapping[str, Any]) -> Figures:
    made: Figures = {}
    for index in ("index_sees_host", "salted"):
        for engine, rows in found[index].items():
            for row in rows:
                made |= _numbers(f"{index}/{engine}/{_name(row['policy'])}", [row])
    return made


def _router(found: Mapping[str, Any]) -> Figures:
    """Every number in the JSON, under the path where it stands."""
    return dict(_leaves("", found))


def _leaves(path: str, value: Any) -> Iterable[tuple[str, Figure]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(f"{path}/{_name(str(name))}" if path else _name(str(name)), item)
    elif isinstance(value, list) and value and all(_is_number(item) for item in value):
        yield path, Figure("", tuple(float(item) for item in value), _better(path))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _leaves(f"{path}/{_name(str(_label(item, number)))}", item)
    elif _is_number(value):
        yield path, Figure("", (float(value),), _better(path))


def _label(item: Any, number: int) -> Any:
    """The name that a row gives itself; its place in the list where it has none."""
    if not isinstance(item, Mapping):
        return number
    return next(
        (item[name] for name in ("stage", "name", "part", "replicas", "contender", "ranks") if name in item), number
    )


def _numbers(path: str, rows: Sequence[Mapping[str, Any]], skip: Sequence[str] = ()) -> Figures:
    """Every number of rows that measured the same, one value per row."""
    made: Figures = {}
    for name in rows[0]:
        values = [row.get(name) for row in rows]
        if name not in skip and all(_is_number(value) for value in values):
            made[f"{path}/{name}"] = Figure("", tuple(float(v) for v in values if v is not None), _better(name))
    return made


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _better(name: str) -> str:
    """Guesses the good direction from the name; used for marks only."""
    if any(word in name for word in _HIGHER):
        return "higher"
    return "lower" if any(word in name for word in _LOWER) else ""


def _name(text: str) -> str:
    return text.replace("/", " of ")
