"""EarlyEnds: ends of routes whose opening has not come yet, each kept by its sender.

    EarlyEnds(ttl_seconds, limit)   .add(event, subject, at) -> new?   .take(route_id, subject) -> event?
                                    .expire(now)   .shift(seconds)

`subject` is the bus subject that the end came on; None where the caller vouches for it. Ends of one route from several
senders are kept apart, so a false one cannot take the place of the right one, and the sender with most ends loses its
own when there is no room.
"""

from __future__ import annotations

from typing import NamedTuple

from dynamo_semkv.contracts.route_events import RouteObserved
from dynamo_semkv.evidence.shares import Shares
from dynamo_semkv.outcome.queues import DueQueue


class _Key(NamedTuple):
    route_id: str
    subject: str | None


class EarlyEnds:
    """Ends that wait for their opening, at most `limit` of them and none longer than `ttl_seconds`."""

    def __init__(self, ttl_seconds: float, limit: int) -> None:
        self.unmatched = 0
        """Ends whose opening never came."""
        self._limit = limit
        self._ends: dict[_Key, RouteObserved] = {}
        self._due = DueQueue[_Key](ttl_seconds)
        self._shares = Shares[str | None, _Key]()

    def add(self, event: RouteObserved, subject: str | None, at: float) -> bool:
        """Keeps an end. False: it is known."""
        key = _Key(event.route_id, subject)
        if key in self._ends:
            return False
        self._ends[key] = event
        self._due.add(key, at)
        self._shares.use(subject, key)
        while len(self._ends) > self._limit and (victim := self._shares.victim()) is not None:
            self._drop(victim[1])
        return True

    def take(self, route_id: str, subject: str) -> RouteObserved | None:
        """Removes and returns the end that `subject`, or the caller itself, sent for the route; None: there is none."""
        for key in (_Key(route_id, None), _Key(route_id, subject)):
            if key in self._ends:
                return self._pop(key)
        return None

    def expire(self, now: float) -> None:
        """Drops what has waited too long and counts it as unmatched."""
        for key in self._due.pop_due(now):
            self._drop(key)

    def shift(self, seconds: float) -> None:
        """Moves all waiting times by `seconds`; see RouteTracker.rebase."""
        self._due.shift(seconds)

    def _drop(self, key: _Key) -> None:
        self._pop(key)
        self.unmatched += 1

    def _pop(self, key: _Key) -> RouteObserved:
        self._due.discard(key)
        self._shares.drop(key.subject, key)
        return self._ends.pop(key)
