"""A scripted engine that reaches leader and rank only through the two classes that TensorRT-LLM calls: what they catch
is caught."""

from __future__ import annotations

from typing import Any

from tests.worker_connector.harness import MIB, settings
from tests.worker_connector.scripted import OPTIONS, Request, ScriptedEngine, llm_args
from worker_connector.assembly import LeaderParts
from worker_connector.rank.rank import Rank
from worker_connector.scheduler import SemkvConnectorScheduler
from worker_connector.worker import SemkvConnectorWorker


class _Leader:
    """The names that a scripted engine calls, each by its callback; all others are the real leader's."""

    def __init__(self, scheduler: SemkvConnectorScheduler) -> None:
        self._scheduler = scheduler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler.leader, name)

    def allocated(self, request: Request, flat: Any, grouped: Any) -> None:
        self._scheduler.update_state_after_alloc_by_layer_group(request, [list(slots) for slots in request.pages])

    def batch(self, output: Any) -> Any:
        return self._scheduler.build_connector_meta(output)

    def finished(self, request: Request) -> None:
        assert self._scheduler.request_finished_by_layer_group(request, request.pages) is False

    def reset(self, request: Request) -> None:
        self._scheduler.request_reset(request)


class _Rank:
    """As above, of the rank."""

    def __init__(self, worker: SemkvConnectorWorker) -> None:
        self._worker = worker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker.rank, name)

    def start_load(self, metadata: Any, stream: Any) -> None:
        self._worker.bind_connector_meta(metadata)
        self._worker.start_load_kv(stream)

    def take_failed(self) -> set[int]:
        return self._worker.take_failed_load_requests()

    def forward_done(self, metadata: Any, stream: Any) -> None:
        assert self._worker.get_connector_meta() is metadata
        self._worker.wait_for_save(stream)

    def finished_loads(self, parked: list[int]) -> list[int]:
        saved, loaded = self._worker.get_finished([], parked)
        assert saved == []
        return loaded

    def take_failed_parked(self) -> set[int]:
        return self._worker.take_failed_async_load_requests()


class CallbackEngine(ScriptedEngine):
    """Options as of `ScriptedEngine`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(settings(MIB, **OPTIONS), **options)
        parts, rank = self.parts, self.rank

        class Scheduler(SemkvConnectorScheduler):
            def _assemble(self, llm_args: Any) -> LeaderParts:
                return parts

        class Worker(SemkvConnectorWorker):
            def _assemble(self, llm_args: Any) -> Rank:
                return rank

        args = llm_args(self.size)
        self.scheduler, self.worker = Scheduler(args), Worker(args)
        self.leader = _Leader(self.scheduler)  # type: ignore[assignment]
        self.rank = _Rank(self.worker)  # type: ignore[assignment]

    def ask(self, request: Request, computed: int = 0) -> int:
        tokens, asynchronous = self.scheduler.get_num_new_matched_tokens(request, computed)
        assert not asynchronous
        return tokens
