"""The outcome of one route, and a report that belongs to no route. Pure values.

    ClosedRoute(opened, observed, report, outcome, reason, joined_by, closed_at)   made by `close_route`
    OrphanReport(report, reason, at)

Token counts of a route form a funnel over one denominator and never grow downstream: `input >= evidence >= placed >=
hinted >= materialized`. What the backend confirmed beyond what was hinted (host-tier blocks that nobody had advised) is
real reuse, but no success of a hint; it is counted apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import msgspec.structs

from dynamo_semkv.contracts.report import MaterializationReport, Outcome, Reason
from dynamo_semkv.contracts.route_events import NO_WORKER, RouteObserved, RouteOpened
from dynamo_semkv.outcome.saving import Saving

CLEAR_SHARE = 0.5
"""The share of the prompt from which a request is called warm or loaded."""
MAX_LOAD_SECONDS = 60.0
"""The longest load that is believed of a route whose stream nobody saw. Where the stream was seen, no load may have
taken longer than its first token."""
COLD_SHARE = 0.1
"""The share of the prompt below which reuse leaves a request cold (a chat template's first block is shared by
everybody)."""


class JoinedBy(str, Enum):
    """How a route found its report. Closed: a metric label."""

    ROUTE_ID = "route_id"
    PROMPT_KEY = "prompt_key"
    NONE = "none"


class TtftClass(str, Enum):
    """Where most of the prompt's KV came from. Requests in between have no class, since they would blur all three
    medians."""

    COLD = "cold"
    WARM = "warm"
    """From the engine's own device cache, nothing loaded."""
    LOADED = "loaded"
    """From the connector."""


class CrossCheck(str, Enum):
    """How the engine's own cached-token count compares with the connector's report (`local_tokens + confirmed`)."""

    EQUAL = "equal"
    DIFFERS = "differs"
    UNKNOWN = "unknown"


class OrphanReason(str, Enum):
    """Why a report belongs to no open route. Closed: metrics use it as a label."""

    WRONG_REPLICA = "wrong_replica"
    """Its route, or every route with its prompt, was served by another replica or rank."""
    LATE = "late"
    """Its route closed without it."""
    ALREADY_REPORTED = "already_reported"
    """Every route that it could belong to has its report."""
    NO_ROUTE = "no_route"
    """No such route was opened: traffic that went around the routers, or a route event that was lost."""
    EVICTED = "evicted"
    """Dropped to keep memory bounded."""


class Funnel(NamedTuple):
    """Token counts of one route. Each field is at most the one before it; `unhinted` is apart."""

    input: int
    evidence: int
    placed: int
    hinted: int
    materialized: int
    beyond_dynamo: int
    """Materialized tokens of routes that were served where we pinned them and that Dynamo's own router, with its own
    weights, would have sent to another replica: what placement added."""
    unhinted: int
    """Tokens that the backend confirmed beyond what was hinted."""

    @classmethod
    def of(cls, opened: RouteOpened, confirmed: int, observed: RouteObserved | None = None) -> Funnel:
        """The funnel of a route. It is clamped step by step, so that wrong numbers of a peer cannot make a later step
        larger than an earlier one."""
        input_tokens = max(0, opened.input_tokens)
        evidence = min(max(0, opened.evidence_tokens), input_tokens)
        placed = min(max(0, opened.placed_tokens), evidence)
        hinted = min(max(0, opened.hinted_tokens), placed)
        materialized = min(max(0, confirmed), hinted)
        ours = materialized if differs_from_dynamo(opened, observed) else 0
        return cls(input_tokens, evidence, placed, hinted, materialized, ours, max(0, confirmed) - materialized)


class ReplicaName(NamedTuple):
    """A replica as reports and route events name it; the rank may be unknown."""

    stable_routing_id: str
    dp_rank: int | None

    def __str__(self) -> str:
        return self.stable_routing_id if self.dp_rank is None else f"{self.stable_routing_id}/{self.dp_rank}"


def placed_on(opened: RouteOpened) -> ReplicaName | None:
    """The replica that the route was pinned to; None when the choice was Dynamo's."""
    return ReplicaName(opened.stable_routing_id, opened.dp_rank) if opened.stable_routing_id is not None else None


def differs_from_dynamo(opened: RouteOpened, observed: RouteObserved | None) -> bool:
    """Whether the route was served where it was pinned, and Dynamo's own router would have chosen another replica.
    False where that is not known (an older router did not record it), or the pin did not hold: then Dynamo chose."""
    placed = placed_on(opened)
    known = placed is not None and opened.dynamo_choice is not None
    return known and opened.dynamo_choice != str(placed) and served_by(opened, observed) == placed


def served_by(opened: RouteOpened, observed: RouteObserved | None) -> ReplicaName | None:
    """The replica that served, as far as known: by the stream, else by the pin."""
    if observed is not None and observed.served_stable_routing_id is not None:
        return ReplicaName(observed.served_stable_routing_id, observed.served_dp_rank)
    return placed_on(opened)


