"""Hooks that only some versions of TensorRT-LLM call, and only some connectors have (NVIDIA/TensorRT-LLM#18676)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from worker_connector.engine_api.engine import KvCacheConnectorScheduler, KvCacheConnectorWorker
from worker_connector.reference_engine.engine.request import LlmRequest


class OptionalHooks:
    """Calls a hook, and does nothing where the version (`called` False) or the connector does not know it."""

    def __init__(self, scheduler: KvCacheConnectorScheduler, worker: KvCacheConnectorWorker, *, called: bool) -> None:
        self._scheduler = scheduler if called else None
        self._worker = worker if called else None

    def cancel_load(self, request: LlmRequest, start: int, end: int) -> None:
        """Tell the connector that the tokens [start, end) of an offer will not be taken."""
        hook = _hook(self._scheduler, "cancel_load")
        if hook is not None:
            hook(request, start, end)

    def request_reset(self, request: LlmRequest) -> None:
        """Tell the connector that the request's pages are destroyed and that it starts over."""
        hook = _hook(self._scheduler, "request_reset")
        if hook is not None:
            hook(request)

    def take_failed_loads(self) -> set[int]:
        """Ids of requests in the batch whose load failed since the last call."""
        return self._take("take_failed_load_requests")

    def take_failed_parked_loads(self) -> set[int]:
        """Ids of requests whose asynchronous load failed since the last call."""
        return self._take("take_failed_async_load_requests")

    def drop_bound_saves(self, request_ids: Collection[int]) -> None:
        """Tell the connector that these requests leave the batch whose metadata is bound."""
        hook = _hook(self._worker, "drop_bound_saves")
        if hook is not None:
            hook(request_ids)

    def _take(self, name: str) -> set[int]:
        hook = _hook(self._worker, name)
        return set() if hook is None else {int(request_id) for request_id in hook()}


def _hook(part: object | None, name: str) -> Callable[..., Any] | None:
    found = getattr(part, name, None)
    return found if callable(found) else None
