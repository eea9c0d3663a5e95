"""Lets a request of the reference engine's Dynamo worker wait, in the event loop and before the engine sees it, for
what its worker has on disk of its prompt. The connector decides what is worth waiting for, and for how long
(leader/disk_prefetch_wait.py); this module adds what only the engine knows: what its own cache holds, and how fast it
computes."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from worker_connector.leader.disk_prefetch_wait import DiskPrefetchWait
from worker_connector.reference_engine.dynamo_worker.request import Submission
from worker_connector.reference_engine.engine.engine import Engine


class DiskAhead:
    """The waits for disk of all ranks of a worker; used in one event loop."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        """A rank whose scheduler has no `disk_door` holds no request."""
        ranks = range(engine.config.data_parallel_size)
        self._engine = engine
        self._clock = clock
        self._doors: Sequence[DiskPrefetchWait | None] = [
            getattr(engine.connector_scheduler(rank), "disk_door", None) for rank in ranks
        ]

    async def before(self, asked: Submission, gone: Callable[[], Awaitable[Any]] | None = None) -> None:
        """Returns when the blocks that are worth waiting for have come. `gone` ends when the client has left. Raises
        nothing but cancellation."""
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
        """Called when the engine gets the request; None where its rank has no `disk_door`."""
        rank = asked.rank_of(len(self._doors))
        door = None if rank is None else self._doors[rank]
        return None if door is None else Prefill(door, self._clock)


class Prefill:
    """Tells the connector, from the output chunks of one request, how fast the engine computed; its clock starts at
    construction."""

    def __init__(self, door: DiskPrefetchWait, clock: Callable[[], float]) -> None:
        self._door = door
        self._clock = clock
        self._began = clock()
        self._first: float | None = None

    def saw(self, chunk: Mapping[str, Any]) -> None:
        """Takes the request's chunks in order. The last one has the engine's count of tokens that it did not
        compute."""
        if self._first is None:
            self._first = self._clock() - self._began
        hit = chunk.get("engine_data", {}).get("kv_cache_hit")
        if hit is not None:
            self._door.prefilled(self._first, hit["prompt_tokens"] - hit["reused_tokens"])
