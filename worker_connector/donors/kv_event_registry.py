"""Where whoever drains an engine hands in its KV cache events, without knowing who listens.

    async for event in llm.get_kv_cache_events_async(...):
        observe_kv_events(event)

Dynamo's TensorRT-LLM component polls `llm.get_kv_cache_events_async` to publish the events; that is the place (the
engine gives each event once). Connectors of this process hear them directly, each of them those of its own attention
data-parallel rank. Where there is none, because the engine runs in worker processes, they go to the engine's own
sockets (donors/kv_event_socket.py), by the name in `DYN_STABLE_ROUTING_ID`.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

from dynamo_semkv.telemetry.throttled import Throttled
from worker_connector.donors.device_events import KvEvents
from worker_connector.donors.kv_event_socket import KvEventSender, event_socket_path
from worker_connector.engine_api.settings import IDENTITY_VARIABLE

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)


MAX_RANK = 65_535
MAX_PIPES = 64
"""A thread each; the ranks are those of one engine, and only those of this machine have a listener."""


class Hearer(Protocol):
    """Whoever needs the engine's KV events."""

    def kv_events(self, events: KvEvents) -> None:
        """Takes events in the order in which the engine made them. On the thread that hands them over."""


_hearers: weakref.WeakSet[Hearer] = weakref.WeakSet()
_pipes: dict[tuple[str, int], KvEventSender] = {}
_lock = threading.Lock()
counts: Counter[str] = Counter()
"""`faults`; of what is sent on: `bad_rank`, `too_many_ranks` and `no_pipe` (dropped)."""


def listen(hearer: Hearer) -> None:
    """As long as it lives."""
    with _lock:
        _hearers.add(hearer)


def observe_kv_events(events: KvEvents) -> int:
    """One event or several, as dicts in the shape of `KVCacheEventSerializer`, in the engine's order. Thread-safe;
    never raises, never waits, keeps a bounded number. Returns how many connectors they were handed to; 0: there is none
    here, and no name to find one by."""
    try:
        batch = [events] if isinstance(events, Mapping) else list(events)
        with _lock:
            hearers = list(_hearers)
        for hearer in hearers:
            hearer.kv_events(batch)
        return len(hearers) or _send(batch, os.environ.get(IDENTITY_VARIABLE, ""))
    except Exception:  # noqa: BLE001 - the caller is the engine's event loop, which must go on
        _count("faults")
        _throttled.exception("semkv connector: KV cache events could not be taken")
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
        if not isinstance(event, Mapping):
            continue
        rank = event.get("attention_dp_rank")
        if rank is None:
            rank = 0
        if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank <= MAX_RANK:
            by_rank.setdefault(rank, []).append(event)
        else:
            _count("bad_rank")
            _throttled.warning(
                "semkv connector: a KV cache event's attention_dp_rank is not 0 to %d: dropped", MAX_RANK
            )
    pipes = 0
    for rank, events in by_rank.items():
        pipe = _pipe_to(stable_routing_id, rank)
        if pipe is not None:
            pipe.send(events)
            pipes += 1
    return pipes


def _pipe_to(stable_routing_id: str, rank: int) -> KvEventSender | None:
    """None: there can be none now, which is counted."""
    try:
        with _lock:
            pipe = _pipes.get((stable_routing_id, rank))
            if pipe is None and len(_pipes) < MAX_PIPES:
                pipe = _pipes[(stable_routing_id, rank)] = KvEventSender(event_socket_path(stable_routing_id, rank))
    except (OSError, RuntimeError) as error:  # somebody else's directory, or no thread to be had
        _count("no_pipe")
        _throttled.warning("semkv connector: KV cache events of rank %d are dropped: %s", rank, error)
        return None
    if pipe is None:
        _count("too_many_ranks")
        _throttled.warning(
            "semkv connector: KV cache events of more than %d ranks: dropped for rank %d", MAX_PIPES, rank
        )
    return pipe


def _count(what: str) -> None:
    with _lock:
        counts[what] += 1
