"""What the scripts share: the device, a pool of KV pages on it with its slab, and a clock. On the CPU the same code runs, for tests."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from worker_connector._cache_layout import KvCacheBufferRef, KvCacheLayerGroupLayout, KvCacheLayout, KvCacheRegion
from worker_connector.copy_stream import CopyStream
from worker_connector.geometry import PoolGeometry
from worker_connector.slab import HostSlab
from worker_connector.transfer import copy_stream_for

NO_CUDA = 2


def cuda_or_exit() -> torch.device:
    """The current CUDA device. Without one the process ends with status 2 and says why."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    build = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
    print(f"no CUDA here: {build} (torch {torch.__version__}); nothing was measured", file=sys.stderr)
    raise SystemExit(NO_CUDA)


@dataclass
class Bench:
    """A pool of `pages` pages in two regions, 7/8 and 1/8 of a block's bytes, as with block scales beside the data, and a slab."""

    device: torch.device
    memory: torch.Tensor
    """uint8, [pages, bytes per block]: both regions of a page side by side."""
    geometry: PoolGeometry
    slab: HostSlab
    copies: CopyStream

    @classmethod
    def make(cls, device: torch.device, *, pages: int, slots: int, block_bytes: int) -> Bench:
        memory = torch.zeros((pages, block_bytes), dtype=torch.uint8, device=device)
        cut = block_bytes // 8 * 7
        regions = tuple(
            KvCacheRegion(
                memory.data_ptr() + start, size, block_bytes, pages, (KvCacheBufferRef(0, role),), device=str(device)
            )
            for role, start, size in (("data", 0, cut), ("scales", cut, block_bytes - cut))
        )
        layout = KvCacheLayout(32, (KvCacheLayerGroupLayout(0, (0,), None, regions),))
        geometry = PoolGeometry.from_layout(layout)
        slab = HostSlab(slots, block_bytes, pinned=device.type == "cuda")
        return cls(device, memory, geometry, slab, copy_stream_for(device))

    @property
    def engine_stream(self) -> Any:
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(device: torch.device, work: Callable[[], None], *, rounds: int = 5) -> float:
    """Best of `rounds` after one to warm up, with the device idle before and after."""
    best = float("inf")
    for number in range(rounds + 1):
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
        if number:
            best = min(best, time.perf_counter() - started)
    return best


def finish(result: dict[str, Any], *, passed: bool) -> NoReturn:
    """Prints the result and ends the process."""
    print(json.dumps({**result, "passed": passed}, indent=2))
    raise SystemExit(0 if passed else 1)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
