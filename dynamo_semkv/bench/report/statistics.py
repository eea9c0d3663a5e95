"""Figures: one value per repeat, shown as a median with its spread. Ratios are taken within a repeat, where both sides
saw the same machine.

    Figure("s", (0.41, 0.39, 0.44), better="lower").median      paired(ours, theirs) -> ratio of each repeat
    growth(xs, ys) -> exponent of the power law that fits best
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

BETTER = ("lower", "higher", "")


@dataclass(frozen=True)
class Figure:
    """One measured quantity. `values`: one per repeat, all finite, at least one. `better`: which direction is good;
    empty where neither is."""

    unit: str
    values: tuple[float, ...]
    better: str = ""

    def __post_init__(self) -> None:
        if not self.values or not all(math.isfinite(value) for value in self.values):
            raise ValueError(f"values are {self.values!r}; at least one is needed, and all finite")
        if self.better not in BETTER:
            raise ValueError(f"better is {self.better!r}; it must be one of {BETTER}")

    @property
    def median(self) -> float:
        """Over the repeats."""
        return float(median(self.values))

    @property
    def low(self) -> float:
        """The lowest repeat."""
        return min(self.values)

    @property
    def high(self) -> float:
        """The highest repeat."""
        return max(self.values)

    def worst(self, *, most: bool) -> float:
        """The repeat that decides a promise; `most`: of at most so much, else of at least. A promise that one repeat
        breaks is broken."""
        return self.high if most else self.low

    def plain(self) -> dict[str, Any]:
        """JSON-able; `from_plain` reads it."""
        return {"unit": self.unit, "better": self.better, "median": self.median, "values": list(self.values)}

    @classmethod
    def from_plain(cls, raw: Mapping[str, Any]) -> Figure:
        """The figure that `plain` wrote. KeyError or ValueError for anything else."""
        return cls(str(raw["unit"]), tuple(float(value) for value in raw["values"]), str(raw["better"]))


Figures = dict[str, Figure]
"""Figures by path: `scenarios/negative/semkv/ttft_mean`."""


def paired(ours: Figure, theirs: Figure) -> Figure:
    """ours / theirs, repeat by repeat. ValueError where they are not of the same repeats, or theirs is 0."""
    if len(ours.values) != len(theirs.values) or not all(theirs.values):
        raise ValueError(f"no pairs: {len(ours.values)} against {theirs.values}")
    ratios = tuple(a / b for a, b in zip(ours.values, theirs.values, strict=True))
    return Figure("ratio", ratios, ours.better)


def quantile(values: Sequence[float], share: float) -> float:
    """Interpolates between the two nearest values, as numpy does by default. ValueError without values."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("values: got none")
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def upper_bound(count: int, of: int, confidence: float = 0.95) -> float:
    """The largest share that `count` in `of` independent trials leaves possible (Clopper and Pearson, one-sided): 0 in
    400 is 0.75 %, and 0 in 53 is 5.5 %."""
    if count >= of:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        share = (low + high) / 2
        as_few = sum(math.comb(of, n) * share**n * (1 - share) ** (of - n) for n in range(count + 1))
        low, high = (share, high) if as_few > 1 - confidence else (low, share)
    return high


def growth(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """The exponent k of y ~ x**k by least squares over the logarithms; None with fewer than two different x above 0."""
    points = [(math.log(x), math.log(y)) for x, y in zip(xs, ys, strict=True) if x > 0 and y > 0]
    if len({x for x, _ in points}) < 2:
        return None
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    over = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / over


def law(exponent: float | None) -> str:
    """The growth law in words."""
    if exponent is None:
        return "too few points to tell"
    if exponent < 0.1:
        return f"does not grow (exponent {exponent:.2f})"
    if exponent < 0.35:
        return f"grows slowly, about as a logarithm would over this range (exponent {exponent:.2f})"
    if exponent < 0.8:
        return f"grows more slowly than in proportion (exponent {exponent:.2f})"
    if exponent <= 1.2:
        return f"grows in proportion (exponent {exponent:.2f})"
    return f"grows faster than in proportion (exponent {exponent:.2f})"
