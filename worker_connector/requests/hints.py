"""Hints that reached this engine: parsing, and the out-of-band table.

TensorRT-LLM carries no hint to its requests yet (NVIDIA/TensorRT-LLM#18153), so the router also sends each envelope to
the replica, keyed by the digest of the request's tokens, and the leader finds it by hashing the tokens itself. A
request that does carry `kv_hints` needs no table. A hint is advice: nothing here decides what is correct, and a lost
one costs the route's id on the report and nothing else.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dynamo_semkv.contracts import hints as wire
from dynamo_semkv.contracts.codec import (
    UnsupportedVersion,
    check_envelope,
    decode_hint_delivery,
    envelope_from_plain,
    parse_donor_payload,
    parse_fetch_payload,
)
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.hints import DonorHint, FetchHint, HintDelivery, KvHintsEnvelope
from dynamo_semkv.contracts.identity import StableReplica
from dynamo_semkv.telemetry.traceparent import parse as parse_traceparent

_PER_PROMPT = 64
_REMEMBERED_TTLS = 30.0
"""How long it is remembered that a hint expired before its request came, in times to live: a request may wait long in
an engine."""


@dataclass(frozen=True)
class ParsedHints:
    """The actions of one envelope that this build knows."""

    donor: DonorHint | None = None
    fetch: FetchHint | None = None
    traceparent: str | None = None


class HintReader:
    """Envelope -> known actions. What is not known, or not well formed, is skipped and counted; the other actions go
    on."""

    def __init__(self, *, fetches: bool = False) -> None:
        """`fetches`: this worker pulls blocks on `kv.fetch`."""
        self._fetches = fetches
        self.on_fetch: Callable[[Any], None] | None = None
        """Told of each `Attempt`, on the scheduler's thread; must be quick."""
        self.counts: Counter[str] = Counter()
        """`donor`, `fetch`, `fetch_not_supported`, `fetch_foreign`, `unknown_action`, `unknown_version`, `bad_payload`,
        `bad_envelope`, `unsupported_envelope`."""

    def parse(
        self, envelope: KvHintsEnvelope, traceparent: str | None = None, *, by_dynamo: bool = False
    ) -> ParsedHints:
        """`by_dynamo`: it came with the request that Dynamo dispatched. Only Dynamo's router says where blocks may be
        pulled from: a `kv.fetch` that came another way is `fetch_foreign`, and not looked at."""
        donor: DonorHint | None = None
        fetch: FetchHint | None = None
        try:
            check_envelope(envelope)
            for action in envelope.actions:
                try:
                    if action.action_type == wire.DONOR_ACTION and action.action_version == wire.DONOR_VERSION:
                        found = parse_donor_payload(action)
                        donor = donor or found
                        self.counts["donor"] += 1
                    elif action.action_type == wire.FETCH_ACTION and action.action_version == wire.FETCH_VERSION:
                        if not by_dynamo:
                            self.counts["fetch_foreign"] += 1
                            continue
                        fetch = fetch or parse_fetch_payload(action)
                        self.counts["fetch" if self._fetches else "fetch_not_supported"] += 1
                    elif action.action_type in (wire.DONOR_ACTION, wire.FETCH_ACTION):
                        self.counts["unknown_version"] += 1
                    else:
                        self.counts["unknown_action"] += 1
                except ContractError:
                    self.counts["bad_payload"] += 1
        except UnsupportedVersion:
            self.counts["unsupported_envelope"] += 1
        except ContractError:
            self.counts["bad_envelope"] += 1
        contexts = (traceparent, donor.traceparent if donor is not None else None)
        # It goes onto the report: what is no trace context, of whatever length, is none.
        return ParsedHints(donor, fetch, next((text for text in contexts if parse_traceparent(text) is not None), None))

    def of_request(self, request: Any) -> ParsedHints | None:
        """From `request.kv_hints`; None where the request has none, so that the table is asked."""
        native = getattr(request, "kv_hints", None)
        if native is None:
            return None
        try:
            envelope = native if isinstance(native, KvHintsEnvelope) else envelope_from_plain(native)
            return self.parse(envelope, by_dynamo=True)
        except UnsupportedVersion:
            self.counts["unsupported_envelope"] += 1
        except ContractError:
            self.counts["bad_envelope"] += 1
        return None


@dataclass(eq=False)
class _Row:
    delivery: HintDelivery
    received_ns: int
    expires: float
    spent: bool = False


