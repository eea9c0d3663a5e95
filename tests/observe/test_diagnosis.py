"""Each thing that a graph can lack is named, with its remedy; a healthy one is called healthy."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dynamo_semkv.bus.inspection import BusInspection, StreamSeen
from dynamo_semkv.bus.streams import STREAMS
from dynamo_semkv.bus.subscription import Message
from dynamo_semkv.config.load import build
from dynamo_semkv.contracts import subjects
from dynamo_semkv.contracts.announcement import KvEvents, ReplicaAnnouncement
from dynamo_semkv.contracts.codec import encode_announcement
from dynamo_semkv.contracts.identity import StableReplica
from dynamo_semkv.contracts.namespace import CacheNamespace
from dynamo_semkv.observe.diagnosis import Finding, diagnose
from dynamo_semkv.observe.health import Level

NOW = 1e9
CONFIG = build({})
KNOWN = {
    name: "x"
    for name in CacheNamespace.__struct_fields__
    if name not in ("tenant", "lora", "lora_revision", "multimodal")
} | {"tokens_per_block": 32}


def announcement(name: str = "w-a", *, age: float = 1.0, subject: str | None = None, **changes: Any) -> Message:
    said = ReplicaAnnouncement(
        version="1.0",
        stable_routing_id=name,
        dp_rank=0,
        generation="g",
        model="tiny",
        namespace=CacheNamespace(**KNOWN),
        materialization="exact",
        slab_blocks=10,
        connector_version="semkv/1",
    )
    payload = encode_announcement(msgspec.structs.replace(said, **changes))
    return Message(subject or subjects.announcements(StableReplica(name, 0)), payload, None, 1, NOW - age)


def bus(*announcements: Message, **changes: Any) -> BusInspection:
    limits = StreamSeen(5, CONFIG.bus.stream_max_age_seconds, CONFIG.bus.stream_max_bytes, CONFIG.bus.replicas)
    values: dict[str, Any] = {
        "address": "h:4222",
        "streams": dict.fromkeys(STREAMS, limits),
        "clock_offset_seconds": 0.0,
    }
    return BusInspection(**{**values, "announcements": list(announcements), **changes})


def snapshot(**changes: Any) -> dict[str, Any]:
    return {
        "now": NOW,
        "readiness": {"checks": [{"name": "workers", "level": "ok", "detail": "2 replicas"}]},
        "replicas": [{"name": "w-a/0", "live": True, "standing": "ok"}],
        "requests": 100,
        "beside": {"engine_cached_tokens": 5_000, "exact_device_tokens": 4_800},
        "outcomes": [{"outcome": "materialized_exact", "routes": 60}, {"outcome": "unconfirmed", "routes": 3}],
        **changes,
    }


def bad(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level is not Level.OK]


def test_a_broker_that_nothing_named_is_not_called_missing() -> None:
    findings = diagnose(CONFIG, None, snapshot(), NOW)
    (finding,) = bad(findings)
    assert (finding.check, finding.level) == ("bus", Level.WARN)
    assert "were not checked: no file was given" in finding.detail
    assert {"replicas", "kv_events", "feedback"} <= {found.check for found in findings}


def test_a_healthy_graph_has_nothing_bad_and_every_check_speaks() -> None:
    findings = diagnose(CONFIG, bus(announcement("w-a"), announcement("w-b")), snapshot(), NOW)
    assert bad(findings) == []
    assert {"bus", "streams", "connectors", "replicas", "kv_events", "feedback"} <= {
        finding.check for finding in findings
    }


def test_routes_that_owe_no_report_do_not_hide_that_reports_are_missing() -> None:
    outcomes = [
        {"outcome": "refused", "reason": "request_refused", "routes": 40},
        {"outcome": "cancelled", "reason": "before_first_token", "routes": 20},
        {"outcome": "unconfirmed", "reason": "no_report", "routes": 30},
    ]
    (finding,) = bad(diagnose(CONFIG, bus(announcement("w-a"), announcement("w-b")), snapshot(outcomes=outcomes), NOW))
    assert (finding.check, finding.level) == ("feedback", Level.FAIL)
    assert "30 of 40" in finding.detail


WRONG = CacheNamespace(**{**KNOWN, "kv_dtype": "fp8"})
UNKNOWN = CacheNamespace(**{**KNOWN, "tokenizer": None})
CASES: list[tuple[BusInspection, dict[str, Any] | None, str, Level, str]] = [
    (bus(error="refused"), None, "bus", Level.FAIL, "h:4222"),
    (bus(jetstream_error="JetStream is off"), None, "jetstream", Level.FAIL, "off"),
    (bus(announcement(), streams=dict.fromkeys(STREAMS)), None, "streams", Level.FAIL, "SEMKV_DONORS"),
    (bus(announcement(), streams={STREAMS[0]: StreamSeen(1, 60.0, 9, 1)}), None, "streams", Level.WARN, "other limits"),
    (bus(announcement(), clock_offset_seconds=30.0), None, "clock", Level.WARN, "30.0 s"),
    (bus(), None, "connectors", Level.FAIL, "no worker"),
    (bus(announcement(age=300.0)), None, "announcements", Level.WARN, "w-a/0"),
    (
        bus(announcement(), announcement(subject="semkv.announcements.w-b.0")),
        None,
        "announcements",
        Level.WARN,
        "speaks for w-a",
    ),
    (bus(announcement(version="9.0"), announcement("w-b")), None, "announcements", Level.WARN, "9.0"),
    (bus(announcement(), announcement("w-b", namespace=WRONG)), None, "namespace", Level.FAIL, "kv_dtype"),
    (
        bus(announcement(), announcement("w-b", namespace=WRONG), announcement("w-c")),
        None,
        "namespace",
        Level.WARN,
        "no advice for w-b/0 (in kv_dtype)",
    ),
    (bus(announcement(namespace=UNKNOWN)), None, "namespace", Level.WARN, "tokenizer"),
    (bus(announcement(materialization="off")), None, "materialization", Level.WARN, "w-a/0"),
    (
        bus(announcement(kv_events=KvEvents.HEARD), announcement("w-b", kv_events=KvEvents.SILENT)),
        None,
        "device_events",
        Level.WARN,
        "the connector of w-b/0",
    ),
    (bus(announcement(slab_blocks=0)), None, "slab", Level.FAIL, "w-a/0"),
    (bus(announcement(), announcement("w-b", connector_version="semkv/2")), None, "versions", Level.WARN, "semkv/2"),
    (bus(announcement()), snapshot(now=NOW + 60), "clock", Level.WARN, "60.0 s"),
    (
        bus(announcement()),
        snapshot(beside={"engine_cached_tokens": 99, "exact_device_tokens": 0}),
        "kv_events",
        Level.FAIL,
        "99",
    ),
    (
        bus(announcement()),
        snapshot(beside={"engine_cached_tokens": 0, "exact_device_tokens": 0}),
        "block_reuse",
        Level.WARN,
        "100",
    ),
    (
        bus(announcement()),
        snapshot(outcomes=[{"outcome": "unconfirmed", "routes": 80}]),
        "feedback",
        Level.FAIL,
        "80 of 100",
    ),
    *(
        (
            bus(announcement()),
            snapshot(replicas=[{"name": "w", "live": True, "standing": name}]),
            "replicas",
            Level.WARN,
            name,
        )
        for name in ("no_stable_id", "unannounced", "block_size_mismatch", "model_differs", "namespace_differs")
    ),
    (
        bus(announcement()),
        snapshot(readiness={"checks": [{"name": "catalog", "level": "warn", "detail": "events are missing"}]}),
        "router: catalog",
        Level.WARN,
        "missing",
    ),
]


@pytest.mark.parametrize(
    ("seen", "page", "check", "level", "says"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_what_is_missing_is_named(
    seen: BusInspection, page: dict[str, Any] | None, check: str, level: Level, says: str
) -> None:
    found = [finding for finding in bad(diagnose(CONFIG, seen, page, NOW)) if finding.check == check]
    assert [finding.level for finding in found] == [level]
    assert says in found[0].detail
    assert found[0].remedy or check.startswith("router: ")


def test_what_connectors_loaded_is_nothing_that_dynamos_index_should_have_seen() -> None:
    """An engine counts it as cached. With a working set that only host memory holds there is nothing else."""
    page = snapshot(beside={"engine_cached_tokens": 5_792, "confirmed_tokens": 5_792, "exact_device_tokens": 0})
    found = diagnose(CONFIG, bus(announcement()), page, NOW)
    assert [(f.level, f.detail) for f in found if f.check == "kv_events"] == [
        (Level.OK, "Dynamo's index foresaw 0 of 0 tokens that engines reused of their own")
    ]


@pytest.mark.parametrize(
    ("events", "level"),
    [(KvEvents.HEARD, [Level.OK]), (KvEvents.SILENT, [Level.WARN]), (KvEvents.WAITING, []), (KvEvents.UNKNOWN, [])],
)
def test_engine_events_that_do_not_arrive_are_named_once_they_are_due(events: KvEvents, level: list[Level]) -> None:
    found = diagnose(CONFIG, bus(announcement(kv_events=events)), None, NOW)
    assert [finding.level for finding in found if finding.check == "device_events"] == level


def test_every_standing_of_the_router_has_a_remedy() -> None:
    from dynamo_semkv.observe.diagnosis import _STANDINGS
    from dynamo_semkv.router.replicas import Standing

    assert set(_STANDINGS) == {standing.value for standing in Standing} - {"ok"}


def test_few_requests_are_not_judged() -> None:
    findings = diagnose(CONFIG, bus(announcement()), snapshot(requests=3, beside={}, outcomes=[]), NOW)
    assert bad(findings) == []


ASKED_FOR = {
    "block size mismatch": ("replicas", "block_size_mismatch"),
    "worker publishes no events": ("kv_events", "saw none coming"),
    "stable id absent": ("replicas", "no_stable_id"),
    "block reuse off": ("block_reuse", "no engine reused anything"),
    "connector not attached": ("replicas", "unannounced"),
    "no connector at all": ("connectors", "no worker's connector"),
    "clock skew": ("clock", "clock and this machine's differ"),
    "NATS unreachable": ("bus", "no connection to"),
    "NATS without JetStream": ("jetstream", "JetStream is off"),
    "namespace fields unknown": ("namespace", "not known to the engine"),
    "engine's events not handed over": ("device_events", "no KV cache event"),
}


@pytest.mark.parametrize("fault", ASKED_FOR)
def test_each_fault_that_a_newcomer_makes_is_found_and_the_remedy_says_what_to_do(fault: str) -> None:
    check, says = ASKED_FOR[fault]
    found = [
        finding
        for seen, page, *_ in CASES
        for finding in bad(diagnose(CONFIG, seen, page, NOW))
        if finding.check == check and says in finding.detail
    ]
    assert found
    assert all(len(finding.remedy.split()) > 1 for finding in found)
