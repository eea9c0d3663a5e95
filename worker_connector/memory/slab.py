"""HostSlab: one rank's host memory for blocks, and the checksums that prove that a block still holds what was put into
it.

When are they checked? TensorRT-LLM takes an offer for a promise: after it, a load that fails can only end the executor.
So a block is verified *before* it is offered. But a 32k-token prompt is hundreds of MiB of KV for a real model, which
no checksum reads within the millisecond that an offer may take on the scheduler's thread. Therefore the work is spread:

* *Seal*: once a block's copy has landed, its checksum is computed and stored off the hot path, and only then may the
  leader offer the block. A slot with a stored checksum is *sealed*. Writing to a slot drops its checksum first, so a
  slot that is being written, or whose copy never ended, is never offered.
* *Check at the offer*: within a budget (about 0.1 ms), the block of the offer that was checked longest ago and its
  neighbours are read. Small offers are thus verified whole, and repeated offers of a long prompt go round all of its
  blocks.
* *Scrub*: a background thread reads sealed blocks again and again at a low rate, those just loaded first, so that
  damage is found before somebody asks, and a damaged block that was loaded is at least reported.
* A block that fails any check is never offered again, and with it every block that continues it.

The slab knows slots and bytes, not tokens, keys or requests. Writers: the rank's copies only. Readers: the rank, and
the offer's check.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dynamo_semkv.config.host_memory import Available
from worker_connector.errors import Refused
from worker_connector.memory.checksum import Words, padded, seals
from worker_connector.memory.pinned import host_rows, pinned_rows

Slots = npt.NDArray[np.int64]

_MIB = 1024 * 1024
_GATHERED = 64 * 1024
"""Bytes of a row. Reading smaller ones one by one takes longer than copying them together first."""
_RESERVE_SHARE = 0.9
"""Of the memory that is available, a slab may take this much: the engine starts other threads and buffers after us."""


class Budget(NamedTuple):
    """What one check may read: a row costs about a microsecond beside its bytes, so both are bounded."""

    rows: int
    size: int
    """Bytes."""

    def of(self, row_bytes: int) -> int:
        """How many rows of `row_bytes` bytes the check may read."""
        return min(self.rows, self.size // row_bytes)


OFFER_BUDGET = Budget(rows=64, size=_MIB // 2)
NO_READING = Budget(rows=0, size=0)
"""Checks only whether the slots are sealed."""


def slots_for(slab_bytes: int, bytes_per_block: int, available: Available | None) -> int:
    """How many blocks fit into `connector.slab_bytes`. Refused, with the numbers, when none does or there is not that
    much memory."""
    row = padded(bytes_per_block)
    slots = slab_bytes // row
    if slots < 1:
        raise Refused(
            "connector.slab_bytes",
            slab_bytes,
            f"one block of this model takes {row} bytes of host memory",
            f"set it to at least {row}, better to a multiple that holds a working set",
        )
    if available is not None and slots * row > available.size * _RESERVE_SHARE:
        raise Refused(
            "connector.slab_bytes",
            slab_bytes,
            f"{slots * row // _MIB} MiB are wanted and {available.size // _MIB} MiB are available: {available.bound}",
            f"set it to at most {int(available.size * _RESERVE_SHARE)} (it counts per rank), or give the container "
            "more memory",
        )
    return slots


class HostSlab:
    """`slots` rows of host memory, pinned where the engine's pages are on a GPU, so that copies are asynchronous DMA.

    Slot states: broken (being written, or never written) or sealed. `verify` and `seal` may run on any thread; a lock
    covers the stored checksums, never a copy or the computing of a checksum."""

    def __init__(self, slots: int, bytes_per_block: int, *, pinned: bool = False) -> None:
        self.slots = slots
        self.incarnation = secrets.token_hex(8)
        """Names this slab; its rank reports it (`RankReady`)."""
        self.bytes_per_block = bytes_per_block
        width = padded(bytes_per_block)
        self.rows = pinned_rows(slots, width) if pinned else host_rows(slots, width)
        """uint8, shape [slots, bytes_per_block rounded up to whole checksum rows]. The rest of a row is never
        written."""
        self._bytes = self.rows.numpy()
        self._columns: dict[tuple[int, int], torch.Tensor] = {}
        self._lock = threading.Lock()
        self._seals = np.zeros(slots, dtype=np.uint64)
        self._writes = np.zeros(slots, dtype=np.int64)
        self._checked = np.zeros(slots, dtype=np.int64)
        """`_clock` at the slot's last check; 0: it is not sealed."""
        self._clock = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, padding included."""
        return int(self._bytes.shape[1])

    def columns(self, offset: int, size: int) -> torch.Tensor:
        """Bytes [offset, offset + size) of every row, shape [slots, size]; made once."""
        view = self._columns.get((offset, size))
        if view is None:
            view = self._columns[offset, size] = self.rows[:, offset : offset + size]
        return view

    def break_seals(self, slots: Sequence[int]) -> None:
        """Drops the checksums of these slots. Must be called before the first byte of a new block is written to
        them."""
        with self._lock:
            checked, writes = self._checked, self._writes
            for slot in slots:  # each one is there once; an index array would cost more for the few that a pass saves
                checked[slot] = 0
                writes[slot] += 1

    def seal(self, slots: Sequence[int]) -> None:
        """Computes and stores the checksums of slots whose copies have landed. A slot that was written again meanwhile
        stays broken."""
        if not len(slots):
            return
        index = np.asarray(slots, dtype=np.int64)
        with self._lock:
            writes = self._writes[index].copy()
        found = self._compute(index)
        with self._lock:
            index, found = index[still := self._writes[index] == writes], found[still]
            self._seals[index] = found
            self._stamp(index)

    def verify(self, slots: Sequence[int], budget: Budget | None = None) -> list[int]:
        """Slots that may not be offered: those that are not sealed, and those whose bytes do not match their checksum.

        With a budget, only that much of what was checked longest ago is read again; a slot that is not sealed is found
        in any case."""
        index = np.asarray(slots, dtype=np.int64)
        if not len(index):
            return []
        broken: list[int] = []
        with self._lock:
            checked = self._checked.take(index)
            oldest = int(checked.argmin())
            if not checked[oldest]:
                broken = index[checked == 0].tolist()
                index, checked = index[checked > 0], checked[checked > 0]
                oldest = int(checked.argmin()) if len(index) else 0
            count = len(index) if budget is None else budget.of(self.row_bytes)
            if count < len(index):
                # The oldest one, and those on the side of it that was checked longer ago, which most often lie side by
                # side and were
                # checked together before. Each check reads the oldest one, so checks of the same slots go round all of
                # them.
                last = len(index) - 1
                upwards = oldest == 0 or (oldest < last and checked[oldest + 1] <= checked[oldest - 1])
                first = max(0, min(oldest if upwards else oldest - count + 1, len(index) - count))
                index = np.sort(index[first : first + count])
            expected, writes = self._seals[index], self._writes[index]
        wrong = self._differing(index, expected, writes)
        return sorted({*broken, *wrong}) if broken or wrong else []

    def damaged(self, slots: Sequence[int]) -> list[int]:
        """Sealed slots whose bytes do not match their checksum; other slots are being written and are left out."""
        index = np.asarray(slots, dtype=np.int64)
        with self._lock:
            index = index[self._checked[index] > 0]
            expected, writes = self._seals[index], self._writes[index]
        return self._differing(index, expected, writes)

    def _differing(self, index: Slots, expected: Words, writes: Slots) -> list[int]:
        """Slots whose bytes do not match. `expected`, `writes`: of these slots, read at one moment at which all of them
        were sealed."""
        if not len(index):
            return []
        same = self._compute(index) == expected
        with self._lock:
            untouched = self._writes[index] == writes
            self._stamp(
                index if untouched.all() else index[untouched]
            )  # a stamp marks a slot as sealed: none for what is being written
        return [] if same.all() else sorted(index[untouched & ~same].tolist())

    def copy_sealed(self, slot: int, into: npt.NDArray[np.uint8]) -> bool:
        """Copies a slot, shape [1, row_bytes]; False if it is not sealed, was written meanwhile, or does not match its
        checksum."""
        with self._lock:
            sealed, writes, expected = bool(self._checked[slot]), int(self._writes[slot]), self._seals[slot]
        if not sealed:
            return False
        into[0] = self._bytes[slot]
        if seals(into)[0] != expected:
            return False
        with self._lock:
            return bool(self._checked[slot]) and int(self._writes[slot]) == writes

    def sealed_slots(self) -> list[int]:
        """All sealed slots, longest unchecked first: the scrubber's round."""
        with self._lock:
            index = np.flatnonzero(self._checked)
            return list(index[np.argsort(self._checked[index], kind="stable")].tolist())

    @property
    def sealed(self) -> int:
        """How many slots are sealed."""
        with self._lock:
            return int(np.count_nonzero(self._checked))

    def _stamp(self, index: Slots) -> None:
        self._clock += 1
        self._checked[index] = self._clock

    def _compute(self, index: Slots) -> Words:
        """Checksums of these slots as they are now. Runs of neighbouring slots are read in place; many scattered small
        ones are copied together first."""
        count, first, last = len(index), int(index[0]), int(index[-1])
        if last - first == count - 1 and index.tolist() == list(range(first, first + count)):
            return seals(self._bytes[first : first + count])
        breaks = np.flatnonzero(np.diff(index) != 1) + 1
        found = np.empty(len(index), dtype=np.uint64)
        if self.row_bytes <= _GATHERED and len(breaks) > len(index) // 4:
            together = max(1, _MIB // self.row_bytes)
            for at in range(0, len(index), together):
                found[at : at + together] = seals(self._bytes[index[at : at + together]])
            return found
        for start, end in zip([0, *breaks], [*breaks, len(index)], strict=True):
            if start < end:
                found[start:end] = seals(self._bytes[index[start] : index[start] + (end - start)])
        return found
