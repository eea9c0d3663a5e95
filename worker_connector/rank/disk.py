"""RankDisk: the rank's thread for its disk store. It obeys the leader's orders (disk/messages.py) and answers each of
them, whatever happens.

Into the slab: the file's checksum, header and tokens are verified over the very memory of the slot, which is sealed
only then. Out of it: a copy of the slot is taken and checked against its seal before it is written, so damage in memory
never becomes a file with a right checksum. The leader holds a lease on what is written and keeps to itself what is
being read, so no slot changes hands meanwhile.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from dynamo_semkv.contracts.keys import BlockKey
from dynamo_semkv.telemetry.throttled import Throttled
from worker_connector.disk.block_file import BlockRecord
from worker_connector.disk.messages import (
    Clear,
    DiskCleared,
    DiskFound,
    DiskGone,
    DiskOrder,
    DiskResult,
    Placed,
    Spill,
    SpillDone,
    Stage,
    StageDone,
    Tell,
)
from worker_connector.disk.store import DiskStore
from worker_connector.disk.store_lock import InUse
from worker_connector.errors import Refused
from worker_connector.memory.slab import HostSlab

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)

FOUND_AT_ONCE = 64
"""Blocks in one report of what is there: it has to fit a frame, and the leader's lock is held for as long as it takes
to enter them."""
_GONE_AT_ONCE = 4_096
_STORES = 256
_END_SECONDS = 5.0


@dataclass(frozen=True)
class DiskPlace:
    """`connector.disk_path` and `connector.disk_bytes`, made out for one rank.

    A store is a directory `<layout and shard>-<n>` below the path, the first that no other rank is using. So engines
    may share a path, an engine finds its blocks whatever it is called this time (they are told apart by what they are,
    not by who wrote them), and engines of other layouts leave them alone.
    """

    path: Path
    limit_bytes: int
    shard: str = "0/1"
    """Which tensor-parallel shard of a block these are: rank/size."""

    def open(self, layout: str, bytes_per_block: int) -> DiskStore:
        """Raises Refused when no directory can be used, or the file system has not that much left."""
        digest = hashlib.blake2b(f"{layout}/{self.shard}".encode(), digest_size=8, person=b"semkv-disk").hexdigest()
        store = self._first_free(digest, bytes_per_block)
        try:
            check_room(store.directory, self.limit_bytes)
        except Refused:
            store.close()
            raise
        others = [found.name for found in self.path.iterdir() if found.is_dir() and not found.name.startswith(digest)]
        if others:
            _log.info(
                "semkv connector: %d stores of other layouts or shards in %s; those that no engine uses any more may "
                "be removed",
                len(others),
                self.path,
            )
        return store

    def _first_free(self, digest: str, bytes_per_block: int) -> DiskStore:
        for number in range(_STORES):
            try:
                return DiskStore(self.path / f"{digest}-{number}", digest, bytes_per_block, self.limit_bytes)
            except InUse:
                continue
        raise Refused(
            "connector.disk_path", str(self.path), f"all of its {_STORES} stores are in use", "name another one"
        )


def check_room(directory: Path, limit_bytes: int, free: Callable[[Path], int] | None = None) -> None:
    """Refused when `connector.disk_bytes` is more than the file system can still give, blocks that are there already
    included."""
    left = shutil.disk_usage(directory).free if free is None else free(directory)
    if limit_bytes <= left:
        return
    room = left + sum(map(_size_of, directory.glob("*.kv")))
    if limit_bytes > room:
        raise Refused(
            "connector.disk_bytes",
            limit_bytes,
            f"the file system of {directory} has {room} bytes for it",
            f"set it to at most {room} (it counts per rank), or connector.disk_path to a directory on a larger disk",
        )


def _size_of(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:  # it went meanwhile: what it takes is free
        return 0


class RankDisk:
    """`order` may be called from any thread, and waits for nothing but, when the books of its leader begin anew, the
    block that is just being read. `manual=True`: no thread, orders run in `run_pending` (tests)."""

    def __init__(
        self,
        number: int,
        store: DiskStore,
        slab: HostSlab,
        post: Callable[[DiskResult], None],
        *,
        manual: bool = False,
    ) -> None:
        self._number = number
        self._store = store
        self._slab = slab
        self._post = post
        self._wake = threading.Condition()
        self._first: deque[Stage] = deque()
        self._then: deque[tuple[Tell | Spill | Clear, int]] = deque()
        """With the number of resets that were ordered before it."""
        self._life = 0
        self._resets = 0
        self._durable = 0
        """How many of the resets the store knows of."""
        self._resetting = threading.Lock()
        self._closed = False
        self._staging = False
        self._closing = False
        self._busy = False
        self._copy = np.empty((1, slab.row_bytes), dtype=np.uint8)
        self._thread: threading.Thread | None = None
        self._manual = manual
        self.failed = 0
        """Orders that ended in an exception."""

    @property
    def store(self) -> DiskStore:
        """The files of this rank."""
        return self._store

    def start(self) -> None:
        """Once."""
        if not self._manual:
            self._thread = threading.Thread(target=self._run, name=f"semkv-disk-{self._number}", daemon=True)
            self._thread.start()

    def order(self, order: DiskOrder) -> None:
        """Takes an order of the leader; its thread carries it out. Reads that a request waits for go before everything
        else."""
        with self._wake:
            if isinstance(order, Tell):
                self._life = order.order_id
                # The pool was rebuilt on some rank. What is being read into a slot of the old books ends before the new
                # ones use it.
                self._wake.wait_for(lambda: not self._staging, _END_SECONDS)
            if isinstance(order, Stage):
                self._first.append(order)
            else:
                self._then.append((order, self._resets))
            if isinstance(order, Clear):
                self._resets += 1
            self._wake.notify_all()

    def make_resets_durable(self) -> None:
        """What was ordered to be cleared is never served again, also not after a restart: the store has another epoch
        when this returns. One small write that is flushed to the disk, so not from an engine's callback. Raises OSError
        when the disk does not take it."""
        with self._resetting:
            ordered = self._resets
            if not self._closed and self._durable != ordered:
                self._store.begin_epoch()
                self._durable = ordered

    def run_pending(self, limit: int | None = None) -> int:
        """Manual mode: runs what waits, at most `limit` orders; returns how many."""
        done = 0
        while (limit is None or done < limit) and (following := self._next()) is not None:
            self._work(*following)
            done += 1
        return done

    def drain(self, timeout: float) -> bool:
        """Waits until nothing is left to do; False when the time is over. Not in manual mode."""
        with self._wake:
            return self._wake.wait_for(lambda: not self._first and not self._then and not self._busy, timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Ends after the order in hand; those that wait stay unanswered: their leader's books end too. Files stay, but
        for a `Clear` that waits: what it forgets may not be found by the next start."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
            if self._thread.is_alive():
                _log.warning("semkv connector: the disk's thread did not end within %.0f s; its lock is kept", timeout)
                return
        if not self._closed:
            self._finish_resets()
        with self._resetting:
            self._closed = True
            self._store.close()

    def _finish_resets(self) -> None:
        try:
            self.make_resets_durable()
            self._store.sweep()
        except OSError:
            self.failed += 1
            _throttled.exception("semkv connector: the disk could not be cleared; remove %s", self._store.directory)

    # on the thread

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closing or bool(self._first) or bool(self._then))
                if self._closing:
                    return
                following = self._next()
                self._busy = following is not None
            if following is not None:
                self._work(*following)
            with self._wake:
                self._busy = False
                self._wake.notify_all()

    def _next(self) -> tuple[DiskOrder, int] | None:
        if self._first:
            return self._first.popleft(), self._resets
        return self._then.popleft() if self._then else None

    def _tell(self, order: Tell) -> DiskFound:
        """Posts all but the last report."""
        records = iter(self._store.take_over(lambda: self._closing))
        told: set[bytes] = set()
        batch = tuple(islice(records, FOUND_AT_ONCE))
        while True:
            following = tuple(islice(records, FOUND_AT_ONCE))
            blocks = tuple(_once(record, told) for record in batch)
            if not following or self._closing:
                return DiskFound(self._number, order.order_id, blocks, last=True)
            self._post(DiskFound(self._number, order.order_id, blocks, last=False))
            batch = following

    def _work(self, order: DiskOrder, resets: int) -> None:
        """Answers the order, which `resets` came before; what left the store on the way is told first, or the leader
        would believe in a file that made room."""
        try:
            answer = self._do(order, resets)
        except Exception:  # noqa: BLE001 - an unanswered order would hold slots and leases for ever
            self.failed += 1
            _throttled.exception("semkv connector: an order to the disk failed")
            answer = self._undone(order)
        gone = self._store.take_gone()
        if isinstance(order, Spill):
            # A block that was written by this order and had to make room for the next one is no news.
            answered = {placed.block.key for placed in order.blocks} & set(gone)
            answer = _without(order, answer, answered)
        for at in range(0, len(gone), _GONE_AT_ONCE):
            self._post(DiskGone(self._number, tuple(gone[at : at + _GONE_AT_ONCE])))
        self._post(answer)

    def _do(self, order: DiskOrder, resets: int) -> DiskResult:
        if isinstance(order, Tell):
            return self._tell(order)
        if isinstance(order, Stage):
            done = 0
            for placed in order.blocks:
                if not self._stage(placed, order.life):
                    break
                done += 1
            return StageDone(self._number, order.order_id, done)
        if isinstance(order, Spill):
            written = tuple(self._spill(placed, order.life, resets) for placed in order.blocks)
            return SpillDone(self._number, order.order_id, written)
        self.make_resets_durable()
        self._store.sweep()
        return DiskCleared(self._number, order.order_id)

    def _undone(self, order: DiskOrder) -> DiskResult:
        if isinstance(order, Tell):
            return DiskFound(self._number, order.order_id, (), last=True)
        if isinstance(order, Stage):
            return StageDone(self._number, order.order_id, 0)
        if isinstance(order, Spill):
            return SpillDone(self._number, order.order_id, (False,) * len(order.blocks))
        return DiskCleared(self._number, order.order_id)

    def _stage(self, placed: Placed, life: int) -> bool:
        with self._wake:
            if life != self._life:
                return False
            self._staging = True
        try:
            slot = placed.slot
            self._slab.break_seals([slot])
            row = self._slab.rows[slot].numpy()
            if not self._store.read_into(placed.block, row[: self._slab.bytes_per_block].data):
                return False
            self._slab.seal([slot])
            return True
        finally:
            with self._wake:
                self._staging = False
                self._wake.notify_all()

    def _spill(self, placed: Placed, life: int, resets: int) -> bool:
        epoch = self._store.epoch  # asked for first: a reset that is ordered from here on changes one or the other
        if resets != self._resets:
            return False
        if self._store.contains(placed.block.namespace, placed.block.key):
            return True
        if not self._slab.copy_sealed(placed.slot, self._copy) or life != self._life:
            return False
        return self._store.put(placed.block, self._copy[0, : self._slab.bytes_per_block].data, epoch)


def _once(record: BlockRecord, told: set[bytes]) -> BlockRecord:
    if record.namespace in told:
        return replace(record, words=b"")
    told.add(record.namespace)
    return record


def _without(order: Spill, answer: DiskResult, gone: set[BlockKey]) -> DiskResult:
    if not gone or not isinstance(answer, SpillDone):
        return answer
    kept = tuple(ok and placed.block.key not in gone for ok, placed in zip(answer.written, order.blocks, strict=True))
    return SpillDone(answer.rank, answer.order_id, kept)
