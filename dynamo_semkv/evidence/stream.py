"""Stream: the events of one emitter; which of them count, in which order, and when its donors get no credit.

Rules (ai-dynamo/dynamo#10127, and what went wrong elsewhere):

* `event_id` counts up by one. Below the cursor: duplicate. Above: a gap; what came early is held, the stream is
  quarantined, and it is released when the missing events come, or when a reset says that everything before it is gone.
* A generation is fenced by equality, never by age. Once another one took its place, its late events are refused for
  ever (bounded memory: the last 64 are remembered).
* A new process may start at `event_id` 0 with or without a reset; an unknown generation in the middle of a stream is a
  lost reset, so a gap.
* The first event ever seen must have `event_id` 0, be a reset, or wait: a consumer that joins late does not know what
  it missed.

A stream knows nothing about donors; it decides about events.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum

from dynamo_semkv.contracts.donor_events import DonorEvent, GenerationReset
from dynamo_semkv.evidence.donor import Epoch, StreamKey

RETIRED_KEPT = 64


class Verdict(str, Enum):
    """What became of one event. Closed: counters use it as a label."""

    APPLIED = "applied"
    DUPLICATE = "duplicate"
    HELD = "held"
    """After a gap: kept until the missing events come."""
    LOST = "lost"
    """After a gap that can no longer be filled (too much was held): dropped until a reset."""
    STALE_GENERATION = "stale_generation"
    FOREIGN_LOCATION = "foreign_location"
    """The event claims KV on a worker or rank that is not the emitter's own."""
    FOREIGN_DONOR = "foreign_donor"
    """About a donor that another stream registered."""
    FOREIGN_SCOPE = "foreign_scope"
    """A purge of somebody else's donors."""
    UNKNOWN_DONOR = "unknown_donor"
    MALFORMED_NAMESPACE = "malformed_namespace"
    BAD_SKETCH = "bad_sketch"
    TOO_MANY_STREAMS = "too_many_streams"
    UNLISTED_RANK = "unlisted_rank"
    """The event is of a rank that the worker's model card does not have."""


def generation_of(event: DonorEvent) -> str:
    """Emitters write integers or strings; both are compared as text."""
    data = event.data
    return str(data.generation if isinstance(data, GenerationReset) else data.provider_generation)


class Stream:
    """State of one `(worker_id, dp_rank)` stream."""

    def __init__(self, key: StreamKey, max_held: int) -> None:
        self.key = key
        self.epoch: Epoch | None = None
        """None until the stream is understood for the first time."""
        self.absent_since: float | None = None
        """The worker is gone from discovery: no credit, whatever its events say."""
        self.expected = 0
        self.lost = False
        self._held: dict[tuple[str, int], DonorEvent] = {}
        self._max_held = max_held
        self._retired: OrderedDict[str, None] = OrderedDict()

    @property
    def quarantined(self) -> bool:
        """Whether there is a gap: the donors are known, but not which of them are still there."""
        return self.lost or bool(self._held)

    @property
    def held(self) -> int:
        """Number of events that came before an earlier one."""
        return len(self._held)

    @property
    def generation(self) -> str | None:
        """The current generation; None before the first one, and after the last one was given up."""
        return self.epoch.generation if self.epoch is not None else None

    def admit(self, event: DonorEvent, *, may_hold: bool = True) -> tuple[Verdict, list[DonorEvent]]:
        """The events that may be applied now, in order (this one, those that waited for it, or none). If they start
        with a new epoch, `self.epoch` is already the new one and the old one has ended. `may_hold`: there is room left
        to keep events that came early."""
        generation = generation_of(event)
        if generation in self._retired:
            return Verdict.STALE_GENERATION, []
        if not self._enter_generation(event, generation):
            return self._hold(event, generation, may_hold)
        if event.event_id < self.expected:
            return Verdict.DUPLICATE, []
        if event.event_id > self.expected:
            return self._hold(event, generation, may_hold)
        ready = [event]
        self.expected = event.event_id + 1
        while (waiting := self._held.pop((generation, self.expected), None)) is not None:
            ready.append(waiting)
            self.expected += 1
        self._update_credit()
        return Verdict.APPLIED, ready

    def mark_absent(self, at: float) -> None:
        """The worker is gone from discovery (idempotent)."""
        if self.absent_since is None:
            self.absent_since = at
        self._update_credit()

    def readmit(self, generation: str) -> bool:
        """The worker is back. True if it is known to be in the same generation; otherwise it has to send a reset."""
        if self.absent_since is None or self.epoch is None or self.epoch.generation != generation:
            return False
        self.absent_since = None
        self._update_credit()
        return True

    def begin_empty(self) -> None:
        """The generation goes on without any donor: all donors so far are gone."""
        if self.epoch is not None:
            self.epoch.end()
            self.epoch = Epoch(self.epoch.generation)
            self._update_credit()

    def forget(self) -> None:
        """The generation will not come back: its late events are refused from now on."""
        if self.epoch is not None:
            self.epoch.end()
            self._retire(self.epoch.generation)
            self.epoch = None
        self._held.clear()

    def mark_lost(self) -> None:
        """Events were lost and cannot be had again: no credit until a reset."""
        self._held.clear()
        self.lost = True
        self._update_credit()

    def _enter_generation(self, event: DonorEvent, generation: str) -> bool:
        """Makes `generation` the current one where this event may do that. False: the event belongs to a generation
        that has not begun."""
        reset = isinstance(event.data, GenerationReset)
        current = self.epoch is not None and self.epoch.generation == generation
        if reset and (not current or event.event_id >= self.expected):
            self._begin_epoch(generation, event.event_id)
        elif not current and event.event_id == 0:
            self._begin_epoch(generation, 0)
        elif not current:
            return False
        return True

    def _begin_epoch(self, generation: str, event_id: int) -> None:
        if self.epoch is not None:
            self.epoch.end()
            if self.epoch.generation != generation:
                self._retire(self.epoch.generation)
                # The worker restarted: what made it absent was its last epoch.
                self.absent_since = None
        self.epoch = Epoch(generation)
        self.expected = event_id
        self.lost = False
        self._held = {at: event for at, event in self._held.items() if at[0] == generation and at[1] > event_id}

    def _retire(self, generation: str) -> None:
        self._retired[generation] = None
        while len(self._retired) > RETIRED_KEPT:
            self._retired.popitem(last=False)

    def _hold(self, event: DonorEvent, generation: str, may_hold: bool) -> tuple[Verdict, list[DonorEvent]]:
        if (generation, event.event_id) in self._held:
            return Verdict.DUPLICATE, []
        if self.lost or not may_hold or len(self._held) >= self._max_held:
            self._held.clear()
            self.lost = True
        else:
            self._held[(generation, event.event_id)] = event
        self._update_credit()
        return (Verdict.LOST if self.lost else Verdict.HELD), []

    def _update_credit(self) -> None:
        if self.epoch is not None and not self.epoch.over:
            self.epoch.creditable = not self.quarantined and self.absent_since is None
