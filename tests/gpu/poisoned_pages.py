"""Every byte arrives where it should and nowhere else, and in the order of the streams, with no wait of the host in
between.

Pages that nobody may read are full of 0xFF (not a number in every floating-point format). The engine's stream and the
copies are kept late, so that a wait that is missing is caught; `main` proves that by leaving each of them out once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
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
    one_region,
    spin,
    synchronize,
)
from worker_connector.engine_api.pages import NO_PAGE
from worker_connector.memory.copy_stream import Blocks, CopyStream, Mark, Ticket
from worker_connector.memory.transfer import Move, check_moves, copy_stream_for, copy_to_pages, copy_to_slab

POISON = 0xFF


class Late:
    """A copy stream whose copies begin so many milliseconds late as `delay` says each time, and which leaves out what
    `without` names: `after`, `before` or both."""

    def __init__(
        self, device: torch.device, inner: CopyStream, delay: Callable[[], float], without: Sequence[str] = ()
    ) -> None:
        self._device = device
        self._inner = inner
        self._delay_ms = delay
        self._without = without

    def after(self, engine_stream: Any) -> None:
        if "after" not in self._without:
            self._inner.after(engine_stream)

    def before(self, engine_stream: Any) -> None:
        if "before" not in self._without:
            self._inner.before(engine_stream)

    def to_pages(self, pages: torch.Tensor, rows: torch.Tensor, blocks: Blocks) -> None:
        self._delay()
        self._inner.to_pages(pages, rows, blocks)

    def to_rows(self, rows: torch.Tensor, pages: torch.Tensor, blocks: Blocks) -> None:
        self._delay()
        self._inner.to_rows(rows, pages, blocks)

    def prepare(self, pages: torch.Tensor, rows: torch.Tensor) -> None:
        self._inner.prepare(pages, rows)

    def ticket(self) -> Ticket:
        return self._inner.ticket()

    def mark(self) -> Mark:
        return self._inner.mark()

    def recording(self) -> bool:
        return self._inner.recording()

    def _delay(self) -> None:
        side = getattr(self._inner, "_side", None)
        if side is not None:
            with torch.cuda.stream(side):
                spin(self._device, self._delay_ms())


def check(
    device: torch.device,
    *,
    blocks: int,
    block_bytes: int,
    regions: Sequence[tuple[int, int]] | None = None,
    rounds: int = 20,
    engine_late_ms: float = 2.0,
    copies_late_ms: float = 1.0,
    without: Sequence[str] = (),
) -> dict[str, Any]:
    """Counts of blocks that were wrong, by what was wrong."""
    # On streams of their own, as an engine's: the default stream would order things by itself.
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    with torch.cuda.stream(stream) if stream is not None else nullcontext():
        late = Late(device, copy_stream_for(device), lambda: copies_late_ms, without)
        bench = Bench.make(
            device, pages=2 * blocks, slots=blocks, block_bytes=block_bytes, regions=regions, copies=late
        )
        synchronize(device)
        return _check(bench, blocks, block_bytes, rounds, engine_late_ms)


def _check(bench: Bench, blocks: int, block_bytes: int, rounds: int, engine_late_ms: float) -> dict[str, Any]:
    device = bench.device
    wrong = {"saved_wrong": 0, "loaded_too_late": 0, "loaded_wrong": 0, "written_elsewhere": 0, "not_sealed": 0}
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
        spin(device, engine_late_ms)
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
        wrong["saved_wrong"] += int((bench.slab.rows[slots, :block_bytes] != content.cpu()).any(dim=1).sum())
        synchronize(device)
        bench.slab.rows[slots, :block_bytes] = (
            content.cpu()
        )  # so that what follows is told apart from a save that went wrong
        # A load into pages that an earlier pass still writes, and a forward pass that reads them right behind it. Every
        # fourth block has no page.
        loads = [
            Move(slot, (NO_PAGE if index % 4 == 3 else page,))
            for index, (slot, page) in enumerate(zip(slots, loaded_to, strict=True))
        ]
        spin(device, engine_late_ms)
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
    return {"rounds": rounds, "blocks": blocks, "block_bytes": block_bytes, "wrong": wrong}


SHAPES: dict[str, dict[str, Any]] = {
    "by the copy engine": {"blocks": 24, "block_bytes": 2 * MIB, "regions": one_region(2 * MIB)},
    "staged, then by the copy engine": {"blocks": 12, "block_bytes": 2 * MIB, "regions": one_region(2 * MIB)},
    "by kernels": {"blocks": 256, "block_bytes": 16 * KIB, "regions": one_region(16 * KIB)},
    "by kernels, beyond the staging buffer": {
        "blocks": 200,
        "block_bytes": 256 * KIB,
        "regions": one_region(256 * KIB),
    },
    "data and scales": {"blocks": 64, "block_bytes": 512 * KIB, "regions": data_and_scales(512 * KIB)},
    "a region per layer": {"blocks": 64, "block_bytes": 512 * KIB, "regions": a_region_per_layer(512 * KIB, 8)},
    "odd sizes": {"blocks": 64, "block_bytes": 1000, "regions": [(0, 501), (501, 499)]},
}
MUTATIONS: dict[str, dict[str, Any]] = {
    "copies do not wait for the engine": {"without": ["after"], "engine_late_ms": 6.0, "copies_late_ms": 0.0},
    "the engine does not wait for copies": {"without": ["before"], "engine_late_ms": 0.5, "copies_late_ms": 6.0},
}


def main() -> None:
    device = cuda_or_exit()
    sound = {name: check(device, rounds=6, **shape) for name, shape in SHAPES.items()}
    caught = {
        f"{name}: {mutation}": check(device, rounds=2, **SHAPES[name], **changes)["wrong"]
        for name in ("by the copy engine", "by kernels")
        for mutation, changes in MUTATIONS.items()
    }
    unsound = [name for name, found in sound.items() if any(found["wrong"].values())]
    missed = [name for name, wrong in caught.items() if not any(wrong.values())]
    result = {
        "device": device_name(device),
        "unsound": unsound,
        "missed_mutations": missed,
        "sound": sound,
        "caught": caught,
    }
    finish(result, passed=not unsound and not missed)


if __name__ == "__main__":
    main()
