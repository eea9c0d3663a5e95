"""FetchTier: what of a prompt is to be pulled from another worker, and which of what came may enter the slab.

A block enters only when its tokens are those of the prompt, one by one, its bytes have the checksum that travelled with
them, and what it continues is resident: so chains arrive from their start, and a key is never believed. It gets a slot
only then (a slow peer holds none), and becomes resident only when it is written and sealed there, so an offer never
waits for a pull and never promises one. Slots come from what is free, or was last used before the hint came, and is not
leased.

If either cache is reset meanwhile, its own or that of the source, nothing of the pull stays: what came before is worth
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from dynamo_semkv.contracts.keys import BlockKey, child_key
from dynamo_semkv.contracts.location import Tier
from dynamo_semkv.contracts.namespace import CacheNamespace
from worker_connector.fetch.export import SHARD, Held
from worker_connector.fetch.transport import Answer, Rows, Wanted
from worker_connector.ledger.block import BlockEntry, Origin
from worker_connector.memory.checksum import seals


class Stop(str, Enum):
    """Why no further block of an answer entered."""

    WRONG_TOKENS = "wrong_tokens"
    WRONG_BYTES = "wrong_bytes"
    WRONG_LIFE = "source_reset"
    STALE = "own_reset"
    NO_SLOT = "no_slot"
    BUSY = "being_saved"
    """A request here is just computing and saving the same block, or its chain was evicted."""


@dataclass(eq=False)
class Pull:
    """One prompt's missing blocks, from the end of what is resident here."""

    held: Held
    """The life of our own cache that it is for."""
    namespace: CacheNamespace
    digest: bytes
    tokens: bytes
    """Packed u32: of the missing blocks only."""
    keys: list[BlockKey]
    tip: BlockEntry | None
    """What the next block continues."""
    horizon: int
    """Blocks that were used at this tick of the ledger or later keep their slots."""
    at: int = 0
    """How many blocks are here by now."""
    began: float = 0.0
    """When the exchange began that is in hand, by the clock of the tier."""
    life: str | None = None
    """Of the source's cache, once it has answered."""
    entered: list[BlockEntry] = field(default_factory=list)

    def wanted(self, count: int) -> Wanted:
        """The next blocks."""
        pool = self.held.pool
        keys = tuple(self.keys[self.at : self.at + count])
        size, held = pool.bytes_per_block, self.held
        return Wanted(self.digest, pool.kv_layout, SHARD, pool.tokens_per_block, size, keys, held.weights)


