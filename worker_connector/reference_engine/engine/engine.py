"""The engine's public face: submit prompts, get tokens, KV events and statistics.

    engine = Engine(EngineConfig(...), connector=ConnectorSpec(MyScheduler, MyWorker))
    handle = engine.submit(tokens, max_new_tokens=32, on_output=callback)

It knows tokens, not text; HTTP, Dynamo and tokenizers belong to other modules. A connector is reached through the
public ABC only.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from worker_connector.engine_api.engine import KvCacheConnectorScheduler
from worker_connector.reference_engine.engine.config import ConnectorSpec, EngineConfig
from worker_connector.reference_engine.engine.fair_lock import FairLock
from worker_connector.reference_engine.engine.outcome import OnOutput, RankStats, RequestStats
from worker_connector.reference_engine.engine.rank import EngineDeadError, Rank
from worker_connector.reference_engine.engine.request import LlmRequest, RequestOptions
from worker_connector.reference_engine.engine.reuse import ReuseScope
from worker_connector.reference_engine.models.presets import LoadedModel, load_model
from worker_connector.reference_engine.models.sampling import SamplingParams
from worker_connector.reference_engine.models.weights import random_lora

_GREEDY = SamplingParams()


@dataclass(frozen=True)
class Generation:
    """The outcome of one request that has ended; `finish_reason` is one of those in `outcome.py`."""

    token_ids: list[int]
    finish_reason: str
    stats: RequestStats


class RequestHandle:
    """A submitted request. Thread-safe."""

    def __init__(self, request_id: int, dp_rank: int, cancel: Callable[[int], None]) -> None:
        self.request_id = request_id
        self.dp_rank = dp_rank
        self._cancel = cancel
        self._done = threading.Event()
        self._token_ids: list[int] = []
        self._generation: Generation | None = None

    def cancel(self) -> None:
        """End the request; it finishes as "cancelled" unless it has finished already."""
        self._cancel(self.request_id)

    def result(self, timeout: float | None = None) -> Generation:
        """Wait until the request has ended and its blocks, events and statistics are in place.

        TimeoutError after `timeout` seconds. Do not call it from an output callback.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"request {self.request_id} did not end within {timeout} s")
        assert self._generation is not None
        return self._generation

    def _take(self, token_ids: list[int], finish_reason: str | None, stats: RequestStats) -> None:
        self._token_ids.extend(token_ids)
        if finish_reason is not None:
            self._generation = Generation(self._token_ids, finish_reason, stats)

    def _end(self) -> None:
        self._done.set()


