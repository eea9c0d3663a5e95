"""What is written is what is read, for every type and both encodings."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_semkv.contracts import codec
from dynamo_semkv.contracts.donor_events import DonorEvent
from dynamo_semkv.contracts.evidence import SemanticTrtMatch
from dynamo_semkv.contracts.hints import DonorHint, FetchHint, KvHintAction, KvHintsEnvelope
from dynamo_semkv.contracts.load_plan import SemanticTrtLoadPlan
from tests.contracts import strategies
from tests.contracts.messages import MESSAGES, WireMessage


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: m.name)
@given(data=st.data())
def test_messages(message: WireMessage, data: st.DataObject) -> None:
    value = data.draw(message.values)
    assert message.decode(message.encode(value)) == value


@given(strategies.donor_events)
def test_json_and_msgpack_say_the_same(event: DonorEvent) -> None:
    from_json = codec.decode_donor_event(codec.encode_donor_event(event, codec.JSON), codec.JSON)
    from_msgpack = codec.decode_donor_event(codec.encode_donor_event(event, codec.MSGPACK), codec.MSGPACK)
    assert from_json == from_msgpack


@given(strategies.envelopes)
def test_envelopes_as_plain_values(envelope: KvHintsEnvelope) -> None:
    plain = codec.envelope_to_plain(envelope)
    assert msgspec.json.decode(msgspec.json.encode(plain)) == plain
    assert codec.envelope_from_plain(plain) == envelope


class Native:
    """An engine's own envelope type: attributes, no dict."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


def test_envelopes_from_an_engines_own_types() -> None:
    action = Native(action_id="a", action_type="kv.fetch", action_version="1.0", payload={"x": 1})
    native = Native(protocol_version="0.1", message_id="m", actions=[action])
    expected = KvHintAction(action_id="a", action_type="kv.fetch", action_version="1.0", payload={"x": 1})
    assert codec.envelope_from_plain(native).actions == [expected]


@given(strategies.donor_hints)
def test_donor_action(hint: DonorHint) -> None:
    action = codec.donor_action("a1", hint)
    assert (action.action_type, action.action_version) == ("semkv.donor", "1.0")
    assert codec.parse_donor_payload(action) == hint


@given(strategies.fetch_hints)
def test_fetch_action(hint: FetchHint) -> None:
    action = KvHintAction(
        action_id="a", action_type="kv.fetch", action_version="1.0", payload=msgspec.to_builtins(hint)
    )
    assert codec.parse_fetch_payload(action) == hint


@given(strategies.matches)
def test_evidence(match: SemanticTrtMatch) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(match), type=SemanticTrtMatch) == match


@given(strategies.load_plans)
def test_load_plans(plan: SemanticTrtLoadPlan) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=SemanticTrtLoadPlan) == plan
