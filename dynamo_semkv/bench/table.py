"""The demo's table: placement against materialization, a row per scenario. Pure: routes in, rows out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

REUSED = frozenset({"materialized_exact", "materialized_experimental"})
"""Outcomes that need no explanation: the tokens are in the table."""
QUIET_UNPLACED = frozenset({"local_exact", "no_donor"})
"""These need none either where the route was not placed: nothing was promised, so nothing is missing."""
NAMED_BY_OUTCOME = frozenset({"local_exact", "no_donor", "unconfirmed"})
"""Shown as the outcome, since the reason says what the engine saw and not what became of the route; all other outcomes
are shown as their reason."""


@dataclass(frozen=True)
class RouteFacts:
    """What the router's page says about one route. Counts in tokens, time in seconds."""

    scenario: str
    input: int
    local: int
    """Tokens in the engine's own cache, as the connector saw it: what Dynamo's exact overlap predicted."""
    evidence: int
    placed: int
    hinted: int
    confirmed: int
    decision: str
    """Why the route was placed, or left to Dynamo."""
    outcome: str
    reason: str
    ttft: float | None
    ttft_class: str | None
    """`cold`, `warm` (on the device) or `loaded` (by the connector); None in between."""

    @classmethod
    def from_page(cls, scenario: str, route: Mapping[str, Any]) -> RouteFacts:
        """`route`: one item of the page's `/api/requests/{id}`. KeyError for a page of another format."""
        tokens, report = route["tokens"], route["report"] or {}
        return cls(
            scenario=scenario,
            input=tokens["input"],
            local=report.get("local_tokens", 0),
            evidence=tokens["evidence"],
            placed=tokens["placed"],
            hinted=tokens["hinted"],
            confirmed=report.get("confirmed", 0),
            decision=route["decision"],
            outcome=route["outcome"],
            reason=route["reason"],
            ttft=route["ttft_seconds"],
            ttft_class=route["ttft_class"],
        )


@dataclass(frozen=True)
class Row:
    """One line of the table: sums over one scenario, in tokens; medians in seconds."""

    scenario: str
    requests: int
    failed: int
    input: int
    local: int
    evidence: int
    placed: int
    hinted: int
    materialized: int
    """Confirmed by the backend; nothing else is counted as reuse."""
    left: tuple[tuple[str, int], ...]
    """(`decision`, requests) of requests with evidence that were left to Dynamo nevertheless, most frequent first."""
    declines: tuple[tuple[str, int], ...]
    """(word, requests) of what did not materialize: the `reason` of a decline or failure; `unconfirmed`, and on a
    placed route `local_exact` and `no_donor`, by name. Every placed route is either here or materialized."""
    ttft_cold: float | None
    ttft_warm: float | None
    ttft_loaded: float | None


def rows(order: Sequence[str], facts: Iterable[RouteFacts], failed: Mapping[str, int]) -> list[Row]:
    """A row per scenario in the given order, also for one without a single route, and one over all."""
    by_scenario: dict[str, list[RouteFacts]] = {name: [] for name in order}
    for fact in facts:
        by_scenario[fact.scenario].append(fact)
    everything = [fact for name in order for fact in by_scenario[name]]
    parts = [_row(name, by_scenario[name], failed.get(name, 0)) for name in order]
    return [*parts, _row("all", everything, sum(failed.values()))]


def _row(name: str, facts: Sequence[RouteFacts], failed: int) -> Row:
    return Row(
        scenario=name,
        requests=len(facts) + failed,
        failed=failed,
        input=sum(f.input for f in facts),
        local=sum(f.local for f in facts),
        evidence=sum(f.evidence for f in facts),
        placed=sum(f.placed for f in facts),
        hinted=sum(f.hinted for f in facts),
        materialized=sum(f.confirmed for f in facts),
        left=tuple(Counter(f.decision for f in facts if f.evidence and not f.placed).most_common()),
        declines=tuple(
            Counter(
                word for f in facts if (word := unmaterialized(f.outcome, f.reason, f.placed)) is not None
            ).most_common()
        ),
        ttft_cold=_median(facts, "cold"),
        ttft_warm=_median(facts, "warm"),
        ttft_loaded=_median(facts, "loaded"),
    )


def unmaterialized(outcome: str, reason: str, placed: int) -> str | None:
    """Why nothing was loaded although something was placed, hinted or offered; None where something was loaded, or
    there was nothing to load."""
    if outcome in REUSED or (outcome in QUIET_UNPLACED and not placed):
        return None
    return outcome if outcome in NAMED_BY_OUTCOME else reason


def _median(facts: Sequence[RouteFacts], ttft_class: str) -> float | None:
    times = [f.ttft for f in facts if f.ttft is not None and f.ttft_class == ttft_class]
    return median(times) if times else None
