"""Bytes between page slots and host slots, ordered against the engine's stream.

One code path for CPU and CUDA: copies are torch copies of uint8 views, and what differs is a `CopyStream` of three verbs. On CUDA the
copies run on a side stream; on the CPU they are done when the call returns and every verb is a no-op.

Order, which no layer hook is needed for (CUDA graphs skip those, ai-dynamo/dynamo#3297):
* loads: side stream waits for the engine's stream (pages may still be read), copies, engine's stream waits for the copies before the
  forward pass reads a page;
* saves: side stream waits for the engine's stream (the forward pass has written the pages), copies; the engine's stream waits for them
  before the next forward pass may write pages that were freed meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from worker_connector.geometry import Plane, PoolGeometry
from worker_connector.pages import NO_PAGE
from worker_connector.refusal import LoadFailed
from worker_connector.slab import HostSlab


class Move(NamedTuple):
    """One block: its host slot, and its page slot in each layer group (`NO_PAGE`: none there)."""

    slot: int
    pages: tuple[int, ...]


class Ticket(Protocol):
    """Stands for copies that were handed to a stream."""

    def done(self) -> bool: ...

    def wait(self) -> None:
        """Blocks the calling thread, not the stream, until the copies have landed."""


class CopyStream(Protocol):
    def after(self, engine_stream: Any) -> None:
        """Our next copies start only when what is enqueued on the engine's stream now has run."""

    def before(self, engine_stream: Any) -> None:
        """What is enqueued on the engine's stream from now on starts only when our copies so far have landed."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None: ...

    def ticket(self) -> Ticket:
        """For all copies so far."""


class _Landed:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class CpuStream:
    """Copies between host memories: done on return."""

    _landed = _Landed()

    def after(self, engine_stream: Any) -> None:
        return None

    def before(self, engine_stream: Any) -> None:
        return None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def ticket(self) -> Ticket:
        return self._landed


class _EventTicket:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


class CudaStream:
    """A side stream of the pages' device; host memory must be pinned for the copies to be asynchronous."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)

    def after(self, engine_stream: Any) -> None:
        self._side.wait_stream(_stream_of(engine_stream, self._device))

    def before(self, engine_stream: Any) -> None:
        _stream_of(engine_stream, self._device).wait_stream(self._side)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)

    def ticket(self) -> Ticket:
        event = torch.cuda.Event()
        event.record(self._side)
        return _EventTicket(event)


def _stream_of(engine_stream: Any, device: torch.device) -> torch.cuda.Stream:
    """The engine hands over a torch stream, or a raw `cudaStream_t` from its C++ side."""
    if isinstance(engine_stream, torch.cuda.Stream):
        return engine_stream
    if isinstance(engine_stream, int):
        return torch.cuda.ExternalStream(engine_stream, device=device)
    return torch.cuda.current_stream(device)


def copy_stream_for(device: torch.device) -> CopyStream:
    return CudaStream(device) if device.type == "cuda" else CpuStream()


def check_moves(geometry: PoolGeometry, slab: HostSlab, moves: Sequence[Move]) -> None:
    """LoadFailed, naming the number, for a slot or page outside the slab or the pool: a wrong number must never become a copy."""
    limits = geometry.num_pages
    if not moves:
        return
    if any(len(move.pages) != len(limits) for move in moves):
        raise LoadFailed(f"a move does not have {len(limits)} page slots, one for each layer group")
    _check_range("host slot", [move.slot for move in moves], 0, slab.slots)
    for index, limit in enumerate(limits):
        _check_range("page slot", [move.pages[index] for move in moves], NO_PAGE, limit)


def _check_range(what: str, numbers: list[int], low: int, limit: int) -> None:
    for number in (min(numbers), max(numbers)):
        if not low <= number < limit:
            raise LoadFailed(f"{what} {number} is outside [0, {limit})")


def copy_to_pages(stream: CopyStream, geometry: PoolGeometry, slab: HostSlab, moves: Sequence[Move]) -> None:
    """Host slots -> page slots. Groups without a page for a block are left out."""
    for plane in geometry.planes:
        columns = slab.rows[:, plane.offset : plane.offset + plane.size]
        for slot, page, count in _runs(plane, moves):
            stream.copy(plane.pages[page : page + count], columns[slot : slot + count])


def copy_to_slab(stream: CopyStream, geometry: PoolGeometry, slab: HostSlab, moves: Sequence[Move]) -> None:
    """Page slots -> host slots. The caller has broken the seals and checked that every group has a page."""
    for plane in geometry.planes:
        columns = slab.rows[:, plane.offset : plane.offset + plane.size]
        for slot, page, count in _runs(plane, moves):
            stream.copy(columns[slot : slot + count], plane.pages[page : page + count])


def _runs(plane: Plane, moves: Sequence[Move]) -> Iterator[tuple[int, int, int]]:
    """(first slot, first page, count): neighbours on both sides are copied in one go."""
    start: tuple[int, int] | None = None
    count = 0
    for move in moves:
        page = move.pages[plane.group]
        if start is not None and page == start[1] + count and move.slot == start[0] + count:
            count += 1
            continue
        if start is not None:
            yield (*start, count)
            start = None
        if page != NO_PAGE:
            start, count = (move.slot, page), 1
    if start is not None:
        yield (*start, count)
