"""Totals over closed routes: one fold step a route, so that a replay gives the same numbers in whatever order routes
close.

    Totals().add(route); .add_orphan(orphan)

Only integers and seconds are summed; every set of names is closed or bounded: nothing that a peer sends can make the
memory or a page grow.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from dynamo_semkv.contracts.report import Outcome
from dynamo_semkv.contracts.route_events import NO_WORKER, RouteObserved, RouteOpened
from dynamo_semkv.outcome.closed import ClosedRoute, OrphanReport, ReplicaName, TtftClass, placed_on

STEPS = ("input", "evidence", "placed", "hinted", "materialized", "beyond_dynamo")
"""The steps of the funnel. Its denominator is `input`; `beyond_dynamo` is the reuse that placement added."""
MODES = frozenset({"off", "shadow", "canary", "enforce"})
LOOKUPS = frozenset({"hit", "miss", "timeout", "error", "skipped"})
ENDS = frozenset({"complete", "cancelled", "worker_lost", NO_WORKER, "error"})
OTHER = "other"
MAX_REPLICAS = 1_024
MAX_DECISIONS = 64
TTFT_SAMPLES = 1_024


def bounded(value: str, allowed: frozenset[str]) -> str:
    """The value if it is allowed, else OTHER."""
    return value if value in allowed else OTHER


@dataclass
class FunnelTotals:
    """Tokens of each step, and at how many requests the step was above zero."""

    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STEPS, 0))
    requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STEPS, 0))

    def add(self, step: str, tokens: int) -> None:
        """Adds one request's tokens of a step."""
        self.tokens[step] += tokens
        self.requests[step] += tokens > 0


@dataclass
class ReplicaTotals:
    """Sums over the routes that were placed on, or served by, one replica."""

    placed_requests: int = 0
    placed_tokens: int = 0
    served_requests: int = 0
    confirmed_tokens: int = 0
    """Tokens that its connector confirmed, hinted or not."""
    declined_requests: int = 0
    """Requests with a hint of which nothing was materialized."""
    timed_loads: int = 0
    """Routes that loaded KV and whose first token was seen, once the replica's cold rate was known."""
    saved_seconds: float = 0.0
    """Time to first token that these saved against that rate; negative where loading made it worse."""


@dataclass
class TtftSample:
    """Times to first token of one class, in seconds. Quantiles are over the last TTFT_SAMPLES routes, the sum over
    all."""

    count: int = 0
    sum_seconds: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=TTFT_SAMPLES))

    def add(self, seconds: float) -> None:
        """Adds the time of one route."""
        self.count += 1
        self.sum_seconds += seconds
        self.recent.append(seconds)

    def quantile(self, share: float) -> float | None:
        """The quantile by nearest rank, `share` in [0, 1]; None without a sample."""
        if not self.recent:
            return None
        ordered = sorted(self.recent)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass
class Totals:
    """Sums over all closed routes since the oldest event on the bus."""

    requests: int = 0
    funnel: FunnelTotals = field(default_factory=FunnelTotals)
    exact_device_tokens: int = 0
    """Dynamo's own exact overlap on the device, for comparison; in no step of the funnel."""
    exact_host_tokens: int = 0
    local_tokens: int = 0
    """Tokens that the engines' own caches held, as their connectors reported them."""
    engine_cached_tokens: int = 0
    """The engines' own count of cached prompt tokens, from their streams: device, and loaded ones where the engine
    counts them."""
    confirmed_tokens: int = 0
    """All that was confirmed on routes: `materialized` of the funnel + `unhinted_tokens`."""
    unhinted_tokens: int = 0
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(outcome, reason) -> routes."""
    lookups: Counter[str] = field(default_factory=Counter)
    decisions: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    joined_by: Counter[str] = field(default_factory=Counter)
    cross_checks: Counter[str] = field(default_factory=Counter)
    replicas: dict[str, ReplicaTotals] = field(default_factory=dict)
    ttft: dict[str, TtftSample] = field(default_factory=lambda: {c.value: TtftSample() for c in TtftClass})
    orphans: Counter[str] = field(default_factory=Counter)
    would_have: int = 0
    """Routes where a placement was recorded but not acted on (shadow, canary)."""
    would_have_tokens: int = 0
    """The evidence on these routes: what `enforce` would have placed."""
    would_have_agreed: int = 0
    """Those of these routes that were served by that replica anyway."""

    def add(self, route: ClosedRoute) -> None:
        """Adds a closed route. Each comes once; names and counts of peers are clamped."""
        opened, observed = route.opened, route.observed
        funnel = route.funnel
        self.requests += 1
        for step in STEPS:
            self.funnel.add(step, getattr(funnel, step))
        self.exact_device_tokens += min(max(0, opened.exact_device_tokens), funnel.input)
        self.exact_host_tokens += min(max(0, opened.exact_host_tokens), funnel.input)
        self.local_tokens += route.report.local_tokens if route.report is not None else 0
        if observed is not None and observed.engine_cached_tokens is not None:
            self.engine_cached_tokens += min(max(0, observed.engine_cached_tokens), funnel.input)
        self.confirmed_tokens += route.confirmed_tokens
        self.unhinted_tokens += funnel.unhinted
        self.outcomes[route.outcome.value, route.reason.value] += 1
        self.lookups[bounded(opened.lookup, LOOKUPS)] += 1
        known = opened.decision_reason in self.decisions or len(self.decisions) < MAX_DECISIONS
        self.decisions[opened.decision_reason if known else OTHER] += 1
        self.modes[bounded(opened.mode, MODES)] += 1
        self.ends[bounded(observed.end, ENDS) if observed is not None else "unknown"] += 1
        self.joined_by[route.joined_by.value] += 1
        self.cross_checks[route.cross_check.value] += 1
        self._add_to_replicas(route)
        if route.ttft_class is not None and observed is not None and observed.ttft_seconds is not None:
            self.ttft[route.ttft_class.value].add(observed.ttft_seconds)
        if opened.shadow_choice is not None:
            self.would_have += 1
            self.would_have_tokens += funnel.evidence
            self.would_have_agreed += opened.shadow_choice == str(route.replica)

    def add_orphan(self, orphan: OrphanReport) -> None:
        """Counts the report; its tokens are in no sum, since no route of ours bounds them."""
        self.orphans[orphan.reason.value] += 1

    def _add_to_replicas(self, route: ClosedRoute) -> None:
        funnel = route.funnel
        if (pinned := placed_on(route.opened)) is not None:
            placed = self._replica(pinned)
            placed.placed_requests += 1
            placed.placed_tokens += funnel.placed
        if route.replica is None:
            return
        served = self._replica(route.replica)
        served.served_requests += _was_served(route.opened, route.observed)
        served.confirmed_tokens += route.confirmed_tokens
        if route.saving is not None and route.saving.saved_seconds is not None:
            served.timed_loads += 1
            served.saved_seconds += route.saving.saved_seconds
        served.declined_requests += route.outcome is Outcome.DECLINED

    def _replica(self, name: ReplicaName) -> ReplicaTotals:
        key = str(name)
        if key not in self.replicas and len(self.replicas) >= MAX_REPLICAS:
            key = OTHER
        return self.replicas.setdefault(key, ReplicaTotals())


def _was_served(opened: RouteOpened, observed: RouteObserved | None) -> bool:
    return observed is not None and (observed.served_stable_routing_id is not None or observed.output_tokens > 0)
