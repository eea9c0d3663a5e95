"""Rate at which the host seals blocks, alone and while saves come in; and what the saves lose by it.

Sealing is the host's part of a save: a block may be offered once its checksum is known, so a seal rate below the copy's
delays offers, and nothing else.
"""

from __future__ import annotations

import argparse
import threading
import time
from typing import Any

import torch

from tests.gpu.bench import MIB, Bench, cuda_or_exit, device_name, finish, neighbours, one_region, synchronize
from worker_connector.memory.transfer import copy_to_slab


def measure(device: torch.device, *, blocks: int, block_bytes: int, seconds: float = 1.0) -> dict[str, Any]:
    """GB/s of each for about `seconds`."""
    total = blocks * block_bytes
    bench = Bench.make(device, pages=blocks, slots=2 * blocks, block_bytes=block_bytes, regions=one_region(block_bytes))
    copy_to_slab(bench.copies, bench.geometry, bench.slab, neighbours(blocks))
    synchronize(device)
    sealed = list(range(blocks, 2 * blocks))  # other rows than those that are being written

    def seal() -> None:
        for at in range(0, blocks, 16):
            bench.slab.seal(sealed[at : at + 16])

    def save() -> None:
        copy_to_slab(bench.copies, bench.geometry, bench.slab, neighbours(blocks))
        bench.copies.ticket().wait()

    alone = {"seal": total * _rate(seal, seconds), "save": total * _rate(save, seconds)}
    together: dict[str, float] = {}
    stop = threading.Event()

    def keep_sealing() -> None:
        started, count = time.perf_counter(), 0
        while not stop.is_set() or not count:
            seal()
            count += 1
        together["seal"] = total * count / (time.perf_counter() - started)

    thread = threading.Thread(target=keep_sealing)
    thread.start()
    try:
        together["save"] = total * _rate(save, seconds)
    finally:
        stop.set()
        thread.join()
    return {
        "block_bytes": block_bytes,
        "gb_per_s": {
            "alone": {name: rate / 1e9 for name, rate in alone.items()},
            "together": {name: rate / 1e9 for name, rate in together.items()},
        },
        "save_kept": together["save"] / alone["save"],
    }


def _rate(work: Any, seconds: float) -> float:
    """Times a second."""
    work()
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < seconds or not count:
        work()
        count += 1
    return count / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--goal", type=float, default=0.8, help="share of the saves' rate that is left while sealing")
    options = parser.parse_args()
    device = cuda_or_exit()
    found = {
        "4 MiB": measure(device, blocks=128, block_bytes=4 * MIB),
        "256 KiB": measure(device, blocks=1024, block_bytes=MIB // 4),
    }
    kept = min(result["save_kept"] for result in found.values())
    finish({"device": device_name(device), "goal": options.goal, "sizes": found}, passed=kept >= options.goal)


if __name__ == "__main__":
    main()
