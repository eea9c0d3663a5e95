"""A long random schedule in which the engine, its loads and its saves overlap, checked byte by byte afterwards, with no
wait of the host that the connector itself would not make.

Each page holds one value in all its bytes; which one is known by order of what was enqueued. Copies and passes begin at
random times. The host overwrites a row once the load that reads it has landed, and looks at a row once the save into it
has landed: both by ticket. `main` also leaves out each wait in turn; a schedule that then shows nothing wrong would
prove nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.gpu.bench import KIB, MIB, Bench, cuda_or_exit, device_name, finish, one_region, spin, synchronize
from tests.gpu.poisoned_pages import Late
from worker_connector.memory.copy_stream import CopyStream, Ticket
from worker_connector.memory.transfer import Move, copy_stream_for, copy_to_pages, copy_to_slab

GARBAGE = 0xFF

MUTATIONS = (
    "load.after",
    "load.before",
    "save.after",
    "save.before",
    "rows overwritten before the load has landed",
    "rows read before the save has landed",
)


@dataclass
class _Books:
    """What must be where, by order of enqueueing."""

    pages: list[int]
    rows: dict[int, int] = field(default_factory=dict)
    """Slots that may be loaded."""
    saved: dict[int, int] = field(default_factory=dict)
    """Slots that were not looked at since their save."""
    free: list[int] = field(default_factory=list)
    saving: list[tuple[Ticket, list[int]]] = field(default_factory=list)
    loading: list[tuple[Ticket, list[int]]] = field(default_factory=list)
    read: list[tuple[torch.Tensor, list[int]]] = field(default_factory=list)


class Schedule:
    def __init__(
        self,
        device: torch.device,
        *,
        pages: int,
        block_bytes: int,
        seed: int,
        mutation: str | None = None,
        late_ms: float = 0.6,
    ) -> None:
        self._device = device
        self._random = random.Random(seed)
        self._mutation = mutation
        self._late_ms = late_ms
        self._loads = self._stream("load")
        self._saves = self._stream("save")
        self._bench = Bench.make(
            device, pages=pages, slots=2 * pages, block_bytes=block_bytes, regions=one_region(block_bytes)
        )
        self._bytes = block_bytes
        self._bench.memory.fill_(0)
        self._books = _Books([0] * pages, free=list(range(2 * pages)))
        self._matrix = torch.randn((1024, 1024) if device.type == "cuda" else (8, 8), device=device)
        self.wrong = {"read by a pass": 0, "row in the slab": 0}
        self.copies = 0

    def _stream(self, which: str) -> CopyStream:
        without = [self._mutation.split(".")[1]] if self._mutation in (f"{which}.after", f"{which}.before") else []
        return Late(self._device, copy_stream_for(self._device), self._some_ms, without)

    def _some_ms(self) -> float:
        return self._random.choice([0.0, self._random.random() * self._late_ms])

    def step(self) -> None:
        """One iteration of an engine."""
        bench, books = self._bench, self._books
        self._saves.before(bench.engine_stream)
        self._look_at_what_landed()
        loaded = self._load()
        spin(self._device, self._some_ms())
        if self._random.random() < 0.3:
            self._matrix @ self._matrix
        looked_at = loaded + self._random.sample(range(len(books.pages)), 4)
        index = torch.tensor(looked_at).pin_memory() if self._device.type == "cuda" else torch.tensor(looked_at)
        index = index.to(self._device, non_blocking=True)
        books.read.append((bench.memory.index_select(0, index), [books.pages[page] for page in looked_at]))
        written = self._random.sample(range(len(books.pages)), self._random.randint(1, len(books.pages) // 4))
        for page in written:
            books.pages[page] = self._random.randint(1, 250)
        self._write(written)
        self._save(self._random.sample(written, self._random.randint(1, len(written))))

    def check(self) -> dict[str, int]:
        """After all of it has run: counts of what was wrong so far."""
        synchronize(self._device)
        self._look_at_what_landed()
        for seen, values in self._books.read:
            expected = torch.tensor(values, dtype=torch.uint8, device=self._device).unsqueeze(1)
            self.wrong["read by a pass"] += int((seen != expected).any(dim=1).sum())
        self._books.read.clear()
        return self.wrong

    def _write(self, pages: Sequence[int]) -> None:
        both = torch.tensor([list(pages), [self._books.pages[page] for page in pages]])
        both = both.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else both
        rows = both[1].to(torch.uint8).unsqueeze(1).expand(-1, self._bytes)
        self._bench.memory.index_copy_(0, both[0], rows)

    def _load(self) -> list[int]:
        """Some rows of the slab into pages that passes before may still read and write."""
        books, stream = self._books, self._bench.engine_stream
        count = min(len(books.rows), self._random.randint(0, 12))
        if not count:
            return []
        slots = self._random.sample(sorted(books.rows), count)
        pages = self._random.sample(range(len(books.pages)), count)
        self._loads.after(stream)
        copy_to_pages(self._loads, self._bench.geometry, self._bench.slab, _moves(slots, pages))
        self._loads.before(stream)
        for slot, page in zip(slots, pages, strict=True):
            books.pages[page] = books.rows.pop(slot)
        self.copies += count
        ticket = self._loads.ticket()
        if self._mutation == "rows overwritten before the load has landed":
            self._overwrite(slots)
        else:
            books.loading.append((ticket, slots))
        return pages

    def _save(self, pages: Sequence[int]) -> None:
        books, stream = self._books, self._bench.engine_stream
        slots = [books.free.pop(self._random.randrange(len(books.free))) for _ in pages[: len(books.free)]]
        if not slots:
            return
        self._saves.after(stream)
        copy_to_slab(self._saves, self._bench.geometry, self._bench.slab, _moves(slots, pages))
        self.copies += len(slots)
        books.saved |= {slot: books.pages[page] for slot, page in zip(slots, pages, strict=False)}
        if self._mutation == "rows read before the save has landed":
            self._look_at(slots)
        else:
            books.saving.append((self._saves.ticket(), slots))

    def _look_at_what_landed(self) -> None:
        books = self._books
        while books.saving and books.saving[0][0].done():
            self._look_at(books.saving.pop(0)[1])
        while books.loading and books.loading[0][0].done():
            self._overwrite(books.loading.pop(0)[1])

    def _look_at(self, slots: Sequence[int]) -> None:
        """The rows hold what was saved, and may be loaded from now on."""
        for slot in slots:
            value = self._books.saved.pop(slot)
            row = self._bench.slab.rows[slot, : self._bytes]
            self.wrong["row in the slab"] += int(bool((row != value).any()))
            self._books.rows[slot] = value

    def _overwrite(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._bench.slab.rows[slot, : self._bytes] = GARBAGE
            self._books.free.append(slot)


def _moves(slots: Sequence[int], pages: Sequence[int]) -> list[Move]:
    return [Move(slot, (page,)) for slot, page in zip(slots, pages, strict=False)]


def hunt(device: torch.device, *, steps: int, check_every: int = 50, **options: Any) -> dict[str, Any]:
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    with torch.cuda.stream(stream) if stream is not None else nullcontext():
        schedule = Schedule(device, **options)
        synchronize(device)
        for step in range(1, steps + 1):
            schedule.step()
            if step % check_every == 0:
                schedule.check()
        return {"steps": steps, "blocks_copied": schedule.copies, "wrong": schedule.check()}


SHAPES: dict[str, dict[str, int]] = {
    "by the copy engine": {"pages": 24, "block_bytes": MIB},
    "by kernels": {"pages": 96, "block_bytes": 16 * KIB},
}


def main() -> None:
    device = cuda_or_exit()
    sound = {
        f"{name}, seed {seed}": hunt(device, steps=400, seed=seed, **shape)
        for name, shape in SHAPES.items()
        for seed in range(2)
    }
    caught = {
        f"{name}: {mutation}": hunt(device, steps=80, seed=9, mutation=mutation, late_ms=3.0, **shape)["wrong"]
        for name, shape in SHAPES.items()
        for mutation in MUTATIONS
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
