"""Builders of route events and reports, and a clock that only a test moves."""

from __future__ import annotations

from typing import Any

from dynamo_semkv.contracts.report import MaterializationReport, Outcome, Reason
from dynamo_semkv.contracts.route_events import RouteObserved, RouteOpened
from dynamo_semkv.outcome.closed import ClosedRoute, OrphanReport
from dynamo_semkv.outcome.history import History
from dynamo_semkv.outcome.route_tracker import RouteTracker
from dynamo_semkv.outcome.totals import Totals

PROMPT = b"p" * 16


class ManualClock:
    def __init__(self, now: float = 1_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def route_id(number: int) -> str:
    return f"{number:032x}"


def opened(number: int = 1, **fields: Any) -> RouteOpened:
    """Pinned to `w-a/0`, where Dynamo would have chosen `w-b/0`; 1,000 prompt tokens of which 800 were evidence, placed
    and hinted."""
    values: dict[str, Any] = {
        "route_id": route_id(number),
        "router": "router-1",
        "attempt": 0,
        "model": "tiny",
        "mode": "enforce",
        "opened_at": float(number),
        "prompt_key": PROMPT,
        "input_tokens": 1_000,
        "evidence_tokens": 800,
        "placed_tokens": 800,
        "hinted_tokens": 800,
        "lookup": "hit",
        "decision_reason": "placed",
        "stable_routing_id": "w-a",
        "dp_rank": 0,
        "dynamo_choice": "w-b/0",
    }
    return RouteOpened(**{**values, **fields})


def observed(number: int = 1, **fields: Any) -> RouteObserved:
    values: dict[str, Any] = {
        "route_id": route_id(number),
        "observed_at": number + 5.0,
        "end": "complete",
        "served_stable_routing_id": "w-a",
        "served_dp_rank": 0,
        "ttft_seconds": 0.25,
        "output_tokens": 8,
    }
    return RouteObserved(**{**values, **fields})


def report(number: int = 1, *, confirmed: int = 800, named: bool = True, **fields: Any) -> MaterializationReport:
    """Of the request of route `number` on `w-a/0`, naming its route unless `named` is False."""
    values: dict[str, Any] = {
        "version": "1.0",
        "report_id": f"report-{number}",
        "stable_routing_id": "w-a",
        "dp_rank": 0,
        "generation": "g1",
        "prompt_key": PROMPT,
        "namespace": "00" * 32,
        "route_id": route_id(number) if named else None,
        "request_id": number,
        "prompt_tokens": 1_000,
        "offered": confirmed,
        "honoured": confirmed,
        "copied": confirmed,
        "confirmed": confirmed,
        "outcome": Outcome.MATERIALIZED_EXACT if confirmed else Outcome.DECLINED,
        "reason": Reason.OK if confirmed else Reason.NOT_RESIDENT,
    }
    return MaterializationReport(**{**values, **fields})


def comparable(totals: Totals) -> dict[str, Any]:
    """Totals but for the order in which samples came."""
    ttft = {name: (t.count, round(t.sum_seconds, 9), sorted(t.recent)) for name, t in totals.ttft.items()}
    return {**vars(totals), "ttft": ttft}


class Listener:
    """A tracker with everything that it tells, and the history that it fills. Pairs close at once unless
    `settle_seconds` says otherwise."""

    def __init__(self, ttl_seconds: float = 30.0, **options: Any) -> None:
        options.setdefault("settle_seconds", 0.0)
        self.closed: list[ClosedRoute] = []
        self.orphans: list[OrphanReport] = []
        self.history = History(10_000)
        self.tracker = RouteTracker(ttl_seconds, self._on_close, self._on_orphan, **options)

    def _on_close(self, route: ClosedRoute) -> None:
        self.closed.append(route)
        self.history.add(route)

    def _on_orphan(self, orphan: OrphanReport) -> None:
        self.orphans.append(orphan)
        self.history.add_orphan(orphan)

    def only(self) -> ClosedRoute:
        (route,) = self.closed
        return route
