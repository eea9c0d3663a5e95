"""Where whoever drains an engine hands in its KV cache events, without knowing who listens.

    async for event in llm.get_kv_cache_events_async(...):
        observe_kv_events(event)

Dynamo's TensorRT-LLM component polls `llm.get_kv_cache_events_async` to publish the events; that is the place (the engine gives each
event once). Connectors of this process hear them directly, each of them those of its own attention data-parallel rank. Where there is
none, because the engine runs in worker processes, they go to the engine's own sockets (event_pipe.py), by the name in
`DYN_STABLE_ROUTING_ID`.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

from worker_connector.device_events import KvEvents
from worker_connector.event_pipe import EventPipe, pipe_path
from worker_connector.settings import IDENTITY_VARIABLE

_log = logging.getLogger(__name__)


class Hearer(Protocol):
    def kv_events(self, events: KvEvents) -> None: ...


_hearers: weakref.WeakSet[Hearer] = weakref.WeakSet()
_pipes: dict[tuple[str, int], EventPipe] = {}
_lock = threading.Lock()


def listen(hearer: Hearer) -> None:
    """As long as it lives."""
    with _lock:
        _hearers.add(hearer)


def observe_kv_events(events: KvEvents) -> int:
    """One event or several, as dicts in the shape of `KVCacheEventSerializer`, in the engine's order. Thread-safe; never raises, never
    waits, keeps a bounded number. Returns how many connectors they were handed to; 0: there is none here, and no name to find one by."""
    try:
        batch = [events] if isinstance(events, Mapping) else list(events)
        with _lock:
            hearers = list(_hearers)
        for hearer in hearers:
            hearer.kv_events(batch)
        return len(hearers) or _send(batch, os.environ.get(IDENTITY_VARIABLE, ""))
    except Exception:  # noqa: BLE001 - the caller is the engine's event loop, which must go on
        _log.exception("semkv connector: KV cache events could not be taken")
        return 0


def close_pipes() -> None:
    """Ends the threads that bring events to other processes; the next event begins anew."""
    with _lock:
        pipes = list(_pipes.values())
        _pipes.clear()
    for pipe in pipes:
        pipe.close()


def _send(batch: list[Any], stable_routing_id: str) -> int:
    if not stable_routing_id:
        return 0
    by_rank: dict[int, list[Mapping[str, Any]]] = {}
    for event in batch:
        if isinstance(event, Mapping):
            rank = event.get("attention_dp_rank")
            by_rank.setdefault(rank if isinstance(rank, int) else 0, []).append(event)
    for rank, events in by_rank.items():
        _pipe_to(stable_routing_id, rank).send(events)
    return len(by_rank)


def _pipe_to(stable_routing_id: str, rank: int) -> EventPipe:
    with _lock:
        pipe = _pipes.get((stable_routing_id, rank))
        if pipe is None:
            pipe = _pipes[(stable_routing_id, rank)] = EventPipe(pipe_path(stable_routing_id, rank))
        return pipe