class Engine:
    """All data-parallel ranks of one process. Starts at construction; close it with `shutdown` or as a context manager.

    `on_fatal(rank, exception)` is called once, on that rank's thread, if a connector callback ended the engine; all
    requests have then failed and `submit` raises EngineDeadError.
    """

    def __init__(
        self,
        config: EngineConfig,
        connector: ConnectorSpec | None = None,
        on_fatal: Callable[[int, BaseException], None] | None = None,
        *,
        model: LoadedModel | None = None,
    ) -> None:
        """`model` is another engine's, to compute with the same weights in memory; None: loaded as the config says."""
        self.config = config
        self._on_fatal = on_fatal
        self._fatal_lock = threading.Lock()
        self._fatal: BaseException | None = None
        torch.set_num_threads(config.num_threads)
        self.model: LoadedModel = model or load_model(config.model, config.device)
        device = torch.device(config.device)
        self.max_seq_len = config.resolved_max_seq_len(self.model.config)
        self._loras = {
            task: random_lora(self.model.config, seed).to(device) for task, seed in config.lora_seeds.items()
        }
        self._ids = itertools.count(1)
        self._load_lock = threading.Lock()
        #: Requests per rank that have not ended.
        self._open_requests = [0] * config.data_parallel_size
        forward_lock = FairLock()
        self._ranks: list[Rank] = []
        try:
            for rank in range(config.data_parallel_size):
                self._ranks.append(Rank(rank, config, self.model, connector, forward_lock, self._rank_died))
        except BaseException:
            self._close_connectors()
            raise
        for started in self._ranks:
            started.start()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    @property
    def fatal_error(self) -> BaseException | None:
        """What ended the engine, or None. It is set before the failed requests are delivered."""
        return self._fatal or next((rank.fatal_error for rank in self._ranks if rank.fatal_error is not None), None)

    def submit(  # noqa: PLR0913 - the fields of a request, by the names that TensorRT-LLM's submit has
        self,
        tokens: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: SamplingParams = _GREEDY,
        eos_token_ids: Iterable[int] = (),
        dp_rank: int | None = None,
        cache_salt: str | None = None,
        lora_task_id: int | None = None,
        multimodal_hashes: Sequence[Sequence[int]] = (),
        retention_priority: int | None = None,
        kv_hints: Any = None,
        on_output: OnOutput | None = None,
    ) -> RequestHandle:
        """Queue a request and return at once.

        `dp_rank` None takes the rank with the fewest open requests. ValueError names the argument that
        is wrong; EngineDeadError if the engine no longer runs.
        """
        prompt = list(tokens)
        self._check(prompt, max_new_tokens, dp_rank, lora_task_id)
        rank = self._ranks[self._take_rank(dp_rank)]
        request_id = next(self._ids)
        options = RequestOptions(
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            eos_token_ids=frozenset(eos_token_ids),
            cache_salt=cache_salt,
            lora_task_id=lora_task_id,
            multimodal_hashes=tuple(tuple(words) for words in multimodal_hashes),
            retention_priority=retention_priority,
            kv_hints=kv_hints,
        )
        lora = None if lora_task_id is None else self._loras[lora_task_id]
        return self._hand_over(rank, LlmRequest(request_id, prompt, options, lora), on_output)

    def _hand_over(self, rank: Rank, request: LlmRequest, on_output: OnOutput | None) -> RequestHandle:
        handle = RequestHandle(request.request_id, rank.rank, rank.cancel)

        def deliver(token_ids: list[int], finish_reason: str | None, stats: RequestStats) -> None:
            try:
                if on_output is not None:
                    on_output(token_ids, finish_reason, stats)
            finally:
                if finish_reason is not None:
                    self._leave_rank(rank.rank)
                handle._take(token_ids, finish_reason, stats)

        try:
            rank.submit(request, deliver, handle._end)
        except EngineDeadError:
            self._leave_rank(rank.rank)
            raise
        return handle

    def poll_kv_events(self, rank: int) -> list[dict[str, Any]]:
        """KV events of one rank since the last call, oldest first, in TensorRT-LLM's dict shape
        (`engine/events.py`)."""
        return self._rank(rank).drain_events()

    def stats(self, rank: int) -> RankStats:
        """The rank's numbers at the end of its last iteration. ValueError for an unknown rank."""
        return self._rank(rank).stats()

    def processor_seconds(self, rank: int) -> float:
        """Processor time in seconds that the thread of that rank's executor has taken."""
        return self._rank(rank).processor_seconds()

    def cached_tokens(self, rank: int, tokens: Sequence[int], cache_salt: str | None = None) -> int:
        """An estimate of how many tokens of its prompt a request without adapter and media would find in that rank's
        own cache. Any thread may ask."""
        return self._rank(rank).cached_tokens(tokens, ReuseScope(cache_salt))

    def reset_prefix_cache(self) -> None:
        """Drop, on every rank, the cached KV that no request holds; takes effect before the next iteration."""
        for rank in self._ranks:
            rank.drop_cached()

    def kv_pool(self, rank: int) -> torch.Tensor:
        """The rank's pool `[num_blocks, num_layers, kv_factor, block_size]`, for inspection."""
        return self._rank(rank).pool.tensor

    def connector_scheduler(self, rank: int) -> KvCacheConnectorScheduler | None:
        """The rank's instance of the connector's scheduler class; None without a connector."""
        connector = self._rank(rank).connector
        return None if connector is None else connector.scheduler

    def shutdown(self, timeout: float | None = 30.0) -> None:
        """Cancel open requests and end the threads. RuntimeError if one does not end within `timeout` seconds.

        A connector's optional `shutdown` hooks are called once its rank has ended.
        """
        for rank in self._ranks:
            rank.stop()
        stuck = [rank.rank for rank in self._ranks if not rank.join(timeout)]
        if stuck:
            raise RuntimeError(f"ranks {stuck} did not stop within {timeout} s")
        self._close_connectors()

    def _close_connectors(self) -> None:
        for rank in self._ranks:
            if rank.connector is None:
                continue
            for part in (rank.connector.scheduler, rank.connector.worker):
                hook = getattr(part, "shutdown", None)
                if callable(hook):
                    hook()

    def _rank(self, rank: int) -> Rank:
        if not 0 <= rank < len(self._ranks):
            raise ValueError(f"rank is {rank}; this engine has ranks 0 to {len(self._ranks) - 1}")
        return self._ranks[rank]

    def _check(self, prompt: list[int], max_new_tokens: int, dp_rank: int | None, lora_task_id: int | None) -> None:
        if not prompt:
            raise ValueError("tokens is empty; a prompt needs at least one token")
        vocabulary = self.model.config.vocab_size
        if min(prompt) < 0 or max(prompt) >= vocabulary:
            raise ValueError(f"tokens has ids {min(prompt)} to {max(prompt)}; the vocabulary is 0 to {vocabulary - 1}")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
        total = len(prompt) + max_new_tokens
        limit = min(self.max_seq_len, self.config.num_blocks * self.config.tokens_per_block)
        if total > limit:
            raise ValueError(
                f"prompt of {len(prompt)} tokens plus max_new_tokens {max_new_tokens} is {total}; max_seq_len and the "
                f"pool of a rank allow {limit}"
            )
        if dp_rank is not None:
            self._rank(dp_rank)
        if lora_task_id is not None and lora_task_id not in self._loras:
            raise ValueError(f"lora_task_id is {lora_task_id}; the engine has adapters {sorted(self._loras)}")

    def _take_rank(self, dp_rank: int | None) -> int:
        with self._load_lock:
            if dp_rank is None:
                dp_rank = min(range(len(self._ranks)), key=self._open_requests.__getitem__)
            self._open_requests[dp_rank] += 1
            return dp_rank

    def _leave_rank(self, dp_rank: int) -> None:
        with self._load_lock:
            self._open_requests[dp_rank] -= 1

    def _rank_died(self, rank: int, error: BaseException) -> None:
        """Ends the other ranks as well: in TensorRT-LLM a dead owner takes the process down."""
        with self._fatal_lock:
            first = self._fatal is None
            if first:
                self._fatal = error
        for other in self._ranks:
            other.stop()
        if first and self._on_fatal is not None:
            self._on_fatal(rank, error)


__all__ = ["Engine", "EngineDeadError", "Generation", "RequestHandle"]
