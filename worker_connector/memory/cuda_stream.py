"""CudaStream: copies between pinned slab rows and pages on a GPU, on a side stream.

Two ways, chosen by the size of what is one range of memory on both sides:
* large ranges go to the copy engine, one asynchronous copy each;
* small or strided ones by kernels that read and write the pinned rows directly (unified addressing), a few launches for
  all of them: a copy of 16 KiB takes 0.3 us on the bus and several to enqueue. The kernels are ours where there is
  Triton (memory/row_kernel.py), else torch's.

A save that fits the staging buffer is first gathered there, on the device, so that the engine may write its pages again
at once, while the slow way to the host is still going on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from worker_connector.memory.copy_stream import Blocks, Mark, Ticket, copy_pairs, touching

_log = logging.getLogger(__name__)

STAGING_BYTES = 32 * 1024 * 1024
"""Bytes of device memory of one stream; allocated when the pool is registered."""
KERNEL_BELOW = 1024 * 1024
"""Bytes of a range: smaller ones are moved by kernels."""
_WORDS = (torch.int64, torch.int32, torch.int16)


_CopyRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], None]


def _row_kernel() -> _CopyRows | None:
    try:
        from worker_connector.memory.row_kernel import copy_rows
    except ImportError:
        _log.warning("semkv connector: there is no Triton; small copies will take all multiprocessors")
        return None
    return copy_rows


class _EventTicket:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def hold(self, engine_stream: Any) -> None:
        stream_of(engine_stream, self._device).wait_event(self._event)


class _EventMark(_EventTicket):
    def seconds_since(self, earlier: _EventMark) -> float:
        return float(earlier._event.elapsed_time(self._event)) / 1e3  # CUDA tells milliseconds


class _HostBytes:
    """Pinned host memory as a GPU sees it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


