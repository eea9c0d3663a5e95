"""DonorStream: the donor lifecycle events of one replica, numbered without a gap (contracts/donor_events.py).

The number is given to an event and the event handed to the bus under one lock, so numbers and order agree. Whatever the
bus could not keep is a gap that consumers answer by quarantine; `reset` ends it: a new generation, after which
everything resident is registered anew.
"""

from __future__ import annotations

import threading
from enum import Enum

from msgspec.structs import replace

from dynamo_semkv.contracts.codec import MSGPACK, encode_donor_event
from dynamo_semkv.contracts.donor_events import (
    SCHEMA_VERSION,
    DonorEvent,
    DonorEventData,
    DonorRegistered,
    GenerationReset,
)
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.identity import StableReplica, stable_worker_id
from dynamo_semkv.contracts.subjects import donor_events
from worker_connector.donors.sink import ReportSink


class Sent(Enum):
    """What became of an event."""

    YES = "yes"
    LOST = "lost"
    """The bus had no room: consumers have a gap."""
    TOO_LARGE = "too_large"
    """It can never be stored."""


class DonorStream:
    """Thread-safe. Event ids go on over resets and start at 0 with the process, whose first event is a reset."""

    def __init__(self, sink: ReportSink, replica: StableReplica, ttl: float | None = None) -> None:
        """`ttl`: seconds for which a registration holds unless it is said again; None: the events do not say."""
        self._sink = sink
        self._ttl = ttl
        self._subject = donor_events(replica)
        self._worker_id = stable_worker_id(replica.stable_routing_id)
        self._dp_rank = replica.dp_rank
        self._lock = threading.Lock()
        self._next_id = 0
        self.emitted = 0
        self.since_reset = 0
        """Events since the last reset: what a consumer that joins now has to find on the bus to understand the rest."""
        self.lost = 0
        """Events that the bus refused; each one is a gap until the next reset."""
        self.oversized = 0
        """Events that are larger than any broker may take, or than ours does."""

    @property
    def subject(self) -> str:
        """The bus subject of its events."""
        return self._subject

    @property
    def worker_id(self) -> int:
        """How this replica is named in locations."""
        return self._worker_id

    @property
    def dp_rank(self) -> int:
        """The data-parallel rank that its locations name."""
        return self._dp_rank

    @property
    def has_room(self) -> bool:
        """May more be said without pushing out what waits already? A restatement goes at the pace at which this turns
        true again."""
        return self._sink.has_room(self._subject)

    def reset(self, generation: str) -> Sent:
        """Announces a new generation: what was said before is void."""
        return self.emit(GenerationReset(generation=generation))

    def emit(self, data: DonorEventData) -> Sent:
        """An event that is too large uses up no number, so it makes no gap."""
        if isinstance(data, DonorRegistered):
            data = replace(data, ttl=self._ttl)
        with self._lock:
            event = DonorEvent(
                schema_version=SCHEMA_VERSION,
                event_id=self._next_id,
                worker_id=self._worker_id,
                dp_rank=self._dp_rank,
                data=data,
            )
            try:
                payload = encode_donor_event(event, MSGPACK)
            except ContractError:
                payload = b""
            if not payload or len(payload) > self._sink.largest_payload:
                self.oversized += 1
                return Sent.TOO_LARGE
            self._next_id += 1
            self.since_reset = 0 if isinstance(data, GenerationReset) else self.since_reset + 1
            if self._sink.publish(self._subject, payload, content_type=MSGPACK, persistent=True):
                self.emitted += 1
                return Sent.YES
            self.lost += 1
            return Sent.LOST
