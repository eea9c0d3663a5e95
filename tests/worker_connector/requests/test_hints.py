"""Hints: what is parsed, what is skipped, and who gets a route's id."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dynamo_semkv.contracts.codec import donor_action, encode_hint_delivery
from dynamo_semkv.contracts.evidence import Bucket
from dynamo_semkv.contracts.hints import (
    FETCH_ACTION,
    FETCH_VERSION,
    HINT_DELIVERY_VERSION,
    DonorHint,
    HintDelivery,
    KvHintAction,
    KvHintsEnvelope,
)
from dynamo_semkv.contracts.identity import StableReplica
from dynamo_semkv.contracts.load_plan import ExpectedMode
from worker_connector.requests.hints import HintReader, HintTable

HERE = StableReplica("engine-a", 1)


def donor(route: str = "a" * 32, **changes: Any) -> DonorHint:
    options: dict[str, Any] = {
        "route_id": route,
        "donor_id": "d1",
        "expected_mode": ExpectedMode.EXACT_EQUIVALENT,
        "generation": "g",
        "namespace": "n",
        "token_count": 10,
        "exact_prefix_tokens": 0,
        "score_bucket": Bucket.LOW,
    }
    return DonorHint(**options | changes)


def action(kind: str, version: str = "1.0", payload: dict[str, Any] | None = None) -> KvHintAction:
    return KvHintAction(action_id="x", action_type=kind, action_version=version, payload=payload or {})


FETCH = action(FETCH_ACTION, FETCH_VERSION, {"source_control_endpoint": "tcp://127.0.0.1:1", "block_hashes": [1, 2]})


def envelope(*actions: KvHintAction, version: str = "0.1") -> KvHintsEnvelope:
    return KvHintsEnvelope(protocol_version=version, message_id="m", actions=list(actions))


def delivery(key: bytes = b"k" * 16, route: str = "a" * 32, replica: StableReplica = HERE) -> HintDelivery:
    return HintDelivery(
        version=HINT_DELIVERY_VERSION,
        stable_routing_id=replica.stable_routing_id,
        dp_rank=replica.dp_rank,
        prompt_key=key,
        envelope=envelope(donor_action("1", donor(route))),
    )


def route_of(found: tuple[HintDelivery, bool] | None) -> tuple[str, bool] | None:
    if found is None:
        return None
    parsed = HintReader().parse(found[0].envelope)
    assert parsed.donor is not None
    return parsed.donor.route_id, found[1]


@pytest.mark.parametrize(("fetches", "count"), [(True, "fetch"), (False, "fetch_not_supported")])
def test_known_actions_are_parsed_and_fetch_is_counted(fetches: bool, count: str) -> None:
    reader = HintReader(fetches=fetches)
    parsed = reader.parse(envelope(FETCH, donor_action("1", donor())), by_dynamo=True)
    assert parsed.donor == donor()
    assert parsed.fetch is not None
    assert parsed.fetch.block_hashes == [1, 2]
    assert reader.counts == {"donor": 1, count: 1}


def test_an_address_that_did_not_come_from_dynamo_is_not_looked_at() -> None:
    """The hint table's way (the bus) is the router's for `semkv.donor`, and nobody's for addresses."""
    reader = HintReader(fetches=True)
    parsed = reader.parse(envelope(FETCH, donor_action("1", donor())))
    assert (parsed.donor, parsed.fetch) == (donor(), None)
    assert reader.counts == {"donor": 1, "fetch_foreign": 1}


@dataclasses.dataclass(slots=True)
class RfcAction:
    """As NVIDIA/TensorRT-LLM#18153 proposes it."""

    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any]


@dataclasses.dataclass(slots=True)
class RfcEnvelope:
    protocol_version: str
    message_id: str
    actions: list[RfcAction]


class VllmAction(msgspec.Struct):
    """As vllm-project/vllm#53423 has it (vllm/v1/kv_hints/protocol.py)."""

    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any]


class VllmEnvelope(msgspec.Struct):
    protocol_version: str
    message_id: str
    actions: list[VllmAction]


NATIVE = [
    pytest.param(RfcAction, RfcEnvelope, id="rfc"),
    pytest.param(VllmAction, VllmEnvelope, id="vllm"),
    pytest.param(dict, dict, id="json"),
]


