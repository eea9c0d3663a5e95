"""Where whoever drains an engine hands in its KV cache events, without knowing who listens.

    async for event in llm.get_kv_cache_events_async(...):
        observe_kv_events(event)

Dynamo's TensorRT-LLM component polls `llm.get_kv_cache_events_async` to publish the events; that is the place (the engine gives each event
once). It reaches the connectors of this process, each of which takes the events of its own attention data-parallel rank.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Mapping
from typing import Protocol

from worker_connector.device_events import KvEvents

_log = logging.getLogger(__name__)


class Hearer(Protocol):
    def kv_events(self, events: KvEvents) -> None: ...


_hearers: weakref.WeakSet[Hearer] = weakref.WeakSet()
_lock = threading.Lock()


def listen(hearer: Hearer) -> None:
    """As long as it lives."""
    with _lock:
        _hearers.add(hearer)


def observe_kv_events(events: KvEvents) -> int:
    """One event or several, as dicts in the shape of `KVCacheEventSerializer`, in the engine's order. Thread-safe; never raises, never
    waits, keeps a bounded number. Returns how many connectors of this process heard them; 0: none of them lives here."""
    try:
        batch = [events] if isinstance(events, Mapping) else list(events)
        with _lock:
            hearers = list(_hearers)
        for hearer in hearers:
            hearer.kv_events(batch)
        return len(hearers)
    except Exception:  # noqa: BLE001 - the caller is the engine's event loop, which must go on
        _log.exception("semkv connector: KV cache events could not be taken")
        return 0
