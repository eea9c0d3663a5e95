"""The page's pictures as SVG, by matplotlib (extra `report`). The same figures and the same matplotlib give the same
files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dynamo_semkv.bench.report.scaling_pages import AGAINST, Curve, curves
from dynamo_semkv.bench.report.scenario_pages import ORDER, TITLES
from dynamo_semkv.bench.report.statistics import Figures

COLOURS = {
    "semkv": "#2a7d4f",
    "no_lookup": "#57a77c",
    "kv": "#3465a4",
    "kv_connector": "#75b0e0",
    "passing": "#a8c98b",
    "round_robin": "#888888",
    "semblend": "#c17d11",
    "cold": "#a40000",
}


def available() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw(sections: Mapping[str, Any], figures: Figures, folder: Path) -> dict[str, str]:
    """Draws what was measured into `folder`; returns name -> file name. ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "dynamo_semkv", "svg.fonttype": "none", "font.size": 9})
    folder.mkdir(parents=True, exist_ok=True)
    made: dict[str, str] = {}
    for name, curve in curves(sections).items():
        made[name] = f"{name}.svg"
        _curve(curve, AGAINST[name], folder / made[name])
    scenarios = sections.get("scenarios", {}).get("found")
    for name, group in (scenarios or {"groups": {}})["groups"].items():
        made[f"ttft_{name}"] = f"ttft_{name}.svg"
        _bars(name, group, figures, folder / made[f"ttft_{name}"])
    points: Points = {}
    for name, group in (scenarios or {"groups": {}})["groups"].items():
        if group["model"] == "tiny":
            points |= _lengths(name, group, figures)
    if len(points) > 1:
        made["lengths"] = "lengths.svg"
        _by_length("reference engine, `tiny`", dict(sorted(points.items())), folder / made["lengths"])
    return made


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight")
    pyplot.close(figure)
    # Removes the trailing blanks that matplotlib leaves in paths.
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def _curve(curve: Curve, against: str, path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.2, 3.0))
    axes.loglog(curve.xs, curve.ys, "o-", color=COLOURS["semkv"], label=curve.name)
    axes.loglog(curve.xs, curve.limit, "--", color=COLOURS["cold"], label=f"limit: {curve.limit_words}")
    axes.set_xlabel(against)
    axes.set_ylabel(curve.unit)
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(fontsize=7)
    _save(figure, path)


PHASES = {"first": "cold", "again": "warm on the device", "after_eviction": "after the device forgot it"}
Points = dict[float, dict[tuple[str, str], float]]


def _lengths(name: str, group: Mapping[str, Any], figures: Figures) -> Points:
    """Prompt tokens -> (contender, phase) -> seconds, of the scenarios that have every phase."""
    found: Points = {}
    for scenario in group["scenarios"]:
        tokens = [r["prompt_tokens"] for r in group["records"] if r["scenario"] == scenario]
        points = {
            (contender, phase): figure.median
            for contender in ("semkv", "kv")
            for phase in PHASES
            if (figure := figures.get(f"scenarios/{name}/{scenario}/{contender}/ttft_{phase}")) is not None
        }
        if len(points) == 2 * len(PHASES):
            found[max(tokens)] = points
    return found


def _by_length(title: str, points: Points, path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.2, 3.4))
    styles = {"first": "o-", "again": "^:", "after_eviction": "s--"}
    for contender in ("semkv", "kv"):
        for phase, words in PHASES.items():
            ys = [at[contender, phase] * 1e3 for at in points.values()]
            axes.loglog(
                list(points), ys, styles[phase], color=COLOURS[contender], label=f"{TITLES[contender]}, {words}"
            )
    axes.set_xlabel(f"prompt tokens ({title})")
    axes.set_ylabel("time to first token, ms")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(fontsize=6)
    _save(figure, path)


def _bars(name: str, group: Mapping[str, Any], figures: Figures, path: Path) -> None:
    """Mean time to first token by scenario; the bar is the median of the repeats, the line its spread."""
    from matplotlib import pyplot

    scenarios: Sequence[str] = list(group["scenarios"])
    present = {record["contender"] for record in group["records"]}
    contenders = [c for c in ORDER if c in present]
    figure, axes = pyplot.subplots(figsize=(8.0, 0.55 * len(scenarios) + 1.4))
    height = 0.8 / len(contenders)
    for n, contender in enumerate(contenders):
        ys, widths, errors = [], [], ([], [])  # type: ignore[var-annotated]
        for place, scenario in enumerate(scenarios):
            found = figures.get(f"scenarios/{name}/{scenario}/{contender}/ttft_mean")
            if found is None:
                continue
            ys.append(place + n * height)
            widths.append(found.median * 1e3)
            errors[0].append((found.median - found.low) * 1e3)
            errors[1].append((found.high - found.median) * 1e3)
        axes.barh(
            ys, widths, height, xerr=errors, color=COLOURS[contender], label=TITLES[contender], error_kw={"lw": 0.8}
        )
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(scenarios))])
    axes.set_yticklabels([group["scenarios"][scenario]["title"] for scenario in scenarios], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(f"mean time to first token, ms ({group['title']})")
    axes.legend(fontsize=7)
    _save(figure, path)
