"""DiskTier: the leader's decisions about the tier below the slab. What goes to disk, what comes back, and when.

* Down: blocks that became resident are leased and written behind, a few at a time and in that order (so chains arrive
  from their start). Not only what is evicted: a slot that is needed now could not wait for the disk, and a process that
  dies would leave nothing behind.
* Up: the engine asks for a prompt whose chain ends in the slab and goes on here, a hint names a donor that is here, or
  a request waits for its chain before the engine takes it (leader/disk_prefetch_wait.py), which goes first. Its blocks
  get slots and are read into them; only when every rank has verified and sealed a block does it enter the ledger as
  resident, so an offer never waits for a disk and never promises one. A request that the engine asks about is served by
  what is in the slab.
* No thrashing: a slot for staging comes from what is free, or from blocks that nobody leases and that were used last
  *before* the read was queued. Bytes in flight are bounded both ways, queued reads by their number.

No I/O and no waiting: orders are handed to the ranks, whose threads answer (rank/disk.py). Under tensor parallelism
they go out with the engine's broadcast, and an order is over when every rank has answered it: until then its slots are
nobody else's.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from itertools import count

from dynamo_semkv.contracts.keys import BlockKey, root_key
from dynamo_semkv.contracts.location import Tier
from dynamo_semkv.contracts.namespace import CacheNamespace
from worker_connector.background import Job
from worker_connector.disk.block_file import BlockRecord
from worker_connector.disk.index import DiskBlock, DiskIndex
from worker_connector.disk.listeners import TierListeners
from worker_connector.disk.messages import (
    Clear,
    DiskCleared,
    DiskFound,
    DiskGone,
    DiskOrder,
    DiskResult,
    OpenOrder,
    Placed,
    Spill,
    Stage,
    StageDone,
    Tell,
)
from worker_connector.disk.namespace_codec import KnownWords, namespace_of
from worker_connector.disk.read_queue import QueuedRead, ReadQueue, StageTimes
from worker_connector.ledger.block import BlockEntry, Origin
from worker_connector.ledger.ledger import Ledger

_log = logging.getLogger(__name__)

_MIB = 1024 * 1024
STAGE_BYTES = 64 * _MIB
"""Bytes in flight from disk."""
STAGE_ORDER_BYTES = 16 * _MIB
SPILL_BYTES = 32 * _MIB
"""Bytes in flight to disk, whose blocks are leased."""
SPILL_ORDER_BYTES = 8 * _MIB
_ORDER_BLOCKS = 16
_BLOCKS_IN_FLIGHT = 64
"""Each way, however small they are: an order is made up on the scheduler's thread, and that many take a fraction of a
millisecond."""

_ORDER_IDS = count(1)
"""Counted over all generations of the cache: a late answer to an older order must not be taken for another's."""