@dataclass(frozen=True)
class ClosedRoute:
    """One route after its end, with what became of it. Made once, by `close_route`."""

    opened: RouteOpened
    observed: RouteObserved | None
    """None: nobody published the route's end (its router died)."""
    report: MaterializationReport | None
    outcome: Outcome
    reason: Reason
    joined_by: JoinedBy
    closed_at: float
    """Unix seconds of the tracker's clock; for display."""
    saving: Saving | None = None
    """What loading was worth, by the replica's cold rate when the route closed. None: nothing was loaded, or no rate
    was known yet."""

    @property
    def route_id(self) -> str:
        """The id that its opening gave."""
        return self.opened.route_id

    @property
    def confirmed_tokens(self) -> int:
        """What the backend confirmed; 0 without a report."""
        return self.report.confirmed if self.report is not None else 0

    @cached_property
    def funnel(self) -> Funnel:
        """The route's tokens step by step; computed once."""
        return Funnel.of(self.opened, self.confirmed_tokens, self.observed)

    @property
    def replica(self) -> ReplicaName | None:
        """The replica that served; where nobody saw the stream (a gateway's), the one that sent the report. None:
        unknown."""
        served = served_by(self.opened, self.observed)
        if served is None and self.report is not None:
            return ReplicaName(self.report.stable_routing_id, self.report.dp_rank)
        return served

    @property
    def ttft_class(self) -> TtftClass | None:
        """None without a time to first token, without the counts that decide it, and for requests in between."""
        if self.observed is None or self.observed.ttft_seconds is None or self.opened.input_tokens < 1:
            return None
        prompt = self.opened.input_tokens
        engine = self.observed.engine_cached_tokens
        if self.report is None:
            return TtftClass.COLD if engine is not None and engine < COLD_SHARE * prompt else None
        confirmed, local = self.report.confirmed, self.report.local_tokens
        if max(confirmed + local, engine or 0) < COLD_SHARE * prompt:
            return TtftClass.COLD
        if confirmed >= CLEAR_SHARE * prompt:
            return TtftClass.LOADED
        return TtftClass.WARM if confirmed == 0 and local >= CLEAR_SHARE * prompt else None

    @property
    def cross_check(self) -> CrossCheck:
        """UNKNOWN without a report or without the engine's own count."""
        engine = self.observed.engine_cached_tokens if self.observed is not None else None
        if engine is None or self.report is None:
            return CrossCheck.UNKNOWN
        return CrossCheck.EQUAL if engine == self.report.local_tokens + self.report.confirmed else CrossCheck.DIFFERS


@dataclass(frozen=True)
class OrphanReport:
    """A report that no open route could take, and why; `at`: when it was given up, by the tracker's clock."""

    report: MaterializationReport
    reason: OrphanReason
    at: float


_NOT_FOR_REPORTS = (Outcome.UNCONFIRMED, Outcome.REFUSED, Outcome.ORPHAN_REPORT)


def report_is_owed(observed: RouteObserved | None) -> bool:
    """Whether the connector must have something to report of this route. False where it ended before its first token:
    refused, or cancelled. A report may come all the same, if the engine had asked the connector."""
    return observed is None or observed.output_tokens > 0 or observed.end not in ("cancelled", "error", NO_WORKER)


def was_refused(observed: RouteObserved | None) -> bool:
    """Whether the route ended by itself before its first token, so that no engine ran it as far as is known."""
    return observed is not None and not report_is_owed(observed) and observed.end != "cancelled"


def close_route(
    opened: RouteOpened,
    observed: RouteObserved | None,
    report: MaterializationReport | None,
    joined_by: JoinedBy,
    closed_at: float,
) -> ClosedRoute:
    """Makes the ClosedRoute: counts clamped to the prompt, an implausible load time dropped, outcome and reason
    decided. `closed_at`: Unix seconds."""
    if report is not None:
        report = within(report, opened.input_tokens)
        if not is_plausible_load(report, observed):
            report = msgspec.structs.replace(report, load_seconds=None)
    outcome, reason = _verdict(observed, report)
    return ClosedRoute(opened, observed, report, outcome, reason, joined_by, closed_at)


def within(report: MaterializationReport, input_tokens: int) -> MaterializationReport:
    """The report with no count above the prompt that the route really had: what a worker reports beyond that is in no
    sum."""
    if report.prompt_tokens <= input_tokens:
        return report
    local = min(report.local_tokens, input_tokens)
    offered = min(report.offered, input_tokens - local)
    honoured = min(report.honoured, offered)
    copied = min(report.copied, honoured)
    return msgspec.structs.replace(
        report,
        prompt_tokens=input_tokens,
        local_tokens=local,
        offered=offered,
        honoured=honoured,
        copied=copied,
        confirmed=min(report.confirmed, copied),
    )


def is_plausible_load(report: MaterializationReport, observed: RouteObserved | None) -> bool:
    """Whether the load, if its time is reported, was over before the first token that the router saw. A load that a
    connector began before the request may have taken longer; then the first token shows what it was worth."""
    seen = observed.ttft_seconds if observed is not None else None
    return report.load_seconds is None or report.load_seconds <= (seen if seen is not None else MAX_LOAD_SECONDS)


def _verdict(observed: RouteObserved | None, report: MaterializationReport | None) -> tuple[Outcome, Reason]:
    if report is not None:
        # A connector may not report the outcomes that only a router decides.
        outcome = Outcome.UNKNOWN if report.outcome in _NOT_FOR_REPORTS else report.outcome
        return outcome, report.reason
    if observed is not None and observed.end == "cancelled":
        return Outcome.CANCELLED, Reason.CANCELLED if report_is_owed(observed) else Reason.BEFORE_FIRST_TOKEN
    if observed is not None and observed.end == "worker_lost":
        return Outcome.UNCONFIRMED, Reason.WORKER_LOST
    if observed is not None and was_refused(observed):
        return Outcome.REFUSED, Reason.NO_WORKER if observed.end == NO_WORKER else Reason.REQUEST_REFUSED
    return Outcome.UNCONFIRMED, Reason.NO_REPORT
