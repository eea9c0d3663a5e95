"""CopyStream: what the connector needs of a stream that copies run on, and the CPU's stream, whose copies are done when
the call returns."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

Numbers = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class Blocks:
    """Which blocks are copied: row `slots[i]` of the slab and page `pages[i]` of the pool belong together, every row
    and page once."""

    __slots__ = ("_pages", "_slots")

    def __init__(self, slots: Numbers | list[int], pages: Numbers | list[int]) -> None:
        """Takes lists where there are few: behind a forward pass, one numpy call costs as much as a loop over twenty
        numbers."""
        self._slots = slots
        self._pages = pages

    @property
    def many(self) -> bool:
        """True where the numbers came as arrays."""
        return not isinstance(self._slots, list)

    @property
    def slots(self) -> Numbers:
        """Rows of the slab, shape [n]."""
        return np.asarray(self._slots, np.int64)

    @property
    def pages(self) -> Numbers:
        """Pages of the pool, shape [n]."""
        return np.asarray(self._pages, np.int64)

    @property
    def starts(self) -> Numbers:
        """Indices at which a run begins, that is, blocks that are neighbours on both sides."""
        slots, pages = self.slots, self.pages
        breaks = np.flatnonzero((np.diff(slots) != 1) | (np.diff(pages) != 1)) + 1
        return np.concatenate(([0], breaks)) if len(slots) else breaks

    def __len__(self) -> int:
        return len(self._slots)

    def runs(self) -> Iterable[tuple[int, int, int]]:
        """Every run as (first slot, first page, number of blocks)."""
        slots, pages = self._slots, self._pages
        if isinstance(slots, list) and isinstance(pages, list):
            return _runs(slots, pages)
        slots, pages, starts = self.slots, self.pages, self.starts
        counts = np.diff(np.append(starts, len(slots)))
        return zip(slots[starts].tolist(), pages[starts].tolist(), counts.tolist(), strict=True)


def _runs(slots: list[int], pages: list[int]) -> list[tuple[int, int, int]]:
    found: list[tuple[int, int, int]] = []
    first, count = 0, 0
    for slot, page in zip(slots, pages, strict=True):
        if count and slot == slots[first] + count and page == pages[first] + count:
            count += 1
            continue
        if count:
            found.append((slots[first], pages[first], count))
            first += count
        count = 1
    if count:
        found.append((slots[first], pages[first], count))
    return found


class Ticket(Protocol):
    """Stands for copies that were handed to a stream."""

    def done(self) -> bool:
        """Says without waiting whether the copies have landed."""
        ...

    def wait(self) -> None:
        """Blocks the calling thread, not the stream, until the copies have landed."""

    def hold(self, engine_stream: Any) -> None:
        """What is enqueued on the engine's stream from now on starts only when the copies have landed."""


class Mark(Ticket, Protocol):
    """A ticket with a timestamp, by the clock of whatever makes the copies."""

    def seconds_since(self, earlier: Any) -> float:
        """Seconds from an `earlier` mark of the same stream to this one; both must be `done`. What the host does
        meanwhile counts only where the stream waited for it."""


class CopyStream(Protocol):
    """`pages` and `rows` are uint8 views, two-dimensional, equally wide, the bytes of a row side by side; rows may be
    strided. `rows` is host memory (pinned where `pages` is on a GPU)."""

    def after(self, engine_stream: Any) -> None:
        """Our next copies start only when what is enqueued on the engine's stream now has run."""

    def before(self, engine_stream: Any) -> None:
        """What is enqueued on the engine's stream from now on starts only when our copies so far have left the pages:
        those into pages have landed, those out of pages have read them."""

    def to_pages(self, pages: torch.Tensor, rows: torch.Tensor, blocks: Blocks) -> None:
        """Must copy each block from its row to its page, now or in the order of the stream."""
        ...

    def to_rows(self, rows: torch.Tensor, pages: torch.Tensor, blocks: Blocks) -> None:
        """Must copy each block from its page to its row, now or in the order of the stream."""
        ...

    def prepare(self, pages: torch.Tensor, rows: torch.Tensor) -> None:
        """Announces copies between these, when the pool is registered; without it the first of them may take long."""

    def ticket(self) -> Ticket:
        """For all copies that were handed over so far."""

    def mark(self) -> Mark:
        """As `ticket`, with the time at which the stream reaches it."""

    def recording(self) -> bool:
        """True while the engine records a graph of this thread's stream: nothing of ours may get into it."""


class _Landed:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None

    def hold(self, engine_stream: Any) -> None:
        return None


