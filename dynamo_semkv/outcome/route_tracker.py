"""RouteTracker: the routes that are open, each closed exactly once.

    RouteTracker(ttl_seconds, on_close, on_orphan=None, settle_seconds=SETTLE_SECONDS, abandoned_seconds=None,
                limits=TrackerLimits())
    .opened(event, at)  .observed(event, at, subject=None)  .report(report, at)  .expire(now)

A route closes when it has its report *and* its end, or when its time is over: `ttl_seconds` after its end without a
report, or after `UNOWED_SECONDS` where none is owed, `abandoned_seconds` after it was opened without an end (its router
died). Every event may come twice, echoed or replayed, and in any order. A route belongs to the router that opened it:
an opening or an end of it from another router is dropped. The tracker has no clock: `at` and `now` are seconds of
whatever clock the caller keeps, and a jump of it costs at most that a route closes as `unconfirmed`. One thread.

`settle_seconds` holds a pair back until so long (at most twice as long) after its last event, so that routers that
receive the same events in another order arrive at the same pairs even for equal prompts, and many equal prompts in
flight are paired once and not at every event; 0 closes at once.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dynamo_semkv.contracts import subjects
from dynamo_semkv.contracts.report import MaterializationReport
from dynamo_semkv.contracts.route_events import RouteObserved, RouteOpened
from dynamo_semkv.evidence.shares import Shares
from dynamo_semkv.outcome.closed import (
    ClosedRoute,
    JoinedBy,
    OrphanReason,
    OrphanReport,
    close_route,
    report_is_owed,
    served_by,
)
from dynamo_semkv.outcome.closed_routes import ClosedRoutes, Remembered
from dynamo_semkv.outcome.early_ends import EarlyEnds
from dynamo_semkv.outcome.held_reports import HeldReports
from dynamo_semkv.outcome.join import (
    EngineRequest,
    Fit,
    HeldReport,
    Match,
    OpenRoute,
    engine_request,
    fit,
    match,
    replica_of,
    same_replica,
)
from dynamo_semkv.outcome.queues import Bounded, DueQueue, Groups
from dynamo_semkv.telemetry.throttled import Throttled

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)

_T = TypeVar("_T")

SETTLE_SECONDS = 1.0
"""Longer than the route events of two routers can be apart on their way; shorter than an operator waits for the
page."""
UNOWED_SECONDS = 5.0
"""How long a route that ended before its first token waits for a report, though none has to come."""


@dataclass(frozen=True)
class TrackerLimits:
    """Bounds on memory. What is evicted is counted: a route closes with what is known, a report becomes an orphan."""

    open_routes: int = 100_000
    """At this limit the router with most open routes loses its oldest; the same bound holds for ends whose routes are
    not open yet."""
    held_reports: int = 100_000
    """Reports whose route is not known yet. At this limit the worker with most of them loses its oldest."""
    remembered: int = 200_000
    """Closed routes and seen reports that are remembered: a duplicate that comes after so many others counts as new."""


@dataclass
class TrackerStats:
    """Counters of one tracker since it was made; each counts events unless it says otherwise."""

    opened: int = 0
    observed: int = 0
    reports: int = 0
    closed: int = 0
    orphans: int = 0
    duplicates: int = 0
    """Events that brought nothing new: replays, redeliveries, echoes."""
    superseded: int = 0
    """Further reports of an engine request that was allocated again: they close nothing and count nothing."""
    evicted_routes: int = 0
    unmatched_ends: int = 0
    """Ends whose opening never came."""
    callback_errors: int = 0
    implausible_loads: int = 0
    """Reports whose load took longer than the first token of their route did: the load time is dropped."""


@dataclass
class _Route:
    opened: RouteOpened
    observed: RouteObserved | None = None
    observed_at: float = 0.0

    @property
    def open(self) -> OpenRoute:
        return OpenRoute(self.opened, self.observed)


class RouteTracker:
    """Holds open routes and reports without a route. `on_close` gets each closed route once, `on_orphan` each report
    that belongs to none; an exception of either is counted and logged."""

    def __init__(
        self,
        ttl_seconds: float,
        on_close: Callable[[ClosedRoute], None],
        on_orphan: Callable[[OrphanReport], None] | None = None,
        *,
        settle_seconds: float = SETTLE_SECONDS,
        abandoned_seconds: float | None = None,
        limits: TrackerLimits | None = None,
    ) -> None:
        self.stats = TrackerStats()
        self._ttl = ttl_seconds
        self._settle = settle_seconds
        self._abandoned = abandoned_seconds if abandoned_seconds is not None else max(10 * ttl_seconds, 300.0)
        self._limits = limits = limits or TrackerLimits()
        self._on_close = on_close
        self._on_orphan = on_orphan

        self._routes: OrderedDict[str, _Route] = OrderedDict()
        self._routers = Shares[str, str]()
        """The open routes, by the router that opened them."""
        self._running = DueQueue[str](self._abandoned)
        self._ended = DueQueue[str](ttl_seconds)
        self._unowed = DueQueue[str](min(ttl_seconds, UNOWED_SECONDS))
        self._by_prompt = Groups[bytes]()
        self._early_ends = EarlyEnds(ttl_seconds, limits.open_routes)

        self._reports = HeldReports(ttl_seconds, limits.held_reports)
        self._unsettled = DueQueue[bytes](settle_seconds)
        self._closed = ClosedRoutes(limits.remembered)
        self._seen = Bounded[str, None](limits.remembered)
        self._spent = Bounded[EngineRequest, None](limits.remembered)

    @property
    def open_routes(self) -> int:
        """How many routes are open."""
        return len(self._routes)

    @property
    def held_reports(self) -> int:
        """How many reports wait for their route."""
        return len(self._reports)

    def opened(self, event: RouteOpened, at: float) -> bool:
        """Takes the opening of a route. False: another router has opened that route, and the event is dropped."""
        if event.route_id in self._routes or self._closed.get(event.route_id) is not None:
            known = self._routes.get(event.route_id)
            if known is not None and known.opened.router != event.router:
                return False
            self.stats.duplicates += 1
            return True
        self.stats.opened += 1
        route = _Route(event)
        self._routes[event.route_id] = route
        self._routers.use(event.router, event.route_id)
        self._by_prompt.add(event.prompt_key, event.route_id)
        self._running.add(event.route_id, at)
        end = self._early_ends.take(event.route_id, subjects.routes(event.router))
        if end is not None:
            self._record_end(route, end, at)
        while len(self._routes) > self._limits.open_routes and (victim := self._routers.victim()) is not None:
            self.stats.evicted_routes += 1
            self._close_overdue(victim[1], at)
        self._schedule_match(event.prompt_key, at)
        return True

    def observed(self, event: RouteObserved, at: float, *, subject: str | None = None) -> bool:
        """Takes the end of a route's stream. `subject`: the bus subject that it came on; None: the caller vouches for
        it. False: another router than the one that opened the route sent it, and the event is dropped."""
        route = self._routes.get(event.route_id)
        if route is not None and subject is not None and subject != subjects.routes(route.opened.router):
            return False
        known = self._closed.get(event.route_id) is not None or (route is not None and route.observed is not None)
        if known or (route is None and not self._early_ends.add(event, subject, at)):
            self.stats.duplicates += 1
            return True
        self.stats.observed += 1
        self.stats.unmatched_ends = self._early_ends.unmatched
        if route is not None:
            self._record_end(route, event, at)
            self._schedule_match(route.opened.prompt_key, at)
        return True

    def report(self, report: MaterializationReport, at: float) -> None:
        """Takes a report, once by its id; it closes its route when the route's end is known and has settled."""
        if report.report_id in self._seen:
            self.stats.duplicates += 1
            return
        self._seen[report.report_id] = None
        self.stats.reports += 1
        self._take(HeldReport(report, at), at)

    def expire(self, now: float) -> None:
        """Close what is due. Call it about once a second, and only while reports can arrive."""
        for prompt_key in self._unsettled.pop_due(now):
            self._close_settled(prompt_key, now)
        for queue in (self._ended, self._unowed, self._running):
            for route_id in queue.pop_due(now):
                if route_id in self._routes:  # the one before may have closed it
                    self._close_overdue(route_id, now)
        self._early_ends.expire(now)
        self.stats.unmatched_ends = self._early_ends.unmatched
        self._give_up(self._reports.pop_due(now), now)

    def rebase(self, seconds: float) -> None:
        """Shifts the times of everything that is open, for a caller whose clock went on while nothing could arrive."""
        for queue in (self._running, self._ended, self._unowed):
            queue.shift(seconds)
        self._early_ends.shift(seconds)
        self._unsettled.shift(seconds)
        for route in self._routes.values():
            route.observed_at += seconds
        self._reports.shift(seconds)

    def _record_end(self, route: _Route, event: RouteObserved, at: float) -> None:
        route.observed, route.observed_at = event, at
        self._running.discard(event.route_id)
        (self._ended if report_is_owed(event) else self._unowed).add(event.route_id, at)

    def _take(self, held: HeldReport, now: float) -> None:
        """Keeps a report until its route is known, unless what is closed already shows that it has none."""
        report = held.report
        request = engine_request(report)
        if request is not None and request in self._spent:
            self.stats.superseded += 1
            return
        closed = self._closed.get(report.route_id)
        if closed is not None:
            if closed.replica is not None and not same_replica(closed.replica, replica_of(report)):
                self._orphan(report, OrphanReason.WRONG_REPLICA, now)
                return
            if not closed.reported:
                self._orphan(report, OrphanReason.LATE, now)
                return
        for gone in self._reports.add(held):
            self._orphan(gone, OrphanReason.EVICTED, now)
        self._schedule_match(self._group_of(report), now)

    def _group_of(self, report: MaterializationReport) -> bytes:
        named = self._routes.get(report.route_id) if report.route_id is not None else None
        return named.opened.prompt_key if named is not None else report.prompt_key

    def _schedule_match(self, prompt_key: bytes, at: float) -> None:
        if self._settle == 0.0:
            self._close_settled(prompt_key, at)
        elif prompt_key not in self._unsettled:
            self._unsettled.add(prompt_key, at)

    def _match(self, prompt_key: bytes) -> dict[str, Match]:
        routes = [self._routes[route_id] for route_id in self._by_prompt.of(prompt_key)]
        reports = self._reports.of(prompt_key, (route.opened.route_id for route in routes))
        return match([route.open for route in routes], reports, self._closed) if reports else {}

    def _close_settled(self, prompt_key: bytes, now: float) -> None:
        """Closes every pair of the group that has its end and has settled."""
        closed: list[str] = []
        unripe = False
        for route_id, pair in self._match(prompt_key).items():
            route = self._routes[route_id]
            if route.observed is None or pair.doubtful:
                continue
            if max(route.observed_at, pair.at) + self._settle > now:
                unripe = True
            else:
                self._close(route_id, pair, now)
                closed.append(route_id)
        if unripe:
            self._unsettled.add(prompt_key, now)
        for route_id in closed:
            self._reconsider(route_id, now)

    def _close_overdue(self, route_id: str, now: float) -> None:
        """Closes a route whose time is over, with the report that is its own, or with none."""
        route = self._routes[route_id]
        self._close(route_id, self._match(route.opened.prompt_key).get(route_id), now)
        self._reconsider(route_id, now)

    def _reconsider(self, closed_id: str, now: float) -> None:
        """Looks again at reports that named a route which closed without them: some are orphans now, some may belong to
        another."""
        for report_id in self._reports.naming(closed_id):
            if report_id in self._reports:  # the one before may have closed a route with it
                self._take(self._reports.drop(report_id), now)

    def _close(self, route_id: str, pair: Match | None, now: float) -> None:
        route = self._routes.pop(route_id)
        prompt_key = route.opened.prompt_key
        self._routers.drop(route.opened.router, route_id)
        self._by_prompt.discard(prompt_key, route_id)
        self._running.discard(route_id)
        self._ended.discard(route_id)
        self._unowed.discard(route_id)
        served = served_by(route.opened, route.observed)
        if pair is not None and route.observed is None:
            served = replica_of(pair.report)  # the report names the route, so its replica is surer than the pin
        self._closed.add(route_id, prompt_key, Remembered(served, pair is not None))
        if pair is not None:
            request = engine_request(pair.report)
            if request is not None:
                self._spent[request] = None
            for report_id in pair.report_ids:
                self._reports.drop(report_id)
            self.stats.superseded += len(pair.report_ids) - 1
        self.stats.closed += 1
        report, joined_by = (pair.report, pair.joined_by) if pair is not None else (None, JoinedBy.NONE)
        closed = close_route(route.opened, route.observed, report, joined_by, now)
        told, kept = (each.load_seconds if each is not None else None for each in (report, closed.report))
        self.stats.implausible_loads += told != kept
        self._emit(self._on_close, closed)

    def _give_up(self, due: Sequence[str], now: float) -> None:
        """Ends the wait of reports whose time is over: those of a route that still runs wait on, the others become
        orphans. Each prompt is matched once, since an orphan that goes leaves the pairs of the others as they are:
        otherwise many reports of one prompt would be matched with each other each time."""
        taken: dict[bytes, set[str]] = {}
        for report_id in due:
            report = self._reports[report_id].report
            group = self._group_of(report)
            if group not in taken:
                taken[group] = {each for pair in self._match(group).values() for each in pair.report_ids}
            if report_id in taken[group]:
                self._reports.wait_again(report_id, now)
            else:
                self._reports.drop(report_id)
                self._orphan(report, self._orphan_reason(report), now)

    def _orphan_reason(self, report: MaterializationReport) -> OrphanReason:
        """Why no open route took the report: by the route that it names, else by the routes with its prompt."""
        if report.route_id is not None:
            named = self._routes.get(report.route_id)
            if named is None and self._closed.get(report.route_id) is None:
                return OrphanReason.NO_ROUTE
            wrong = named is not None and fit(named.open, report) is Fit.OTHER
            return OrphanReason.WRONG_REPLICA if wrong else OrphanReason.ALREADY_REPORTED
        replica = replica_of(report)
        closed = list(self._closed.of_prompt(report.prompt_key))
        here = [t for t in closed if t is not None and (t.replica is None or same_replica(t.replica, replica))]
        if here:
            return OrphanReason.ALREADY_REPORTED if all(t.reported for t in here) else OrphanReason.LATE
        open_here = [fit(self._routes[i].open, report) for i in self._by_prompt.of(report.prompt_key)]
        if any(found is Fit.SAME for found in open_here):
            return OrphanReason.ALREADY_REPORTED
        return OrphanReason.WRONG_REPLICA if closed or open_here else OrphanReason.NO_ROUTE

    def _orphan(self, report: MaterializationReport, reason: OrphanReason, now: float) -> None:
        self.stats.orphans += 1
        if self._on_orphan is not None:
            self._emit(self._on_orphan, OrphanReport(report, reason, now))

    def _emit(self, callback: Callable[[_T], None], value: _T) -> None:
        """Calls a listener once the tracker is consistent; a listener's fault may not reach the request that closed the
        route."""
        try:
            callback(value)
        except Exception:  # noqa: BLE001 - counted and logged
            self.stats.callback_errors += 1
            _throttled.exception("a listener of the route tracker failed")
