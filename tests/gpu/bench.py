"""What the scripts share: the device, pools of KV pages on it with their slab, and clocks. On the CPU the same code
runs, for tests."""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from worker_connector.engine_api.cache_layout import (
    KvCacheBufferRef,
    KvCacheLayerGroupLayout,
    KvCacheLayout,
    KvCacheRegion,
)
from worker_connector.engine_api.geometry import PoolGeometry
from worker_connector.memory.copy_stream import CopyStream
from worker_connector.memory.slab import HostSlab
from worker_connector.memory.transfer import Move, copy_stream_for

NO_CUDA = 2
KIB = 1024
MIB = 1024 * KIB


def cuda_or_exit() -> torch.device:
    """The current CUDA device. Without one the process ends with status 2 and says why."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    build = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
    print(f"no CUDA here: {build} (torch {torch.__version__}); nothing was measured", file=sys.stderr)
    raise SystemExit(NO_CUDA)


def one_region(block_bytes: int) -> list[tuple[int, int]]:
    return [(0, block_bytes)]


def data_and_scales(block_bytes: int) -> list[tuple[int, int]]:
    """As with block scales beside the data: 7/8 and 1/8."""
    cut = block_bytes // 8 * 7
    return [(0, cut), (cut, block_bytes - cut)]


def a_region_per_layer(block_bytes: int, layers: int) -> list[tuple[int, int]]:
    size = block_bytes // layers
    return [(layer * size, size) for layer in range(layers)]


@dataclass
class Bench:
    """A pool of `pages` pages and a slab of `slots` blocks."""

    device: torch.device
    memory: torch.Tensor
    """uint8, [pages, bytes per block]: all regions of a page side by side."""
    geometry: PoolGeometry
    slab: HostSlab
    copies: CopyStream

    @classmethod
    def make(
        cls,
        device: torch.device,
        *,
        pages: int,
        slots: int,
        block_bytes: int,
        regions: Sequence[tuple[int, int]] | None = None,
        copies: CopyStream | None = None,
    ) -> Bench:
        """`regions`: (offset, size) of each inside a page, by default data and scales."""
        memory = torch.randint(0, 256, (pages, block_bytes), dtype=torch.uint8, device=device)
        parts = data_and_scales(block_bytes) if regions is None else regions
        found = tuple(
            KvCacheRegion(
                memory.data_ptr() + start,
                size,
                block_bytes,
                pages,
                (KvCacheBufferRef(layer, "data"),),
                device=str(device),
            )
            for layer, (start, size) in enumerate(parts)
        )
        layout = KvCacheLayout(32, (KvCacheLayerGroupLayout(0, tuple(range(len(parts))), None, found),))
        geometry = PoolGeometry.from_layout(layout)
        slab = HostSlab(slots, block_bytes, pinned=device.type == "cuda")
        return cls(device, memory, geometry, slab, copies or copy_stream_for(device))

    @property
    def engine_stream(self) -> Any:
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None


def neighbours(count: int) -> list[Move]:
    """Runs of slots and pages, as of a prompt that was saved in one piece."""
    return [Move(number, (number,)) for number in range(count)]


def scattered(count: int, seed: int = 0) -> list[Move]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return [Move(slot, (page,)) for slot, page in enumerate(order)]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(device: torch.device, work: Callable[[], None], *, rounds: int = 5) -> float:
    """Median of `rounds` after one to warm up, with the device idle before and after."""
    times = []
    for number in range(rounds + 1):
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
        if number:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def spin(device: torch.device, milliseconds: float) -> None:
    """Keeps the current stream busy. Nothing on the CPU, where nothing is ever late."""
    if device.type == "cuda" and milliseconds > 0:
        torch.cuda._sleep(int(milliseconds * 1_800_000))


def finish(result: dict[str, Any], *, passed: bool) -> NoReturn:
    """Prints the result and ends the process."""
    print(json.dumps({**result, "passed": passed}, indent=2))
    raise SystemExit(0 if passed else 1)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
