"""How much of a copy hides behind compute: 1 when the longer of the two takes as long as both together, 0 when they take turns.

Copies go to pages that the compute does not touch, without the waits between streams that the connector adds where they could. What is
measured is the side stream and the pinned slab, not a whole iteration.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch

from tests.gpu.bench import Bench, cuda_or_exit, device_name, finish, seconds
from worker_connector.transfer import Move, copy_to_pages, copy_to_slab


def measure(
    device: torch.device, *, blocks: int, block_bytes: int, rank: int = 8192, rounds: int = 5
) -> dict[str, Any]:
    """`hidden`: (compute + copy - both together) / the shorter of them, for loads and for saves."""
    bench = Bench.make(device, pages=blocks, slots=blocks, block_bytes=block_bytes)
    moves = [Move(number, (number,)) for number in range(blocks)]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left = torch.ones((rank, rank), dtype=dtype, device=device)

    def load() -> None:
        copy_to_pages(bench.copies, bench.geometry, bench.slab, moves)

    def save() -> None:
        copy_to_slab(bench.copies, bench.geometry, bench.slab, moves)

    result: dict[str, Any] = {"device": device_name(device), "bytes": blocks * block_bytes, "seconds": {}, "hidden": {}}
    one = seconds(device, lambda: _compute(left, 1), rounds=rounds)
    for name, copy in (("load", load), ("save", save)):
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


def _compute(left: torch.Tensor, steps: int) -> None:
    for _ in range(steps):
        left @ left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--goal", type=float, default=0.7)
    options = parser.parse_args()
    result = measure(cuda_or_exit(), blocks=256, block_bytes=4096 * 1024)
    finish(result | {"goal": options.goal}, passed=min(result["hidden"].values()) >= options.goal)


if __name__ == "__main__":
    main()
