"""BusSubscriber: streams replayed from where one wants to start, in order, without gap or duplicate, over any number
of broker restarts.

It keeps one number per subscription, the last stream sequence it handed over, and makes a new throw-away consumer
from the next one whenever anything is in doubt: a new connection, a hole in the consumer's own numbering, a missing
heartbeat. A stream that was made anew (other creation time, or fewer messages than were seen) starts from its
beginning. All it knows of the content of a message is that it may be a pack of records (contracts/pack.py): these are
handed over one by one, as if each had been stored alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js import errors as js_errors
from nats.js.api import StreamInfo

from dynamo_semkv.bus.connection import Backoff, Connection, end_tasks
from dynamo_semkv.bus.server_check import LENIENT, is_strict
from dynamo_semkv.bus.streams import ensure_streams
from dynamo_semkv.bus.subscription import (
    ConsumerState,
    ConsumerUnreliable,
    CoreSubscription,
    Handler,
    Known,
    Message,
    Start,
    StreamSubscription,
    content_type_of,
    records_of,
)
from dynamo_semkv.config.schema import BusConfig
from dynamo_semkv.telemetry.throttled import Throttled

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)

_P = ParamSpec("_P")
_T = TypeVar("_T")

_API_SECONDS = 5.0
_SILENT_HEARTBEATS = 2.5
_YIELD_SECONDS = 0.001
"""A replay, or a flood, gives the event loop back this often. A request takes some twenty steps of the loop, and each
of them may wait so long: at 5 ms no question to Dynamo was answered within its deadline while a restarted router read
its donors back."""


@dataclass
class SubscriberStats:
    """What a subscriber has done since it was made, and whether it is connected now."""

    connected: bool = False
    delivered: int = 0
    """Records that were handed over, or known."""
    handler_errors: int = 0
    resumed: int = 0
    """Consumers made again in the middle of a connection: a hole, or silence."""
    restarted: int = 0
    """Streams that were made anew, so that everything was read again."""
    expired: int = 0
    """Times that retention had removed messages before they were read."""
    reconnects: int = 0
    last_error: str | None = None


class BusSubscriber:
    """Lives in the event loop that calls `start()`. Subscribe before or after; handlers are called in that loop, must
    be quick, and what they raise is counted and logged and never ends the subscription."""

    def __init__(self, settings: BusConfig, name: str, *, heartbeat_seconds: float = 2.0) -> None:
        self._settings = settings
        self._name = name
        self._heartbeat = heartbeat_seconds
        self._connection = Connection(settings, name)
        self._streams: list[StreamSubscription] = []
        self._core: list[CoreSubscription] = []
        self._counts = SubscriberStats()
        self._added = asyncio.Event()
        self._strictness_checked = False

    async def start(self) -> None:
        """Returns at once, broker or not; connects in the background until `close()`."""
        self._connection.start(self._session)

    async def close(self) -> None:
        """After this no handler is called."""
        await self._connection.stop()

    def subscribe_stream(
        self,
        stream: str,
        subject_filter: str,
        handler: Handler,
        *,
        start: Start = "all",
        on_caught_up: Callable[[], None] | None = None,
        known: Known | None = None,
    ) -> None:
        """`start`: every message that is kept, the last of each subject, or only what comes after the first connection.

        `on_caught_up()` is called when everything that was stored at that time has been handed over: after the first
        replay, and again after each that a lost connection made necessary.

        `known(subject, records)` is called once for each message, with its number of records. True: the content is
        known here already, because this process published it, and `handler` is not called.
        """
        if start not in ("all", "last_per_subject", "new"):
            raise ValueError(f"start: got {start!r}, allowed: all, last_per_subject, new")
        self._streams.append(StreamSubscription(stream, subject_filter, handler, start, on_caught_up, known))
        self._added.set()

    def subscribe_core(self, subject: str, handler: Handler) -> None:
        """Messages that are not kept: only what is published while connected."""
        self._core.append(CoreSubscription(subject, handler))
        self._added.set()

    def caught_up(self, stream: str) -> bool:
        """Whether every subscription of this stream has handed over what was stored; False while disconnected, and
        with none."""
        of_stream = [subscription for subscription in self._streams if subscription.stream == stream]
        return bool(of_stream) and all(subscription.caught_up for subscription in of_stream)

    def stats(self) -> SubscriberStats:
        """Counters of this moment. Event loop only."""
        at = self._connection
        return replace(self._counts, connected=at.connected, reconnects=at.reconnects, last_error=at.last_error)

    async def _session(self, client: Client) -> None:
        js = client.jetstream(timeout=_API_SECONDS)
        try:
            while True:
                self._added.clear()
                for core in self._core:
                    if core.task is None:
                        core.task = asyncio.ensure_future(self._subscribe_core(client, core))
                for subscription in self._streams:
                    if subscription.task is None:
                        subscription.task = asyncio.ensure_future(self._keep_following(client, js, subscription))
                await self._added.wait()
        finally:
            owners: list[StreamSubscription | CoreSubscription] = [*self._core, *self._streams]
            tasks = [owner.task for owner in owners if owner.task is not None]
            for owner in owners:
                owner.task = None
            await end_tasks(*tasks)

    async def _subscribe_core(self, client: Client, core: CoreSubscription) -> None:
        async def on_message(msg: Msg) -> None:
            self._deliver(core.handler, Message(msg.subject, msg.data, content_type_of(msg), 0, 0.0))

        await client.subscribe(core.subject, cb=on_message)

    async def _keep_following(self, client: Client, js: JetStreamContext, subscription: StreamSubscription) -> None:
        backoff = Backoff()
        while True:
            before = self._counts.delivered
            try:
                await self._follow(client, js, subscription)
            except ConsumerUnreliable as error:
                self._counts.resumed += 1
                self._connection.record(subscription.stream, error)
            except js_errors.NotFoundError as error:
                self._connection.record(subscription.stream, error)
                await self._ensure(js)
            except Exception as error:  # noqa: BLE001 - may not end the others; recorded, retried
                self._connection.record(subscription.stream, error)
            if self._counts.delivered > before:
                backoff.reset()
            await backoff.pause()

    async def _ensure(self, js: JetStreamContext) -> None:
        try:
            await ensure_streams(js, self._settings)
        except (nats.errors.Error, asyncio.TimeoutError) as error:
            self._connection.record("streams", error)

    async def _follow(self, client: Client, js: JetStreamContext, subscription: StreamSubscription) -> None:
        """Makes one consumer and follows it until it fails; never returns without an exception."""
        loop = asyncio.get_running_loop()
        state = await js.stream_info(subscription.stream)
        await self._check_strictness_once(client)
        self._choose_position(subscription, state)
        consumer = ConsumerState(loop.create_future(), active_at=loop.time(), yielded_at=loop.time())
        inbox = client.new_inbox()

        async def on_message(msg: Msg) -> None:
            await self._on_stream_message(client, subscription, consumer, msg)

        listening = await client.subscribe(inbox, cb=on_message)
        try:
            made = await js.add_consumer(subscription.stream, subscription.consumer_config(inbox, self._heartbeat))
            # Checked after the consumer exists: had the stream been made anew in between, the consumer would stand at
            # the old one's number.
            if (await js.stream_info(subscription.stream)).created != subscription.made_at:
                raise ConsumerUnreliable("the stream was made anew meanwhile")
            if made.num_pending == 0 and consumer.expected == 1:
                self._reached_end(subscription)
            while True:
                await asyncio.wait({consumer.failed}, timeout=self._heartbeat)
                if consumer.failed.done():
                    consumer.failed.result()
                if loop.time() - consumer.active_at > _SILENT_HEARTBEATS * self._heartbeat:
                    raise ConsumerUnreliable("no heartbeat")
        finally:
            subscription.caught_up = False
            consumer.failed.cancel()
            if not client.is_closed:
                await listening.unsubscribe()

    async def _check_strictness_once(self, client: Client) -> None:
        """Warns of a server that is not strict. Only for readers of streams: others may lack the permission to ask."""
        if not self._strictness_checked:
            self._strictness_checked = True
            if await is_strict(client) is False:
                _log.warning("bus %s: %s; see docs/security.md", self._name, LENIENT)

    def _choose_position(self, subscription: StreamSubscription, info: StreamInfo) -> None:
        """Fix where to go on, given what the stream is now."""
        last = info.state.last_seq
        anew = subscription.made_at is not None and info.created != subscription.made_at
        shorter = subscription.last_seq is not None and last < subscription.last_seq
        if anew or shorter:
            self._counts.restarted += 1
            # What was "new" once includes all of a stream that did not exist then.
            subscription.last_seq = None if subscription.start == "last_per_subject" else 0
            subscription.begun = (0, 0)
        elif subscription.last_seq is None and subscription.start == "new":
            subscription.last_seq = last
        subscription.made_at = info.created
        if subscription.last_seq and info.state.first_seq > subscription.last_seq + 1:
            self._counts.expired += 1

    async def _on_stream_message(
        self, client: Client, subscription: StreamSubscription, consumer: ConsumerState, msg: Msg
    ) -> None:
        if consumer.failed.done():
            return
        consumer.active_at = asyncio.get_running_loop().time()
        headers = msg.headers or {}
        if headers.get("Status"):
            await self._on_status(client, consumer, msg, headers)
            return
        metadata = msg.metadata
        if metadata.sequence.consumer != consumer.expected:
            consumer.fail(f"message {consumer.expected} of the consumer is missing")
            return
        consumer.expected += 1
        if metadata.sequence.stream > (subscription.last_seq or 0):
            await self._deliver_records(subscription, consumer, msg, metadata)
            if consumer.failed.done():
                return
        if metadata.num_pending == 0:
            self._reached_end(subscription)
        await self._yield_if_due(consumer)

    async def _deliver_records(
        self, subscription: StreamSubscription, consumer: ConsumerState, msg: Msg, metadata: Msg.Metadata
    ) -> None:
        """Hands the records of one message over. A pack that was left half way, because the connection or the
        subscription ended, is continued when it comes again."""
        content_type, records = records_of(msg)
        sequence = metadata.sequence.stream
        if subscription.known is not None and self._guarded(subscription.known, msg.subject, len(records)):
            subscription.last_seq = sequence
            self._counts.delivered += len(records)
            return
        stored_at = metadata.timestamp.timestamp()
        number, handed = subscription.begun
        for at in range(handed if number == sequence else 0, len(records)):
            subscription.begun = (sequence, at + 1)
            if at + 1 == len(records):
                subscription.last_seq = sequence
            message = Message(msg.subject, records[at], content_type, sequence, stored_at)
            self._deliver(subscription.handler, message)
            if at + 1 < len(records):
                await self._yield_if_due(consumer)
                if consumer.failed.done():
                    return

    @staticmethod
    async def _yield_if_due(consumer: ConsumerState) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() - consumer.yielded_at > _YIELD_SECONDS:
            await asyncio.sleep(0)
            consumer.yielded_at = loop.time()

    @staticmethod
    async def _on_status(client: Client, consumer: ConsumerState, msg: Msg, headers: dict[str, str]) -> None:
        """Flow control is answered when it is reached in the queue, so the broker never sends more than we have room
        for."""
        answer = msg.reply or headers.get("Nats-Consumer-Stalled")
        if answer:
            await client.publish(answer)
        sent = headers.get("Nats-Last-Consumer")
        if sent is not None and sent.isdigit() and int(sent) >= consumer.expected:
            consumer.fail(f"messages {consumer.expected} to {sent} of the consumer are missing")

    def _reached_end(self, subscription: StreamSubscription) -> None:
        if subscription.caught_up:
            return
        subscription.caught_up = True
        if subscription.on_caught_up is not None:
            self._guarded(subscription.on_caught_up)

    def _deliver(self, handler: Handler, message: Message) -> None:
        self._counts.delivered += 1
        self._guarded(handler, message)

    def _guarded(self, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        """Calls a callback of the user's. None: it has failed, which is counted."""
        try:
            return call(*args, **kwargs)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - the handler's own, counted
            self._counts.handler_errors += 1
            _throttled.error("bus %s: a handler failed", self._name, exc_info=error)
            return None