class HintTable:
    """Deliveries of the last seconds by prompt key; bounded; thread-safe (the bus thread puts, the reporter takes).

    Equal prompts in flight have one row each, oldest first. A row's route id is given out once, or one route would be
    closed by another route's report; its last row then stays until it expires, without the id, for a request that comes
    again. That a hint expired unused is remembered for a while longer, so that the report of the request it was for can
    say so.
    """

    def __init__(
        self,
        ttl_seconds: float,
        max_hints: int,
        clock: Callable[[], float],
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._ttl = ttl_seconds
        self._max = max_hints
        self._clock = clock
        self._wall_ns = wall_ns
        self._lock = threading.Lock()
        self._rows: OrderedDict[bytes, deque[_Row]] = OrderedDict()
        self._count = 0
        self._missed: OrderedDict[bytes, float] = OrderedDict()
        self.counts: Counter[str] = Counter()
        """`received`, `taken`, `expired`, `crowded_out`, `misdirected`, `undecodable`."""

    def receive(self, payload: bytes, replica: StableReplica) -> HintDelivery | None:
        """One message of the hint subject; None, counted, if it is not well formed or for another replica."""
        try:
            delivery = decode_hint_delivery(payload)
        except ContractError:
            self.counts["undecodable"] += 1
            return None
        if (delivery.stable_routing_id, delivery.dp_rank) != replica:
            self.counts["misdirected"] += 1
            return None
        self.put(delivery)
        return delivery

    def put(self, delivery: HintDelivery) -> None:
        """Keeps a hint until its time to live is over. The oldest hints go first where a prompt, or the table, has too
        many. Any thread."""
        now = self._clock()
        with self._lock:
            self.counts["received"] += 1
            rows = self._rows.setdefault(delivery.prompt_key, deque())
            self._rows.move_to_end(delivery.prompt_key)
            rows.append(_Row(delivery, self._wall_ns(), now + self._ttl))
            self._count += 1
            if len(rows) > _PER_PROMPT:
                rows.popleft()
                self._count -= 1
                self.counts["crowded_out"] += 1
            self._expire(now)
            while self._count > self._max:
                _, oldest = self._rows.popitem(last=False)
                self._count -= len(oldest)
                self.counts["crowded_out"] += len(oldest)

    def take(self, prompt_key: bytes, asked_ns: int = 0) -> tuple[HintDelivery, bool] | None:
        """A live delivery for a prompt, and whether its route id is still to be given out. `asked_ns`: when the engine
        asked about the request (Unix nanoseconds; 0: not known), whose hint came just before that."""
        now = self._clock()
        with self._lock:
            rows = self._rows.get(prompt_key)
            if rows is not None:
                self._drop_expired(prompt_key, rows, now)
            if not rows:
                self._rows.pop(prompt_key, None)
                return None
            self.counts["taken"] += 1
            unspent = [row for row in rows if not row.spent]
            before = [row for row in unspent if row.received_ns <= asked_ns]
            # A hint whose request never came must not be given to the next one, and so on down the line: that request
            # has its own.
            row = before[-1] if before else unspent[0] if unspent else rows[-1]
            fresh, row.spent = not row.spent, True
            for other in [other for other in rows if other.spent and other is not row]:
                rows.remove(other)
                self._count -= 1
            return row.delivery, fresh

    def missed(self, prompt_key: bytes) -> bool:
        """Whether a hint for this prompt expired before anybody took it. True once for each such prompt."""
        with self._lock:
            until = self._missed.pop(prompt_key, None)
            return until is not None and self._clock() < until

    def __len__(self) -> int:
        return self._count

    def _expire(self, now: float) -> None:
        """Rows of the least recently fed prompts first; a prompt that is fed again is looked at when it is asked
        for."""
        while self._rows:
            key, rows = next(iter(self._rows.items()))
            self._drop_expired(key, rows, now)
            if rows:
                return
            del self._rows[key]

    def _drop_expired(self, key: bytes, rows: deque[_Row], now: float) -> None:
        while rows and rows[0].expires <= now:
            row = rows.popleft()
            self._count -= 1
            self.counts["expired"] += 1
            if not row.spent:
                self._missed[key] = row.expires + _REMEMBERED_TTLS * self._ttl
                self._missed.move_to_end(key)
        while self._missed and (len(self._missed) > self._max or next(iter(self._missed.values())) <= now):
            self._missed.popitem(last=False)