@pytest.mark.parametrize(("make_action", "make_envelope"), NATIVE)
def test_native_types_carry_the_fetch_and_what_is_not_known_costs_only_itself(
    make_action: Any, make_envelope: Any
) -> None:
    payload = {"source_control_endpoint": "tcp://127.0.0.1:7011", "block_hashes": [111, 222, 333], "later": {"x": 1}}
    actions = [
        make_action(action_id="a0", action_type="kv.share", action_version="1.0", payload={}),
        make_action(action_id="a1", action_type="kv.fetch", action_version="2.0", payload={"other": 1}),
        make_action(action_id="a2", action_type="kv.fetch", action_version="1.0", payload={"block_hashes": [1]}),
        make_action(action_id="a3", action_type="kv.fetch", action_version="1.0", payload=payload),
    ]
    reader = HintReader(fetches=True)
    parsed = reader.of_request(
        SimpleNamespace(kv_hints=make_envelope(protocol_version="0.1", message_id="msg-123", actions=actions))
    )
    assert parsed is not None
    assert parsed.fetch is not None
    assert parsed.fetch.source_control_endpoint == "tcp://127.0.0.1:7011"
    assert parsed.fetch.block_hashes == [111, 222, 333]
    assert reader.counts == {"unknown_action": 1, "unknown_version": 1, "bad_payload": 1, "fetch": 1}


@pytest.mark.parametrize(
    ("bad", "count"),
    [
        (action("vendor.magic"), "unknown_action"),
        (action("semkv.donor", "2.0", {}), "unknown_version"),
        (action("semkv.donor", "1.0", {"route_id": 5}), "bad_payload"),
        (action(FETCH_ACTION, FETCH_VERSION, {"block_hashes": "no"}), "bad_payload"),
    ],
)
def test_one_bad_action_does_not_cost_the_others(bad: KvHintAction, count: str) -> None:
    reader = HintReader()
    assert reader.parse(envelope(bad, donor_action("1", donor())), by_dynamo=True).donor == donor()
    assert reader.counts == {count: 1, "donor": 1}


@pytest.mark.parametrize(
    ("it", "count"),
    [
        (envelope(donor_action("1", donor()), version="9.9"), "unsupported_envelope"),
        (envelope(*[FETCH] * 17), "bad_envelope"),
    ],
)
def test_other_envelopes_are_not_read(it: KvHintsEnvelope, count: str) -> None:
    reader = HintReader()
    assert reader.parse(it).donor is None
    assert reader.counts == {count: 1}


def test_hint_on_the_request_is_read_from_structs_dicts_and_foreign_objects() -> None:
    it = envelope(donor_action("1", donor()))
    plain = {
        "protocol_version": "0.1",
        "message_id": "m",
        "actions": [
            {
                "action_id": "1",
                "action_type": "semkv.donor",
                "action_version": "1.0",
                "payload": it.actions[0].payload,
            }
        ],
    }
    foreign = SimpleNamespace(
        protocol_version="0.1",
        message_id="m",
        actions=[SimpleNamespace(**plain["actions"][0])],  # type: ignore[arg-type]
    )
    for native in (it, plain, foreign):
        parsed = HintReader().of_request(SimpleNamespace(kv_hints=native))
        assert parsed is not None
        assert parsed.donor == donor()


@pytest.mark.parametrize(
    "native", [7, {"protocol_version": "0.1"}, {"protocol_version": "7", "message_id": "", "actions": []}]
)
def test_unreadable_hint_on_the_request_is_no_hint(native: Any) -> None:
    reader = HintReader()
    assert reader.of_request(SimpleNamespace(kv_hints=native)) is None
    assert sum(reader.counts.values()) == 1
    assert HintReader().of_request(SimpleNamespace()) is None


def test_row_lives_for_its_seconds() -> None:
    now = [0.0]
    table = HintTable(10.0, 100, lambda: now[0])
    table.put(delivery())
    now[0] = 9.9
    assert route_of(table.take(b"k" * 16)) == ("a" * 32, True)
    now[0] = 10.0
    assert table.take(b"k" * 16) is None
    assert table.take(b"x" * 16) is None
    assert len(table) == 0


