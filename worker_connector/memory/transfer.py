"""Bytes between page slots and host slots, ordered against the engine's stream.

One code path for CPU and CUDA: what differs is a `CopyStream` (memory/copy_stream.py, memory/cuda_stream.py). On CUDA
copies run on side streams; on the CPU they are done when the call returns and there is nothing to order.

The order, for which no layer hook is needed (CUDA graphs skip those, ai-dynamo/dynamo#3297):
* loads: side stream waits for the engine's stream (pages may still be read), copies, engine's stream waits for the
  copies before the forward pass reads a page;
* saves: side stream waits for the engine's stream (the forward pass has written the pages), copies; the engine's stream
  waits until they have read the pages before the next forward pass may write those that were freed meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch

from worker_connector.engine_api.geometry import Plane, PoolGeometry
from worker_connector.engine_api.pages import NO_PAGE
from worker_connector.errors import LoadFailed
from worker_connector.memory.copy_stream import Blocks, CopyStream, CpuStream, Numbers, Ticket
from worker_connector.memory.cuda_stream import CudaStream
from worker_connector.memory.slab import HostSlab

PIECE = 2_048
"""Moves that are handed to the stream at once."""
FEW = 128
"""Up to so many moves are handled one by one: with cold caches, as between two forward passes, twenty small arrays cost
more."""


class Move(NamedTuple):
    """One block: its host slot, and its page slot in each layer group (`NO_PAGE`: none there)."""

    slot: int
    pages: tuple[int, ...]


def copy_stream_for(device: torch.device) -> CopyStream:
    """A new stream for copies between host memory and this device."""
    return CudaStream(device) if device.type == "cuda" else CpuStream()


def check_moves(geometry: PoolGeometry, slab: HostSlab, moves: Sequence[Move]) -> None:
    """LoadFailed, naming the number, for a slot or page outside the slab or the pool: a wrong number must never become
    a copy."""
    limits = geometry.num_pages
    if len(moves) <= FEW:
        _check_one_by_one(moves, slab.slots, limits)
        return
    if any(len(pages) != len(limits) for _, pages in moves):
        raise _wrong_groups(limits)
    _check_range("host slot", _slots(moves), 0, slab.slots)
    for index, limit in enumerate(limits):
        _check_range("page slot", _pages(moves, index), NO_PAGE, limit)


def _check_one_by_one(moves: Sequence[Move], slots: int, limits: Sequence[int]) -> None:
    groups = len(limits)
    for slot, pages in moves:
        if len(pages) != groups:
            raise _wrong_groups(limits)
        if not 0 <= slot < slots:
            raise LoadFailed(f"host slot {slot} is outside [0, {slots})")
        for page, limit in zip(pages, limits, strict=True):
            if not NO_PAGE <= page < limit:
                raise LoadFailed(f"page slot {page} is outside [{NO_PAGE}, {limit})")


def _wrong_groups(limits: Sequence[int]) -> LoadFailed:
    return LoadFailed(f"a move does not have {len(limits)} page slots, one for each layer group")


def _check_range(what: str, numbers: Numbers, low: int, limit: int) -> None:
    for number in (int(numbers.min()), int(numbers.max())):
        if not low <= number < limit:
            raise LoadFailed(f"{what} {number} is outside [0, {limit})")


def _slots(moves: Sequence[Move]) -> Numbers:
    return np.fromiter(map(itemgetter(0), moves), np.int64, len(moves))


def _pages(moves: Sequence[Move], group: int) -> Numbers:
    return np.fromiter(map(itemgetter(group), map(itemgetter(1), moves)), np.int64, len(moves))


def copy_to_pages(stream: CopyStream, geometry: PoolGeometry, slab: HostSlab, moves: Sequence[Move]) -> None:
    """Host slots -> page slots. Groups without a page for a block are left out."""
    load_planes(stream, geometry.planes, slab, moves)


def copy_to_slab(stream: CopyStream, geometry: PoolGeometry, slab: HostSlab, moves: Sequence[Move]) -> None:
    """Page slots -> host slots. The caller must have dropped the checksums and checked that every group has a page."""
    save_planes(stream, geometry.planes, slab, moves)


def prepare_copies(stream: CopyStream, geometry: PoolGeometry, slab: HostSlab, *, by_layer: bool) -> None:
    """Lets `stream` compile what it needs. Called when a pool is registered."""
    for plane in (*geometry.planes, *(geometry.by_layer if by_layer else ())):
        stream.prepare(plane.pages, _columns(plane, slab))


def load_by_layer(
    stream: CopyStream, geometry: PoolGeometry, slab: HostSlab, moves: Sequence[Move]
) -> dict[int, Ticket]:
    """`copy_to_pages`, in the order in which a pass reaches the layers. Returns a ticket for every layer, of all that
    the layer reads."""
    tickets: dict[int, Ticket] = {}
    planes = geometry.by_layer
    ends = {plane.layers[0]: index for index, plane in enumerate(planes)}  # the last plane that begins with that layer
    for index, plane in enumerate(planes):
        load_planes(stream, [plane], slab, moves)
        if ends[plane.layers[0]] == index:
            tickets[plane.layers[0]] = stream.ticket()
    for before, layer in pairwise(geometry.layers):
        tickets.setdefault(layer, tickets[before])  # its bytes lie in planes that begin with earlier layers
    return tickets


def load_planes(stream: CopyStream, planes: Sequence[Plane], slab: HostSlab, moves: Sequence[Move]) -> None:
    """`copy_to_pages` of some planes."""
    for blocks in _pieces(planes, moves):
        for plane in planes:
            if blocks[plane.group]:
                stream.to_pages(plane.pages, _columns(plane, slab), blocks[plane.group])


def save_planes(stream: CopyStream, planes: Sequence[Plane], slab: HostSlab, moves: Sequence[Move]) -> None:
    """`copy_to_slab` of some planes."""
    for blocks in _pieces(planes, moves):
        for plane in planes:
            if blocks[plane.group]:
                stream.to_rows(_columns(plane, slab), plane.pages, blocks[plane.group])


def _columns(plane: Plane, slab: HostSlab) -> torch.Tensor:
    return slab.columns(plane.offset, plane.size)


def _pieces(planes: Sequence[Plane], moves: Sequence[Move]) -> Iterator[dict[int, Blocks]]:
    """The moves as blocks of each layer group, in pieces, so that the device copies the first while the host prepares
    the next."""
    groups = {plane.group for plane in planes}
    if 0 < len(moves) <= FEW:
        yield {group: _few(moves, group) for group in groups}
        return
    for at in range(0, len(moves), PIECE):
        piece = moves[at : at + PIECE]
        slots = _slots(piece)
        yield {group: _blocks(slots, _pages(piece, group)) for group in groups}


def _few(moves: Sequence[Move], group: int) -> Blocks:
    slots, numbers = [], []
    for slot, pages in moves:
        page = pages[group]
        if page != NO_PAGE:
            slots.append(slot)
            numbers.append(page)
    return Blocks(slots, numbers)


def _blocks(slots: Numbers, pages: Numbers) -> Blocks:
    there = pages != NO_PAGE
    return Blocks(slots, pages) if there.all() else Blocks(slots[there], pages[there])