class _Moment(_Landed):
    def __init__(self) -> None:
        self._at = time.perf_counter()

    def seconds_since(self, earlier: _Moment) -> float:
        return self._at - earlier._at


class CpuStream:
    """Copies within host memory through numpy, whose assignment of a row costs a tenth of torch's: run by run where
    blocks are neighbours on both sides, else in one call for each run on one side (docs/performance.md)."""

    _landed = _Landed()

    def after(self, engine_stream: Any) -> None:
        """Nothing is to be ordered: each copy is done when its call returns."""
        return None

    def before(self, engine_stream: Any) -> None:
        """Nothing is to be ordered: each copy is done when its call returns."""
        return None

    def to_pages(self, pages: torch.Tensor, rows: torch.Tensor, blocks: Blocks) -> None:
        """Done when it returns. IndexError where many blocks have a number out of range."""
        target, source = pages.numpy(), rows.numpy()
        if blocks.many and _copy_one_sided(target, source, blocks.pages, blocks.slots, blocks.starts):
            return
        for slot, page, count in blocks.runs():
            target[page : page + count] = source[slot : slot + count]

    def to_rows(self, rows: torch.Tensor, pages: torch.Tensor, blocks: Blocks) -> None:
        """Done when it returns. IndexError where many blocks have a number out of range."""
        target, source = rows.numpy(), pages.numpy()
        if blocks.many and _copy_one_sided(target, source, blocks.slots, blocks.pages, blocks.starts):
            return
        for slot, page, count in blocks.runs():
            target[slot : slot + count] = source[page : page + count]

    def prepare(self, pages: torch.Tensor, rows: torch.Tensor) -> None:
        """There is nothing to compile."""
        return None

    def ticket(self) -> Ticket:
        """Always done."""
        return self._landed

    def mark(self) -> Mark:
        """The time of the call; always done."""
        return _Moment()

    def recording(self) -> bool:
        """Always False."""
        return False


_LONG = 4
"""Blocks a run, on average, from which a call for each run pays."""


def _copy_one_sided(target: Bytes, source: Bytes, to: Numbers, of: Numbers, both: Numbers) -> bool:
    """`target[to] = source[of]`, row by row, where the numbers of one side form runs, in whatever order they come.
    False, and nothing done, where neither side does, or where runs of both sides (`both`: their starts) are long: a
    copy for each of those is better.

    numpy's indexing on both sides takes twice as long as a loop over rows; on one side it is faster than the loop.
    IndexError, and nothing copied, for a number outside.
    """
    count = len(to)
    if _LONG * len(both) <= count:
        return False
    gather, order = True, _ascending(to)
    starts = _starts(to[order])
    # `take` would first copy a source whose rows do not touch, whole
    if _LONG * len(starts) > count or not (source.flags.c_contiguous and target.flags.c_contiguous):
        gather, order = False, _ascending(of)
        starts = _starts(of[order])
        if _LONG * len(starts) > count:
            return False
    to, of = to[order], of[order]
    for numbers, limit in ((to, len(target)), (of, len(source))):
        # numpy would count from the end, or take the nearest
        if not 0 <= int(numbers.min()) <= int(numbers.max()) < limit:
            raise IndexError(f"rows {int(numbers.min())} to {int(numbers.max())} of {limit}")
    for first, last in zip(starts.tolist(), [*starts[1:].tolist(), count], strict=True):
        if gather:
            at = int(to[first])
            # other modes are buffered
            np.take(source, of[first:last], axis=0, out=target[at : at + last - first], mode="clip")
        else:
            at = int(of[first])
            target[to[first:last]] = source[at : at + last - first]
    return True


def _ascending(numbers: Numbers) -> Numbers | slice:
    """An index that sorts the numbers."""
    return slice(None) if (np.diff(numbers) > 0).all() else np.argsort(numbers)


def _starts(numbers: Numbers) -> Numbers:
    """Where runs of ascending numbers begin."""
    return np.concatenate(([0], np.flatnonzero(np.diff(numbers) != 1) + 1))


def copy_pairs(pages: torch.Tensor, rows: torch.Tensor, blocks: Blocks) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs (view of pages, view of rows), each view one range of memory: whole runs where blocks touch on both sides,
    else block by block."""
    whole = touching(pages, rows)
    for slot, page, count in blocks.runs():
        if whole or count == 1:
            yield pages[page : page + count], rows[slot : slot + count]
        else:
            for offset in range(count):
                yield pages[page + offset], rows[slot + offset]


def touching(pages: torch.Tensor, rows: torch.Tensor) -> bool:
    """True if neighbouring blocks are one range of memory on both sides."""
    return pages.stride(0) == pages.shape[1] and rows.stride(0) == rows.shape[1]
