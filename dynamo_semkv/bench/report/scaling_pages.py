"""The part of the page about how costs grow, next to the machine's limits. Pure: sections in, Markdown out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from dynamo_semkv.bench.report.markdown import number, table
from dynamo_semkv.bench.report.statistics import growth, law

SAMPLE_EVERY = 32
"""One window in so many tokens is a sample (docs/evidence.md)."""
SKETCH_BYTES_A_SAMPLE = 9.4
"""A donor event of an 8k prompt has 256 samples in 2.4 kB."""
ROW_BYTES = 256
"""What a decision must read of a replica at least: four cache lines of counts, load and identity."""


@dataclass(frozen=True)
class Curve:
    """One figure against one size; `limit` is what the machine allows for each point, in the same unit."""

    name: str
    unit: str
    xs: tuple[float, ...]
    ys: tuple[float, ...]
    limit: tuple[float, ...]
    limit_words: str
    more_is_better: bool = False

    @property
    def exponent(self) -> float | None:
        """The exponent k of y ~ x**k; None with too few points."""
        return growth(self.xs, self.ys)

    @property
    def distance(self) -> float:
        """The last point as a multiple of its limit (where more is better, the limit as a multiple of the point)."""
        y, limit = self.ys[-1], self.limit[-1]
        return limit / y if self.more_is_better else y / limit


def curves(sections: Mapping[str, Any]) -> dict[str, Curve]:
    """The curves that were measured: `lookup`, `memory`, `events`, `decision`, `route`, `offer`."""
    found: dict[str, Curve] = {}
    scaling = sections.get("scaling", {}).get("found")
    if scaling is None:
        return found
    limits, tokens = scaling["limits"], scaling["prompt_tokens"]
    samples = tokens / SAMPLE_EVERY
    xs, lookup = _medians(scaling["donors"], "donors", "hit_p50")
    if xs:
        least = 1e6 * (4 * tokens / limits["read_bytes_per_second"] + samples * limits["miss_seconds"])
        words = "reading the prompt once, and one cache miss a sample"
        found["lookup"] = Curve("lookup, median", "us", xs, lookup, (least,) * len(xs), words)
        memory = _medians(scaling["donors"], "donors", "bytes_per_donor")[1]
        sketch = samples * SKETCH_BYTES_A_SAMPLE
        found["memory"] = Curve(
            "memory a donor", "bytes", xs, memory, (sketch,) * len(xs), "the sketch that the event carries"
        )
        events = _medians(scaling["donors"], "donors", "registers_per_second")[1]
        most = 1.0 / (2 * sketch / limits["copy_bytes_per_second"] + samples * limits["miss_seconds"])
        words = "copying the sketch twice, and one cache miss a sample"
        found["events"] = Curve(
            "donors registered a second", "1/s", xs, events, (most,) * len(xs), words, more_is_better=True
        )
    xs, decision = _medians(scaling["replicas"], "replicas", "own_p50")
    least_of = tuple(1e6 * x * ROW_BYTES / limits["read_bytes_per_second"] for x in xs)
    found["decision"] = Curve(
        "score sheet", "us", xs, tuple(1e6 * y for y in decision), least_of, f"reading {ROW_BYTES} bytes a replica"
    )
    router = sections.get("router", {}).get("found") or {}
    if rows := [{"replicas": row["replicas"], **row["whole"]} for row in router.get("decisions", ())]:
        xs, whole = _medians(rows, "replicas", "own_p50")
        read = 4 * router.get("tokens", tokens) / limits["read_bytes_per_second"] + samples * limits["miss_seconds"]
        least_of = tuple(1e6 * (read + x * ROW_BYTES / limits["read_bytes_per_second"]) for x in xs)
        words = f"reading the prompt and {ROW_BYTES} bytes a replica, one cache miss a sample"
        found["route"] = Curve("whole decision of the router", "us", xs, tuple(1e3 * y for y in whole), least_of, words)
    connector = sections.get("connector", {}).get("found")
    if connector is not None:
        rows = [row for run in connector["runs"] for row in run.get("lookup", ()) if row["tokens_as"] == "array"]
        xs, offer = _medians(rows, "tokens", "p50")
        least_of = tuple(1e6 * 2 * 4 * x / limits["read_bytes_per_second"] for x in xs)
        found["offer"] = Curve(
            "offer (`get_num_new_matched_tokens`)",
            "us",
            xs,
            tuple(1e6 * y for y in offer),
            least_of,
            "comparing all tokens once",
        )
    return found


def _medians(rows: Sequence[Mapping[str, Any]], x: str, y: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    by: dict[float, list[float]] = {}
    for row in rows:
        by.setdefault(float(row[x]), []).append(float(row[y]))
    xs = tuple(sorted(by))
    return xs, tuple(median(by[one]) for one in xs)


AGAINST = {
    "lookup": "donors",
    "memory": "donors",
    "events": "donors",
    "decision": "replicas",
    "route": "replicas",
    "offer": "prompt tokens",
}


def page(sections: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    """The whole part. `pictures`: curve -> path of its plot from the page."""
    found = curves(sections)
    if not found:
        return "Not measured in this run."
    limits = sections["scaling"]["found"]["limits"]
    parts = [
        f"This machine: {limits['copy_bytes_per_second'] / 1e9:.1f} GB/s copied and "
        f"{limits['read_bytes_per_second'] / 1e9:.1f} GB/s read on one thread, {limits['miss_seconds'] * 1e9:.1f} ns a "
        f"scattered read, {limits['flops_per_second'] / 1e9:.0f} GFLOP/s (float32)."
    ]
    rows = []
    for name, curve in found.items():
        at = f"{number(curve.ys[-1], 0)} {curve.unit} at {number(curve.xs[-1], 0)} {AGAINST[name]}"
        rows.append(
            [
                curve.name,
                at,
                _law(curve),
                f"{curve.limit_words}: {_short(curve.limit[-1])} {curve.unit}",
                f"{curve.distance:,.1f}",
            ]
        )
    parts.append(table(["what", "measured", "growth", "physical limit", "times the limit"], rows))
    for name, curve in found.items():
        points = ", ".join(f"{number(x, 0)}: {number(y, 0)}" for x, y in zip(curve.xs, curve.ys, strict=True))
        picture = f"\n\n![{curve.name} against {AGAINST[name]}]({pictures[name]})" if name in pictures else ""
        parts.append(f"**{curve.name}**, {curve.unit}, against {AGAINST[name]} ({points}){picture}")
    parts += [_events(sections["scaling"]["found"])]
    prefill = _prefill(sections)
    return "\n\n".join([*parts, *([prefill] if prefill else [])])


EVENTS = {"at_capacity": "registrations at capacity", "moves": "moves", "evictions": "evictions"}


def _events(found: Mapping[str, Any]) -> str:
    """Event rates, by the worst repeat."""
    rows = []
    for donors in sorted({row["donors"] for row in found["donors"]}):
        same = [row for row in found["donors"] if row["donors"] == donors]
        rows.append([f"{donors:,}", *(f"{min(row[f'{name}_per_second'] for row in same):,.0f}" for name in EVENTS)])
    return (
        "Donor events a second on one core, from their bytes into catalog and index, the worst repeat (each "
        f"registration of {found['prompt_tokens']:,} tokens carries its "
        f"sketch):\n\n{table(['donors', *EVENTS.values()], rows)}"
    )


def _law(curve: Curve) -> str:
    """The growth in words; for a rate, the growth of the time of one."""
    exponent = curve.exponent
    if not curve.more_is_better:
        return law(exponent)
    return f"the time of one {law(None if exponent is None else -exponent)}"


def _short(value: float) -> str:
    """Three significant digits, also for values far below 1."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


