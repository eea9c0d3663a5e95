"""The two records of a route: RouteOpened before the dispatch, RouteObserved when its stream has ended.

A record that cannot be written is counted and stops no request.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from dynamo_semkv.config.schema import KvRouterOptions
from dynamo_semkv.contracts.identity import ReplicaKey, RouteId, StableReplica
from dynamo_semkv.contracts.route_events import ADVISED, MAX_CLIENT_TEXT, RouteObserved, RouteOpened
from dynamo_semkv.router.attempts import Attempts
from dynamo_semkv.router.fallback import FallbackReason, Fallbacks, pin_reason
from dynamo_semkv.router.opened_event import Attempt, opened_event
from dynamo_semkv.router.pipeline import Advice
from dynamo_semkv.router.replicas import ReplicaDirectory
from dynamo_semkv.router.runtime_types import CallContext, Dispatch


class Journal(Protocol):
    """The part of outcome.intake.RouteJournal that is used here."""

    def opened(self, event: RouteOpened) -> None:
        """Records the opening; the caller counts an exception and goes on."""
        ...

    def observed(self, event: RouteObserved) -> None:
        """Records the end; the caller counts an exception and goes on."""
        ...


@dataclass
class OpenRoute:
    """One opened attempt and what its stream has shown so far."""

    route_id: RouteId
    arrived: float
    """Monotonic seconds."""
    pinned: StableReplica | None
    queued: Mapping[ReplicaKey, int | None]
    """Prefill tokens on every replica, until the first chunk says which one served."""
    first_at: float | None = None
    """When the first token came, in monotonic seconds; None: none came."""
    served: StableReplica | None = None
    waited: int | None = None
    """Prefill tokens queued before it on the replica that served."""

    def begun(self, dispatch: Dispatch, directory: ReplicaDirectory, *, has_tokens: bool) -> None:
        """Notes from the first chunk who serves. dynamo.trtllm reports a request that its engine refuses in a chunk
        with an error and no tokens: that is no first token."""
        if has_tokens or dispatch.finish_reason != "error":
            self.first_at = time.monotonic()
        replica = dispatch.replica
        if replica is not None:
            self.served, self.waited = directory.stable_of(replica), self.queued.get(replica)
        self.queued = {}


class RouteRecords:
    """Writes the records of this router's routes. One event loop. `router`: the name that route events carry."""

    def __init__(
        self,
        journal: Journal,
        directory: ReplicaDirectory,
        attempts: Attempts,
        fallbacks: Fallbacks,
        *,
        router: str,
        kv_router: KvRouterOptions,
    ) -> None:
        """`kv_router`: what Dynamo's router was made with; its own choice is recorded by these weights."""
        self._journal = journal
        self._directory = directory
        self._attempts = attempts
        self._fallbacks = fallbacks
        self._router = router
        self._kv_router = kv_router
        self.open_routes = 0

    def opened(self, advice: Advice, route_id: RouteId, call: CallContext, model: str, config_hash: str) -> None:
        """Records what was decided. `config_hash`: of the configuration that decided."""
        self.open_routes += 1
        try:
            attempt = Attempt(
                route_id=route_id,
                request_id=call.request_id,
                router=self._router,
                number=self._attempts.next(call.request_id[:MAX_CLIENT_TEXT], advice.prompt.namespace.tenant),
                model=model,
                opened_at=time.time(),
                config_hash=config_hash,
                traceparent=call.traceparent,
            )
            self._journal.opened(opened_event(advice, attempt, self._directory, self._kv_router))
        except Exception as error:  # noqa: BLE001 - a record that cannot be written does not stop a request; counted and logged
            self._fallbacks.add(FallbackReason.JOURNAL_ERROR, error)

    def advised(self, route_id: RouteId) -> None:
        """Records the end of a route that somebody else dispatches: only its report says what became of it."""
        self.open_routes -= 1
        try:
            self._journal.observed(RouteObserved(route_id=route_id, observed_at=time.time(), end=ADVISED))
        except Exception as error:  # noqa: BLE001 - as for the opening record
            self._fallbacks.add(FallbackReason.JOURNAL_ERROR, error)

    def ended(self, route: OpenRoute, dispatch: Dispatch, end: str) -> None:
        """Records the one end of a route."""
        self.open_routes -= 1
        try:
            if dispatch.fallback is not None:
                self._fallbacks.add(pin_reason(dispatch.fallback), f"route {route.route_id}")
            served, replica = route.served, dispatch.replica
            if served is None and dispatch.pinned:
                served = route.pinned
            self._journal.observed(
                RouteObserved(
                    route_id=route.route_id,
                    observed_at=time.time(),
                    end=end,
                    served_stable_routing_id=served.stable_routing_id if served is not None else None,
                    served_dp_rank=served.dp_rank if served is not None else replica.dp_rank if replica else None,
                    served_worker_id=str(replica.worker_id) if replica is not None else None,
                    ttft_seconds=route.first_at - route.arrived if route.first_at is not None else None,
                    queued_tokens=route.waited,
                    output_tokens=_output_tokens(dispatch) if route.first_at is not None else 0,
                    engine_cached_tokens=_engine_cached_tokens(dispatch),
                )
            )
        except Exception as error:  # noqa: BLE001 - as for the opening record
            self._fallbacks.add(FallbackReason.JOURNAL_ERROR, error)


def _output_tokens(dispatch: Dispatch) -> int:
    """The engine's count; for a cut stream its number of chunks (each has one or more tokens)."""
    count = (dispatch.usage or {}).get("completion_tokens")
    return count if isinstance(count, int) else dispatch.chunks


def _engine_cached_tokens(dispatch: Dispatch) -> int | None:
    """The engine's own count of prompt tokens it did not compute: dynamo.trtllm's `engine_data.kv_cache_hit`, else the
    usage."""
    hit = (dispatch.engine_data or {}).get("kv_cache_hit")
    count = hit.get("reused_tokens") if isinstance(hit, Mapping) else None
    if not isinstance(count, int):
        details = (dispatch.usage or {}).get("prompt_tokens_details")
        count = details.get("cached_tokens") if isinstance(details, Mapping) else None
    return count if isinstance(count, int) else None
