"""Version and unknown-field rules of contracts/codec.py, message by message; and the ranges that decoding checks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dynamo_semkv.contracts import codec
from dynamo_semkv.contracts.codec import UnsupportedVersion
from dynamo_semkv.contracts.donor_events import DonorEvicted, DonorRegistered, DonorsPurged, PurgeAll
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.hints import KvHintAction
from dynamo_semkv.contracts.pack import MAX_PACK_BYTES, PACK, Pack
from dynamo_semkv.contracts.report import Outcome, Reason
from tests.contracts import golden
from tests.contracts.messages import BY_NAME, MESSAGES

OURS = [message.name for message in MESSAGES if message.version]
FOREIGN = [message.name for message in MESSAGES if not message.version]


def plain(name: str) -> dict[str, Any]:
    raw = golden.messages()[name]
    value: dict[str, Any] = msgspec.json.decode(raw) if BY_NAME[name].json else msgspec.msgpack.decode(raw)
    return value


def decode(name: str, value: Any) -> Any:
    return BY_NAME[name].decode(msgspec.json.encode(value) if BY_NAME[name].json else msgspec.msgpack.encode(value))


@pytest.mark.parametrize("name", OURS)
def test_a_newer_minor_with_more_fields_is_read(name: str) -> None:
    version = f"{BY_NAME[name].major}.9"
    newer = {**plain(name), "version": version, "added_in_9": [1, 2]}
    assert msgspec.structs.asdict(decode(name, newer)) == {
        **msgspec.structs.asdict(decode(name, plain(name))),
        "version": version,
    }


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("version", ["3.0", "0.9", "10.0", "", "x", "of the other"])
def test_another_major_is_told_apart_from_a_broken_message(name: str, version: str) -> None:
    """Also when nothing else of the message is as this build knows it."""
    major = BY_NAME[name].major
    version = f"{3 - major}.0" if version == "of the other" else version  # records are 1.x, packs of them 2.x
    for newer in ({**plain(name), "version": version}, {"version": version, "all": "different"}):
        with pytest.raises(UnsupportedVersion, match=rf"version.*allowed: {major}\.x"):
            decode(name, newer)


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("version", [0, 2, 10])
def test_donor_events_of_another_schema_are_never_parsed_on_a_best_effort(name: str, version: int) -> None:
    for other in ({**plain(name), "schema_version": version}, {"schema_version": version, "all": "different"}):
        with pytest.raises(UnsupportedVersion, match="allowed: 1"):
            decode(name, other)


@pytest.mark.parametrize("name", FOREIGN)
def test_donor_events_ignore_what_they_do_not_know(name: str) -> None:
    event = plain(name)
    event["added"] = 1
    event["data"]["added"] = {"x": 1}
    event["data"]["segments"][0]["added"] = None
    event["data"]["location"]["added"] = "x"
    assert decode(name, event) == decode(name, plain(name))


@pytest.mark.parametrize("version", ["0.2", "1.0", "0.1.0", ""])
def test_another_envelope_is_refused(version: str) -> None:
    with pytest.raises(UnsupportedVersion, match=r"protocol_version.*allowed: 0\.1"):
        codec.envelope_from_plain({"protocol_version": version, "message_id": "m", "actions": []})
    delivery = plain("hint_delivery")
    delivery["envelope"]["protocol_version"] = version
    with pytest.raises(UnsupportedVersion):
        decode("hint_delivery", delivery)


def test_envelopes_ignore_what_they_do_not_know() -> None:
    action = {"action_id": "a", "action_type": "t", "action_version": "1", "payload": {"kept": [1]}, "added": 1}
    envelope = codec.envelope_from_plain(
        {"protocol_version": "0.1", "message_id": "m", "actions": [action], "added": 1}
    )
    known = KvHintAction(action_id="a", action_type="t", action_version="1", payload={"kept": [1]})
    assert envelope.actions == [known]


def test_a_namespace_with_a_field_we_do_not_know_is_refused() -> None:
    """It may decide correctness, so ignoring it is not an option."""
    announcement = plain("announcement")
    announcement["namespace"]["quantum"] = "x"
    with pytest.raises(ContractError, match="quantum"):
        decode("announcement", announcement)


def test_outcomes_and_reasons_of_a_newer_peer_read_as_unknown() -> None:
    report = decode("report", {**plain("report"), "outcome": "teleported", "reason": "because"})
    assert (report.outcome, report.reason) == (Outcome.UNKNOWN, Reason.UNKNOWN)


RANGES: list[tuple[str, tuple[Any, ...], Any, str]] = [
    ("report", ("stable_routing_id",), "a b", "stable_routing_id"),
    ("report", ("prompt_key",), b"short", "report.prompt_key"),
    ("report", ("dp_rank",), -1, "report.dp_rank"),
    ("report", ("route_id",), "r1", "route_id"),
    ("report", ("donor_id",), "a b", "donor_id"),
    ("report", ("epoch",), -1, "report.epoch"),
    ("report", ("load_seconds",), float("nan"), "report.load_seconds"),
    ("report", ("load_seconds",), -0.5, "report.load_seconds"),
    ("report", ("load_seconds",), 1e308, "report.load_seconds"),
    ("report", ("copied",), 97, "report.counts"),
    ("report", ("confirmed",), -1, "report.counts"),
    ("report", ("honoured",), 90, "report.counts"),
    ("report", ("local_tokens",), 5, "report.tokens"),
    ("announcement", ("stable_routing_id",), "", "stable_routing_id"),
    ("announcement", ("dp_rank",), 65_536, "announcement.dp_rank"),
    ("announcement", ("generation",), "g" * 257, "announcement.generation"),
    ("announcement", ("slab_blocks",), -1, "announcement.slab_blocks"),
    ("announcement", ("namespace", "tokens_per_block"), 0, "namespace.tokens_per_block"),
    ("announcement", ("namespace", "model"), "m" * 513, "namespace.model"),
    ("announcement", ("namespace", "multimodal"), ["x"] * 257, "namespace.multimodal"),
    ("route_opened", ("route_id",), "0" * 31, "route_id"),
    ("route_opened", ("route_id",), "A" * 32, "route_id"),
    ("route_opened", ("prompt_key",), b"x" * 17, "route_opened.prompt_key"),
    ("route_opened", ("input_tokens",), -1, "route_opened.input_tokens"),
    ("route_opened", ("hinted_tokens",), -1, "route_opened.hinted_tokens"),
    ("route_opened", ("opened_at",), float("inf"), "route_opened.opened_at"),
    ("route_opened", ("stable_routing_id",), ">", "stable_routing_id"),
    ("route_opened", ("dp_rank",), -1, "route_event.dp_rank"),
    ("route_observed", ("ttft_seconds",), float("nan"), "route_observed.ttft_seconds"),
    ("route_observed", ("ttft_seconds",), 1e308, "route_observed.ttft_seconds"),
    ("route_observed", ("engine_cached_tokens",), -1, "route_observed.engine_cached_tokens"),
    ("route_observed", ("served_stable_routing_id",), "*", "stable_routing_id"),
    ("pack", ("records",), [], "pack.records"),
    ("pack", ("records",), [b""] * 65, "pack.records"),
    ("pack", ("records",), ["text"], "pack"),
    ("pack", ("content_type",), PACK, "pack.content_type"),
    ("hint_delivery", ("prompt_key",), b"", "hint_delivery.prompt_key"),
    ("hint_delivery", ("dp_rank",), -1, "hint_delivery.dp_rank"),
    *(
        (name, path, value, field)
        for name in FOREIGN
        for path, value, field in (
            (("event_id",), -1, "donor_event.event_id"),
            (("worker_id",), -1, "donor_event.worker_id"),
            (("dp_rank",), 65_536, "donor_event.dp_rank"),
            (("data", "donor_id"), "a b", "donor_id"),
            (("data", "provider_generation"), "g" * 257, "donor_event.generation"),
            (("data", "token_count"), 0, "donor_registered.token_count"),
            (("data", "token_count"), 50, "segment.token_range"),
            (("data", "segments"), [], "donor_registered.segments"),
            (("data", "segments", 0, "token_range"), [5, 5], "segment.token_range"),
            (("data", "segments", 0, "token_range"), [-1, 5], "segment.token_range"),
            (("data", "segments", 0, "provider_metadata"), [256], "segment.provider_metadata"),
            (("data", "location", "worker_id"), -1, "donor_registered.location.worker_id"),
            (("data", "location", "dp_rank"), -1, "donor_registered.location.dp_rank"),
        )
    ),
]


@pytest.mark.parametrize(("name", "path", "value", "field"), RANGES)
def test_values_out_of_range_are_refused_by_name(name: str, path: tuple[Any, ...], value: Any, field: str) -> None:
    message = plain(name)
    holder: Any = message
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = value
    with pytest.raises(ContractError) as caught:
        decode(name, message)
    assert caught.value.field == field, caught.value


def test_too_many_segments() -> None:
    event = plain("donor_event_msgpack")
    event["data"]["segments"] = [{"segment_id": 0, "token_range": [0, 1], "digest": 0}] * 257
    with pytest.raises(ContractError, match="got 257, allowed: 1 to 256"):
        decode("donor_event_msgpack", event)


def event_with(**data: Any) -> dict[str, Any]:
    return {"schema_version": 1, "event_id": 0, "worker_id": 0, "dp_rank": 0, "data": data}


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"kind": "donor_evicted", "donor_id": "", "provider_generation": 1}, "donor_id"),
        (
            {
                "kind": "donor_relocated",
                "donor_id": "d",
                "provider_generation": 1,
                "new_location": {"kind": "worker", "worker_id": 1, "dp_rank": -1, "tier": "device"},
            },
            "donor_relocated.new_location.dp_rank",
        ),
        (
            {"kind": "donors_purged", "provider_generation": 1, "scope": {"kind": "worker", "worker_id": -1}},
            "donors_purged.scope.worker_id",
        ),
        (
            {
                "kind": "donors_purged",
                "provider_generation": 1,
                "scope": {
                    "kind": "location",
                    "location": {"kind": "worker", "worker_id": -1, "dp_rank": 0, "tier": "disk"},
                },
            },
            "donors_purged.scope.location.worker_id",
        ),
    ],
)
def test_the_other_kinds_are_checked_too(data: dict[str, Any], field: str) -> None:
    with pytest.raises(ContractError) as caught:
        codec.decode_donor_event(msgspec.json.encode(event_with(**data)))
    assert caught.value.field == field, caught.value


def test_what_semblend_writes_is_read() -> None:
    """Shapes of SemBlend 0.3.25: integer generation of wall-clock milliseconds, ids of any text, metadata as
    integers, zeros as literals."""
    registered = {
        "kind": "donor_registered",
        "donor_id": "any-string:of/theirs",
        "namespace": {
            "model": "m",
            "tokenizer": "t",
            "kv_layout": "paged",
            "block_size": 32,
            "extra": {"tenant_key": "semblend:tenant:v1:none", "cache_salt": "x"},
        },
        "location": {"kind": "worker", "worker_id": 0, "dp_rank": 0, "tier": "device"},
        "token_count": 64,
        "segments": [
            {"segment_id": 0, "token_range": [0, 64], "digest": 2**64 - 1, "provider_metadata": [0, 0, 192, 127]}
        ],
        "provider_generation": 1_764_400_000_000,
    }
    data = codec.decode_donor_event(msgspec.json.encode(event_with(**registered))).data
    assert isinstance(data, DonorRegistered)
    assert data.segments[0].provider_metadata == bytes([0, 0, 192, 127])
    evicted = {"kind": "donor_evicted", "donor_id": "d", "provider_generation": 1}
    assert codec.decode_donor_event(msgspec.json.encode(event_with(**evicted))).data == DonorEvicted(
        donor_id="d", provider_generation=1
    )
    purged = {"kind": "donors_purged", "provider_generation": "g", "scope": {"kind": "all"}}
    assert codec.decode_donor_event(msgspec.json.encode(event_with(**purged))).data == DonorsPurged(
        scope=PurgeAll(), provider_generation="g"
    )


def test_hints_and_events_over_the_cap_are_not_written() -> None:
    delivery = codec.decode_hint_delivery(golden.messages()["hint_delivery"])
    action = KvHintAction(action_id="a", action_type="t", action_version="1", payload={"x": "y" * 300_000})
    big = msgspec.structs.replace(delivery, envelope=msgspec.structs.replace(delivery.envelope, actions=[action]))
    with pytest.raises(ContractError, match=r"hint_delivery\.bytes"):
        codec.encode_hint_delivery(big)
    event = codec.decode_donor_event(golden.messages()["donor_event_msgpack"], codec.MSGPACK)
    assert isinstance(event.data, DonorRegistered)
    segment = msgspec.structs.replace(event.data.segments[0], provider_metadata=b"x" * 300_000)
    data = msgspec.structs.replace(event.data, segments=[segment])
    with pytest.raises(ContractError, match=r"donor_event\.bytes"):
        codec.encode_donor_event(msgspec.structs.replace(event, data=data))


@pytest.mark.parametrize("records", [(), (b"",) * 65, (b"x" * 2**18,)], ids=["none", "too many", "too large"])
def test_packs_that_nobody_would_read_are_not_written(records: tuple[bytes, ...]) -> None:
    with pytest.raises(ContractError, match=r"pack\.(records|bytes)"):
        codec.encode_pack(Pack(records=records))


@pytest.mark.parametrize("name", ["report", "route_opened"])
def test_who_knows_no_packs_finds_a_version_and_no_broken_message(name: str) -> None:
    record = golden.messages()[name]
    raw = codec.encode_pack(Pack(content_type=codec.MSGPACK, records=(record,) * (MAX_PACK_BYTES // (len(record) + 5))))
    with pytest.raises(UnsupportedVersion, match=r"got '2\.0', allowed: 1\.x"):
        BY_NAME[name].decode(raw)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"route_id": "r1"}, "route_id"),
        ({"donor_id": ""}, "donor_id"),
        ({"token_count": -1}, "semkv.donor.token_count"),
    ],
)
def test_donor_hints_are_checked(changed: dict[str, Any], field: str) -> None:
    action = codec.decode_hint_delivery(golden.messages()["hint_delivery"]).envelope.actions[0]
    codec.parse_donor_payload(action)
    with pytest.raises(ContractError) as caught:
        codec.parse_donor_payload(msgspec.structs.replace(action, payload={**action.payload, **changed}))
    assert caught.value.field == field
