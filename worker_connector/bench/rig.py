"""The connector without an engine: its callbacks are called in TensorRT-LLM's order, over a pool of pages that nothing
computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dynamo_semkv.bus.publishing import DiscardingPublisher
from dynamo_semkv.config.schema import BusConfig, ConnectorConfig
from dynamo_semkv.contracts.namespace import DEFAULT_SALT_KEY
from worker_connector.assembly import LeaderParts, assemble_leader_with, assemble_rank_with
from worker_connector.engine_api.engine import RequestData, SchedulerOutput
from worker_connector.engine_api.settings import Settings
from worker_connector.rank.rank import Rank
from worker_connector.scheduler import SemkvConnectorScheduler
from worker_connector.worker import SemkvConnectorWorker

TOKENS_PER_BLOCK = 32
Tokens = npt.NDArray[np.int32]


def bench_settings(slab_bytes: int, **connector: Any) -> Settings:
    """Settings without environment or files; `connector` overrides fields of its section."""
    config = ConnectorConfig(slab_bytes=slab_bytes, **connector)
    return Settings(config, BusConfig(), "bench", DEFAULT_SALT_KEY, "bench", "0" * 16)


class DiscardingSink(DiscardingPublisher):
    """A publisher without a broker: it always has room and drops what it gets."""

    on_loss: Callable[[str], None] | None = None
    largest_payload = 1024 * 1024

    def has_room(self, subject: str) -> bool:
        """Always."""
        return True


class Request:
    """What the connector reads of an engine's request. `view`: it hands out tokens as an array, as some engines do,
    besides as a list."""

    def __init__(self, request_id: int, tokens: Tokens, *, view: bool) -> None:
        self.request_id = request_id
        self.prompt_len = len(tokens)
        self.context_current_position = 0
        self.cache_salt = None
        self.lora_task_id = None
        self._tokens = tokens
        if view:
            self.get_tokens_view = lambda beam: self._tokens

    def get_tokens(self, beam: int) -> list[int]:
        """All tokens as a list, which takes time in proportion to them."""
        found: list[int] = self._tokens.tolist()
        return found


class Rig:
    """One scheduler and worker of the connector in this thread. `row_bytes` is the KV of one block, `blocks` are those
    that the slab holds, `longest_prompt` is in tokens."""

    def __init__(self, *, row_bytes: int, blocks: int, longest_prompt: int) -> None:
        self._pages = -(-longest_prompt // TOKENS_PER_BLOCK)
        settings = bench_settings(max(blocks * row_bytes, 1 << 20), min_donor_tokens=64)
        rig_settings = settings

        class Scheduler(SemkvConnectorScheduler):
            def _assemble(self, llm_args: Any) -> LeaderParts:
                return assemble_leader_with(llm_args, rig_settings, DiscardingSink(), clock=time.monotonic)

        class Worker(SemkvConnectorWorker):
            def _assemble(self, llm_args: Any) -> Rank:
                return assemble_rank_with(llm_args, rig_settings, inline=True)

        cache = SimpleNamespace(tokens_per_block=TOKENS_PER_BLOCK, dtype="auto", enable_block_reuse=True)
        args = SimpleNamespace(model="bench", revision="1", backend="pytorch", kv_cache_config=cache)
        self.scheduler = Scheduler(args)
        self.worker = Worker(args)
        pool = torch.randint(0, 256, (self._pages, 1, 2, row_bytes // 2), dtype=torch.uint8)
        self.worker.register_kv_caches(pool)
        self._next_id = 1

    def request(self, tokens: Tokens, *, view: bool = True) -> Request:
        """A new request with an id of its own; for `view` see `Request`."""
        request = Request(self._next_id, tokens, view=view)
        self._next_id += 1
        return request

    def serve(self, tokens: Tokens) -> None:
        """Runs a whole request in one chunk; afterwards its full blocks are resident."""
        request = self.request(tokens)
        offered, _ = self.scheduler.get_num_new_matched_tokens(request, 0)
        request.context_current_position = offered
        pages = list(range(-(-len(tokens) // TOKENS_PER_BLOCK)))
        self.scheduler.update_state_after_alloc(request, pages)
        data = RequestData(request.request_id, tokens.tolist(), pages, 0, len(tokens) - offered)
        self.worker.bind_connector_meta(self.scheduler.build_connector_meta(SchedulerOutput(new_requests=[data])))
        self.worker.start_load_kv(None)
        self.worker.wait_for_save(None)
        self.worker.get_finished([], [])
        self.scheduler.request_finished(request, pages)

    def ask(self, request: Request) -> int:
        """The tokens that the connector offers to a request without local reuse."""
        return self.scheduler.get_num_new_matched_tokens(request, 0)[0]

    def forget(self, request: Request) -> None:
        """Ends a request that never came to run."""
        self.scheduler.request_finished(request, [])

    def close(self) -> None:
        """Shuts both sides of the connector down."""
        self.scheduler.shutdown()
        self.worker.shutdown()


def random_tokens(length: int, seed: int) -> Tokens:
    """So many token ids below 100,000, the same for the same seed."""
    return np.random.default_rng(seed).integers(0, 100_000, length, dtype=np.int32)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that a share `share` of `values` does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]
