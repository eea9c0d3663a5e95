"""Bytes between page slots and host slots, ordered against the engine's stream.

One code path for CPU and CUDA: what differs is a `CopyStream` (copy_stream.py, cuda_stream.py). On CUDA copies run on side streams; on the
CPU they are done when the call returns and there is nothing to order.

Order, which no layer hook is needed for (CUDA graphs skip those, ai-dynamo/dynamo#3297):
* loads: side stream waits for the engine's stream (pages may still be read), copies, engine's stream waits for the copies before the
  forward pass reads a page;
* saves: side stream waits for the engine's stream (the forward pass has written the pages), copies; the engine's stream waits until they
  have read the pages before the next forward pass may write those that were freed meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from worker_connector.copy_stream import CopyStream, CpuStream, Run
from worker_connector.cuda_stream import CudaStream
from worker_connector.geometry import Plane, PoolGeometry
from worker_connector.pages import NO_PAGE
from worker_connector.refusal import LoadFailed
from worker_connector.slab import HostSlab


class Move(NamedTuple):
    """One block: its host slot, and its page slot in each layer group (`NO_PAGE`: none there)."""

    slot: int
    pages: tuple[int, ...]


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
    load_planes(stream, geometry.planes, slab, moves)


def copy_to_slab(stream: CopyStream, geometry: PoolGeometry, slab: HostSlab, moves: Sequence[Move]) -> None:
    """Page slots -> host slots. The caller has broken the seals and checked that every group has a page."""
    save_planes(stream, geometry.planes, slab, moves)


def load_planes(stream: CopyStream, planes: Iterable[Plane], slab: HostSlab, moves: Sequence[Move]) -> None:
    """`copy_to_pages` of some planes."""
    for plane in planes:
        if runs := _runs(plane, moves):
            stream.to_pages(plane.pages, _columns(plane, slab), runs)


def save_planes(stream: CopyStream, planes: Iterable[Plane], slab: HostSlab, moves: Sequence[Move]) -> None:
    """`copy_to_slab` of some planes."""
    for plane in planes:
        if runs := _runs(plane, moves):
            stream.to_rows(_columns(plane, slab), plane.pages, runs)


def _columns(plane: Plane, slab: HostSlab) -> torch.Tensor:
    return slab.rows[:, plane.offset : plane.offset + plane.size]


def _runs(plane: Plane, moves: Sequence[Move]) -> list[Run]:
    """Neighbours on both sides are copied in one go."""
    runs: list[Run] = []
    group = plane.group
    slot = page = count = 0
    for move in moves:
        at = move.pages[group]
        if count and at == page + count and move.slot == slot + count:
            count += 1
            continue
        if count:
            runs.append(Run(slot, page, count))
        slot, page, count = move.slot, at, int(at != NO_PAGE)
    if count:
        runs.append(Run(slot, page, count))
    return runs
