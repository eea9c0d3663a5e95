"""Packing: the same records in the same order, in as few messages as a reader and the broker take."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_semkv.bus.acks import HEADERS_AT_MOST, Message
from dynamo_semkv.bus.packing import packed
from dynamo_semkv.contracts.codec import MAX_REPORT_BYTES, MSGPACK, decode_pack
from dynamo_semkv.contracts.pack import MAX_PACK_BYTES, MAX_PACK_RECORDS, PACK

ROOM = 2**20


def ids() -> Iterator[str]:
    return (f"p{n}" for n in itertools.count())


def record(payload: bytes, content_type: str | None = MSGPACK, *, fixed: bool = False) -> Message:
    headers = {} if content_type is None else {"content-type": content_type}
    return Message(payload, {**headers, "Nats-Msg-Id": f"id-{payload[:8]!r}"}, fixed=fixed)


def taken_apart(messages: list[Message]) -> list[tuple[bytes, str | None]]:
    """What a reader finds, message by message."""
    found: list[tuple[bytes, str | None]] = []
    for message in messages:
        if message.headers.get("content-type") == PACK:
            pack = decode_pack(message.payload)
            found += [(payload, pack.content_type) for payload in pack.records]
        else:
            found.append((message.payload, message.headers.get("content-type")))
    return found


def some(*sizes: int) -> list[Message]:
    return [record(bytes([at]) * size) for at, size in enumerate(sizes)]


heads = st.lists(
    st.builds(
        record,
        st.integers(0, 300).map(lambda size: b"x" * size)
        | st.sampled_from([b"y" * (MAX_PACK_BYTES - less) for less in (0, 5, 63, 64, 90, 91, 200)] + [b"z" * 20_000]),
        st.sampled_from([None, MSGPACK, "application/json", "t" * 256]),
        fixed=st.sampled_from([False, False, False, True]),
    ),
    max_size=80,
)


@given(heads, st.sampled_from([0, 500, 1_500, 4_000, ROOM]))
def test_any_records_are_there_in_their_order_and_nothing_is_too_large(found: list[Message], max_payload: int) -> None:
    sent = packed(found, max_payload, ids())
    assert taken_apart(sent) == [(head.payload, head.headers.get("content-type")) for head in found]
    assert [record for message in sent for record in message.records or (message,)] == found
    assert sum(message.record_count for message in sent) == len(found)
    assert sum(message.record_bytes for message in sent) == sum(len(head.payload) for head in found)
    packs = [message for message in sent if message.records]
    assert len({pack.headers["Nats-Msg-Id"] for pack in packs}) == len(packs)
    for pack in packs:
        assert 2 <= len(pack.records) <= MAX_PACK_RECORDS
        assert len(pack.payload) <= min(MAX_PACK_BYTES, max_payload - HEADERS_AT_MOST)
        assert not any(record.fixed for record in pack.records)


@given(heads)
def test_what_is_a_pack_stays_one(found: list[Message]) -> None:
    numbers = ids()
    once = packed(found, ROOM, numbers)
    again = packed(once, ROOM, numbers)
    assert all(pack in again for pack in once if pack.records)
    assert taken_apart(again) == taken_apart(once)


def test_one_alone_is_what_it_was() -> None:
    (alone,) = found = some(10)
    assert packed(found, ROOM, ids()) == [alone]
    assert packed([], ROOM, ids()) == []


def test_many_small_ones_are_one_message_and_the_most_of_one_is_sixty_four() -> None:
    assert [message.record_count for message in packed(some(*[100] * 64), ROOM, ids())] == [64]
    assert [message.record_count for message in packed(some(*[100] * 70), ROOM, ids())] == [64, 6]


def test_a_message_holds_as_much_as_a_record_may_and_no_more() -> None:
    assert MAX_PACK_BYTES == MAX_REPORT_BYTES
    assert [message.record_count for message in packed(some(*[700] * 50), ROOM, ids())] == [23, 23, 4]
    assert [message.record_count for message in packed(some(8_000, 8_000, 8_000, 10), ROOM, ids())] == [2, 2]
    assert [message.record_count for message in packed(some(10, 16_300, 10, 10), ROOM, ids())] == [1, 1, 2]


@pytest.mark.parametrize("other", [None, "application/json"])
def test_another_content_type_goes_apart(other: str | None) -> None:
    found = [record(b"1"), record(b"2"), record(b"3", other), record(b"4"), record(b"5")]
    assert [message.record_count for message in packed(found, ROOM, ids())] == [2, 1, 2]


def test_what_may_have_been_sent_goes_as_it_went() -> None:
    """The broker knows it by its id: in a pack it would be stored twice."""
    found = [record(b"1", fixed=True), record(b"2"), record(b"3"), record(b"4", fixed=True)]
    sent = packed(found, ROOM, ids())
    assert [message.record_count for message in sent] == [1, 2, 1]
    assert (sent[0], sent[2]) == (found[0], found[3])


def test_who_publishes_a_pack_of_its_own_is_not_packed_again() -> None:
    found = [record(b"1", PACK), record(b"2", PACK)]
    assert packed(found, ROOM, ids()) == found
