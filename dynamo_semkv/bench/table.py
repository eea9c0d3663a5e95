"""The demo's table: placement against materialization, a row per scenario. Pure: routes in, rows out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

REUSE_OUTCOMES = frozenset({"materialized_exact", "materialized_experimental"})
QUIET_OUTCOMES = REUSE_OUTCOMES | {"local_exact", "no_donor"}
"""Outcomes that need no explanation in the declines column: reuse, or nothing to reuse."""


@dataclass(frozen=True)
class RouteFacts:
    """What the router's page says about one route. Counts in tokens, time in seconds."""

    scenario: str
    input: int
    exact_device: int
    evidence: int
    placed: int
    hinted: int
    confirmed: int
    outcome: str
    reason: str
    ttft: float | None
    ttft_class: str | None
    """`cold`, `warm` (on the device) or `loaded` (by the connector); None in between."""

    @classmethod
    def from_page(cls, scenario: str, route: Mapping[str, Any]) -> RouteFacts:
        """`route`: one item of the page's `/api/routes`. KeyError for a page that speaks another format."""
        funnel = route["funnel"]
        return cls(
            scenario=scenario,
            input=funnel["input"],
            exact_device=route["exact_device_tokens"],
            evidence=funnel["evidence"],
            placed=funnel["placed"],
            hinted=funnel["hinted"],
            confirmed=route["confirmed_tokens"],
            outcome=route["outcome"],
            reason=route["reason"],
            ttft=route["ttft_seconds"],
            ttft_class=route["ttft_class"],
        )


@dataclass(frozen=True)
class Row:
    scenario: str
    requests: int
    failed: int
    input: int
    exact_device: int
    evidence: int
    placed: int
    hinted: int
    materialized: int
    """Confirmed by the backend; nothing else is counted as reuse."""
    placed_requests: int
    declines: tuple[tuple[str, int], ...]
    """(`outcome: reason`, requests), most frequent first."""
    ttft_cold: float | None
    ttft_warm: float | None
    ttft_loaded: float | None


def rows(order: Sequence[str], facts: Iterable[RouteFacts], failed: Mapping[str, int]) -> list[Row]:
    """A row per scenario in the given order, also for one without a single route."""
    by_scenario: dict[str, list[RouteFacts]] = {name: [] for name in order}
    for fact in facts:
        by_scenario[fact.scenario].append(fact)
    return [_row(name, by_scenario[name], failed.get(name, 0)) for name in order]


def total(parts: Sequence[Row], facts: Sequence[RouteFacts]) -> Row:
    return _row("all", facts, sum(part.failed for part in parts))


def _row(name: str, facts: Sequence[RouteFacts], failed: int) -> Row:
    declines = Counter(f"{f.outcome}: {f.reason}" for f in facts if f.outcome not in QUIET_OUTCOMES)
    return Row(
        scenario=name,
        requests=len(facts) + failed,
        failed=failed,
        input=sum(f.input for f in facts),
        exact_device=sum(f.exact_device for f in facts),
        evidence=sum(f.evidence for f in facts),
        placed=sum(f.placed for f in facts),
        hinted=sum(f.hinted for f in facts),
        materialized=sum(f.confirmed for f in facts),
        placed_requests=sum(f.placed > 0 for f in facts),
        declines=tuple(declines.most_common()),
        ttft_cold=_median(facts, "cold"),
        ttft_warm=_median(facts, "warm"),
        ttft_loaded=_median(facts, "loaded"),
    )


def _median(facts: Sequence[RouteFacts], ttft_class: str) -> float | None:
    times = [f.ttft for f in facts if f.ttft is not None and f.ttft_class == ttft_class]
    return median(times) if times else None
