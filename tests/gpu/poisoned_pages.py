"""Every byte arrives where it should and nowhere else, and in the order of the streams, with no wait of the host in between.

Pages that nobody may read are full of 0xFF (not a number in every floating-point format). The engine's stream is kept busy, so that a copy
that does not wait for it, or that it does not wait for, is caught.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from tests.gpu.bench import Bench, cuda_or_exit, device_name, finish, synchronize
from worker_connector.pages import NO_PAGE
from worker_connector.transfer import Move, check_moves, copy_to_pages, copy_to_slab

POISON = 0xFF


def check(
    device: torch.device, *, blocks: int, block_bytes: int, rounds: int = 20, delay: int = 2048
) -> dict[str, Any]:
    """`delay`: rank of the matrices whose products keep the engine's stream busy. Counts of what was wrong."""
    bench = Bench.make(device, pages=2 * blocks, slots=blocks, block_bytes=block_bytes)
    busy = torch.ones((delay, delay), device=device)
    wrong = {"saved_too_early": 0, "loaded_too_late": 0, "loaded_wrong": 0, "written_elsewhere": 0, "not_sealed": 0}
    shuffled = random.Random(0)
    for _ in range(rounds):
        content = torch.randint(0, POISON, (blocks, block_bytes), dtype=torch.uint8, device=device)
        pages = list(range(2 * blocks))
        shuffled.shuffle(pages)
        saved_from, loaded_to = pages[:blocks], pages[blocks:]
        slots = list(range(blocks))
        shuffled.shuffle(slots)
        # On the device before anything runs: an index from the host would make the host wait for the stream.
        saved_index, loaded_index = (torch.tensor(those, device=device) for those in (saved_from, loaded_to))
        bench.memory.fill_(POISON)
        synchronize(device)
        # A forward pass writes the pages late; the save is enqueued behind it.
        _keep_busy(busy)
        bench.memory.index_copy_(0, saved_index, content)
        bench.slab.break_seals(slots)
        saves = [Move(slot, (page,)) for slot, page in zip(slots, saved_from, strict=True)]
        check_moves(bench.geometry, bench.slab, saves)
        bench.copies.after(bench.engine_stream)
        copy_to_slab(bench.copies, bench.geometry, bench.slab, saves)
        landed = bench.copies.ticket()
        bench.copies.before(bench.engine_stream)
        # The next one reuses them at once.
        bench.memory.index_fill_(0, saved_index, POISON)
        landed.wait()
        bench.slab.seal(slots)
        wrong["not_sealed"] += len(bench.slab.verify(slots))
        wrong["saved_too_early"] += int((bench.slab.rows[slots, :block_bytes] != content.cpu()).any(dim=1).sum())
        # A load into pages that an earlier pass still writes, and a forward pass that reads them right behind it. Every fourth block has
        # no page.
        loads = [
            Move(slot, (NO_PAGE if index % 4 == 3 else page,))
            for index, (slot, page) in enumerate(zip(slots, loaded_to, strict=True))
        ]
        _keep_busy(busy)
        bench.memory.index_fill_(0, loaded_index, POISON)
        bench.copies.after(bench.engine_stream)
        copy_to_pages(bench.copies, bench.geometry, bench.slab, loads)
        bench.copies.before(bench.engine_stream)
        seen = bench.memory.clone()  # on the engine's stream
        synchronize(device)
        expected = torch.full_like(bench.memory, POISON)
        for index, page in enumerate(loaded_to):
            if index % 4 != 3:
                expected[page] = content[index]
        differs = (bench.memory != expected).any(dim=1)
        wrong["loaded_wrong"] += int(differs[loaded_to].sum())
        wrong["written_elsewhere"] += int(differs[saved_from].sum())
        wrong["loaded_too_late"] += int((seen != expected).any(dim=1).sum())
    return {
        "device": device_name(device),
        "rounds": rounds,
        "blocks": blocks,
        "block_bytes": block_bytes,
        "wrong": wrong,
    }


def _keep_busy(matrix: torch.Tensor) -> None:
    for _ in range(8):
        matrix @ matrix


def main() -> None:
    device = cuda_or_exit()
    result = check(device, blocks=64, block_bytes=512 * 1024)
    finish(result, passed=not any(result["wrong"].values()))


if __name__ == "__main__":
    main()
