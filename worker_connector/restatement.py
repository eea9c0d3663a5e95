"""Decides when a replica begins a new generation of its donor events and registers everything resident again.

A routine generation begins before the bus forgets how the present one began. A router that starts later than the bus
remembers would otherwise wait for ever for the beginning of the stream, and one that was confused by a forged event of
ours would never trust it again. It also begins before registrations expire: one holds for RESTATES_PER_TTL of these
intervals, so that one that is late or lost costs nothing, while the donors of an emitter that fell silent end. After a
loss consumers have a gap, and a new generation ends it. The answers to losses that follow each other wait longer and
longer, since a generation that is lost again costs the broker everything and consumers gain nothing. Pure but for the
clock that is handed in."""

from __future__ import annotations

import math
from collections.abc import Callable

RESTATES_PER_MEMORY = 6
"""How often everything resident is registered again within the time that the bus keeps events, so that it always holds
the beginning of a generation."""
RESTATES_PER_TTL = 3
"""How often within the time to live of a registration."""
RESTATE_EVENTS = 20_000
"""A new generation begins at the latest after so many donor events: the bus forgets by bytes too."""
FIRST_BACKOFF_SECONDS = 1.0
LAST_BACKOFF_SECONDS = 60.0
CALM_SECONDS = 300.0
"""Without a loss for so long, the next one is answered at once again."""


def restate_every(memory_seconds: float, max_donor_age: float) -> float:
    """Seconds between two routine generations. `memory_seconds`: how long the bus keeps donor events
    (`bus.stream_max_age_seconds`); `max_donor_age`: how long routers believe one (`evidence.max_donor_age`)."""
    return min(memory_seconds / RESTATES_PER_MEMORY, max_donor_age / RESTATES_PER_TTL)


class Restatement:
    """Not thread-safe: the leader's lock covers it. Times are seconds of `clock`."""

    def __init__(self, every_seconds: float, clock: Callable[[], float]) -> None:
        """`every_seconds`: between two routine generations (`restate_every`)."""
        self._clock = clock
        self._every = every_seconds
        self._stated_at = clock()
        self._lost_at = -math.inf
        self._backoff = 0.0
        self.due_at = math.inf
        """When a loss is to be answered; infinite: no loss is unanswered."""

    def lost(self) -> None:
        """Consumers have a gap in our donor events. Further losses until the answer are part of it."""
        now = self._clock()
        if now - self._lost_at > CALM_SECONDS:
            self._backoff = 0.0
        self._lost_at = now
        if self.due_at == math.inf:
            self.due_at = now + self._backoff
            self._backoff = min(max(2 * self._backoff, FIRST_BACKOFF_SECONDS), LAST_BACKOFF_SECONDS)

    def answers_a_loss(self) -> bool:
        """True when it is time for the new generation that a loss asks for."""
        return self._clock() >= self.due_at

    def is_routine(self, events_to_forget: int | None) -> bool:
        """True when it is time for a new generation without a loss. `events_to_forget`: donor events since the last one
        that a new one would make needless; None: the last one is still being sent, and a new one would have to begin
        all over."""
        if events_to_forget is None:
            return False
        return self._clock() - self._stated_at >= self._every or events_to_forget >= RESTATE_EVENTS

    def begun(self) -> None:
        """A new generation begins now."""
        self._stated_at = self._clock()
        self.due_at = math.inf
