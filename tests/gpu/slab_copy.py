"""Bandwidth of the connector's copies between slab and pages, as a ratio to one plain copy of as many pinned bytes.

`python -m tests.gpu.slab_copy [--block-kib 4096] [--blocks 256] [--goal 0.8]`; the goal is for neighbouring blocks, in both directions.
"""

from __future__ import annotations

import argparse
import random
from functools import partial
from typing import Any

import torch

from tests.gpu.bench import Bench, cuda_or_exit, device_name, finish, seconds
from worker_connector.transfer import Move, copy_to_pages, copy_to_slab


def measure(device: torch.device, *, blocks: int, block_bytes: int, rounds: int = 5) -> dict[str, Any]:
    """GB/s and ratios. `neighbours`: runs of slots and pages, as of a prompt that was saved in one piece; `scattered`: none."""
    bench = Bench.make(device, pages=blocks, slots=blocks, block_bytes=block_bytes)
    host = torch.empty(blocks * block_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(blocks * block_bytes, dtype=torch.uint8, device=device)
    plain = {
        "load": seconds(device, lambda: _copy(there, host), rounds=rounds),
        "save": seconds(device, lambda: _copy(host, there), rounds=rounds),
    }
    order = list(range(blocks))
    random.Random(0).shuffle(order)
    moves = {
        "neighbours": [Move(number, (number,)) for number in range(blocks)],
        "scattered": [Move(slot, (page,)) for slot, page in enumerate(order)],
    }
    size = blocks * block_bytes
    result: dict[str, Any] = {
        "device": device_name(device),
        "blocks": blocks,
        "block_bytes": block_bytes,
        "plain_gb_per_s": {way: size / time / 1e9 for way, time in plain.items()},
        "ratio_to_plain": {},
    }
    for name, those in moves.items():
        load = seconds(device, partial(copy_to_pages, bench.copies, bench.geometry, bench.slab, those), rounds=rounds)
        save = seconds(device, partial(copy_to_slab, bench.copies, bench.geometry, bench.slab, those), rounds=rounds)
        result["ratio_to_plain"][name] = {"load": plain["load"] / load, "save": plain["save"] / save}
    return result


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block-kib", type=int, default=4096, help="32 tokens of an 8B model in 16 bits take 4096")
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--goal", type=float, default=0.8)
    options = parser.parse_args()
    device = cuda_or_exit()
    result = measure(device, blocks=options.blocks, block_bytes=options.block_kib * 1024)
    worst = min(result["ratio_to_plain"]["neighbours"].values())
    finish(result | {"goal": options.goal}, passed=worst >= options.goal)


if __name__ == "__main__":
    main()
