"""Expiry: finds the donors that were not registered again in time, without looking at the others."""

from __future__ import annotations

import math
from heapq import heappop, heappush

from dynamo_semkv.evidence.chains import NOBODY, Chains, Slots


class Expiry:
    """Members, slots of `slots`, by the span of time in which they end. Adding one costs the same however many there
    are."""

    def __init__(self, slots: Slots, max_age: float) -> None:
        """`max_age`: how many seconds ahead members end, may be infinite. A span is a second, or 1/4,096 of that."""
        self._chains = Chains(slots)
        self._span = max(1.0, max_age / 4_096) if max_age < math.inf else 1.0
        self._heads: dict[int, int] = {}
        """Head of the chain of those that end with this span."""
        self._spans: list[int] = []
        """The same spans, as a heap."""

    def add(self, member: int, ends_at: float) -> None:
        """Instead of when it would have ended before. Infinite: never."""
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
        """One that has ended; the caller discards it. None: there is none."""
        while self._spans and self._spans[0] * self._span <= now:
            member = self._chains.first(self._heads[self._spans[0]])
            if member != NOBODY:
                return member
            self._chains.end(self._heads.pop(heappop(self._spans)))
        return None
