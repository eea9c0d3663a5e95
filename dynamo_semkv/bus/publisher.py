"""BusPublisher: takes bytes from any thread and sends them on its own.

A thread of its own runs the connection, because the callers are a router's event loop and an engine's scheduler
thread, and neither may wait for a broker. Persistent messages are buffered within bounds while the broker is away;
what does not fit is dropped and counted, and `on_loss` gets its subject once there is room again.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import secrets
import threading
from collections.abc import Callable

import nats.errors
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js import errors as js_errors

from dynamo_semkv.bus.acks import HEADERS_AT_MOST, Acks, Message
from dynamo_semkv.bus.connection import Backoff, Connection, end_tasks
from dynamo_semkv.bus.outbox import Outbox, PublisherStats
from dynamo_semkv.bus.pace import Paces
from dynamo_semkv.bus.packing import packed
from dynamo_semkv.bus.publishable import publishable
from dynamo_semkv.bus.refusals import Refusals, words_of
from dynamo_semkv.bus.streams import STREAMS, ensure_streams, in_any_order, stream_of
from dynamo_semkv.config.schema import BusConfig
from dynamo_semkv.contracts.pack import MAX_PACK_RECORDS
from dynamo_semkv.telemetry.throttled import Throttled

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)

_ACK_SECONDS = 5.0
_QUIET_ROUNDS = 2
"""The task of a busy subject ends after it found nothing this many times; until then publishing need not wake the bus
thread."""
_TOGETHER = MAX_PACK_RECORDS
"""Most records of one subject that are sent together, for streams whose readers take any order."""
_BATCHES = 16
"""Most batches of one subject that wait for their acknowledgements at a time."""
_ENSURE_SECONDS = 1.0
"""The shortest time between two checks of the streams that failed batches cause, however many fail."""
_USUAL_MAX_PAYLOAD = 1024 * 1024  # of a NATS server where nothing else is configured
_TOO_LARGE_FOR_STREAM = 10054
"""JetStream's error code for a message above the stream's own limit (`max_msg_size`)."""


class BusPublisher:
    """`start()` once, `publish(...)` from anywhere, `close(timeout)` once.

    Persistent messages of one subject are stored in the order of the calls, each once: retried under its message id
    until the stream has acknowledged it. Subjects do not wait for each other. Where order matters to consumers (donor
    events, announcements) one message is in flight at a time, so a subject's rate is bounded by round trips (measured
    on loopback: thousands a second), which is why each replica and each router has subjects of its own. Routes and
    reports, which are joined in any order, are gathered for a few milliseconds, where many come for more (pace.py), and
    sent together, with `bus.pack_records` in one message (packing.py), which is from then on what is retried and stored
    once. They do not wait for the acknowledgements of those before them: a broker whose disk is slow would otherwise
    keep them in this process, and they would die with it. A broker that fails one of them and takes a later one stores
    the later one first.

    `on_loss(subject)` runs on the bus thread, once per episode in which persistent messages of that subject were
    dropped, when there is room again (connected, buffer at most half full): what the callee publishes in answer has a
    place. It may call `publish`.
    """

    def __init__(self, settings: BusConfig, name: str, *, on_loss: Callable[[str], None] | None = None) -> None:
        self.on_loss = on_loss
        self._settings = settings
        self._name = name
        self._connection = Connection(settings, name)
        self._refusals = Refusals(name)
        self._pack_ids = (secrets.token_hex(12) for _ in itertools.count())
        """Used by the bus thread alone, like everything up to `_ensured_at`."""
        self._senders: dict[str, asyncio.Task[None]] = {}
        """By subject: the task that looks at its queue again by itself."""
        self._batches: dict[asyncio.Task[None], tuple[str, list[Message]]] = {}
        """What each sends that has not arrived yet, oldest first."""
        self._paces = Paces()
        self._ensured_at = -_ENSURE_SECONDS
        self._largest = _USUAL_MAX_PAYLOAD - HEADERS_AT_MOST
        self._outbox = Outbox(settings, self._wake_up)

        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._wake = asyncio.Event()
        self._closing = asyncio.Event()
        self._close_seconds = 0.0

    def start(self) -> None:
        """Returns at once, broker or not."""
        if self._thread is not None:
            raise RuntimeError("start() is called once")
        self._loop = asyncio.new_event_loop()
        self._outbox.open()
        self._thread = threading.Thread(target=self._run, name=f"semkv-bus-{self._name}", daemon=True)
        self._thread.start()

    def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        content_type: str | None = None,
        message_id: str | None = None,
        persistent: bool = True,
    ) -> bool:
        """Never blocks, never raises. True: accepted (persistent: will arrive if the buffer outlives the outage).
        False: dropped or refused, and counted.

        `message_id`: of several with the same id the stream stores one; not so where records are packed (readers are
        idempotent by what they say). `persistent`: kept by JetStream, so `subject` must belong to one of our streams.
        Otherwise sent if connected, and forgotten.
        """
        if not publishable(subject, payload, content_type, message_id, persistent):
            self._outbox.refuse()
            return False
        headers: dict[str, str] = {}
        if content_type is not None:
            headers["content-type"] = content_type
        if persistent:
            # Random: a stream stores one message of an id, so a reader that could guess the next id could block it.
            headers["Nats-Msg-Id"] = message_id if message_id is not None else secrets.token_hex(12)
        message = Message(payload, headers)
        return self._outbox.add(subject, message, persistent=persistent, connected=self._connection.connected)

    def _wake_up(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._wake.set)

    @property
    def largest_payload(self) -> int:
        """Bytes of the largest persistent message that can be stored: as the broker said last, else its default."""
        return self._largest

    def has_room(self, subject: str) -> bool:
        """May more be published of this subject, where it can wait? True while few of its messages are on their way and
        the buffer that all subjects share is at most half full: what goes on at this pace goes as fast as the broker
        acknowledges."""
        return self._outbox.has_room(subject)

    def stats(self) -> PublisherStats:
        """Counters and buffer of this moment. Any thread."""
        return self._outbox.stats(self._connection, self._refusals.current())

    def close(self, timeout: float = 5.0) -> bool:
        """Refuse new messages, send what is buffered for at most `timeout` seconds, end the thread. True: nothing was
        left behind.

        Does not wait for a broker that was never there. Not to be called from `on_loss`.
        """
        self._outbox.shut()
        if self._thread is None or self._loop is None or not self._thread.is_alive():
            return self._outbox.empty
        self._close_seconds = timeout
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(timeout + 10.0)
        left = self._outbox.discard()
        if left:
            _log.warning("bus %s: closed with %d messages undelivered", self._name, left)
        return left == 0

    # Everything below runs on the bus thread.

    def _run(self) -> None:
        assert self._loop is not None
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._outbox.shut()
            self._loop.close()

    async def _serve(self) -> None:
        self._connection.start(self._session)
        await self._closing.wait()
        deadline = asyncio.get_running_loop().time() + self._close_seconds
        while asyncio.get_running_loop().time() < deadline:
            if self._outbox.empty or (self._connection.failed_once and not self._connection.sessions):
                break
            await asyncio.sleep(0.005)
        await self._connection.stop()

    async def _session(self, client: Client) -> None:
        js, acks = client.jetstream(timeout=_ACK_SECONDS), Acks(client)
        self._largest = client.max_payload - HEADERS_AT_MOST
        await acks.open()
        streams = asyncio.ensure_future(self._ensure(js))  # beside the loop: not all messages need a stream
        try:
            while True:
                for subject in self._outbox.watch():
                    self._senders[subject] = asyncio.ensure_future(self._drain(client, js, acks, streams, subject))
                await self._send_transient(client)
                self._report_losses()
                await self._wake.wait()
                self._wake.clear()
        finally:
            await end_tasks(streams, *self._senders.values(), *self._batches)
            for batch in reversed(list(self._batches)):
                self._outbox.put_back(*self._batches.pop(batch))
            self._senders.clear()  # what was ended before its first step did not leave by itself
            self._outbox.end_session()

    async def _ensure(self, js: JetStreamContext) -> None:
        """Failing is not fatal: streams may exist that this account may not touch, and hints need none."""
        try:
            refused = await ensure_streams(js, self._settings)
        except (nats.errors.Error, asyncio.TimeoutError) as error:
            self._connection.record("streams", error)
            return
        for stream in STREAMS:
            if stream in refused:
                self._refusals.refused(stream, words_of(refused[stream]), at_set_up=True)
            else:
                self._refusals.exists(stream)

    async def _send_transient(self, client: Client) -> None:
        while (found := self._outbox.next_transient()) is not None:
            subject, message = found
            try:
                await client.publish(subject, message.payload, headers=message.headers or None)
            except nats.errors.Error as error:
                self._connection.record(subject, error)
                self._outbox.count(dropped=1)
            else:
                self._outbox.count(published=1)

    async def _drain(
        self, client: Client, js: JetStreamContext, acks: Acks, streams: asyncio.Future[None], subject: str
    ) -> None:
        """Sends this subject's messages until none is left."""
        any_order = in_any_order(subject)
        pace, now = self._paces.of(subject), asyncio.get_running_loop().time
        quiet = 0
        try:
            await asyncio.shield(streams)
            while not client.is_closed:  # the next session goes on with the same messages and ids
                if any_order and self._outbox.waiting(subject) < _TOGETHER:
                    await asyncio.sleep(pace.gather_seconds(now()))
                if any_order and len(own := self._batches_of(subject)) >= _BATCHES:
                    await asyncio.wait(own, return_when=asyncio.FIRST_COMPLETED)
                    continue
                leave = not any_order or quiet >= _QUIET_ROUNDS or not pace.busy(now())
                heads = self._outbox.take(subject, _TOGETHER if any_order else 1, leave_if_empty=leave)
                if heads is None:
                    return
                quiet = 0 if heads else quiet + 1
                if not heads:
                    continue
                pace.sent(sum(head.record_count for head in heads), now())
                if any_order and len(heads) > 1 and self._settings.pack_records:
                    heads = packed(heads, client.max_payload, self._pack_ids)
                batch = asyncio.ensure_future(self._send_until_stored(client, js, acks, subject, heads))
                self._batches[batch] = (subject, heads)
                batch.add_done_callback(functools.partial(self._batch_ended, client))
                if not any_order:
                    await batch
        finally:
            self._senders.pop(subject, None)
            self._outbox.unwatch(subject)

    def _batches_of(self, subject: str) -> set[asyncio.Task[None]]:
        return {batch for batch, (of, _) in self._batches.items() if of == subject}

    async def _send_until_stored(
        self, client: Client, js: JetStreamContext, acks: Acks, subject: str, heads: list[Message]
    ) -> None:
        """Sends messages until each is stored or can never be; the list keeps those that are not."""
        backoff = Backoff()
        while not client.is_closed:
            heads[:] = await self._send(client, acks, subject, heads)
            self._report_losses()
            if not heads or client.is_closed:
                return
            await backoff.pause()
            now = asyncio.get_running_loop().time()
            if now - self._ensured_at >= _ENSURE_SECONDS:
                self._ensured_at = now
                await self._ensure(js)

    def _batch_ended(self, client: Client, batch: asyncio.Task[None]) -> None:
        """What did not arrive because the session ends is put back by the session, with that of all others and in their
        order."""
        if batch.cancelled() or (client.is_closed and batch.exception() is None):
            return
        subject, left = self._batches.pop(batch)
        error = batch.exception()
        if error is not None:
            self._connection.record(subject, error)
            _throttled.error("bus %s: sending on %s failed", self._name, subject, exc_info=error)
            self._outbox.put_back(subject, left)
            self._wake.set()

    async def _send(self, client: Client, acks: Acks, subject: str, heads: list[Message]) -> list[Message]:
        """Sends the messages once. Returns those that have to be sent again."""
        left, done, size, impossible = [], 0, 0, 0
        stream = stream_of(subject) or ""
        for message, error in zip(heads, await acks.send(subject, heads, _ACK_SECONDS, stream), strict=True):
            if error is None:
                self._refusals.stored(stream)
            else:
                self._connection.record(subject, error)
                if not client.is_closed:
                    self._refusals.refused(stream, words_of(error))
                if not isinstance(error, (nats.errors.MaxPayloadError, js_errors.BadRequestError)):
                    left.append(message)  # whatever a foreign responder may have answered
                    continue
                if message.records:
                    left.extend(message.records)  # not one of them is stored; alone each may be
                    continue
                impossible += 1  # would fail for ever, and hold up everything behind it
                if getattr(error, "err_code", None) == _TOO_LARGE_FOR_STREAM:
                    self._largest = min(self._largest, len(message.payload) - 1)
            done += message.record_count
            size += message.record_bytes
        self._outbox.settled(subject, done, size, impossible)
        return left

    def _report_losses(self) -> None:
        for subject in self._outbox.take_lost():
            _throttled.warning("bus %s: messages on %s were dropped", self._name, subject)
            if self.on_loss is None:
                continue
            try:
                self.on_loss(subject)
            except Exception:  # noqa: BLE001 - the owner's fault, which may not end the thread that serves all subjects
                self._outbox.count(callback_errors=1)
                _throttled.exception("bus %s: on_loss(%r) failed", self._name, subject)
