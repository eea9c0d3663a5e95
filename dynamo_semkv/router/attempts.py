"""How often a request came: Dynamo migrates a request under the same context id, so a second arrival is a second
attempt.

Clients may choose that id, so requests of two tenants may have the same: attempts are counted by id and tenant.

Nothing in a migrated request says so, and it may come to another router than the first time; so each router reads the
route events of the others. The number is for people: two arrivals within the time of one message on the bus may carry
the same number, and what keeps attempts apart is the route id.
"""

from __future__ import annotations

from collections import OrderedDict

MAX_REQUESTS = 16_384


class Attempts:
    """Counts arrivals per context id and tenant. Bounded: the second attempt of a request that was forgotten counts as
    a first one."""

    def __init__(self, limit: int = MAX_REQUESTS) -> None:
        self._limit = limit
        self._seen: OrderedDict[tuple[str, str | None], int] = OrderedDict()

    def next(self, request_id: str, tenant: str | None = None) -> int:
        """0 for the first arrival, 1 for the next, ... An empty id (a call without a context) is always a first one.
        `tenant`: as route events have it."""
        if not request_id:
            return 0
        attempt = self._seen.get((request_id, tenant), -1) + 1
        self._keep((request_id, tenant), attempt)
        return attempt

    def opened_elsewhere(self, request_id: str | None, tenant: str | None, attempt: int) -> None:
        """Takes over that another router (or this one, by the echo of its own event) opened a route for this
        request."""
        if request_id and attempt > self._seen.get((request_id, tenant), -1):
            self._keep((request_id, tenant), attempt)

    def _keep(self, request: tuple[str, str | None], attempt: int) -> None:
        self._seen[request] = attempt
        self._seen.move_to_end(request)
        while len(self._seen) > self._limit:
            self._seen.popitem(last=False)

    def __len__(self) -> int:
        return len(self._seen)