class CudaStream:
    """Not thread-safe but for its tickets. Work runs in inference mode, in which tensors of the engine may be written
    whatever mode they were made in."""

    def __init__(
        self, device: torch.device, *, staging_bytes: int = STAGING_BYTES, kernel_below: int = KERNEL_BELOW
    ) -> None:
        self._device = device
        self._kernel_below = kernel_below
        self._side = torch.cuda.Stream(device, priority=-1)
        self._left = torch.cuda.Event()
        """Recorded after our last copy that reads or writes pages."""
        self._left.record(self._side)
        self._kernel = _row_kernel()
        self._counting = torch.empty(0, dtype=torch.int64, device=device)
        self._aliases: dict[tuple[int, torch.Size, tuple[int, ...]], torch.Tensor] = {}
        self._staging: torch.Tensor | None = None
        if staging_bytes:
            try:
                with torch.inference_mode(False), torch.cuda.stream(self._side):
                    self._staging = torch.empty(staging_bytes, dtype=torch.uint8, device=device)
            except torch.cuda.OutOfMemoryError:
                _log.warning(
                    "semkv connector: no %d bytes of GPU memory to stage copies in; they go one by one", staging_bytes
                )

    def after(self, engine_stream: Any) -> None:
        """Makes the side stream wait for the engine's."""
        self._side.wait_stream(stream_of(engine_stream, self._device))

    def before(self, engine_stream: Any) -> None:
        """Makes the engine's stream wait for the last copy that reads or writes pages."""
        stream_of(engine_stream, self._device).wait_event(self._left)

    def ticket(self) -> Ticket:
        """An event on the side stream."""
        event = torch.cuda.Event()
        event.record(self._side)
        return _EventTicket(event, self._device)

    def mark(self) -> Mark:
        """An event on the side stream that CUDA puts a time on."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._side)
        return _EventMark(event, self._device)

    def recording(self) -> bool:
        """True while CUDA captures the current stream."""
        return bool(torch.cuda.is_current_stream_capturing())

    def to_pages(self, pages: torch.Tensor, rows: torch.Tensor, blocks: Blocks) -> None:
        """By kernels or by the copy engine (see module)."""
        with torch.inference_mode(), torch.cuda.stream(self._side):
            try:
                seen = self._for_kernels(pages, rows, blocks)
                if seen is None:
                    for page, row in copy_pairs(pages, rows, blocks):
                        page.copy_(row, non_blocking=True)
                else:
                    self._gather_to_pages(pages, seen, blocks)
            finally:  # also what a fault left half done may not run into the next pass
                self._left.record(self._side)

    def to_rows(self, rows: torch.Tensor, pages: torch.Tensor, blocks: Blocks) -> None:
        """By kernels or by the copy engine, through the staging buffer where that serves (see module)."""
        with torch.inference_mode(), torch.cuda.stream(self._side):
            try:
                seen = self._for_kernels(pages, rows, blocks)
                if seen is not None:
                    self._scatter_to_rows(seen, pages, blocks)
                elif self._staging is not None and pages.shape[1] * len(blocks) <= len(self._staging):
                    self._stage_to_rows(self._staging, rows, pages, blocks)
                else:
                    for page, row in copy_pairs(pages, rows, blocks):
                        row.copy_(page, non_blocking=True)
                    self._left.record(self._side)
            except BaseException:  # raised again: what is half done may still read pages
                self._left.record(self._side)
                raise

    def prepare(self, pages: torch.Tensor, rows: torch.Tensor) -> None:
        """Compiles the row kernel now; else a forward pass would wait for that at the first small copy between
        these."""
        if self._kernel is None or self._staging is None:
            return
        nothing = torch.zeros(2, dtype=torch.int64, device=self._device)
        with torch.inference_mode(), torch.cuda.stream(self._side):
            seen = self._seen_from_device(rows)
            if seen is None:
                return
            words, (target, source) = as_words(pages, seen)
            part = _part(self._staging, words, 1, pages.shape[1]) if pages.shape[1] <= len(self._staging) else target
            try:
                self._kernel(target, nothing, source, nothing, 0)
                self._kernel(source, nothing, part, nothing, 0)
            except Exception as error:  # noqa: BLE001 - whatever a compiler raises: torch's own kernels do it too
                _log.warning(
                    "semkv connector: small copies will take all multiprocessors, no kernel of ours: %s", error
                )
                self._kernel = None

    def _gather_to_pages(self, pages: torch.Tensor, seen: torch.Tensor, blocks: Blocks) -> None:
        words, (target, source) = as_words(pages, seen)
        slots, numbers = self._indices(blocks)
        if self._kernel is not None:
            self._kernel(target, numbers, source, slots, len(blocks))
            return
        for part, at in self._parts(words, len(slots), pages.shape[1]):
            torch.index_select(source, 0, slots[at : at + len(part)], out=part)
            target.index_copy_(0, numbers[at : at + len(part)], part)

    def _scatter_to_rows(self, seen: torch.Tensor, pages: torch.Tensor, blocks: Blocks) -> None:
        words, (source, target) = as_words(pages, seen)
        slots, numbers = self._indices(blocks)
        for part, at in self._parts(words, len(slots), pages.shape[1]):
            torch.index_select(source, 0, numbers[at : at + len(part)], out=part)
            if at + len(part) == len(slots):
                self._left.record(self._side)
            if self._kernel is not None:
                self._kernel(target, slots[at : at + len(part)], part, self._in_order(len(part)), len(part))
            else:
                target.index_copy_(0, slots[at : at + len(part)], part)

    def _stage_to_rows(self, staging: torch.Tensor, rows: torch.Tensor, pages: torch.Tensor, blocks: Blocks) -> None:
        words, (source,) = as_words(pages)
        _, numbers = self._indices(blocks)
        part = _part(staging, words, len(numbers), pages.shape[1])
        torch.index_select(source, 0, numbers, out=part)
        self._left.record(self._side)
        staged = Blocks(blocks.slots, np.arange(len(blocks)))
        for page, row in copy_pairs(part.view(torch.uint8), rows, staged):
            row.copy_(page, non_blocking=True)

    def _parts(self, words: torch.dtype, count: int, size: int) -> Iterator[tuple[torch.Tensor, int]]:
        """Pairs (piece of the staging buffer in words, its first block) that together cover all blocks."""
        assert self._staging is not None
        step = max(len(self._staging) // size & ~1, 1)  # even, so that slices of the indices stay on their boundary
        for at in range(0, count, step):
            yield _part(self._staging, words, min(step, count - at), size), at

    def _for_kernels(self, pages: torch.Tensor, rows: torch.Tensor, blocks: Blocks) -> torch.Tensor | None:
        """The rows as kernels see them; None where the copy engine is to do it."""
        return (
            self._seen_from_device(rows) if self._staging is not None and self._is_small(pages, rows, blocks) else None
        )

    def _is_small(self, pages: torch.Tensor, rows: torch.Tensor, blocks: Blocks) -> bool:
        ranges = len(blocks.starts) if touching(pages, rows) else len(blocks)
        return ranges > 1 and pages.shape[1] * len(blocks) < self._kernel_below * ranges

    def _indices(self, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
        """(slots, pages) on the device, int64, each on a 16 byte boundary. torch keeps the pinned copy until it was
        read."""
        count = len(blocks)
        both = torch.empty((2, count + count % 2), dtype=torch.int64, pin_memory=True)
        numbers = both.numpy()
        numbers[0, :count], numbers[1, :count] = blocks.slots, blocks.pages
        slots, pages = both.to(self._device, non_blocking=True)
        return slots[:count], pages[:count]

    def _in_order(self, count: int) -> torch.Tensor:
        if len(self._counting) < count:
            with torch.inference_mode(False):
                self._counting = torch.arange(2 * count, device=self._device)
        return self._counting

    def _seen_from_device(self, rows: torch.Tensor) -> torch.Tensor | None:
        """`rows` as a tensor of the device; None, logged once, where its memory is not mapped there."""
        key = (rows.data_ptr(), rows.shape, rows.stride())
        found = self._aliases.get(key)
        if found is None:
            span = rows.stride(0) * (rows.shape[0] - 1) + rows.shape[1]
            try:
                with torch.inference_mode(False):
                    flat = torch.as_tensor(_HostBytes(rows.data_ptr(), span), device=self._device)
                    if flat.data_ptr() != rows.data_ptr():
                        raise RuntimeError(f"pinned for another GPU than {self._device}")
                    found = flat.as_strided(rows.shape, rows.stride())
            except (RuntimeError, TypeError) as error:
                _log.warning(
                    "semkv connector: host memory is not seen by the GPU, small copies go one by one: %s", error
                )
                self._staging = None
                return None
            self._aliases[key] = found
        return found


def as_words(*tensors: torch.Tensor) -> tuple[torch.dtype, list[torch.Tensor]]:
    """The same memory viewed in the widest integer type that all of the tensors allow, and that type."""
    for dtype in _WORDS:
        width = dtype.itemsize
        if all(
            t.shape[1] % width == 0
            and t.stride(0) % width == 0
            and t.data_ptr() % width == 0
            and t.storage_offset() % width == 0
            for t in tensors
        ):
            return dtype, [t.view(dtype) for t in tensors]
    return torch.uint8, list(tensors)


def _part(staging: torch.Tensor, words: torch.dtype, count: int, size: int) -> torch.Tensor:
    return staging[: count * size].view(words).view(count, size // words.itemsize)


def stream_of(engine_stream: Any, device: torch.device) -> torch.cuda.Stream:
    """The engine's stream for torch: the engine hands over a torch stream, or a raw `cudaStream_t` from its C++ side.
    Anything else stands for the current stream."""
    if isinstance(engine_stream, torch.cuda.Stream):
        return engine_stream
    if isinstance(engine_stream, int):
        return torch.cuda.ExternalStream(engine_stream, device=device)
    return torch.cuda.current_stream(device)
