"""Whatever arrives, a decoder answers with a value or a ContractError: never another exception, never a huge
allocation."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_semkv.contracts import codec
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.hints import MAX_ACTIONS, MAX_BLOCK_HASHES, KvHintAction
from dynamo_semkv.contracts.sketch import DonorSketch
from tests.contracts import golden, strategies
from tests.contracts.messages import MESSAGES, WireMessage

every_message = pytest.mark.parametrize("message", MESSAGES, ids=lambda m: m.name)


def decodes_or_refuses(message: WireMessage, raw: bytes) -> None:
    try:
        message.decode(raw)
    except ContractError:
        return  # the only exception that is allowed


@every_message
@given(raw=st.binary(max_size=200))
def test_any_bytes(message: WireMessage, raw: bytes) -> None:
    decodes_or_refuses(message, raw)


@every_message
@given(data=st.data())
def test_valid_bytes_with_damage(message: WireMessage, data: st.DataObject) -> None:
    raw = bytearray(golden.messages()[message.name])
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    decodes_or_refuses(message, bytes(raw[: data.draw(st.integers(0, len(raw)))]))


def encoded(message: WireMessage, value: Any) -> bytes:
    return msgspec.json.encode(value) if message.json else msgspec.msgpack.encode(value)


def decoded(message: WireMessage, raw: bytes) -> Any:
    return msgspec.json.decode(raw) if message.json else msgspec.msgpack.decode(raw)


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place inside nested dicts and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(path for key, inner in items for path in paths(inner, (*at, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(copy[path[0]], path[1:], new)
    return copy


ODD = (None, True, -1, 2**64 - 1, 2**63, 0.5, float("inf"), float("nan"), "", "x", [], {}, [[]], {"kind": "worker"})


@every_message
def test_every_field_with_every_odd_value(message: WireMessage) -> None:
    """Systematic: each place of a valid message, each odd value, and each place missing."""
    plain = decoded(message, golden.messages()[message.name])
    for path in paths(plain):
        for odd in ODD:
            decodes_or_refuses(message, encoded(message, replaced(plain, path, odd)))
        if path and isinstance(path[-1], str):
            holder = plain
            for step in path[:-1]:
                holder = holder[step]
            without = {key: inner for key, inner in holder.items() if key != path[-1]}
            decodes_or_refuses(message, encoded(message, replaced(plain, path[:-1], without)))


@every_message
def test_deep_nesting(message: WireMessage) -> None:
    depth = 100_000 if message.json else 10_000
    raw = b"[" * depth if message.json else b"\x91" * depth
    with pytest.raises(ContractError):
        message.decode(raw)
    inside = b'{"schema_version":1,"x":' + b"[" * depth if message.json else b"\x81\xa1x" + b"\x91" * depth
    with pytest.raises(ContractError):
        message.decode(inside)


@pytest.mark.parametrize("lie", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"])
@every_message
def test_lengths_that_lie(message: WireMessage, lie: bytes) -> None:
    """An array, map or string that says it has four billion elements, at the top and inside."""
    for raw in (lie, b"\x81\xa1x" + lie, b"\x81\xa7actions" + lie, b"\x81\xa7version" + lie):
        with pytest.raises(ContractError):
            message.decode(raw)


@every_message
def test_messages_over_the_cap_are_not_even_parsed(message: WireMessage) -> None:
    raw = golden.messages()[message.name]
    message.decode(raw)
    with pytest.raises(ContractError, match=rf"bytes: got {message.cap + 1}, allowed: at most {message.cap}"):
        message.decode(raw + b" " * (message.cap + 1 - len(raw)))


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/json; charset=utf-8"])
def test_another_content_type_is_refused(content_type: str) -> None:
    with pytest.raises(ContractError, match="content_type"):
        codec.decode_donor_event(golden.messages()["donor_event_json"], content_type)


@given(strategies.json_values)
def test_any_value_as_an_envelope(value: Any) -> None:
    try:
        codec.envelope_from_plain(value)
    except ContractError:
        pass


@given(st.dictionaries(st.sampled_from(["route_id", "token_count", "block_hashes", "x"]), strategies.json_values))
def test_any_payload(payload: dict[str, Any]) -> None:
    action = KvHintAction(action_id="a", action_type="t", action_version="1.0", payload=payload)
    for parse in (codec.parse_donor_payload, codec.parse_fetch_payload):
        with pytest.raises(ContractError, match=r"t@1\.0"):
            parse(action)


def test_too_many_actions_and_hashes() -> None:
    action = {"action_id": "a", "action_type": "t", "action_version": "1", "payload": {}}
    plain = {"protocol_version": "0.1", "message_id": "m", "actions": [action] * (MAX_ACTIONS + 1)}
    with pytest.raises(ContractError, match=r"kv_hints\.actions"):
        codec.envelope_from_plain(plain)
    payload = {"source_control_endpoint": "tcp://x", "block_hashes": [1] * (MAX_BLOCK_HASHES + 1)}
    fetch = KvHintAction(action_id="a", action_type="kv.fetch", action_version="1.0", payload=payload)
    with pytest.raises(ContractError, match="block_hashes"):
        codec.parse_fetch_payload(fetch)


@given(st.binary(max_size=300))
def test_any_bytes_as_a_sketch(raw: bytes) -> None:
    with pytest.raises(ContractError):
        DonorSketch.from_bytes(raw)


@given(st.data())
def test_sketches_with_damage(data: st.DataObject) -> None:
    raw = bytearray.fromhex(golden.stored()["sketches"]["plain"])
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(raw[: data.draw(st.integers(0, len(raw)))])
    for damaged in (bytes(raw), cut):
        try:
            sketch = DonorSketch.from_bytes(damaged)
        except ContractError:
            continue
        assert len(sketch.fingerprints) == len(sketch.positions) == len(sketch.links) == sketch.sample_count
        assert sketch.proven_blocks([]) == 0
