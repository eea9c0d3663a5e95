"""Which report belongs to which route. Pure: a function of the open routes and the waiting reports of one prompt.

    match(routes, reports, taken) -> {route_id: Match}

Rules, in this order:
1. Reports of one engine request (it may be allocated more than once) count as one: they close one route, with the
   report that confirmed most.
2. A report that names its route belongs to it, unless another replica served that route.
3. Equal prompts in flight on one replica may share one hint, so two requests may name the same route: the second is
   then treated as one that names none.
4. A report that names none belongs to the oldest route with its prompt that went to its replica, has no report, and
   whose stream gave the same count of tokens that were not computed. A route that has no such report gets the oldest
   one left, but that pair is `doubtful`: the right report may still be on its way (a broker that was away delivers
   engine by engine), so the tracker lets it wait until the route's time is over.
5. Where a gateway dispatched a request by itself, nobody reports who served it: such a route takes what is left of
   its prompt, from whichever replica.

Order is by the values given (time opened, time of the report), never by arrival, so any interleaving gives the same
pairs.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from dynamo_semkv.contracts.report import MaterializationReport
from dynamo_semkv.contracts.route_events import ADVISED, RouteObserved, RouteOpened
from dynamo_semkv.outcome.closed import JoinedBy, ReplicaName, placed_on, served_by, was_refused


class OpenRoute(NamedTuple):
    """A route that is not closed; `observed` None: its stream has not ended."""

    opened: RouteOpened
    observed: RouteObserved | None


class HeldReport(NamedTuple):
    """A report that waits for its route."""

    report: MaterializationReport
    at: float
    """When the report was published, by the clock of the tracker."""


class EngineRequest(NamedTuple):
    """One request in one engine: what reports of several allocation epochs have in common."""

    replica: ReplicaName
    generation: str
    prompt_key: bytes
    request_id: int


class Fit(Enum):
    """How the replica of a report compares with that of a route."""

    SAME = "same"
    OTHER = "other"
    UNKNOWN = "unknown"
    """The route was left to Dynamo and no record shows (yet) who served it."""


@dataclass
class Match:
    """The report that a route would close with."""

    report: MaterializationReport
    at: float
    """The time of the request's last report."""
    joined_by: JoinedBy
    report_ids: tuple[str, ...]
    """All reports of the same engine request, this one included."""
    doubtful: bool = False
    """Joined by prompt alone, and the engine's own count in the stream differs from the report's."""


@dataclass
class _Request:
    held: list[HeldReport] = field(default_factory=list)
    """In order of time."""

    @property
    def order(self) -> tuple[float, str]:
        return _order(self.held[0])

    @property
    def route_id(self) -> str | None:
        return next((held.report.route_id for held in self.held if held.report.route_id is not None), None)

    def match(self, joined_by: JoinedBy) -> Match:
        best = max(self.held, key=lambda held: (held.report.confirmed, held.report.epoch, held.report.report_id))
        ids = tuple(sorted(held.report.report_id for held in self.held))
        return Match(best.report, max(held.at for held in self.held), joined_by, ids)


def replica_of(report: MaterializationReport) -> ReplicaName:
    """The replica that sent the report."""
    return ReplicaName(report.stable_routing_id, report.dp_rank)


def engine_request(report: MaterializationReport) -> EngineRequest | None:
    """The request that the report is about. None where the engine gave no number: every such report stands for a
    request of its own."""
    if report.request_id == 0:
        return None
    return EngineRequest(replica_of(report), report.generation, report.prompt_key, report.request_id)


def fit(route: OpenRoute, report: MaterializationReport) -> Fit:
    """Whether the report came from the replica that served the route, as far as that is known."""
    served = served_by(route.opened, route.observed)
    if served is None:
        return Fit.UNKNOWN
    if same_replica(served, replica_of(report)):
        return Fit.SAME
    # The pin may not hold: until the stream says who served, only the pinned replica is known.
    pinned_only = route.observed is None and placed_on(route.opened) is not None
    return Fit.UNKNOWN if pinned_only else Fit.OTHER


def same_replica(left: ReplicaName, right: ReplicaName) -> bool:
    """Whether both names can mean one replica. Ranks have caches of their own, so they must agree; an unknown rank
    agrees with any."""
    return left.stable_routing_id == right.stable_routing_id and (
        left.dp_rank is None or right.dp_rank is None or left.dp_rank == right.dp_rank
    )


def match(
    routes: Sequence[OpenRoute], reports: Iterable[HeldReport], taken: Container[str] = frozenset()
) -> dict[str, Match]:
    """The pairs of the group, by route id. `taken`: ids of routes that closed with another request's report (rule
    3)."""
    # A route that was refused comes last where only the prompt decides: a report is more likely that of an equal
    # prompt.
    ordered = sorted(
        routes, key=lambda route: (was_refused(route.observed), route.opened.opened_at, route.opened.route_id)
    )
    by_id = {route.opened.route_id: route for route in ordered}
    pairs: dict[str, Match] = {}
    loose: list[_Request] = []
    for request in sorted(_requests(reports), key=lambda request: request.order):
        named = request.route_id
        report = request.held[0].report
        if named is None or named in taken:
            loose.append(request)
        elif named in by_id and fit(by_id[named], report) is not Fit.OTHER:
            if named in pairs:
                loose.append(request)
            else:
                pairs[named] = request.match(JoinedBy.ROUTE_ID)
    left = [request for request in loose if not _pair(request, ordered, pairs, doubtful=False)]
    left = [request for request in left if not _pair(request, ordered, pairs, doubtful=True)]
    advised = [route for route in ordered if _is_advised(route)]
    for request in left:
        _pair(request, advised, pairs, doubtful=False, fits=Fit.UNKNOWN)
    return pairs


def _pair(
    request: _Request,
    ordered: Sequence[OpenRoute],
    pairs: dict[str, Match],
    *,
    doubtful: bool,
    fits: Fit = Fit.SAME,
) -> bool:
    """Gives `request` to the oldest route that it may belong to; False when there is none."""
    found = request.match(JoinedBy.PROMPT_KEY)
    for route in ordered:
        if (
            route.opened.route_id not in pairs
            and route.opened.prompt_key == found.report.prompt_key
            and fit(route, found.report) is fits
            and (doubtful or _same_count(route, found.report))
        ):
            pairs[route.opened.route_id] = replace(found, doubtful=not _same_count(route, found.report))
            return True
    return False


def _is_advised(route: OpenRoute) -> bool:
    return route.observed is not None and route.observed.end == ADVISED


def _same_count(route: OpenRoute, report: MaterializationReport) -> bool:
    """Whether the engine's own count in the stream, where it is known, allows the report to be this route's."""
    count = route.observed.engine_cached_tokens if route.observed is not None else None
    return count is None or count == report.local_tokens + report.confirmed


def _requests(reports: Iterable[HeldReport]) -> list[_Request]:
    numbered: dict[EngineRequest, _Request] = {}
    single: list[_Request] = []
    for held in sorted(reports, key=_order):
        key = engine_request(held.report)
        if key is None:
            single.append(_Request([held]))
        else:
            numbered.setdefault(key, _Request()).held.append(held)
    return [*numbered.values(), *single]


def _order(held: HeldReport) -> tuple[float, str]:
    return held.at, held.report.report_id
