"""Each wire message of the codec: how it is written, how it is read, and what valid ones look like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from hypothesis import strategies as st

from dynamo_semkv.contracts import codec
from dynamo_semkv.contracts.donor_events import MAX_EVENT_BYTES
from dynamo_semkv.contracts.hints import MAX_HINT_BYTES
from dynamo_semkv.contracts.pack import MAX_PACK_BYTES
from tests.contracts import strategies


@dataclass(frozen=True)
class WireMessage:
    name: str
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]
    values: st.SearchStrategy[Any]
    cap: int
    json: bool = False
    version: str | None = "version"
    """Our own messages: the field whose major number must match."""
    major: int = 1


MESSAGES = (
    WireMessage("report", codec.encode_report, codec.decode_report, strategies.reports(), codec.MAX_REPORT_BYTES),
    WireMessage(
        "announcement",
        codec.encode_announcement,
        codec.decode_announcement,
        strategies.announcements,
        codec.MAX_ANNOUNCEMENT_BYTES,
    ),
    WireMessage(
        "route_opened",
        codec.encode_route_event,
        codec.decode_route_event,
        strategies.routes_opened,
        codec.MAX_REPORT_BYTES,
    ),
    WireMessage(
        "route_observed",
        codec.encode_route_event,
        codec.decode_route_event,
        strategies.routes_observed,
        codec.MAX_REPORT_BYTES,
    ),
    WireMessage("pack", codec.encode_pack, codec.decode_pack, strategies.packs, MAX_PACK_BYTES, major=2),
    WireMessage(
        "hint_delivery",
        codec.encode_hint_delivery,
        codec.decode_hint_delivery,
        strategies.hint_deliveries,
        MAX_HINT_BYTES,
    ),
    WireMessage(
        "donor_event_msgpack",
        partial(codec.encode_donor_event, content_type=codec.MSGPACK),
        partial(codec.decode_donor_event, content_type=codec.MSGPACK),
        strategies.donor_events,
        MAX_EVENT_BYTES,
        version=None,
    ),
    WireMessage(
        "donor_event_json",
        partial(codec.encode_donor_event, content_type=codec.JSON),
        partial(codec.decode_donor_event, content_type=codec.JSON),
        strategies.donor_events,
        MAX_EVENT_BYTES,
        json=True,
        version=None,
    ),
)
BY_NAME = {message.name: message for message in MESSAGES}
