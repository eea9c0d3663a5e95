"""DonorCatalog: every donor that may still be resident, from lifecycle events alone.

It belongs to one thread (the router's event loop), in which it calls its listeners; other threads may hold
CatalogDonors and read `creditable`. Whole streams are fenced by one assignment (see Epoch); their donors leave the
listeners in small steps, so that no purge stalls.

It does not know which replicas are alive (`router/replicas.py` says so through `purge_replica` and `readmit_replica`),
nor what a donor is worth to a request.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from dynamo_semkv.contracts.donor_events import (
    DonorEvent,
    DonorEvicted,
    DonorRegistered,
    DonorRelocated,
    DonorsPurged,
)
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.evidence.chains import NOBODY, Chains, Row, Sharded, Slots
from dynamo_semkv.evidence.donor import CatalogDonor, StreamKey, parts_of
from dynamo_semkv.evidence.emitters import donor_from, in_scope, may_place, may_purge, partition_of, restricted
from dynamo_semkv.evidence.expiry import Expiry
from dynamo_semkv.evidence.limits import CatalogLimits
from dynamo_semkv.evidence.provider import DonorListener
from dynamo_semkv.evidence.retention import Retention
from dynamo_semkv.evidence.stream import Stream, Verdict
from dynamo_semkv.evidence.streams import Streams
from dynamo_semkv.telemetry.throttled import Throttled

logger = logging.getLogger(__name__)
_throttled = Throttled(logger)

MAX_ROWS = 256
"""Streams in a snapshot."""


class DonorCatalog:
    """`clock`: monotonic seconds, used only for how long a worker has been gone, never for what is newer.

    When `limits` are reached, the oldest unused donor goes, of the largest namespace of the worker with most donors.
    """

    def __init__(
        self,
        listeners: Sequence[DonorListener] = (),
        *,
        clock: Callable[[], float],
        limits: CatalogLimits | None = None,
    ) -> None:
        limits = limits if limits is not None else CatalogLimits()
        self._listeners = tuple(listeners)
        self._clock = clock
        self._max_donors = limits.max_donors
        self._max_per_namespace = limits.max_donors_per_namespace
        self._max_bytes = limits.sketch_bytes
        self._absent_seconds = limits.absent_seconds
        self._max_age = limits.max_age_seconds
        self._streams = Streams(limits, is_empty=lambda key: not self._sizes[key], on_end=self._end_donors)
        self._slots = Slots()
        self._donors: Sharded[str, CatalogDonor] = Sharded()
        self._by_slot: Row[CatalogDonor] = Row()
        self._chains = Chains(self._slots)
        self._chain_of: dict[StreamKey, int] = {}
        """Head of the chain of a stream's donors, in the epoch that it is in."""
        self._sizes: Counter[StreamKey] = Counter()
        self._ended: deque[int] = deque()
        """Chains of donors whose epoch is over."""
        self._retention = Retention(self._slots)
        self._expiry = Expiry(self._slots, limits.max_age_seconds)
        self._count = 0
        self._on_use = self.touch  # one bound method for all donors
        self._bytes = 0
        self.counts: Counter[str] = Counter()
        """Events by Verdict, and `evicted_full`, `expired`, `unknown_segment`, `listener_error`."""

    def __len__(self) -> int:
        return self._count

    def apply(self, event: DonorEvent, stored_at: float | None = None) -> Verdict:
        """One event as it was decoded. Never raises; what it did is counted and returned. `stored_at`: when the bus
        stored it, by the clock that `expire` is given; None: now, by `clock`."""
        verdict, ready, stream = self._streams.admit(event)
        if stream is None or not ready:
            return self._counted(verdict)
        at = self._clock() if stored_at is None else stored_at
        outcome = self._apply(stream, ready[0], at)
        for waiting in ready[1:]:
            self._counted(self._apply(stream, waiting, at))
        self.sweep(16)
        return self._counted(outcome)

    def purge_replica(self, worker_wire_id: int, dp_rank: int) -> int:
        """The worker is gone from discovery: no credit, and late events of its last generation cannot bring it back.
        Its donors, whose number is returned, are kept for `absent_seconds`: it may only be out of sight."""
        key = StreamKey(worker_wire_id, dp_rank)
        stream = self._streams.get(key)
        if stream is None:
            return 0
        stream.mark_absent(self._clock())
        return self._sizes[key]

    def readmit_replica(self, worker_wire_id: int, dp_rank: int, generation: str) -> bool:
        """The worker is back and says which generation it is in: True when its donors count again. Another generation
        stays out until its own reset arrives; a restarted worker is never scored as warm."""
        stream = self._streams.get(StreamKey(worker_wire_id, dp_rank))
        return stream is not None and stream.readmit(generation)

    def set_ranks(self, worker_wire_id: int, ranks: frozenset[int]) -> None:
        """The ranks of a live worker's model card: events of others are refused from now on, and what came of them is
        over. Empty: the worker is not listed, and its ranks are not known."""
        self._streams.set_ranks(worker_wire_id, ranks)

    def get(self, donor_id: str) -> CatalogDonor | None:
        """None also for a donor whose epoch is over and that merely has not been swept."""
        donor = self._donors.get(donor_id)
        return donor if donor is not None and not donor.epoch.over else None

    def donors_of(self, worker_wire_id: int, dp_rank: int) -> list[CatalogDonor]:
        """The donors of one rank that are still registered, in order of registration."""
        return [donor for donor in self._donors_in(StreamKey(worker_wire_id, dp_rank)) if not donor.epoch.over]

    def touch(self, donor_id: str) -> None:
        """The donor was a match, so it is evicted later than one that never was. Any thread."""
        donor = self._donors.get(donor_id)
        if donor is not None:
            self._retention.touch(donor.slot)

    def sweep(self, limit: int = 64) -> int:
        """Takes at most `limit` donors whose epoch is over from the listeners. Every applied event sweeps a little;
        call it when idle."""
        swept = 0
        while self._ended and swept < limit:
            slot = self._chains.first(self._ended[0])
            if slot == NOBODY:
                self._chains.end(self._ended.popleft())
                continue
            donor = self._by_slot[slot]
            # One that was registered again in a later epoch is in that one's chain.
            self._chains.remove(slot)
            if donor is not None:
                self._remove(donor)
            swept += 1
        return swept

    def forget_absent(self) -> int:
        """Ends the streams whose worker has been gone for `absent_seconds`. Call it every few seconds; returns how many
        ended."""
        now = self._clock()
        gone = [
            stream
            for stream in self._streams
            if stream.absent_since is not None and now - stream.absent_since >= self._absent_seconds
        ]
        self._streams.forget(gone)
        return len(gone)

    def expire(self, now: float | None = None, limit: int = 1_000) -> int:
        """Removes at most `limit` donors that were not registered again in time, and returns how many. Call it about
        once a second. `now`: by the clock of `stored_at`; None: by `clock`."""
        now = self._clock() if now is None else now
        gone = 0
        while gone < limit and (slot := self._expiry.due(now)) is not None:
            donor = self._by_slot[slot]
            assert donor is not None
            self._remove(donor)
            gone += 1
        self.counts["expired"] += gone
        return gone

    def snapshot(self) -> dict[str, Any]:
        """JSON-able and bounded. Worker ids as strings: they exceed 2^53."""
        return {
            "donors": self._count,
            "sketch_bytes": self._bytes,
            "namespaces": self._retention.namespaces,
            "held_events": self._streams.held,
            "counts": dict(self.counts),
            "streams": [
                {
                    "worker_id": str(stream.key.worker_id),
                    "dp_rank": stream.key.dp_rank,
                    "generation": stream.generation,
                    "next_event_id": stream.expected,
                    "donors": self._sizes[stream.key],
                    "quarantined": stream.quarantined,
                    "absent": stream.absent_since is not None,
                }
                for stream in itertools.islice(self._streams, MAX_ROWS)
            ],
        }

    def _counted(self, verdict: Verdict) -> Verdict:
        self.counts[verdict.value] += 1
        return verdict

    def _apply(self, stream: Stream, event: DonorEvent, stored_at: float) -> Verdict:
        data = event.data
        if isinstance(data, DonorRegistered):
            return self._register(stream, data, stored_at)
        if isinstance(data, DonorEvicted):
            return self._evict(stream, data)
        if isinstance(data, DonorRelocated):
            return self._relocate(stream, data)
        if isinstance(data, DonorsPurged):
            return self._purge(stream, data)
        return Verdict.APPLIED  # a reset: the stream has begun a new epoch already

    def _register(self, stream: Stream, data: DonorRegistered, stored_at: float) -> Verdict:
        epoch = stream.epoch
        if epoch is None or not may_place(stream.key, data.location):
            return Verdict.FOREIGN_LOCATION
        known = self.get(data.donor_id)
        if known is not None and known.stream != stream.key:
            return Verdict.FOREIGN_DONOR
        partition = partition_of(data.namespace)
        if partition is None:
            return Verdict.MALFORMED_NAMESPACE
        try:
            ends_at = stored_at + min(self._max_age if data.ttl is None else data.ttl, self._max_age)
            donor = donor_from(data, partition, stream.key, epoch, self._on_use, ends_at)
        except ContractError as error:
            _throttled.warning("donor %r of %s dropped: %s", data.donor_id, stream.key, error)
            return Verdict.BAD_SKETCH
        self._store(donor)
        return Verdict.APPLIED

    def _evict(self, stream: Stream, data: DonorEvicted) -> Verdict:
        donor = self.get(data.donor_id)
        if donor is None:
            return Verdict.UNKNOWN_DONOR
        if donor.stream != stream.key:
            return Verdict.FOREIGN_DONOR
        gone = set(data.segments) if data.segments is not None else {segment_id for segment_id, _, _ in donor.segments}
        left = tuple(segment for segment in donor.segments if segment[0] not in gone)
        if not left:
            self._remove(donor)
        elif len(left) == len(donor.segments):
            self.counts["unknown_segment"] += 1
        else:
            sketch = restricted(donor.sketch, donor.token_count, left, donor.tokens_per_block)
            self._store(replace(donor, parts=parts_of(left, donor.token_count), sketch=sketch))
        return Verdict.APPLIED

    def _relocate(self, stream: Stream, data: DonorRelocated) -> Verdict:
        donor = self.get(data.donor_id)
        if donor is None:
            return Verdict.UNKNOWN_DONOR
        if donor.stream != stream.key:
            return Verdict.FOREIGN_DONOR
        if not may_place(stream.key, data.new_location):
            return Verdict.FOREIGN_LOCATION
        self._store(replace(donor, location=data.new_location))
        return Verdict.APPLIED

    def _purge(self, stream: Stream, data: DonorsPurged) -> Verdict:
        if not may_purge(stream.key, data.scope):
            return Verdict.FOREIGN_SCOPE
        own = list(self._donors_in(stream.key))
        leaving = [donor for donor in own if in_scope(donor, data.scope)]
        if len(leaving) == len(own):
            stream.begin_empty()
            self._end_donors(stream.key)
        else:
            for donor in leaving:
                self._remove(donor)
        return Verdict.APPLIED

    def _store(self, donor: CatalogDonor) -> None:
        """Adds the donor or replaces it: donors are a set, so two registrations and one eviction leave nothing."""
        known = self._donors.get(donor.donor_id)
        if known is not None:
            self._unlink(known)
            donor = replace(donor, slot=known.slot)
        else:
            donor = replace(donor, slot=self._slots.take())
            self._count += 1
        self._donors[donor.donor_id] = donor
        self._by_slot[donor.slot] = donor
        head = self._chain_of.get(donor.stream)
        if head is None:
            head = self._chain_of[donor.stream] = self._chains.new()
        self._chains.append(head, donor.slot)
        self._sizes[donor.stream] += 1
        self._retention.add(donor.namespace_digest_hex, donor.stream.worker_id, donor.slot)
        self._expiry.add(donor.slot, donor.ends_at)
        self._bytes += _sketch_bytes(donor)
        self._make_room(donor.namespace_digest_hex)
        if self._donors.get(donor.donor_id) is donor:
            self._notify(lambda listener: listener.donor_added(donor))

    def _make_room(self, namespace: str) -> None:
        while self._retention.size(namespace) > self._max_per_namespace:
            self._evict_for_room(namespace)
        while self._count > self._max_donors or (self._bytes > self._max_bytes and self._count > 1):
            self._evict_for_room(None)

    def _evict_for_room(self, namespace: str | None) -> None:
        victim = self._retention.victim(namespace)
        donor = self._by_slot[victim] if victim is not None else None
        if donor is not None:
            self.counts["evicted_full"] += 1
            self._remove(donor)

    def _remove(self, donor: CatalogDonor) -> None:
        self._unlink(donor)
        del self._donors[donor.donor_id]
        self._by_slot[donor.slot] = None
        self._slots.give_back(donor.slot)
        self._count -= 1
        self._notify(lambda listener: listener.donor_removed(donor.donor_id))

    def _unlink(self, donor: CatalogDonor) -> None:
        self._retention.discard(donor.namespace_digest_hex, donor.stream.worker_id, donor.slot)
        self._expiry.discard(donor.slot)
        self._bytes -= _sketch_bytes(donor)
        self._chains.remove(donor.slot)
        if not donor.epoch.over:
            self._sizes[donor.stream] -= 1
            if not self._sizes[donor.stream]:
                del self._sizes[donor.stream]
                self._chains.end(self._chain_of.pop(donor.stream))

    def _end_donors(self, key: StreamKey) -> None:
        """The stream's donors so far belong to an epoch that is over; they leave step by step."""
        ended = self._chain_of.pop(key, None)
        del self._sizes[key]
        if ended is not None:
            self._ended.append(ended)

    def _donors_in(self, key: StreamKey) -> Iterator[CatalogDonor]:
        """In order of registration. Not to be changed meanwhile."""
        head = self._chain_of.get(key)
        for slot in self._chains.members(head) if head is not None else ():
            donor = self._by_slot[slot]
            if donor is not None:
                yield donor

    def _notify(self, what: Callable[[DonorListener], None]) -> None:
        for listener in self._listeners:
            try:
                what(listener)
            except KeyboardInterrupt:
                raise
            except BaseException:  # noqa: BLE001 - a listener's fault, SystemExit included, must not cost the others their events, or the loop
                self.counts["listener_error"] += 1
                _throttled.exception("a donor listener failed; its index may miss a donor")


def _sketch_bytes(donor: CatalogDonor) -> int:
    return len(donor.sketch.raw) if donor.sketch is not None else 0
