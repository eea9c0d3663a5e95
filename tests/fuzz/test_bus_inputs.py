"""What comes over the bus: whatever it is, it is taken, or dropped and counted; nothing is raised into a
subscription."""

from __future__ import annotations

import asyncio
import datetime
from types import SimpleNamespace
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_semkv.bus.acks import Acks
from dynamo_semkv.bus.subscriber import BusSubscriber
from dynamo_semkv.bus.subscription import ConsumerState, Message
from dynamo_semkv.config.schema import BusConfig
from dynamo_semkv.contracts import codec, subjects
from dynamo_semkv.contracts.donor_events import DonorEvent, DonorRegistered
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.identity import StableReplica
from dynamo_semkv.contracts.pack import PACK, Pack
from dynamo_semkv.evidence.catalog import DonorCatalog
from dynamo_semkv.evidence.fingerprint import FingerprintProvider
from dynamo_semkv.evidence.limits import CatalogLimits
from dynamo_semkv.outcome.intake import Intake
from dynamo_semkv.router.replicas import ReplicaDirectory
from dynamo_semkv.testing import ManualClock
from tests.contracts import golden, strategies
from tests.fuzz import odd
from tests.outcome.build import Listener
from worker_connector.requests.hints import HintReader, HintTable

REPLICA = StableReplica("worker-0", 1)
RAW = golden.messages()
KINDS = {
    "report": subjects.reports(REPLICA),
    "announcement": subjects.announcements(REPLICA),
    "route_opened": subjects.routes("semkv-0"),
    "route_observed": subjects.routes("semkv-0"),
    "donor_event_msgpack": subjects.donor_events(REPLICA),
    "donor_event_json": subjects.donor_events(REPLICA),
}
SUBJECTS = (*KINDS.values(), subjects.DONOR_EVENTS, "semkv.reports.*.0", "", "x")


@st.composite
def payloads(draw: st.DrawFn, name: str) -> bytes:
    """Of the right kind with a damage or an odd value in it, or anything at all."""
    raw = RAW[name]
    decode, encode = (
        (msgspec.json.decode, msgspec.json.encode)
        if name.endswith("json")
        else (msgspec.msgpack.decode, msgspec.msgpack.encode)
    )
    how = draw(st.integers(0, 3))
    if how == 0:
        return draw(st.binary(max_size=100))
    if how == 1:
        return draw(odd.damaged(raw))
    try:
        return encode(draw(odd.changed(decode(raw))))
    except (TypeError, ValueError, OverflowError):
        return raw  # what this encoding cannot say


messages = st.sampled_from(sorted(KINDS)).flatmap(
    lambda name: st.tuples(
        st.just(name),
        payloads(name),
        st.sampled_from(SUBJECTS) | st.just(KINDS[name]),
        st.sampled_from([None, "", codec.JSON, codec.MSGPACK, PACK, "x"]),
    )
)


class Nobody:
    def subscribe_stream(self, *_: Any, **__: Any) -> None: ...

    def caught_up(self, stream: str) -> bool:
        return True


@settings(max_examples=60)
@given(st.lists(messages, max_size=6), st.booleans())
def test_any_messages_into_the_intake(found: list[tuple[str, bytes, str, str | None]], live: bool) -> None:
    provider, directory = FingerprintProvider(), ReplicaDirectory()
    catalog = DonorCatalog([provider], clock=ManualClock())
    listener = Listener()
    intake = Intake(
        Nobody(), listener.tracker, apply_donor_event=catalog.apply, announce=directory.announce,
        wall=lambda: 5.0, monotonic=lambda: 5.0,
    )  # fmt: skip
    if live:
        intake.caught_up(subjects.ROUTE_STREAM)
        intake.caught_up(subjects.REPORT_STREAM)
    handlers = {
        "report": intake.on_report,
        "announcement": intake.on_announcement,
        "route_opened": intake.on_route_event,
        "route_observed": intake.on_route_event,
        "donor_event_msgpack": intake.on_donor_event,
        "donor_event_json": intake.on_donor_event,
    }
    for sequence, (name, payload, subject, content_type) in enumerate(found):
        right = content_type if content_type is not None else codec.JSON if name.endswith("json") else codec.MSGPACK
        handlers[name](Message(subject, payload, right, sequence + 1, 5.0))
    intake.tick()
    catalog.sweep(100)
    counted = sum(count for key, count in intake.counts.items() if key.endswith(".messages"))
    assert counted == len(found)


@st.composite
def stored_packs(draw: st.DrawFn) -> bytes:
    """Of records sound, damaged and odd; the whole damaged or odd, or as it should be."""
    records = draw(st.lists(payloads("report") | st.just(RAW["report"]), min_size=1, max_size=4))
    raw = msgspec.msgpack.encode(
        Pack(content_type=draw(st.sampled_from([codec.MSGPACK, PACK, None])), records=tuple(records))
    )
    how = draw(st.integers(0, 3))
    if how == 0:
        return draw(odd.damaged(raw))
    if how == 1:
        try:
            return msgspec.msgpack.encode(draw(odd.changed(msgspec.msgpack.decode(raw))))
        except (TypeError, ValueError, OverflowError):
            return raw  # what this encoding cannot say
    return raw


def stored_message(payload: bytes, subject: str, sequence: int) -> Any:
    """As nats-py hands over one of a stream."""
    at = SimpleNamespace(consumer=sequence, stream=sequence)
    metadata = SimpleNamespace(
        sequence=at, num_pending=0, num_delivered=1, timestamp=datetime.datetime.now(datetime.timezone.utc)
    )
    return SimpleNamespace(subject=subject, data=payload, headers={"content-type": PACK}, metadata=metadata)


