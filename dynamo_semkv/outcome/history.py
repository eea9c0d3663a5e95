"""History: the last closed routes, the totals since the oldest event on the bus, and their course over time. Bounded.

    History(size)

A restarted router gets all of it again by replay.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from dynamo_semkv.outcome.closed import ClosedRoute, OrphanReport
from dynamo_semkv.outcome.totals import STEPS, Totals

BUCKET_SECONDS = 10.0
BUCKETS = 360
"""Buckets that are kept: one hour."""


@dataclass
class Bucket:
    """What closed within BUCKET_SECONDS from `start` (Unix seconds)."""

    start: float
    requests: int = 0
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STEPS, 0))


class History:
    """Keeps the last `size` routes by id and request, and sums over all. One thread."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._routes: OrderedDict[str, ClosedRoute] = OrderedDict()
        self._by_request: dict[str, list[str]] = {}
        self._totals = Totals()
        self._buckets: dict[int, Bucket] = {}
        self._since: float | None = None

    def __len__(self) -> int:
        return len(self._routes)

    @property
    def since(self) -> float | None:
        """When the oldest route that is counted was opened, by its router's clock."""
        return self._since

    def add(self, route: ClosedRoute) -> None:
        """Takes a closed route; each comes once, by the tracker's contract. ValueError for a route id that is still
        kept, so that no route is counted twice."""
        if route.route_id in self._routes:
            raise ValueError(f"route {route.route_id} is in the history already")
        self._routes[route.route_id] = route
        if route.opened.request_id is not None:
            self._by_request.setdefault(route.opened.request_id, []).append(route.route_id)
        while len(self._routes) > self._size:
            self._forget(self._routes.popitem(last=False)[1])
        self._totals.add(route)
        opened_at = route.opened.opened_at
        self._since = opened_at if self._since is None else min(self._since, opened_at)
        self._add_to_course(route)

    def add_orphan(self, orphan: OrphanReport) -> None:
        """Counts the report; it is not kept."""
        self._totals.add_orphan(orphan)

    def recent(self, count: int) -> list[ClosedRoute]:
        """The last `count` routes, newest first."""
        routes = reversed(self._routes.values())
        return [route for _, route in zip(range(count), routes, strict=False)]

    def get(self, route_id: str) -> ClosedRoute | None:
        """The route, if it is among the last `size`; else None."""
        return self._routes.get(route_id)

    def of_request(self, request_id: str) -> list[list[ClosedRoute]]:
        """The requests with this id (Dynamo's context id, which clients may choose), one per tenant, the oldest first:
        of each its closed attempts in their order."""
        requests: dict[str | None, list[ClosedRoute]] = {}
        for route_id in self._by_request.get(request_id, ()):
            route = self._routes[route_id]
            requests.setdefault(route.opened.tenant, []).append(route)
        found = [sorted(routes, key=lambda route: route.opened.attempt) for routes in requests.values()]
        return sorted(found, key=lambda routes: routes[0].opened.opened_at)

    def totals(self) -> Totals:
        """The running totals themselves: read them, do not keep them."""
        return self._totals

    def course(self) -> list[Bucket]:
        """The buckets of the last hour, oldest first; buckets in which nothing closed are left out."""
        return [self._buckets[number] for number in sorted(self._buckets)]

    def _forget(self, route: ClosedRoute) -> None:
        request_id = route.opened.request_id
        if request_id is None:
            return
        self._by_request[request_id].remove(route.route_id)
        if not self._by_request[request_id]:
            del self._by_request[request_id]

    def _add_to_course(self, route: ClosedRoute) -> None:
        number = int(route.closed_at // BUCKET_SECONDS)
        bucket = self._buckets.get(number)
        if bucket is None:
            newest = max(self._buckets, default=number)
            if number <= newest - BUCKETS:
                return
            for old in [key for key in self._buckets if key <= max(newest, number) - BUCKETS]:
                del self._buckets[old]
            bucket = self._buckets[number] = Bucket(number * BUCKET_SECONDS)
        bucket.requests += 1
        for step in STEPS:
            bucket.tokens[step] += getattr(route.funnel, step)