def test_dynamo_13191_equal_prompts_in_flight_close_each_route_once() -> None:
    """ai-dynamo/dynamo#13191: two attempts with the same prompt; neither report may be credited to the other's
    route."""
    table = HintTable(10.0, 100, lambda: 0.0)
    table.put(delivery(route="a" * 32))
    table.put(delivery(route="b" * 32))
    assert route_of(table.take(b"k" * 16)) == ("a" * 32, True)
    assert route_of(table.take(b"k" * 16)) == ("b" * 32, True)
    assert route_of(table.take(b"k" * 16)) == ("b" * 32, False)  # known donor, but that route is closed
    table.put(delivery(route="c" * 32))
    assert route_of(table.take(b"k" * 16)) == ("c" * 32, True)


def test_a_hint_whose_request_never_came_shifts_nobody() -> None:
    """Its router or the stream died in between. Every later request of that prompt has a hint of its own, sent just
    before it."""
    wall = [0]
    table = HintTable(10.0, 100, lambda: 0.0, lambda: wall[0])
    for at, route in ((100, "a" * 32), (200, "b" * 32), (300, "c" * 32)):
        wall[0] = at
        table.put(delivery(route=route))
        if route != "a" * 32:
            assert route_of(table.take(b"k" * 16, asked_ns=at + 5)) == (route, True)
    assert route_of(table.take(b"k" * 16, asked_ns=400)) == ("a" * 32, True)  # nothing better is left
    assert route_of(table.take(b"k" * 16, asked_ns=500)) == ("a" * 32, False)
    assert len(table) == 1


def test_equal_prompts_in_flight_get_the_hint_that_came_just_before_them() -> None:
    wall = [0]
    table = HintTable(10.0, 100, lambda: 0.0, lambda: wall[0])
    for at, route in ((100, "a" * 32), (200, "b" * 32)):
        wall[0] = at
        table.put(delivery(route=route))
    assert route_of(table.take(b"k" * 16, asked_ns=210)) == ("b" * 32, True)  # the second ended first
    assert route_of(table.take(b"k" * 16, asked_ns=110)) == ("a" * 32, True)
    wall[0] = 400
    table.put(delivery(route="c" * 32))
    assert route_of(table.take(b"k" * 16, asked_ns=399)) == ("c" * 32, True)  # the bus was slower than the request


def test_table_is_bounded() -> None:
    table = HintTable(10.0, 8, lambda: 0.0)
    for number in range(100):
        table.put(delivery(key=number.to_bytes(16, "little")))
    assert len(table) == 8
    assert table.counts["crowded_out"] == 92
    assert table.take((99).to_bytes(16, "little")) is not None
    assert table.take((0).to_bytes(16, "little")) is None
    for _ in range(200):
        table.put(delivery())
    assert len(table) <= 64


def test_expired_rows_go_when_others_come() -> None:
    now = [0.0]
    table = HintTable(1.0, 1000, lambda: now[0])
    for number in range(50):
        table.put(delivery(key=number.to_bytes(16, "little")))
    now[0] = 2.0
    table.put(delivery())
    assert len(table) == 1


def test_a_hint_that_expired_unused_is_remembered_once() -> None:
    now = [0.0]
    table = HintTable(1.0, 4, lambda: now[0])
    table.put(delivery())
    table.put(delivery(key=b"used" * 4))
    assert table.take(b"used" * 4) is not None
    now[0] = 5.0
    for key in (b"k" * 16, b"used" * 4):
        assert table.take(key) is None
    assert table.missed(b"k" * 16)
    assert not table.missed(b"k" * 16)
    assert not table.missed(b"used" * 4)
    for number in range(100):  # dropped by later ones, not by asking: remembered all the same, within the bound
        table.put(delivery(key=number.to_bytes(16, "little")))
        now[0] += 2.0
    table.put(delivery())
    remembered = [number for number in range(100) if table.missed(number.to_bytes(16, "little"))]
    assert remembered == [96, 97, 98, 99]
    now[0] += 1.5
    assert table.take(b"k" * 16) is None
    now[0] += 60.0
    assert not table.missed(b"k" * 16)


def test_messages_for_others_and_noise_are_counted() -> None:
    table = HintTable(10.0, 8, lambda: 0.0)
    assert table.receive(encode_hint_delivery(delivery()), HERE) is not None
    assert table.receive(encode_hint_delivery(delivery(replica=StableReplica("engine-a", 0))), HERE) is None
    assert table.receive(b"\xc1noise", HERE) is None
    assert table.counts == {"received": 1, "misdirected": 1, "undecodable": 1}
