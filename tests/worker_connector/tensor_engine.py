"""A scripted tensor-parallel engine: the leader and rank 0 in this process, the other ranks in processes of their own.

Every rank holds its own shard of the KV of each token, so bytes of another rank's shard are as wrong as those of
another prompt.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from tests.worker_connector.harness import MIB, settings, wait_for
from tests.worker_connector.scripted import OPTIONS, Request, ScriptedEngine, llm_args
from tests.worker_connector.tensor_rank import RankHandle
from worker_connector.disk.tier import DiskTier
from worker_connector.rank.rank import Rank

PAGES = 64


class _Everywhere:
    """Rank 0's calls, and the same ones in the other processes."""

    def __init__(self, local: Rank, others: Sequence[RankHandle]) -> None:
        self._local = local
        self._others = others

    def __getattr__(self, name: str) -> Any:
        return getattr(self._local, name)

    def start_load(self, metadata: Any, stream: Any) -> None:
        pickled = pickle.dumps(metadata)
        self._local.meet(metadata, lambda channel_id: None)
        self._local.start_load(metadata, stream)
        for other in self._others:
            if other.alive:
                other.start_load(pickled)

    def forward_done(self, metadata: Any, stream: Any) -> None:
        self._local.forward_done(metadata, stream)
        for other in self._others:
            if other.alive:
                other.wait_for_save()

    def finished_loads(self, parked: list[int]) -> list[int]:
        for other in self._others:
            if other.alive:
                assert other.get_finished() == ([], [])
        return self._local.finished_loads(parked)


class TensorEngine(ScriptedEngine):
    def __init__(
        self, others: Sequence[RankHandle], *, slabs: Sequence[int] = (), disk_path: str | None = None, **options: Any
    ) -> None:
        args = llm_args(options.get("tokens_per_block", 4), tensor_parallel_size=len(others) + 1)
        more = {**OPTIONS, "disk_path": disk_path}
        super().__init__(settings(MIB, **more), args=args, num_pages=PAGES, **options)
        self.others = list(others)
        slabs = slabs or [MIB] * len(others)
        for number, (other, slab) in enumerate(zip(others, slabs, strict=True), start=1):
            other.new(args, number, PAGES, self.size, {"slab_bytes": slab, **more})
        self.rank = _Everywhere(self.rank, others)  # type: ignore[assignment]

    def meet(self) -> None:
        """A first batch tells the ranks where the leader is; they connect."""
        self.idle()
        wait_for(lambda: self.missing == [])

    @property
    def missing(self) -> list[int]:
        found: list[int] = self.leader.snapshot()["ranks"]["missing"]
        return found

    def resident(self) -> int:
        return self.leader.resident_blocks()

    def shard(self, request: Request, position: int, rank: int) -> int:
        return self.value(request, position, 0, 0) ^ (rank << 24)

    def write(self, request: Request, start: int, end: int) -> None:
        super().write(request, start, end)
        for rank, other in enumerate(self.others, start=1):
            if other.alive:
                other.write(
                    [
                        (request.pages[0][at // self.size], at % self.size, self.shard(request, at, rank))
                        for at in range(start, end)
                    ]
                )

    def check(self, request: Request, end: int) -> None:
        super().check(request, end)
        for rank, other in enumerate(self.others, start=1):
            if not other.alive:
                continue
            pages = other.pages()
            for at in range(end):
                found = pages[request.pages[0][at // self.size]][at % self.size]
                assert found == self.shard(request, at, rank), f"rank {rank}: wrong KV at position {at}"

    def settle_disks(self) -> None:
        """The disk threads of all ranks do what they were told, and the leader hears of it; orders go out with an
        iteration. What other ranks saved is awaited first: a block is written behind only when the leader has heard of
        it from all ranks."""
        life = self.leader._life
        assert life is not None
        assert life.disk is not None
        for _ in range(8):
            self.idle()
            local = self.rank.disk_thread
            assert local is not None
            local.run_pending()
            for other in self.others:
                other.disk_works()
            wait_for(lambda: life.disk is not None and self._answered(life.disk))

    def _answered(self, tier: DiskTier) -> bool:
        """Nothing that went out is unanswered; what is about to go out does not count."""
        with self.leader._lock:
            waiting = {order.order_id for order in self.leader._disk_orders}
            asked = {tier._telling} if len(tier._found) < len(self.others) + 1 else set()
            cleared = set().union(*tier._clearing.values())
            saves = self.leader._life.saves if self.leader._life is not None else None
            if saves is not None and saves.open_orders:
                return False
            return {*tier._spilling, *tier._staging, *asked, *cleared} <= waiting

    def poison(self, page: int) -> None:
        for other in self.others:
            if other.alive:
                other.write([(page, offset, -1) for offset in range(self.size)])

    def release(self, request: Request) -> None:
        for page in request.pages[0]:
            self.poison(page)
        super().release(request)

    def close(self) -> None:
        for other in self.others:
            if other.alive:
                other.stop()
        self.parts.close()