@settings(max_examples=60)
@given(st.lists(stored_packs(), max_size=4))
def test_any_pack_into_a_subscription_and_the_intake(found: list[bytes]) -> None:
    """Every record is taken or counted as refused, and a pack that is none counts as one; none of it ends the
    subscription."""
    listener = Listener()
    bus = BusSubscriber(BusConfig(), "test")
    intake = Intake(bus, listener.tracker, apply_donor_event=print, announce=print)
    for stream in (subjects.ROUTE_STREAM, subjects.REPORT_STREAM):
        intake.caught_up(stream)
    bus.subscribe_stream(subjects.REPORT_STREAM, ">", intake.on_report)
    expected = 0
    for payload in found:
        try:
            expected += len(codec.decode_pack(payload).records)
        except ContractError:
            expected += 1

    async def deliver() -> None:
        consumer = ConsumerState(asyncio.get_running_loop().create_future())
        for sequence, payload in enumerate(found, 1):
            message = stored_message(payload, KINDS["report"], sequence)
            await bus._on_stream_message(None, bus._streams[0], consumer, message)  # type: ignore[arg-type]
        assert not consumer.failed.done()

    asyncio.run(deliver())
    refused = sum(intake.counts[f"reports.{kind}"] for kind in ("malformed", "unsupported_version", "foreign_subject"))
    tracker = listener.tracker.stats
    assert intake.counts["reports.messages"] == bus.stats().delivered == expected
    assert tracker.reports + tracker.duplicates + refused == expected
    assert bus.stats().handler_errors == 0


@settings(max_examples=60)
@given(st.lists(strategies.donor_events, max_size=6), st.binary(max_size=60), st.sampled_from([0, 1]))
def test_any_sound_donor_events_in_any_order_into_catalog_and_index(
    events: list[DonorEvent], metadata: bytes, at: int
) -> None:
    """Sound by the codec, and otherwise whatever an emitter may think of: sketches that are none, ids in any order,
    other workers."""
    provider = FingerprintProvider()
    catalog = DonorCatalog(
        [provider], clock=ManualClock(), limits=CatalogLimits(max_donors=4, max_held=4, max_streams=4)
    )
    for event in events:
        if isinstance(event.data, DonorRegistered):
            segments = [
                msgspec.structs.replace(s, provider_metadata=b"ng8m32-1" + metadata) for s in event.data.segments
            ]
            event = msgspec.structs.replace(
                event, worker_id=at, dp_rank=0, data=msgspec.structs.replace(event.data, segments=segments)
            )
        catalog.apply(event)
        catalog.sweep(10)
    assert len(catalog) <= 4


@settings(max_examples=60)
@given(st.binary(max_size=120) | odd.damaged(RAW["hint_delivery"]) | payloads("hint_delivery"))
def test_any_hint_over_the_bus(payload: bytes) -> None:
    table, reader = HintTable(10.0, 4, ManualClock()), HintReader()
    delivery = table.receive(payload, REPLICA)
    if delivery is not None:
        reader.parse(delivery.envelope, delivery.traceparent)
    assert sum(table.counts.values()) == 1
    assert len(table) <= 1


class Native:
    """An engine's own type with whatever attributes."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


@settings(max_examples=80)
@given(odd.mappings("protocol_version", "message_id", "actions") | odd.values, st.booleans())
def test_any_hint_on_a_request(said: Any, native: bool) -> None:
    fields = {str(key): value for key, value in said.items()} if isinstance(said, dict) else {}
    reader = HintReader()
    reader.of_request(Native(kv_hints=Native(**fields) if native else said))
    assert set(reader.counts) <= {
        "donor", "fetch_not_supported", "unknown_action", "unknown_version", "bad_payload", "bad_envelope",
        "unsupported_envelope",
    }  # fmt: skip


ACKNOWLEDGED = b'{"stream": "SEMKV_ROUTES", "domain": "d", "seq": 7, "duplicate": true}'
REFUSED = b'{"error": {"code": 400, "err_code": 10060, "description": "no"}}'


class Stored(msgspec.Struct):
    stream: str
    seq: int
    error: Any = None


@st.composite
def acknowledgements(draw: st.DrawFn) -> bytes:
    raw = draw(st.sampled_from([ACKNOWLEDGED, REFUSED]))
    how = draw(st.integers(0, 2))
    if how == 0:
        return draw(st.binary(max_size=60))
    if how == 1:
        return draw(odd.damaged(raw))
    try:
        return msgspec.json.encode(draw(odd.changed(msgspec.json.decode(raw))))
    except (TypeError, ValueError, OverflowError):
        return raw  # what JSON cannot say


@given(acknowledgements(), st.sampled_from([None, {}, {"Status": "503"}, {"Status": "100"}, {"other": "503"}]))
@settings(max_examples=200)
def test_any_acknowledgement(raw: bytes, headers: dict[str, str] | None) -> None:
    """A message counts as stored when the stream says where, and in no other case."""
    told = Acks(SimpleNamespace(new_inbox=lambda: "_INBOX.x")).error_in(
        SimpleNamespace(data=raw, headers=headers), "SEMKV_ROUTES"
    )  # type: ignore[arg-type]
    assert told is None or isinstance(told, Exception)
    if told is None:
        said = msgspec.json.decode(raw, type=Stored)  # what nobody looks at may be damaged
        assert said.stream
        assert said.seq >= 1
        assert said.error is None
        assert (headers or {}).get("Status") != "503"


def test_a_sound_acknowledgement_is_one() -> None:
    acks = Acks(SimpleNamespace(new_inbox=lambda: "_INBOX.x"))  # type: ignore[arg-type]
    assert acks.error_in(SimpleNamespace(data=ACKNOWLEDGED, headers=None), "SEMKV_ROUTES") is None  # type: ignore[arg-type]
