"""The disk tier at the door of the reference engine's Dynamo worker: a request waits there, in the event loop, for what
its worker has on disk of its prompt. What is worth waiting for, and for how long, the connector says
(leader/disk_prefetch_wait.py); here is what only the engine knows: what its own cache holds, and how fast it computes.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from worker_connector.leader.disk_prefetch_wait import DiskPrefetchWait
from worker_connector.reference_engine.dynamo_worker.request import Submission
from worker_connector.reference_engine.engine.engine import Engine


class DiskAhead:
    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        """Holds nothing where no rank has a door."""
        ranks = range(engine.config.data_parallel_size)
        self._engine = engine
        self._clock = clock
        self._doors: Sequence[DiskPrefetchWait | None] = [
            getattr(engine.connector_scheduler(rank), "disk_door", None) for rank in ranks
        ]

    async def before(self, asked: Submission, gone: Callable[[], Awaitable[Any]] | None = None) -> None:
        """Returns when what is worth waiting for has come. Never raises but for cancellation."""
        rank = asked.rank_of(len(self._doors))
        door = None if rank is None else self._doors[rank]
        if rank is None or door is None:
            return
        await door.before(
            asked.token_ids,
            salt=asked.cache_salt,
            on_device=lambda: self._engine.cached_tokens(rank, asked.token_ids, asked.cache_salt),
            gone=gone,
        )

    def prefill(self, asked: Submission) -> Prefill | None:
        """The engine gets the request now."""
        rank = asked.rank_of(len(self._doors))
        door = None if rank is None else self._doors[rank]
        return None if door is None else Prefill(door, self._clock)


class Prefill:
    """One request's, from now on: what its output chunks say of how fast the engine computed."""

    def __init__(self, door: DiskPrefetchWait, clock: Callable[[], float]) -> None:
        self._door = door
        self._clock = clock
        self._began = clock()
        self._first: float | None = None

    def saw(self, chunk: Mapping[str, Any]) -> None:
        """In order. The last one has the engine's count of tokens that it did not compute."""
        if self._first is None:
            self._first = self._clock() - self._began
        hit = chunk.get("engine_data", {}).get("kv_cache_hit")
        if hit is not None:
            self._door.prefilled(self._first, hit["prompt_tokens"] - hit["reused_tokens"])
