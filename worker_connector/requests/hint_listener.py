"""HintListener: the replica's hint subject, read on a thread of its own. Hints are not kept by the bus: what comes
while it is away is lost, and costs the hint only."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

from dynamo_semkv.bus.subscriber import BusSubscriber
from dynamo_semkv.bus.subscription import Message
from dynamo_semkv.config.schema import BusConfig
from dynamo_semkv.contracts.identity import StableReplica
from dynamo_semkv.contracts.subjects import hints

_log = logging.getLogger(__name__)


class HintListener:
    """`on_payload` is called on this thread and must be quick; what it raises is the subscriber's to count."""

    def __init__(self, bus: BusConfig, replica: StableReplica, on_payload: Callable[[bytes], None]) -> None:
        self._bus = bus
        self._replica = replica
        self._on_payload = on_payload
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        name = f"semkv-hints-{replica.stable_routing_id}-{replica.dp_rank}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Returns at once, broker or not. Once."""
        self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        """Ends the thread; waits for it `timeout` seconds at most."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._listen())
        except Exception:  # noqa: BLE001 - a thread that ends must say so; requests go on without hints
            _log.exception("semkv connector: the hint listener ended")
        finally:
            self._loop.close()

    async def _listen(self) -> None:
        subscriber = BusSubscriber(self._bus, f"hints-{self._replica.stable_routing_id}-{self._replica.dp_rank}")
        subscriber.subscribe_core(hints(self._replica), self._deliver)
        await subscriber.start()
        try:
            await self._stop.wait()
        finally:
            await subscriber.close()

    def _deliver(self, message: Message) -> None:
        self._on_payload(message.payload)
