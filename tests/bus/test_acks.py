"""Acks: of messages that were sent together each is told its own fate, and nothing is taken for an acknowledgement that
is none."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import nats
import pytest

from dynamo_semkv.bus.acks import Acks, Message, WrongStream

A, B = "semkv.reports.a.0", "semkv.reports.b.1"
STREAM = "SEMKV_REPORTS"


class PartlyDeaf:
    """A connection to streams that take only what they are asked to take."""

    max_payload = 100
    is_closed = False

    def __init__(self) -> None:
        self.answers: dict[bytes, bytes | None] = {}
        """By payload: what is said instead of an acknowledgement; None: nothing."""
        self.taken: list[bytes] = []
        self.sent: list[str] = []
        self._tell: Any = None

    def new_inbox(self) -> str:
        return "_INBOX.one"

    async def subscribe(self, subject: str, cb: Any) -> None:
        assert subject == "_INBOX.one.*"
        self._tell = cb

    async def publish(self, subject: str, payload: bytes, reply: str, headers: dict[str, str]) -> None:
        self.sent.append(reply)
        if payload == b"broken":
            raise nats.errors.ConnectionClosedError
        said = self.answers.get(payload, b'{"stream": "SEMKV_REPORTS", "seq": 7, "duplicate": true}')
        if said is not None:
            self.taken.append(payload)
            status = {"Status": "503"} if said == b"503" else None
            await self._tell(SimpleNamespace(subject=reply, data=said, headers=status))


async def opened(client: PartlyDeaf) -> Acks:
    acks = Acks(client)  # type: ignore[arg-type]
    await acks.open()
    return acks


ANSWERS: list[tuple[bytes, type[Exception]]] = [
    (b"503", nats.js.errors.NoStreamResponseError),
    (b'{"error": {"code": 400, "err_code": 10_060, "description": "no"}}', Exception),  # no JSON
    (b'{"error": {"code": 400, "err_code": 10060, "description": "no"}}', nats.js.errors.BadRequestError),
    (b'{"error": {"code": 503, "err_code": 10023, "description": "full"}}', nats.js.errors.ServiceUnavailableError),
    (b'{"error": {"code": 418, "err_code": 1, "description": "?"}}', nats.js.errors.APIError),
    (b'{"error": {"some": "body else"}}', Exception),
    (b'{"error": 7}', Exception),
    (b'{"error": null}', ValueError),
    (b'{"stream": "T", "seq": 7}', WrongStream),
    (b'{"stream": "s", "seq": 7}', WrongStream),
    (b"{}", ValueError),
    (b'{"stream": "S", "seq": 0}', ValueError),
    (b'{"stream": 1, "seq": 1}', Exception),
    (b"[]", Exception),
    (b"", Exception),
    (b"\xff", Exception),
]


@pytest.mark.parametrize(("said", "kind"), ANSWERS)
async def test_only_an_acknowledgement_counts_as_one(said: bytes, kind: type[Exception]) -> None:
    client = PartlyDeaf()
    client.answers = {b"b": said}
    acks = await opened(client)
    told = await acks.send(A, [Message(payload, {}) for payload in (b"a", b"b", b"c")], 5.0, STREAM)
    assert (told[0], told[2]) == (None, None)
    assert isinstance(told[1], kind)
    assert not isinstance(told[1], asyncio.TimeoutError)
    assert not acks._waiting


async def test_what_is_not_answered_in_time_is_told_so_and_an_answer_after_it_changes_nothing() -> None:
    client = PartlyDeaf()
    client.answers = {b"b": None}
    acks = await opened(client)
    told = await acks.send(A, [Message(b"a", {}), Message(b"b", {})], 0.01, STREAM)
    assert told[0] is None
    assert isinstance(told[1], asyncio.TimeoutError)
    assert not acks._waiting
    late = SimpleNamespace(subject=client.sent[1], data=b'{"stream": "SEMKV_REPORTS", "seq": 1}', headers=None)
    await acks._on_answer(late)  # type: ignore[arg-type]
    assert isinstance(told[1], asyncio.TimeoutError)


async def test_a_send_that_is_given_up_leaves_nothing_behind_and_another_goes_on() -> None:
    client = PartlyDeaf()
    client.answers = {b"b": None}
    acks = await opened(client)
    one = asyncio.ensure_future(acks.send(A, [Message(b"b", {})], 60.0, STREAM))
    other = asyncio.ensure_future(acks.send(B, [Message(b"b", {}), Message(b"c", {})], 60.0, STREAM))
    await asyncio.sleep(0)
    one.cancel()
    with pytest.raises(asyncio.CancelledError):
        await one
    assert list(acks._waiting) == [client.sent[1]]
    answer = SimpleNamespace(subject=client.sent[1], data=b'{"stream": "SEMKV_REPORTS", "seq": 1}', headers=None)
    await acks._on_answer(answer)  # type: ignore[arg-type]
    assert await other == [None, None]
    assert len(set(client.sent)) == len(client.sent) == 3


async def test_what_cannot_be_sent_is_told_at_once_and_the_rest_is_sent() -> None:
    acks = await opened(PartlyDeaf())
    told = await acks.send(A, [Message(p, {}) for p in (b"x" * 101, b"broken", b"a")], 60.0, STREAM)
    assert [type(error) for error in told] == [
        nats.errors.MaxPayloadError,
        nats.errors.ConnectionClosedError,
        type(None),
    ]
    told = await acks.send(A, [Message(b"broken", {})], 60.0, STREAM)
    assert [type(error) for error in told] == [nats.errors.ConnectionClosedError]
    assert await acks.send(A, [], 60.0, STREAM) == []