PREFILL = (
    "Prefill and load against the machine, on which the engine computes in float32; where it takes a GPU's time, "
    "against the GPU's data sheet:"
)


def _prefill(sections: Mapping[str, Any]) -> str:
    """Cold and loaded prompts compared with the machine's floating point and memory."""
    scenarios = sections.get("scenarios", {}).get("found")
    if scenarios is None:
        return ""
    machine = sections["scaling"]["found"]["limits"]
    rows = []
    for name, group in scenarios["groups"].items():
        engine = group["engine"]
        limits = {**machine, **engine}
        for scenario in group["scenarios"]:
            mine = [
                r for r in group["records"] if r["scenario"] == scenario and r["contender"] == "semkv" and r["ttft"]
            ]
            cold = [r for r in mine if r["phase"] == "first" and not r["cached_tokens"]]
            loaded = [r for r in mine if r["phase"] == "after_eviction" and r["route"] and r["route"]["load_seconds"]]
            if not cold or not loaded:
                continue
            tokens = median(r["prompt_tokens"] for r in cold)
            work = tokens * engine["flops_per_token"] + tokens**2 * engine["attention_flops_per_square_token"]
            least = work / limits["flops_per_second"]
            copied = median(r["route"]["confirmed"] for r in loaded) * engine["kv_bytes_per_token"]
            least_copy = copied / limits["copy_bytes_per_second"]
            took, load = median(r["ttft"] for r in cold), median(r["route"]["load_seconds"] for r in loaded)
            rows.append(
                [
                    f"{name}, {tokens:,.0f} tokens",
                    f"{took * 1e3:,.0f} / {least * 1e3:,.0f}",
                    f"{took / least:.1f}",
                    f"{load * 1e3:,.2f} / {least_copy * 1e3:,.2f}",
                    f"{load / least_copy:.1f}" if math.isfinite(least_copy) and least_copy else "-",
                    f"{median(r['ttft'] for r in loaded) * 1e3:,.0f}",
                ]
            )
    if not rows:
        return ""
    head = ["prompt", "cold TTFT / FLOPs alone, ms", "times", "load / copy alone, ms", "times", "loaded TTFT, ms"]
    return PREFILL + "\n\n" + table(head, rows)
