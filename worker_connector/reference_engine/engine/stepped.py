"""One rank without a thread: every iteration is a call, and a `ShadowModel` says whether each page holds what it
should.

    engine = SteppedEngine(EngineConfig(...), ConnectorSpec(MyScheduler, MyWorker))
    request = engine.submit(tokens, max_new_tokens=4)
    engine.step()                  # one iteration; raises what a connector callback raised
    engine.run()                   # until every request has ended
    assert not engine.faults       # wrong words read, pages written by somebody who may not
    engine.ended[request].token_ids

It runs the same executor, scheduler, block manager and connector bookkeeping as `Engine`; a schedule of some requests
takes milliseconds. It is meant for property tests over random schedules.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from worker_connector.engine_api.engine import KvCacheConnectorScheduler, KvCacheConnectorWorker
from worker_connector.reference_engine.engine.assembly import assemble_rank
from worker_connector.reference_engine.engine.behaviours import Dice
from worker_connector.reference_engine.engine.config import ConnectorSpec, EngineConfig
from worker_connector.reference_engine.engine.connector_manager import Batch
from worker_connector.reference_engine.engine.executor import Executor, Probe
from worker_connector.reference_engine.engine.fair_lock import FairLock
from worker_connector.reference_engine.engine.outcome import CANCELLED, RankStats, RequestStats
from worker_connector.reference_engine.engine.page_guard import PageGuard
from worker_connector.reference_engine.engine.request import LlmRequest, RequestOptions
from worker_connector.reference_engine.models.presets import LoadedModel
from worker_connector.reference_engine.models.sampling import SamplingParams
from worker_connector.reference_engine.models.shadow_model import SHADOW_TINY, PageFault, ShadowModel

_GREEDY = SamplingParams(seed=0)


@dataclass
class Ended:
    """What became of a request; `finish_reason` is None while it runs."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stats: RequestStats | None = None


