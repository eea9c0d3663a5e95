"""SemkvConnectorScheduler: TensorRT-LLM's scheduler callbacks, each of which delegates to the leader.

Both complete sets of callbacks are there, flat and by layer group (KV Cache Connector doc): a cache with one flat list
calls the first, every other one the second. No callback raises: an exception in most of them ends the executor.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from dynamo_semkv.telemetry.throttled import Throttled
from worker_connector.assembly import LeaderParts, assemble_leader
from worker_connector.donors.device_events import KvEvents
from worker_connector.donors.sink import ResidencySink
from worker_connector.engine_api.engine import KvCacheConnectorScheduler, SchedulerOutput
from worker_connector.fetch.peer_fetch import PeerFetch
from worker_connector.leader.disk_prefetch_wait import DiskPrefetchWait
from worker_connector.leader.leader import Leader
from worker_connector.link.metadata import ConnectorMetadata
from worker_connector.requests.async_loads import Grouped

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)


class SemkvConnectorScheduler(KvCacheConnectorScheduler):
    """Options come from the file that `SEMKV_CONFIG` names; see `engine_api/settings.py` for what is refused at
    construction."""

    supports_attention_dp = True  # all state is per instance, and there is one instance per owner rank

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._parts = self._assemble(llm_args)
        self.leader: Leader = self._parts.leader
        self.faults: Counter[str] = self._parts.faults
        """Exceptions caught, by callback."""

    def _assemble(self, llm_args: Any) -> LeaderParts:
        return assemble_leader(llm_args, os.environ)

    @property
    def peer_fetch(self) -> PeerFetch | None:
        """Pulls blocks from other workers, for whoever takes requests in; None where `connector.fetch` is off or the
        weights cannot be read."""
        return self._parts.fetch

    @property
    def disk_door(self) -> DiskPrefetchWait | None:
        """Lets requests wait for their blocks on disk, for whoever takes requests in; None where no request waits."""
        return self._parts.door

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """The leader's offer; `(0, False)` after a fault."""
        began = time.perf_counter()
        try:
            offer = self.leader.ask(request, num_computed_tokens)
            return offer.tokens, offer.is_async
        except Exception:  # noqa: BLE001 - see module: nothing is offered instead
            self._fault("get_num_new_matched_tokens")
            return 0, False
        finally:
            self._parts.ask_seconds.add(time.perf_counter() - began)

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """For a cache that reports one flat list of page slots."""
        self._allocated(request, block_ids, None)

    def update_state_after_alloc_by_layer_group(self, request: Any, block_ids_by_layer_group: list[list[int]]) -> None:
        """For a cache that reports page slots by layer group."""
        self._allocated(request, (), block_ids_by_layer_group)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ConnectorMetadata | None:
        """The leader's orders for this iteration; None after a fault."""
        began = time.perf_counter()
        try:
            return self.leader.batch(scheduler_output)
        except Exception:  # noqa: BLE001 - see module: faults of single requests are handled inside, so nothing is owed here
            self._fault("build_connector_meta")
            return None
        finally:
            self._parts.build_seconds.add(time.perf_counter() - began)

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """Always False: no page is held for a save."""
        return self._finished(request)

    def request_finished_by_layer_group(self, request: Any, cache_block_ids_by_layer_group: list[list[int]]) -> bool:
        """Always False: no page is held for a save."""
        return self._finished(request)

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        """Optional hook: the runtime will not take the tokens [start, end) of the offer."""
        try:
            self.leader.cancelled(request, start, end)
        except Exception:  # noqa: BLE001 - see module: the first report says again what is taken
            self._fault("cancel_load")

    def request_reset(self, request: Any) -> None:
        """Optional hook: the request's allocation was destroyed, and the engine will ask about it again. Without this
        hook the leader recognizes the replay by its report."""
        try:
            self.leader.reset(request)
        except Exception:  # noqa: BLE001 - see module: the next question or report ends the old attempt too
            self._fault("request_reset")

    def attach_residency(self, sink: ResidencySink) -> None:
        """`sink` receives which blocks the host slab holds: first those that it holds already, then every change. For
        whoever publishes Dynamo KV events for this engine; called on the connector's background thread."""
        self.leader.attach_residency(sink)

    def kv_events(self, events: KvEvents) -> None:
        """The engine's own KV cache events, one or several, from whoever drains them (donors/device_events.py). Any
        thread; never raises, never waits. Where the scheduler is not at hand:
        `worker_connector.connector.observe_kv_events`."""
        self.leader.kv_events(events)

    def snapshot(self) -> dict[str, Any]:
        """Counters and gauges, JSON-able."""
        return self._parts.snapshot()

    def shutdown(self) -> None:
        """Optional hook of the engine; also good for tests. Idempotent."""
        self._parts.close()

    def _allocated(self, request: Any, flat: Sequence[int], grouped: Grouped) -> None:
        try:
            self.leader.allocated(request, flat, grouped)
        except Exception:  # noqa: BLE001 - see module: where the pass starts is then taken from the first report, and a load that was
            # promised asynchronously is missed by the rank
            self._fault("update_state_after_alloc")

    def _finished(self, request: Any) -> bool:
        """False: pages are never held. Copies read them in stream order before anybody else can write them."""
        try:
            self.leader.finished(request)
        except Exception:  # noqa: BLE001 - see module: the request is then swept as one that vanished
            self._fault("request_finished")
        return False

    def _fault(self, callback: str) -> None:
        self.faults[callback] += 1
        _throttled.exception("semkv connector: a fault in %s", callback, key=callback)