class DiskTier:
    """Not thread-safe: the leader's lock covers it, but for `hinted`, `hold`, `give_up` and what `missed` submits,
    which take it themselves."""

    def __init__(
        self,
        ledger: Ledger,
        bytes_per_block: int,
        listeners: TierListeners,
        *,
        send: Callable[[DiskOrder], None],
        submit: Callable[[Job], bool],
        lock: AbstractContextManager[object],
        ranks: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`send`: to the stores of all `ranks`; `submit`: to the background thread; `lock`: the leader's."""
        self.index = DiskIndex(ranks)
        self._ledger = ledger
        self._ranks = ranks
        self._bytes = bytes_per_block
        self._send = send
        self._submit = submit
        self._lock = lock
        self._on_staged = listeners.staged
        self._on_gone = listeners.gone
        self._on_found = listeners.found
        self._flush = listeners.flush
        self._words = KnownWords()
        self._found: set[int] = set()
        self._telling = next(_ORDER_IDS)
        self._clearing: dict[int, set[int]] = {rank: set() for rank in range(ranks)}
        self._to_spill: OrderedDict[BlockKey, None] = OrderedDict()
        self._spilling: dict[int, OpenOrder] = {}
        self._being_spilled: set[BlockKey] = set()
        self._clock = clock
        self._closed = False
        self._wishes = ReadQueue(self._is_resident)
        self._planned: set[BlockKey] = set()
        self._staging: dict[int, OpenOrder] = {}
        self._being_staged: dict[BlockKey, int] = {}
        """By which order."""
        self.times = StageTimes()
        self.counts: Counter[str] = Counter()
        """Blocks: `spilled`, `spill_failed`, `spill_dropped`, `staged`, `stage_failed`, `found`; queued reads:
        `missed`, `hinted`, `wish_refused`, `wish_dropped`, `no_slot`, `busy`; and `cleared`."""

    def begin(self) -> None:
        """Asks the ranks which blocks they have. To be called once."""
        self._send(Tell(self._telling))

    # down

    def admitted(self, namespace: CacheNamespace, entry: BlockEntry) -> None:
        """A block became resident: it is to be written behind. `pump` sends what may go."""
        self._words.met(entry.digest, namespace)
        self._to_spill[entry.key] = None

    def pump(self) -> None:
        """Sends what the bounds allow, both ways."""
        self._pump_up()
        self._pump_down()

    def _pump_down(self) -> None:
        limit = min(max(1, SPILL_BYTES // self._bytes), _BLOCKS_IN_FLIGHT)
        flying = sum(len(order.entries) for order in self._spilling.values())
        while self._to_spill and flying < limit:
            entries: list[BlockEntry] = []
            size = min(max(1, SPILL_ORDER_BYTES // self._bytes), _ORDER_BLOCKS, limit - flying)
            while self._to_spill and len(entries) < size:
                key, _ = self._to_spill.popitem(last=False)
                entries.extend(self._unwritten(key, size - len(entries)))
            if not entries:
                return
            flying += len(entries)
            records = [self._record(entry) for entry in entries]
            order_id = next(_ORDER_IDS)
            self._ledger.lease(*entries)
            self._spilling[order_id] = OpenOrder(entries, records, [True] * len(entries), set(range(self._ranks)))
            self._send(Spill(order_id, self._telling, tuple(map(Placed, records, [entry.slot for entry in entries]))))

    def _unwritten(self, key: BlockKey, room: int) -> list[BlockEntry]:
        """The block and what it continues, as far as that is not on its way or there: an earlier attempt may have
        failed. What finds no room is put back."""
        entry = self._ledger.by_key(key)
        chain: list[BlockEntry] = []
        while entry is not None and entry.ordinal >= 0 and entry.resident and self.index.get(entry.key) is None:
            if entry.key in self._being_spilled:
                break
            chain.append(entry)
            entry = entry.parent
        chain.reverse()
        for later in reversed(chain[room:]):
            self._to_spill[later.key] = None
            self._to_spill.move_to_end(later.key, last=False)
        for taken in chain[:room]:
            self._to_spill.pop(taken.key, None)
            self._being_spilled.add(taken.key)
        return chain[:room]

    def _spilled(self, order: OpenOrder) -> None:
        self._ledger.release(*order.entries)
        if order.void:
            return
        self._being_spilled.difference_update(entry.key for entry in order.entries)
        done = sum(order.good)
        self.counts["spilled"] += done
        self.counts["spill_failed"] += len(order.good) - done
        if not done and self._to_spill:
            # The disk takes nothing: what waits would only be refused as well. A later block brings its chain along.
            self.counts["spill_dropped"] += len(self._to_spill)
            self._to_spill.clear()

    # up

    def missed(self, digest: bytes, tokens: bytes, at: int, limit: int, key: BlockKey) -> None:
        """On the scheduler's thread: the resident chain of a prompt ends before block `at`, whose key this is. Costs
        one lookup; if the chain goes on here, the rest is looked up on the background thread. `tokens`: the prompt;
        `limit`: how many of its blocks may be served."""
        if self.index.get(key) is None or key in self._planned:
            return
        self._planned.add(key)
        horizon = self._ledger.tick
        if not self._submit(lambda: self._wish_tokens(digest, tokens, at, limit, key, horizon)):
            self._planned.discard(key)
            self.counts["wish_refused"] += 1
            return
        self.counts["missed"] += 1

    def _wish_tokens(self, digest: bytes, tokens: bytes, at: int, limit: int, key: BlockKey, horizon: int) -> None:
        step = 4 * self._ledger.tokens_per_block
        first = self.index.get(key)
        path: list[DiskBlock] = []
        if first is not None and first.tokens == tokens[at * step : (at + 1) * step]:
            path = [first, *self.index.path(key, tokens[(at + 1) * step : limit * step], step)]
        with self._lock:
            self._planned.discard(key)
            self._wish(path, horizon)

    def hinted(self, tip: DiskBlock) -> None:
        """Queues this chain, for which a request is on its way. Never on the scheduler's thread."""
        path = tip.chain()
        with self._lock:
            self.counts["hinted"] += 1
            self._wish(path, self._ledger.tick)

    def hold(self, path: list[DiskBlock], horizon: int) -> Future[int] | None:
        """Queues these blocks, for which a request waits. The future's result: how many of them are in the slab, when
        no more can come; there may never be one. None: too many requests wait, or the tier has ended. Never on the
        scheduler's thread."""
        with self._lock:
            if self._closed or self._wishes.crowded:
                return None
            done: Future[int] = Future()
            done.set_running_or_notify_cancel()  # whoever waits for it may give up, but not cancel it
            self._wish(path, horizon, done)
            return done

    def give_up(self, done: Future[int]) -> None:
        """The request goes on. What is still to come is brought when nobody else waits."""
        with self._lock:
            self._wishes.give_up(done)

    def expected_seconds(self, path: Sequence[DiskBlock]) -> float | None:
        """Under the lock: until these blocks would be in the slab, behind what goes first. None: not known yet."""
        each = self.times.seconds_per_block
        if each is None:
            return None
        own = sum(self._ledger.by_key(block.key) is None for block in path)
        return each * (own + self._flying + self._wishes.blocks_held)

    @property
    def hanging(self) -> bool:
        """Under the lock: True if the disk has answered nothing for long, though asked for something."""
        return self.times.hanging((order.sent for order in self._staging.values()), self._clock())

    def close(self) -> None:
        """Takes no more waiting requests, and resolves those that wait."""
        self._closed = True
        self._wishes.clear()

    def _wish(self, path: list[DiskBlock], horizon: int, done: Future[int] | None = None) -> None:
        if (path or done is not None) and not self._wishes.add(QueuedRead(path, horizon, done=done)):
            self.counts["wish_dropped"] += 1
        self._pump_up()
        self._flush()

    def _is_resident(self, block: DiskBlock) -> bool:
        return (entry := self._ledger.by_key(block.key)) is not None and entry.resident

    @property
    def _flying(self) -> int:
        return sum(len(order.entries) for order in self._staging.values())

    def _pump_up(self) -> None:
        limit = min(max(1, STAGE_BYTES // self._bytes), _BLOCKS_IN_FLIGHT)
        flying = self._flying
        while flying < limit and (wish := self._wishes.first()) is not None:
            size = min(max(1, STAGE_ORDER_BYTES // self._bytes), _ORDER_BLOCKS, limit - flying)
            entries = self._take(wish, size)
            if not entries:
                continue
            flying += len(entries)
            records = [self._record(entry) for entry in entries]
            order_id = next(_ORDER_IDS)
            self._being_staged.update((entry.key, order_id) for entry in entries)
            wish.orders.add(order_id)
            ranks = set(range(self._ranks))
            self._staging[order_id] = OpenOrder(entries, records, [True] * len(entries), ranks, sent=self._clock())
            self._send(Stage(order_id, self._telling, tuple(map(Placed, records, [entry.slot for entry in entries]))))
        self._wishes.settle()

    def _take(self, wish: QueuedRead, size: int) -> list[BlockEntry]:
        """Slots for the next blocks of a queued read, which ends (`at` at its end) where it cannot go on."""
        entries: list[BlockEntry] = []
        while wish.at < len(wish.blocks) and len(entries) < size:
            block = wish.blocks[wish.at]
            there = self._ledger.by_key(block.key)
            if there is None:
                entry = self._enter(block, wish.horizon)
                if entry is None:
                    wish.at = len(wish.blocks)
                    break
                entries.append(entry)
            elif not there.resident:
                order_id = self._being_staged.get(block.key)
                if order_id is None:
                    self.counts["busy"] += 1  # a request is just computing and saving it
                    wish.at = len(wish.blocks)
                    break
                wish.orders.add(order_id)
            wish.at += 1
        return entries

    def _enter(self, block: DiskBlock, horizon: int) -> BlockEntry | None:
        above = None if block.parent is None else self._ledger.by_key(block.parent.key)
        if not block.usable or (block.parent is not None and above is None):
            return None
        entry = self._ledger.enter(block.digest, above, block.tokens, used_before=horizon)
        if entry is None:
            self.counts["no_slot"] += 1
        return entry

    def _staged(self, order: OpenOrder, seconds: float) -> None:
        run: list[BlockEntry] = []
        for entry, good in zip(order.entries, order.good, strict=True):
            if not order.void:
                self._being_staged.pop(entry.key, None)
            self._ledger.landed(entry)
            if entry.removed:
                continue
            parent = entry.parent
            if good and not order.void and parent is not None and (parent.ordinal < 0 or parent.resident):
                self._ledger.admit(entry)
                entry.origin = Origin(Tier.DISK, seconds / len(order.entries))
                run.append(entry)
            else:
                self.counts["stage_failed"] += 1
                self._ledger.remove(entry)
        self.counts["staged"] += len(run)
        if run:
            self._on_staged(run)

    # what the ranks answer

    def on_result(self, result: DiskResult) -> None:
        """Takes one rank's answer, and sends what the bounds then allow."""
        rank = (
            result.rank if self._ranks > 1 else 0
        )  # under attention data parallelism an only rank may have any number
        if isinstance(result, DiskCleared):
            self._clearing[rank].discard(result.order_id)
        elif isinstance(result, DiskFound):
            if result.order_id == self._telling and not self._clearing[rank]:
                self._enter_found(rank, result)
        elif isinstance(result, DiskGone):
            gone = [block for key in result.keys if (block := self.index.remove(rank, key)) is not None]
            if gone:
                self._on_gone(gone)
        elif isinstance(result, StageDone):
            if (staged := self._staging.get(result.order_id)) is not None:
                good = [index < result.blocks for index in range(len(staged.entries))]
                if self._answered(self._staging, result.order_id, rank, good):
                    self._staged(staged, self.times.add(staged.sent, self._clock(), sum(staged.good)))
                    self._wishes.answered(result.order_id)
        elif (spilled := self._spilling.get(result.order_id)) is not None:
            if not spilled.void:
                for record, written in zip(spilled.records, result.written, strict=True):
                    if written:
                        self.index.add(rank, record)
            if self._answered(self._spilling, result.order_id, rank, list(result.written)):
                self._spilled(spilled)
        self.pump()

    def _answered(self, orders: dict[int, OpenOrder], order_id: int, rank: int, good: list[bool]) -> bool:
        """True if this answer completed the order."""
        order = orders[order_id]
        order.good = [a and b for a, b in zip(order.good, good, strict=True)]
        order.waiting.discard(rank)
        if order.waiting:
            return False
        del orders[order_id]
        return True

    def _enter_found(self, rank: int, result: DiskFound) -> None:
        for record in result.blocks:
            self._words.told(record.namespace, record.words)
            if len(record.tokens) == 4 * self._ledger.tokens_per_block:  # else a crafted file: no block of this pool
                self.index.add(rank, record)
        self.counts["found"] += len(result.blocks)
        if result.last:
            self._found.add(rank)
            if len(self._found) == self._ranks:
                self._submit(self._tell_found)

    def _tell_found(self) -> None:
        with self._lock:
            ends = list(self.index.ends())
            words = self._words.all()
        spaces: dict[bytes, CacheNamespace | None] = {}
        told: list[tuple[CacheNamespace, DiskBlock]] = []
        for tip in ends:
            if tip.digest not in spaces:
                spaces[tip.digest] = namespace_of(words.get(tip.digest, b""), tip.digest)
            namespace = spaces[tip.digest]
            if namespace is not None:
                told.append((namespace, tip))
        if told:
            self._on_found(told)

    # all of it

    def clear(self) -> None:
        """Weights or cache were reset: forgets all blocks, and orders the ranks to do so. The ledger is cleared by its
        owner."""
        self.counts["cleared"] += 1
        self._to_spill.clear()
        self._being_spilled.clear()
        self._being_staged.clear()
        for order in (*self._spilling.values(), *self._staging.values()):
            order.void = True
        self._wishes.clear()
        order_id = next(_ORDER_IDS)
        for clearing in self._clearing.values():
            clearing.add(order_id)
        gone = self.index.clear()
        if gone:
            self._on_gone(gone)
        self._send(Clear(order_id))

    @property
    def in_flight(self) -> int:
        """Number of orders that are not answered."""
        return len(self._spilling) + len(self._staging)

    def snapshot(self) -> dict[str, int]:
        """`counts`, blocks on disk and waiting to be written, queued reads (`wishes`), open orders."""
        return {
            **self.counts,
            "blocks": self.index.usable,
            "waiting_to_spill": len(self._to_spill),
            "wishes": len(self._wishes),
            "in_flight": self.in_flight,
        }

    def _record(self, entry: BlockEntry) -> BlockRecord:
        parent = entry.parent
        above = parent.key if parent is not None and parent.ordinal >= 0 else root_key(entry.digest)
        return BlockRecord(entry.digest, entry.key, above, entry.ordinal, entry.tokens, self._words.get(entry.digest))
