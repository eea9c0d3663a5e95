"""Acks: stores messages in JetStream streams over one connection and waits once for the answers to all of them.

nats-py makes a future, a random inbox and a parsed acknowledgement for each message; a router that records two events a
request spends more on that than on sending them. Here messages that go out together share one future, and an answer is
looked at for its error only.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import errors as js_errors

_NOBODY = "503"
"""Status of the broker's own answer when no stream takes the subject."""


HEADERS_AT_MOST = 1024
"""Bytes: two names of ours, two values of at most 256 characters, and what NATS writes around them."""


class Message(NamedTuple):
    """What is stored under one id: a record, or a pack of them (packing.py)."""

    payload: bytes
    headers: dict[str, str]
    records: tuple[Message, ...] = ()
    """The records of a pack; empty for a single record."""
    fixed: bool = False
    """It may have been sent, so the broker may know it by its id: it goes again as it is, never in a pack with
    others."""

    @property
    def record_count(self) -> int:
        """At least 1."""
        return len(self.records) or 1

    @property
    def record_bytes(self) -> int:
        """What was given to `publish`, without what a pack adds."""
        return sum(len(record.payload) for record in self.records) if self.records else len(self.payload)


def _weight(message: Message) -> int:
    """Bytes that the broker counts, headers included: above its `max_payload` it ends the connection."""
    return (
        len(message.payload) + len(b"NATS/1.0\r\n\r\n") + sum(len(f"{k}: {v}\r\n") for k, v in message.headers.items())
    )


class WrongStream(Exception):
    """Another stream stored the message, which none of our readers reads."""


class _Answer(msgspec.Struct):
    """What a stream says of one message: where it was stored, or an error. Anything else is no acknowledgement."""

    stream: str = ""
    seq: int = 0
    error: dict[str, Any] | None = None


class _Batch:
    """Messages that were sent together, and the outcome of each: None means stored."""

    def __init__(self, count: int, stream: str) -> None:
        self.stream = stream
        """The stream whose acknowledgements count."""
        self.errors: list[Exception | None] = [nats.errors.TimeoutError() for _ in range(count)]
        self.left = count
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def answered(self, at: int, error: Exception | None) -> None:
        self.errors[at] = error
        self.left -= 1
        if self.left == 0 and not self.done.done():
            self.done.set_result(None)


class Acks:
    """Belongs to one connection and its event loop. Several `send` may wait at a time."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._inbox = f"{client.new_inbox()}."
        self._numbers = itertools.count()
        self._waiting: dict[str, tuple[_Batch, int]] = {}
        self._answer = msgspec.json.Decoder(_Answer)

    async def open(self) -> None:
        """Subscribes to the answers. Call it once, before the first `send`. The broker reads one connection in order,
        so no answer can come before the subscription."""
        await self._client.subscribe(f"{self._inbox}*", cb=self._on_answer)

    async def send(
        self, subject: str, messages: Sequence[Message], timeout: float, stream: str
    ) -> list[Exception | None]:
        """Publishes them in their order and waits until each is answered, at most `timeout` seconds. For each: None
        when `stream` has stored it, or why not (TimeoutError: no answer came, so nothing is known; WrongStream: another
        stream took it). Raises only its own cancellation."""
        batch = _Batch(len(messages), stream)
        names: list[str] = []
        try:
            for at, message in enumerate(messages):
                name = f"{self._inbox}{next(self._numbers)}"
                self._waiting[name] = batch, at
                names.append(name)
                try:
                    await self._publish(subject, message, name)
                except Exception as error:  # noqa: BLE001 - the outcome of this message, as an answer of the broker is
                    del self._waiting[name]
                    batch.answered(at, error)
            if batch.left:
                await asyncio.wait((batch.done,), timeout=timeout)
            return list(batch.errors)
        finally:
            for name in names:
                self._waiting.pop(name, None)

    async def _publish(self, subject: str, message: Message, name: str) -> None:
        if (
            len(message.payload) > self._client.max_payload - HEADERS_AT_MOST
            and _weight(message) > self._client.max_payload
        ):
            raise nats.errors.MaxPayloadError
        await self._client.publish(subject, message.payload, name, message.headers)

    async def _on_answer(self, msg: Msg) -> None:
        found = self._waiting.pop(msg.subject, None)
        if found is not None:
            batch, at = found
            batch.answered(at, self.error_in(msg, batch.stream))

    def error_in(self, msg: Msg, stream: str) -> Exception | None:
        """What the answer `msg` says is wrong; None: the message is stored in `stream`."""
        if msg.headers and msg.headers.get("Status") == _NOBODY:
            return js_errors.NoStreamResponseError()
        try:
            answer = self._answer.decode(msg.data)
        except msgspec.MsgspecError as error:
            return error
        if answer.error is not None:
            try:
                js_errors.APIError.from_error(answer.error)
            except Exception as error:  # noqa: BLE001 - always raises: by the error's code, or because a foreign responder wrote it
                return error
        if not answer.stream or answer.seq < 1:
            return ValueError("an acknowledgement without stream and sequence")
        if answer.stream != stream:
            return WrongStream(f"stream {answer.stream!r} took it, which is not ours: it has a subject of ours")
        return None