class FetchTier:
    """Called on the threads that pull; takes the leader's lock for short steps, never while bytes are read or
    written."""

    def __init__(
        self,
        lock: AbstractContextManager[object],
        held: Callable[[], Held | None],
        on_entered: Callable[[Sequence[BlockEntry]], None],
        on_kept: Callable[[CacheNamespace, Sequence[BlockEntry]], None],
        on_withdrawn: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`held`: what there is now. `on_entered`: consecutive blocks became resident. `on_kept`: of those, what stays,
        as the pull is over. `on_withdrawn`: some left. All under `lock`."""
        self._lock = lock
        self._held = held
        self._on_entered = on_entered
        self._on_kept = on_kept
        self._on_withdrawn = on_withdrawn
        self._clock = clock

    def plan(self, namespace: CacheNamespace, digest: bytes, tokens: bytes, limit: int) -> Pull | Stop | None:
        """`tokens`: the prompt, packed; `limit`: its blocks that the source has and that may be served. None: nothing
        is missing, or a request here is just saving it."""
        with self._lock:
            held = self._held()
            if held is None:
                return Stop.STALE
            horizon = held.ledger.tick
            match = held.ledger.match(digest, tokens, limit)
            if match.missing is None:
                return None
            held.ledger.touch(match.tip)
        step = 4 * held.pool.tokens_per_block
        start = match.blocks
        keys = [match.missing]
        for ordinal in range(start + 1, limit):
            keys.append(child_key(keys[-1], tokens[ordinal * step : (ordinal + 1) * step]))
        tip = match.tip
        rest = tokens[start * step : limit * step]
        return Pull(held, namespace, digest, rest, keys, tip, horizon, began=self._clock())

    def land(self, pull: Pull, answer: Answer, rows: Rows) -> Stop | None:
        """Enters what one exchange brought; why not all of it, or None."""
        if pull.life is not None and answer.life != pull.life:
            self.withdraw(pull)
            return Stop.WRONG_LIFE
        pull.life = answer.life
        good, stop = self._proven(pull, answer, rows)
        entries, more = self._enter(pull, good)
        stop = more or stop
        slab = pull.held.slab
        fresh = [(row, entry) for row, entry in enumerate(entries) if not entry.resident]
        written = False
        try:
            for row, entry in fresh:
                slab.break_seals([entry.slot])
                slab.rows[entry.slot].numpy()[: slab.bytes_per_block] = rows[row, : slab.bytes_per_block]
            slab.seal([entry.slot for _, entry in fresh])
            written = True
        finally:
            refused = self._admit(pull, entries if written else [], [entry for _, entry in fresh])
        return refused or stop

    def keep(self, pull: Pull) -> None:
        """The pull is over: what it has entered stays."""
        with self._lock:
            if self._current(pull) and (kept := [entry for entry in pull.entered if entry.resident]):
                self._on_kept(pull.namespace, kept)

    def withdraw(self, pull: Pull) -> None:
        """Whatever it has entered is worth nothing, and goes with all that continues it."""
        with self._lock:
            for entry in pull.entered:
                pull.held.ledger.remove(entry)
            pull.entered.clear()
            if self._current(pull):
                self._on_withdrawn()

    def _current(self, pull: Pull) -> bool:
        """Are these still the books that the pull's slots are in? Those of another ledger may be other blocks'."""
        held = self._held()
        return held is not None and held.ledger is pull.held.ledger and held.name == pull.held.name

    @staticmethod
    def _proven(pull: Pull, answer: Answer, rows: Rows) -> tuple[int, Stop | None]:
        """How many blocks of the answer are what was asked for."""
        step = 4 * pull.held.pool.tokens_per_block
        count = min(len(answer.blocks), len(rows), len(pull.keys) - pull.at)
        if not count:
            return 0, None
        rows[:count, pull.held.slab.bytes_per_block :] = np.uint8(0)  # as their owner sealed them
        found = seals(np.ascontiguousarray(rows[:count]))
        for index in range(count):
            at = (pull.at + index) * step
            if answer.blocks[index].tokens != pull.tokens[at : at + step]:
                return index, Stop.WRONG_TOKENS
            if answer.blocks[index].seal != int(found[index]):
                return index, Stop.WRONG_BYTES
        return count, None

    def _enter(self, pull: Pull, count: int) -> tuple[list[BlockEntry], Stop | None]:
        """Entries for the next `count` blocks: new ones with a slot of their own, or such as became resident here
        meanwhile."""
        ledger, step = pull.held.ledger, 4 * pull.held.pool.tokens_per_block
        entries: list[BlockEntry] = []
        with self._lock:
            if not self._current(pull):
                return [], Stop.STALE
            parent = pull.tip
            for index in range(pull.at, pull.at + count):
                if parent is not None and parent.removed:
                    return entries, Stop.BUSY
                tokens = pull.tokens[index * step : (index + 1) * step]
                entry = ledger.child(pull.digest, parent, tokens)
                if entry is not None and not entry.resident:
                    return entries, Stop.BUSY
                if entry is None:
                    entry = ledger.enter(pull.digest, parent, tokens, used_before=pull.horizon)
                    if entry is None:
                        return entries, Stop.NO_SLOT
                    entry.fetched = True
                entries.append(entry)
                parent = entry
        return entries, None

    def _admit(self, pull: Pull, entries: Sequence[BlockEntry], fresh: Sequence[BlockEntry]) -> Stop | None:
        ledger = pull.held.ledger
        run: list[BlockEntry] = []
        stop: Stop | None = None
        with self._lock:
            current = self._current(pull)
            now = self._clock()
            origin = Origin(Tier.EXTERNAL, max(0.0, now - pull.began) / max(len(fresh), 1))
            pull.began = now
            for entry in fresh:
                ledger.landed(entry)
            for entry in entries:
                parent = entry.parent
                if not current or entry.removed or parent is None or (parent.ordinal >= 0 and not parent.resident):
                    stop = Stop.BUSY if current else Stop.STALE
                    break
                if not entry.resident:
                    ledger.admit(entry)
                    entry.origin = origin
                    run.append(entry)
                pull.tip, pull.at = entry, pull.at + 1
            for entry in fresh:
                if not entry.resident:
                    ledger.remove(entry)
            if run:
                pull.entered += run
                self._on_entered(run)
        return stop
