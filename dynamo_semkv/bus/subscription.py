"""Subscriptions of a BusSubscriber: what each has read so far, and the state of its present consumer."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from dynamo_semkv.contracts.codec import decode_pack
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.pack import PACK

Start = Literal["all", "last_per_subject", "new"]


@dataclass(frozen=True)
class Message:
    """A record. Those of one pack have its number, its time and its order. A pack that cannot be read is handed over
    whole, with its own content type: the reader of the stream refuses it like any other broken message."""

    subject: str
    payload: bytes
    content_type: str | None
    stream_seq: int
    """0 for a message that no stream keeps."""
    timestamp: float
    """Unix seconds at which the stream stored it; 0.0 for a message that no stream keeps."""


Handler = Callable[[Message], None]
Known = Callable[[str, int], bool]


class ConsumerUnreliable(Exception):
    """The consumer may have missed something: a new one is made from the last sequence seen."""


@dataclass
class ConsumerState:
    """One consumer from its creation until it fails or is no longer needed."""

    failed: asyncio.Future[None]
    active_at: float = 0.0
    """When anything came from it last, in seconds of the event loop."""
    yielded_at: float = 0.0
    """When its messages gave the event loop back last."""
    expected: int = 1
    """Next number of the consumer's own sequence."""

    def fail(self, why: str) -> None:
        """Ends the consumer with ConsumerUnreliable; only the first reason counts."""
        if not self.failed.done():
            self.failed.set_exception(ConsumerUnreliable(why))


@dataclass(eq=False)
class StreamSubscription:
    """One reader of one stream, over all connections and consumers."""

    stream: str
    filter: str
    handler: Handler
    start: Start
    on_caught_up: Callable[[], None] | None
    known: Known | None = None
    last_seq: int | None = None
    """`None`: nothing was ever delivered and no starting point is fixed."""
    begun: tuple[int, int] = (0, 0)
    """Number of a pack that is after `last_seq`, and how many of its records were handed over already."""
    made_at: datetime.datetime | None = None
    """When the stream was created that `last_seq` counts in."""
    caught_up: bool = False
    task: asyncio.Task[None] | None = None

    def consumer_config(self, inbox: str, heartbeat_seconds: float) -> ConsumerConfig:
        """A throw-away consumer that goes on after `last_seq` and delivers to `inbox`."""
        config = ConsumerConfig(
            deliver_subject=inbox,
            filter_subject=self.filter,
            ack_policy=AckPolicy.NONE,
            max_deliver=1,
            flow_control=True,
            idle_heartbeat=heartbeat_seconds,
            mem_storage=True,
            num_replicas=1,
            inactive_threshold=30.0,
        )
        if self.last_seq:
            return config.evolve(deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=self.last_seq + 1)
        if self.start == "last_per_subject":
            return config.evolve(deliver_policy=DeliverPolicy.LAST_PER_SUBJECT)
        return config.evolve(deliver_policy=DeliverPolicy.ALL)


@dataclass(eq=False)
class CoreSubscription:
    """One reader of a subject that no stream keeps."""

    subject: str
    handler: Handler
    task: asyncio.Task[None] | None = None


def content_type_of(msg: Msg) -> str | None:
    """The header that says how the payload is encoded; None without one."""
    headers = msg.headers or {}
    return headers.get("content-type")


def records_of(msg: Msg) -> tuple[str | None, Sequence[bytes]]:
    """The content type of the message's records, and the records: several if it is a pack."""
    content_type = content_type_of(msg)
    if content_type == PACK:
        try:
            pack = decode_pack(msg.data)
        except ContractError:
            # The reader of the stream decodes it again, says what is wrong and counts it.
            return content_type, (msg.data,)
        return pack.content_type, pack.records
    return content_type, (msg.data,)
