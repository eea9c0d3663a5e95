"""Measures the bandwidth of copies between slab and pages over that of one plain copy of as many bytes, on this
machine's memory or its GPU.

The plain copy is `cudaMemcpyAsync` of pinned memory on a GPU and `memcpy` on the CPU: one thread, as ours is. (torch's
own copy of host memory takes all threads that it has, which an engine needs for its passes.)

Plain copy, load and save take turns, and the ratio is the median of the rounds' ratios, so that whatever else the
machine does affects all alike.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from worker_connector.engine_api.geometry import PoolGeometry
from worker_connector.memory.slab import HostSlab
from worker_connector.memory.transfer import Move, copy_stream_for, copy_to_pages, copy_to_slab

KIB = 1024
MIB = 1024 * KIB
SIZES = (16 * KIB, 64 * KIB, MIB, 4 * MIB)
GOAL = 0.8
WARM_UP = 3
"""Rounds before the first that counts. After them pages of memory are touched, threads started and clocks up, for the
plain copy too."""


@dataclass(frozen=True)
class CopyRate:
    """What was measured for one block size and pattern. Ratios are to the plain copy; above 1 is faster."""

    device: str
    block_bytes: int
    pattern: str
    """`neighbours`: slots and pages of a prompt that was saved in one piece; `scattered`: in random order."""
    plain_gb_per_s: float
    load_ratio: float
    save_ratio: float


def measure(device: torch.device, block_bytes: int, *, total: int = 64 * MIB, rounds: int = 9) -> list[CopyRate]:
    """One figure for each pattern. `total` is the bytes of one copy, which should be more than the caches hold."""
    count = max(2, total // block_bytes)
    pool = torch.randint(0, 256, (count, 1, 2, block_bytes // 2), dtype=torch.uint8, device=device)
    geometry = PoolGeometry.from_tensor(pool, 32)
    on_gpu = device.type == "cuda"
    slab = HostSlab(count, block_bytes, pinned=on_gpu)
    stream = copy_stream_for(device)
    host = torch.empty(count * block_bytes, dtype=torch.uint8, pin_memory=on_gpu)
    host.fill_(1)
    flat = pool.view(-1)
    plain: Callable[[], object] = functools.partial(host.copy_, flat, non_blocking=True)
    if not on_gpu:
        plain = functools.partial(np.copyto, host.numpy(), flat.numpy())
    found = []
    for pattern in ("neighbours", "scattered"):
        order = np.arange(count) if pattern == "neighbours" else np.random.default_rng(0).permutation(count)
        moves = [Move(slot, (page,)) for slot, page in enumerate(order.tolist())]
        ways: tuple[Callable[[], object], ...] = (
            plain,
            lambda those=moves: copy_to_slab(stream, geometry, slab, those),  # type: ignore[misc]
            lambda those=moves: copy_to_pages(stream, geometry, slab, those),  # type: ignore[misc]
        )
        times = [[_seconds(way, device) for way in ways] for _ in range(WARM_UP + rounds)][WARM_UP:]
        found.append(
            CopyRate(
                device=str(device),
                block_bytes=block_bytes,
                pattern=pattern,
                plain_gb_per_s=count * block_bytes / statistics.median(row[0] for row in times) / 1e9,
                save_ratio=statistics.median(row[0] / row[1] for row in times),
                load_ratio=statistics.median(row[0] / row[2] for row in times),
            )
        )
    return found


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
