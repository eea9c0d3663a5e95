"""EarlyEnds: ends of routes whose opening has not come yet, each by who told it.

    EarlyEnds(ttl_seconds, limit)   .add(event, speaker, at) -> new?   .take(route_id, speaker) -> event?
                                    .expire(now)   .shift(seconds)

`speaker` is the subject that the end came on; None where the caller vouches for it. Ends of one route that several tell
are kept apart, so a false one cannot take the place of the right one, and whoever has most gives up its own when there
is no room.
"""

from __future__ import annotations

from typing import NamedTuple

from dynamo_semkv.contracts.route_events import RouteObserved
from dynamo_semkv.evidence.shares import Shares
from dynamo_semkv.outcome.queues import DueQueue


class _Key(NamedTuple):
    route_id: str
    speaker: str | None


class EarlyEnds:
    def __init__(self, ttl_seconds: float, limit: int) -> None:
        self.unmatched = 0
        """Ends whose opening never came."""
        self._limit = limit
        self._ends: dict[_Key, RouteObserved] = {}
        self._due = DueQueue[_Key](ttl_seconds)
        self._shares = Shares[str | None, _Key]()

    def add(self, event: RouteObserved, speaker: str | None, at: float) -> bool:
        """False: it is known."""
        key = _Key(event.route_id, speaker)
        if key in self._ends:
            return False
        self._ends[key] = event
        self._due.add(key, at)
        self._shares.use(speaker, key)
        while len(self._ends) > self._limit and (victim := self._shares.victim()) is not None:
            self._drop(victim[1])
        return True

    def take(self, route_id: str, speaker: str) -> RouteObserved | None:
        """What `speaker`, or the caller itself, told of the route's end; it is kept no longer."""
        for key in (_Key(route_id, None), _Key(route_id, speaker)):
            if key in self._ends:
                return self._pop(key)
        return None

    def expire(self, now: float) -> None:
        for key in self._due.pop_due(now):
            self._drop(key)

    def shift(self, seconds: float) -> None:
        self._due.shift(seconds)

    def _drop(self, key: _Key) -> None:
        self._pop(key)
        self.unmatched += 1

    def _pop(self, key: _Key) -> RouteObserved:
        self._due.discard(key)
        self._shares.drop(key.speaker, key)
        return self._ends.pop(key)
