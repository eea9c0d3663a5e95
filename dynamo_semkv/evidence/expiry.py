"""Expiry: finds the donors that were not registered again in time, without looking at the others."""

from __future__ import annotations

import math
from heapq import heappop, heappush

from dynamo_semkv.evidence.chains import NOBODY, Chains, Slots


class Expiry:
    """Members, which are slots of `slots`, grouped by the span of time in which they end. Adding one is O(1), or
    O(log n) in the number of spans for the first of a span."""

    def __init__(self, slots: Slots, max_age: float) -> None:
        """`max_age`: the most seconds until a member ends; may be infinite. A span is one second, or `max_age` / 4,096
        where that is longer."""
        self._chains = Chains(slots)
        self._span = max(1.0, max_age / 4_096) if max_age < math.inf else 1.0
        self._heads: dict[int, int] = {}
        """Head of the chain of those that end with this span."""
        self._spans: list[int] = []
        """The same spans, as a heap."""

    def add(self, member: int, ends_at: float) -> None:
        """The member ends at `ends_at`, whenever it would have ended before. Infinite: never."""
        self.discard(member)
        if ends_at == math.inf:
            return
        span = math.ceil(ends_at / self._span)
        head = self._heads.get(span)
        if head is None:
            head = self._heads[span] = self._chains.new()
            heappush(self._spans, span)
        self._chains.append(head, member)

    def discard(self, member: int) -> None:
        """The member does not end any more; nothing happens if it was never added."""
        self._chains.remove(member)

    def due(self, now: float) -> int | None:
        """A member whose span is over; the caller discards it. None: there is none."""
        while self._spans and self._spans[0] * self._span <= now:
            member = self._chains.first(self._heads[self._spans[0]])
            if member != NOBODY:
                return member
            self._chains.end(self._heads.pop(heappop(self._spans)))
        return None
