"""A router and a worker on one broker, each with the URL of its own role: what they say, and what each hears."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from dynamo_semkv.bus.publisher import BusPublisher
from dynamo_semkv.bus.streams import STREAMS
from dynamo_semkv.bus.subscriber import BusSubscriber
from dynamo_semkv.bus.subscription import Message
from dynamo_semkv.config.schema import BusConfig
from dynamo_semkv.contracts import subjects
from dynamo_semkv.contracts.identity import StableReplica
from tests.bus.waiting import until

KEPT = (subjects.donor_events, subjects.reports, subjects.announcements)


@dataclass
class Roles:
    """`at_router`: messages of all four streams. `at_worker`: the hints for its replica."""

    replica: StableReplica
    router: BusPublisher
    worker: BusPublisher
    worker_hears: BusSubscriber
    at_router: list[Message] = field(default_factory=list)
    at_worker: list[Message] = field(default_factory=list)

    def say_what_is_kept(self) -> None:
        """One message of each kind that a stream keeps."""
        for make in KEPT:
            assert self.worker.publish(make(self.replica), b"kept")
        assert self.router.publish(subjects.routes("router-1"), b"kept")

    async def hint_arrives(self) -> None:
        """From the router to the worker."""
        await until("listening", lambda: self.worker_hears.stats().connected and self.router.stats().connected)

        def hint() -> bool:
            self.router.publish(subjects.hints(self.replica), b"hint", persistent=False)
            return bool(self.at_worker)

        await until("hint", hint)


@asynccontextmanager
async def roles(of_router: BusConfig, of_worker: BusConfig, replica: StableReplica) -> AsyncIterator[Roles]:
    router = BusSubscriber(of_router, "router", heartbeat_seconds=0.2)
    worker = BusSubscriber(of_worker, "worker", heartbeat_seconds=0.2)
    both = Roles(replica, BusPublisher(of_router, "router"), BusPublisher(of_worker, "worker"), worker)
    both.router.start()
    both.worker.start()
    for stream in STREAMS:
        router.subscribe_stream(stream, ">", both.at_router.append)
    worker.subscribe_core(subjects.hints(replica), both.at_worker.append)
    await router.start()
    await worker.start()
    try:
        yield both
    finally:
        await router.close()
        await worker.close()
        for publisher in (both.router, both.worker):
            await asyncio.to_thread(publisher.close, 2.0)