class SteppedEngine:
    """Single-threaded. The model is `config.model.config` (None: `SHADOW_TINY`) as a `ShadowModel` of
    `config.model.seed`.

    `probe` is called as the executor's own, after the page guard has looked; `dice` replaces the seeded dice that
    decide about `config.behaviours`. For several ranks of attention data parallelism make several engines, with `rank`
    from 0 to `config.data_parallel_size - 1`.
    """

    def __init__(
        self,
        config: EngineConfig,
        connector: ConnectorSpec | None = None,
        *,
        probe: Probe | None = None,
        dice: Dice | None = None,
        rank: int = 0,
    ) -> None:
        self.config = config
        self.model = ShadowModel(config.model.config or SHADOW_TINY, config.model.seed)
        loaded = LoadedModel("shadow", f"seed-{config.model.seed}", self.model)
        self.pool, self._events, self._manager, self._executor = assemble_rank(
            rank, config, loaded, connector, FairLock(), self._look, dice
        )
        self._guard = PageGuard(self.pool, self.model, lambda: self._executor.requests)
        self._probe = probe
        self._ids = itertools.count(1)
        self._cancelled: set[int] = set()
        #: Requests that have not ended, and those that have, by id.
        self.running: dict[int, Ended] = {}
        self.ended: dict[int, Ended] = {}
        #: What ended the rank, or None.
        self.fatal_error: Exception | None = None

    @property
    def faults(self) -> list[PageFault]:
        """What the shadow model and the page guard found wrong; tests expect it to be empty."""
        return self.model.faults

    @property
    def scheduler(self) -> KvCacheConnectorScheduler | None:
        """The connector's scheduler instance; None without a connector."""
        return None if self._manager is None else self._manager.scheduler

    @property
    def worker(self) -> KvCacheConnectorWorker | None:
        """The connector's worker instance; None without a connector."""
        return None if self._manager is None else self._manager.worker

    @property
    def executor(self) -> Executor:
        """The rank's executor, for inspection."""
        return self._executor

    @property
    def is_idle(self) -> bool:
        """Nothing runs, waits or is transferred."""
        return not (self._executor.requests or self._executor.has_transfers)

    def submit(
        self,
        tokens: Sequence[int],
        *,
        max_new_tokens: int = 1,
        eos_token_ids: Iterable[int] = (),
        cache_salt: str | None = None,
        lora_task_id: int | None = None,
        multimodal_hashes: Sequence[Sequence[int]] = (),
        retention_priority: int | None = None,
        kv_hints: Any = None,
    ) -> int:
        """Queue a request and return its id. ValueError if its tokens can never fit or are not of the vocabulary."""
        limit = min(
            self.config.resolved_max_seq_len(self.model.config), self.config.num_blocks * self.config.tokens_per_block
        )
        if not tokens or len(tokens) + max_new_tokens > limit:
            raise ValueError(f"prompt of {len(tokens)} plus max_new_tokens {max_new_tokens}: 1 to {limit} tokens fit")
        if max(tokens) >= self.model.config.vocab_size:
            raise ValueError(f"tokens has id {max(tokens)}; the vocabulary is 0 to {self.model.config.vocab_size - 1}")
        options = RequestOptions(
            max_new_tokens=max_new_tokens,
            sampling=_GREEDY,
            eos_token_ids=frozenset(eos_token_ids),
            cache_salt=cache_salt,
            lora_task_id=lora_task_id,
            multimodal_hashes=tuple(tuple(words) for words in multimodal_hashes),
            retention_priority=retention_priority,
            kv_hints=kv_hints,
        )
        request = LlmRequest(next(self._ids), tokens, options, None)
        seen = self.running[request.request_id] = Ended()

        def deliver(token_ids: list[int], finish_reason: str | None, stats: RequestStats) -> None:
            seen.token_ids.extend(token_ids)
            seen.finish_reason, seen.stats = finish_reason, stats

        def end() -> None:
            self.ended[request.request_id] = self.running.pop(request.request_id)

        self._executor.add(request, deliver, end)
        return request.request_id

    def cancel(self, request_id: int) -> None:
        """End a request in the next iteration; no effect on one that has ended."""
        self._cancelled.add(request_id)

    def step(self) -> bool:
        """Run one iteration; returns whether a forward pass ran. What a connector callback raises fails all requests,
        as the end of a rank does, is kept in `fatal_error` and raised; after that the engine must not be stepped."""
        if self.fatal_error is not None:
            raise RuntimeError("the rank has ended") from self.fatal_error
        cancelled, self._cancelled = self._cancelled, set()
        try:
            return self._executor.iterate(cancelled)
        except Exception as error:
            self.fatal_error = error
            self._executor.fail_all(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._take_ended()

    def run(self, limit: int = 10_000) -> int:
        """Step until the engine is idle; returns the number of iterations. RuntimeError after `limit` of them."""
        for count in range(limit):
            if self.is_idle:
                return count
            self.step()
        raise RuntimeError(f"still {len(self._executor.requests)} requests after {limit} iterations")

    def reset_prefix_cache(self) -> None:
        """Drop the cached KV that no request holds."""
        self._executor.drop_cached()

    def poll_kv_events(self) -> list[dict[str, Any]]:
        """KV events since the last call, oldest first, as `engine/events.py` has them."""
        return self._events.drain()

    def stats(self) -> RankStats:
        """The rank's numbers as they are now."""
        return self._executor.stats()

    def close(self) -> None:
        """Cancel what runs and call the connector's optional `shutdown` hooks."""
        if self.fatal_error is None:
            self._executor.fail_all("", reason=CANCELLED)
            self._take_ended()
        for part in (self.scheduler, self.worker):
            hook = getattr(part, "shutdown", None)
            if callable(hook):
                hook()

    def _take_ended(self) -> None:
        for on_end in self._executor.take_ended():
            on_end()

    def _look(self, stage: str, batch: Batch) -> None:
        self._guard(stage, batch)
        if self._probe is not None:
            self._probe(stage, batch)
