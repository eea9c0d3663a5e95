"""DeviceEvents: one leader's ear for the engine's KV cache events, and what they do to its donors.

Stored and removed blocks say what the device holds. A donor of which the device holds as much as any tier is of the
device tier, and one that left the slab lives as long as the device has it. With materialization off, where donors are
on the device alone, removed blocks shorten or end them, and offloaded ones change their tier. The ledger asks here too
what the device holds, before it gives up a block (`holds`). Where events were lost nothing is known any more: donors
that are nowhere else are withdrawn, and the state begins again with the next event, since the engine has no way to
tell its state anew.

`offer` may be called from any thread, with one event or many, as often as the caller drains the engine; it never
raises and never waits. The work is done on the leader's background thread. Beyond `MAX_WAITING` events the oldest are
dropped, which is a loss like any other.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dynamo_semkv.contracts.identity import DonorId
from dynamo_semkv.contracts.keys import BlockKey, block_keys
from dynamo_semkv.contracts.namespace import CacheNamespace
from dynamo_semkv.telemetry.throttled import Throttled
from worker_connector.background import Job
from worker_connector.donors.device_blocks import DeviceBlock, DeviceBlocks, DigestOf
from worker_connector.donors.kv_events import KvFreshness, Standing
from worker_connector.donors.registry import DonorRegistry
from worker_connector.engine_api.request_view import unpack_tokens

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)

MAX_WAITING = 100_000
_AT_ONCE = 256
"""Events that one job works on: reports wait behind it."""
_UNVOUCHED = 256
_PATIENCE = 2
"""Batches of events after which a new donor's blocks must have been reported: the first may have been drained before it
ended."""

KvEvents = Mapping[str, Any] | Iterable[Mapping[str, Any]]


class DeviceEvents:
    """`offer` is thread-safe; the rest is the background thread's."""

    def __init__(
        self,
        rank: int,
        tokens_per_block: int,
        digest_of: DigestOf,
        donors: Callable[[], DonorRegistry | None],
        submit: Callable[[Job], bool],
    ) -> None:
        self._rank = rank
        self._tokens_per_block = tokens_per_block
        self._donors = donors
        self._submit = submit
        self._blocks = DeviceBlocks(digest_of)
        self._freshness = KvFreshness(tokens_per_block, listeners={rank: self._blocks})
        self._lock = threading.Lock()
        self._waiting: deque[Mapping[str, Any] | None] = deque()
        """None: here some were dropped."""
        self._queued = False
        self._batches = 0
        self._whole: bool | None = None
        """Have all events been seen, from the first one on? Only then does silence about a block say that it is not
        there."""
        self._unvouched: OrderedDict[DonorId, tuple[list[BlockKey], bool, int]] = OrderedDict()
        self.counts: Counter[str] = Counter()
        """`offered`, `other_rank`, `dropped`, `not_events`, `quarantined`, `errors`."""

    def offer(self, events: KvEvents) -> None:
        """Events in the order in which the engine gave them, as dicts (`KVCacheEventSerializer`'s shape)."""
        try:
            batch: list[Any] = [events] if isinstance(events, Mapping) else list(events)
        except Exception:  # noqa: BLE001 - an iterable of somebody else's; its fault is not the engine's loop's
            self.counts["not_events"] += 1
            return
        with self._lock:
            for event in batch:
                if not isinstance(event, Mapping):
                    self.counts["not_events"] += 1
                    continue
                if event.get("attention_dp_rank") not in (None, self._rank):
                    self.counts["other_rank"] += 1
                    continue
                self.counts["offered"] += 1
                self._waiting.append(event)
            while len(self._waiting) > MAX_WAITING:
                self._waiting.popleft()
                self._waiting[0] = None
                self.counts["dropped"] += 1
            if not self._waiting or self._queued:
                return
            self._queued = True
        if not self._submit(self._work):
            self._queued = False  # the next offer tries again

    @property
    def heard(self) -> bool:
        """Has any event of this rank come?"""
        return self.counts["offered"] > 0

    def holds(self, key: BlockKey) -> bool:
        """Does the device hold this block, and all that it continues? Any thread may ask."""
        block = self._blocks.get(key)
        return block is not None and block.level == 0

    def block(self, key: BlockKey) -> DeviceBlock | None:
        """The block of this key in the engine's cache; None where events do not say that it is there."""
        return self._blocks.get(key)

    def forget(self) -> None:
        """The engine's cache was reset: what was said of it so far counts for nothing. On the background thread."""
        with self._lock:
            self._waiting.clear()
        self._whole = False
        self._blocks.clear()
        self._unvouched.clear()
        self._freshness.resync(self._rank)

    def registered(self, donor_id: DonorId, namespace: CacheNamespace, digest: bytes, tokens: bytes) -> None:
        """A donor of the device tier was registered: from now on it lives by the events, if they speak of it."""
        keys = block_keys(digest, unpack_tokens(tokens), self._tokens_per_block)
        if not keys or namespace.lora or namespace.multimodal:
            return  # events name neither well enough (NVIDIA/TensorRT-LLM#18156, #13579)
        if not self._vouch(donor_id, keys, final=False):
            # Events of V2 caches leave the salt out, so silence about a salted prompt says nothing.
            self._unvouched[donor_id] = (keys, namespace.tenant == "", self._batches)
            if len(self._unvouched) > _UNVOUCHED:
                self._unvouched.popitem(last=False)

    def snapshot(self) -> dict[str, Any]:
        """Counters and sizes for metrics and tests."""
        return {
            **self.counts,
            **self._blocks.counts,
            "standing": self._freshness.standing(self._rank).value,
            "blocks": len(self._blocks),
            "waiting": len(self._waiting),
            "events": dict(self._freshness.counts),
        }

    # on the background thread

    def _work(self) -> None:
        with self._lock:
            batch = [self._waiting.popleft() for _ in range(min(_AT_ONCE, len(self._waiting)))]
            more = self._queued = bool(self._waiting)
        if more and not self._submit(self._work):
            self._queued = False
        for event in batch:
            try:
                self._apply(event)
            except Exception:  # noqa: BLE001 - one event's fault may not end the hearing of all later ones; its rank starts anew
                self.counts["errors"] += 1
                _throttled.exception("semkv connector: a KV cache event could not be used")
                self._start_anew()
        self._tell_donors()
        self._batches += 1
        for donor_id, (keys, speaks, since) in list(self._unvouched.items()):
            if self._vouch(donor_id, keys, final=bool(self._whole) and speaks and self._batches - since >= _PATIENCE):
                del self._unvouched[donor_id]

    def _tell_donors(self) -> None:
        forgotten, gone = self._blocks.take_forgotten(), self._blocks.take_gone()
        new, moved = self._blocks.take_new(), self._blocks.take_moved()
        donors = self._donors()
        if donors is None:
            return
        if forgotten:
            donors.device_unknown()
        donors.device_gone(gone)
        donors.device_stored(new)
        donors.device_moved(moved)

    def _apply(self, event: Mapping[str, Any] | None) -> None:
        if event is None:
            self._freshness.lost(self._rank)
            self._start_anew()
            return
        event = {**event, "attention_dp_rank": self._rank}
        if self._whole is None:
            self._whole = event.get("event_id") == 0
        self._freshness.apply((event,))
        if self._blocks.take_cleared():
            # Also said by a publisher that lost events: whatever is not reported from now on may be there all the same.
            self._whole = False
            self._unvouched.clear()
            self._withdraw_all()
        if self._freshness.standing(self._rank) is Standing.QUARANTINED:
            # What was lost may be removals, so all is in doubt; the event that showed it is the first of what is known
            # from now on.
            self._start_anew()
            self._freshness.apply((event,))
            if self._freshness.standing(self._rank) is Standing.QUARANTINED:
                self._freshness.resync(self._rank)

    def _start_anew(self) -> None:
        self.counts["quarantined"] += 1
        self._whole = False
        self._blocks.clear()
        self._unvouched.clear()
        self._freshness.resync(self._rank)
        self._withdraw_all()

    def _withdraw_all(self) -> None:
        donors = self._donors()
        if donors is not None:
            donors.withdraw(donors.device_unknown(), "doubtful")

    def _vouch(self, donor_id: DonorId, keys: list[BlockKey], *, final: bool) -> bool:
        """Ties a donor to its blocks. `final`: what has not been reported by now is not there. False: look again
        later."""
        donors = self._donors()
        if donors is None:
            return True
        known: DeviceBlock | None = None
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            known = block
        if known is not None and (final or known.key == keys[-1]):
            donors.cut_to(donor_id, known)
            return True
        if final:
            donors.withdraw([donor_id], "unvouched")
        return final
