"""Bandwidth of the connector's copies between slab and pages, as a ratio to one plain copy of as many pinned bytes.

`python -m tests.gpu.slab_copy [--goal 0.8]`. Shapes of blocks that real models have: 4 MiB in one region (32 tokens of
an 8B model in 16 bits), the same in a region per layer, and small ones. Blocks of 16 KiB are shown and have no goal:
counting them takes the host as long as moving them takes the bus. `ways`: what either way, copy engine or kernels,
gives by size of a block, from which `KERNEL_BELOW` of worker_connector/memory/cuda_stream.py was chosen.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import torch

from tests.gpu.bench import (
    KIB,
    MIB,
    Bench,
    a_region_per_layer,
    cuda_or_exit,
    data_and_scales,
    device_name,
    finish,
    neighbours,
    one_region,
    scattered,
    seconds,
)
from worker_connector.memory.copy_stream import CopyStream
from worker_connector.memory.cuda_stream import CudaStream
from worker_connector.memory.transfer import copy_to_pages, copy_to_slab

SHAPES: dict[str, tuple[int, list[tuple[int, int]]]] = {
    "4 MiB": (4 * MIB, one_region(4 * MIB)),
    "4 MiB, 32 layers": (4 * MIB, a_region_per_layer(4 * MIB, 32)),
    "512 KiB, data and scales": (512 * KIB, data_and_scales(512 * KIB)),
    "64 KiB": (64 * KIB, one_region(64 * KIB)),
    "16 KiB": (16 * KIB, one_region(16 * KIB)),
}
WITHOUT_GOAL = ("16 KiB",)


def measure(
    device: torch.device,
    *,
    total: int,
    block_bytes: int,
    regions: list[tuple[int, int]] | None = None,
    rounds: int = 5,
    copies: CopyStream | None = None,
) -> dict[str, Any]:
    """GB/s of plain copies, and by pattern and direction the ratio to them and the host's milliseconds per MiB to hand
    copies over."""
    blocks = total // block_bytes
    bench = Bench.make(
        device,
        pages=blocks,
        slots=blocks,
        block_bytes=block_bytes,
        regions=regions or one_region(block_bytes),
        copies=copies,
    )
    plain = plain_seconds(device, total, rounds=rounds)
    result: dict[str, Any] = {
        "blocks": blocks,
        "block_bytes": block_bytes,
        "plain_gb_per_s": {way: total / took / 1e9 for way, took in plain.items()},
        "ratio_to_plain": {},
        "host_ms": {},
    }
    for name, moves in (("neighbours", neighbours(blocks)), ("scattered", scattered(blocks))):
        ratios, host = {}, {}
        for way, copy in (("save", copy_to_slab), ("load", copy_to_pages)):
            work = partial(copy, bench.copies, bench.geometry, bench.slab, moves)
            ratios[way] = plain[way] / seconds(device, work, rounds=rounds)
            started = time.perf_counter()
            work()
            host[way] = (time.perf_counter() - started) * 1e3
        result["ratio_to_plain"][name], result["host_ms"][name] = ratios, host
    return result


def plain_seconds(device: torch.device, total: int, *, rounds: int = 5) -> dict[str, float]:
    host = torch.empty(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(total, dtype=torch.uint8, device=device)
    return {
        "load": seconds(device, lambda: _copy(there, host), rounds=rounds),
        "save": seconds(device, lambda: _copy(host, there), rounds=rounds),
    }


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def by_way(device: torch.device, *, total: int) -> dict[str, Any]:
    """Scattered blocks of one size each: by the copy engine alone, and by kernels alone."""
    found: dict[str, Any] = {}
    for size in (16 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, 1 * MIB, 2 * MIB):
        found[f"{size // KIB} KiB"] = {
            name: measure(
                device, total=total, block_bytes=size, rounds=3, copies=CudaStream(device, kernel_below=below)
            )["ratio_to_plain"]["scattered"]
            for name, below in (("engine", 0), ("kernels", 1 << 40))
        }
    return found


def worst(results: dict[str, Any]) -> tuple[float, str]:
    """The smallest ratio, and where, of those that have a goal."""
    return min(
        (ratio, f"{shape}, {pattern}, {way}")
        for shape, result in results.items()
        if shape not in WITHOUT_GOAL
        for pattern, ways in result["ratio_to_plain"].items()
        for way, ratio in ways.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--total-mib", type=int, default=1024)
    parser.add_argument("--goal", type=float, default=0.8)
    options = parser.parse_args()
    device = cuda_or_exit()
    total = options.total_mib * MIB
    shapes = {
        name: measure(device, total=total, block_bytes=size, regions=regions)
        for name, (size, regions) in SHAPES.items()
    }
    ratio, where = worst(shapes)
    ways = by_way(device, total=total // 4)
    result = {
        "device": device_name(device),
        "goal": options.goal,
        "worst": {"ratio": ratio, "where": where},
        "shapes": shapes,
        "ways": ways,
    }
    finish(result, passed=ratio >= options.goal)


if __name__ == "__main__":
    main()
