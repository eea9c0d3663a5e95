"""How much of a copy hides behind compute: 1 when the longer of the two takes as long as both together, 0 when they
take turns.

Copies go to pages that the compute does not touch, without the waits between streams that the connector adds where they
could. What is measured is the side stream and the pinned slab, not a whole iteration. Blocks of 4 MiB go by the copy
engine, of 64 KiB by kernels, which share the multiprocessors with the compute. `engine_waits_ms`: how long the engine's
next pass waits after a save, and how long the save takes.
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
    cuda_or_exit,
    device_name,
    finish,
    one_region,
    scattered,
    seconds,
    synchronize,
)
from worker_connector.memory.transfer import copy_to_pages, copy_to_slab


def measure(
    device: torch.device, *, blocks: int, block_bytes: int, rank: int = 8192, rounds: int = 5
) -> dict[str, Any]:
    """`hidden`: (compute + copy - both together) / the shorter of them, for loads and for saves."""
    bench = Bench.make(device, pages=blocks, slots=blocks, block_bytes=block_bytes, regions=one_region(block_bytes))
    moves = scattered(blocks)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left = torch.randn((rank, rank), dtype=dtype, device=device)

    def load() -> None:
        copy_to_pages(bench.copies, bench.geometry, bench.slab, moves)

    def save() -> None:
        copy_to_slab(bench.copies, bench.geometry, bench.slab, moves)

    result: dict[str, Any] = {"bytes": blocks * block_bytes, "block_bytes": block_bytes, "seconds": {}, "hidden": {}}
    one = seconds(device, lambda: _compute(left, 1), rounds=rounds)
    for name, copy in (("save", save), ("load", load)):
        alone = seconds(device, copy, rounds=rounds)
        steps = max(1, round(alone / one))
        compute = seconds(device, partial(_compute, left, steps), rounds=rounds)

        def both(n: int = steps, copy_too: Any = copy) -> None:
            copy_too()
            _compute(left, n)

        together = seconds(device, both, rounds=rounds)
        result["seconds"][name] = {"copy": alone, "compute": compute, "together": together}
        result["hidden"][name] = (alone + compute - together) / min(alone, compute)
    return result


def engine_waits(device: torch.device, *, blocks: int, block_bytes: int, rounds: int = 5) -> dict[str, float]:
    """Milliseconds from the end of a pass: until the next one may begin, and until its save has landed."""
    bench = Bench.make(device, pages=blocks, slots=blocks, block_bytes=block_bytes, regions=one_region(block_bytes))
    waits, landed = float("inf"), float("inf")
    for _ in range(rounds):
        synchronize(device)
        started = time.perf_counter()
        bench.copies.after(bench.engine_stream)
        copy_to_slab(bench.copies, bench.geometry, bench.slab, scattered(blocks))
        ticket = bench.copies.ticket()
        bench.copies.before(bench.engine_stream)
        if bench.engine_stream is not None:
            bench.engine_stream.synchronize()
        waits = min(waits, time.perf_counter() - started)
        ticket.wait()
        landed = min(landed, time.perf_counter() - started)
    return {"next_pass_ms": waits * 1e3, "save_ms": landed * 1e3}


def _compute(left: torch.Tensor, steps: int) -> None:
    for _ in range(steps):
        left @ left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--goal", type=float, default=0.7)
    options = parser.parse_args()
    device = cuda_or_exit()
    sizes = {
        "4 MiB": measure(device, blocks=256, block_bytes=4 * MIB),
        "64 KiB": measure(device, blocks=4096, block_bytes=64 * KIB),
    }
    waits = {
        "7 blocks of 4 MiB (staged)": engine_waits(device, blocks=7, block_bytes=4 * MIB),
        "256 blocks of 64 KiB (staged)": engine_waits(device, blocks=256, block_bytes=64 * KIB),
        "64 blocks of 4 MiB": engine_waits(device, blocks=64, block_bytes=4 * MIB),
    }
    goal_met = min(sizes["4 MiB"]["hidden"].values()) >= options.goal
    result = {"device": device_name(device), "goal": options.goal, "sizes": sizes, "engine_waits_ms": waits}
    finish(result, passed=goal_met)


if __name__ == "__main__":
    main()
