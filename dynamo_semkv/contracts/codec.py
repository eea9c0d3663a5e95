"""Bytes <-> type for everything that crosses a process boundary, in one place, with size caps.

Donor events and hints are JSON for compatibility and msgpack between our own parts (NATS header `content-type`);
reports, announcements, route events, hint deliveries and packs are msgpack. Version rule: donor events and hint
envelopes must match exactly; our own messages must match in the major number, and fields that a newer minor adds are
ignored.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from dynamo_semkv.contracts import donor_events, hints
from dynamo_semkv.contracts.announcement import ANNOUNCEMENT_VERSION, MAX_PROBLEM, ReplicaAnnouncement
from dynamo_semkv.contracts.donor_events import (
    DonorEvent,
    DonorEvicted,
    DonorRegistered,
    DonorRelocated,
    DonorSegment,
    DonorsPurged,
    GenerationReset,
    PurgeLocation,
    PurgeWorker,
)
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.evidence import check_signals
from dynamo_semkv.contracts.hints import DONOR_ACTION, DonorHint, FetchHint, HintDelivery, KvHintAction, KvHintsEnvelope
from dynamo_semkv.contracts.identity import (
    DP_RANK_MAX,
    U64_MAX,
    check_donor_id,
    check_route_id,
    check_stable_routing_id,
    check_u64,
)
from dynamo_semkv.contracts.keys import KEY_BYTES
from dynamo_semkv.contracts.location import Location, WorkerLocation
from dynamo_semkv.contracts.pack import MAX_PACK_BYTES, MAX_PACK_RECORDS, PACK, PACK_VERSION, Pack
from dynamo_semkv.contracts.report import REPORT_VERSION, MaterializationReport
from dynamo_semkv.contracts.route_events import (
    MAX_CLIENT_TEXT,
    MAX_SHEET_LINES,
    ROUTE_EVENT_VERSION,
    RouteEvent,
    RouteOpened,
)

JSON = "application/json"
MSGPACK = "application/msgpack"
MAX_REPORT_BYTES = 16 * 1024
MAX_ANNOUNCEMENT_BYTES = 32 * 1024
MAX_GENERATION = 256
"""Characters."""
MAX_TEXT = 256
"""Characters of an id, a digest, the name of a field or a trace context in a report or a route event."""
MAX_COUNT = 2**31 - 1
"""Tokens of a request, and whatever else is counted of one."""
MAX_CREDIT = 2**40
"""Expected tokens of a score sheet: weights of at most 100 times counts. Also blocks of a slab."""
MAX_SECONDS = 1e10
"""Three hundred years: more than any clock shows, and what a sum or a ratio of 64-bit floats still bears."""

T = TypeVar("T")


class UnsupportedVersion(ContractError):
    """A well-formed message of a version that we do not speak: dropped and counted apart from malformed ones."""


def _size(field: str, raw: bytes, cap: int) -> None:
    if len(raw) > cap:
        raise ContractError(f"{field}.bytes", len(raw), f"at most {cap}")


def _decode(field: str, raw: bytes, content_type: str, kind: type[T]) -> T:
    try:
        if content_type == MSGPACK:
            return msgspec.msgpack.decode(raw, type=kind)
        if content_type == JSON:
            return msgspec.json.decode(raw, type=kind)
    except ContractError:
        raise
    except (msgspec.DecodeError, ValueError, RecursionError, OverflowError) as error:
        inner = error.__cause__
        if isinstance(inner, ContractError):
            raise inner from error
        raise ContractError(field, str(error), f"a valid {getattr(kind, '__name__', kind)}") from error
    raise ContractError(f"{field}.content_type", content_type, f"{JSON} or {MSGPACK}")


class _Versioned(msgspec.Struct):
    version: str = ""


def _major(field: str, raw: bytes, ours: str) -> None:
    """Checked before the whole is parsed, so that a newer major reads as a version and not as a broken message."""
    version = _decode(field, raw, MSGPACK, _Versioned).version
    if version.partition(".")[0] != ours.partition(".")[0]:
        raise UnsupportedVersion(f"{field}.version", version, f"{ours.partition('.')[0]}.x")


class _SchemaVersion(msgspec.Struct):
    schema_version: int


def encode_donor_event(event: DonorEvent, content_type: str = JSON) -> bytes:
    """The event as JSON or msgpack."""
    if content_type == JSON and isinstance(event.data, DonorRegistered):
        segments = [
            msgspec.structs.replace(s, provider_metadata=list(s.provider_metadata))
            if isinstance(s.provider_metadata, bytes)
            else s
            for s in event.data.segments
        ]
        event = msgspec.structs.replace(event, data=msgspec.structs.replace(event.data, segments=segments))
    raw = msgspec.json.encode(event) if content_type == JSON else msgspec.msgpack.encode(event)
    _size("donor_event", raw, donor_events.MAX_EVENT_BYTES)
    return raw


def decode_donor_event(raw: bytes, content_type: str = JSON) -> DonorEvent:
    """Reads and checks a donor event. ContractError names the field, UnsupportedVersion another schema."""
    _size("donor_event", raw, donor_events.MAX_EVENT_BYTES)
    version = _decode("donor_event", raw, content_type, _SchemaVersion).schema_version
    if version != donor_events.SCHEMA_VERSION:
        raise UnsupportedVersion("donor_event.schema_version", version, str(donor_events.SCHEMA_VERSION))
    event = _decode("donor_event", raw, content_type, DonorEvent)
    check_u64("donor_event.event_id", event.event_id)
    check_u64("donor_event.worker_id", event.worker_id)
    _check_rank("donor_event.dp_rank", event.dp_rank)
    data = event.data
    generation = data.generation if isinstance(data, GenerationReset) else data.provider_generation
    _check_generation("donor_event", generation)
    if isinstance(data, DonorRegistered):
        checked = _check_registered(data)
        return event if checked is data else msgspec.structs.replace(event, data=checked)
    if isinstance(data, (DonorEvicted, DonorRelocated)):
        check_donor_id(data.donor_id)
    if isinstance(data, DonorRelocated):
        _check_location("donor_relocated.new_location", data.new_location)
    if isinstance(data, DonorsPurged):
        if isinstance(data.scope, PurgeWorker):
            check_u64("donors_purged.scope.worker_id", data.scope.worker_id)
        elif isinstance(data.scope, PurgeLocation):
            _check_location("donors_purged.scope.location", data.scope.location)
    return event


def _check_generation(kind: str, generation: int | str) -> None:
    """It goes into route events and hints, which are bounded: one that fills them would cost every route to its worker
    its record."""
    if len(str(generation)) > MAX_GENERATION:
        raise ContractError(f"{kind}.generation", generation, f"at most {MAX_GENERATION} characters")


def _check_texts(kind: str, message: object, *names: str, most: int = MAX_TEXT) -> None:
    """Of 100,000 reports and routes and the ids of more that are kept: as long as a message may be, they would fill the
    memory."""
    for name in names:
        text = getattr(message, name)
        if text is not None and len(text) > most:
            raise ContractError(f"{kind}.{name}", text, f"at most {most} characters")


def _check_location(field: str, location: Location) -> None:
    if isinstance(location, WorkerLocation):
        check_u64(f"{field}.worker_id", location.worker_id)
        _check_rank(f"{field}.dp_rank", location.dp_rank)


def _check_registered(data: DonorRegistered) -> DonorRegistered:
    """Metadata as bytes, whichever way the emitter wrote them."""
    check_donor_id(data.donor_id)
    _check_location("donor_registered.location", data.location)
    if not 1 <= data.token_count <= 2**31:
        raise ContractError("donor_registered.token_count", data.token_count, "1 to 2^31")
    _check_seconds("donor_registered", data, "ttl")
    if not 1 <= len(data.segments) <= donor_events.MAX_SEGMENTS:
        raise ContractError("donor_registered.segments", len(data.segments), f"1 to {donor_events.MAX_SEGMENTS}")
    as_lists = False
    for segment in data.segments:
        start, end = segment.token_range
        if not 0 <= start < end <= data.token_count:
            raise ContractError("segment.token_range", segment.token_range, f"0 <= start < end <= {data.token_count}")
        as_lists |= isinstance(segment.provider_metadata, list)
    if not as_lists:
        return data
    return msgspec.structs.replace(data, segments=[_with_bytes(segment) for segment in data.segments])


def _with_bytes(segment: DonorSegment) -> DonorSegment:
    if not isinstance(segment.provider_metadata, list):
        return segment
    try:
        return msgspec.structs.replace(segment, provider_metadata=bytes(segment.provider_metadata))
    except ValueError as error:
        raise ContractError("segment.provider_metadata", "out of range", "integers in [0, 255]") from error


def encode_report(report: MaterializationReport) -> bytes:
    """The report as msgpack."""
    return msgspec.msgpack.encode(report)


def decode_report(raw: bytes) -> MaterializationReport:
    """Reads and checks a report. ContractError names the field, its value and what is allowed."""
    _size("report", raw, MAX_REPORT_BYTES)
    _major("report", raw, REPORT_VERSION)
    report = _decode("report", raw, MSGPACK, MaterializationReport)
    check_stable_routing_id(report.stable_routing_id)
    _check_rank("report.dp_rank", report.dp_rank)
    _check_key("report.prompt_key", report.prompt_key)
    if report.route_id is not None:
        check_route_id(report.route_id)
    if report.donor_id is not None:
        check_donor_id(report.donor_id)
    _check_counts("report", report, "request_id", most=U64_MAX)
    _check_counts("report", report, "epoch", "prompt_tokens")
    _check_generation("report", report.generation)
    _check_texts("report", report, "version", "report_id", "namespace", "differing_field", "traceparent")
    _check_seconds("report", report, "load_seconds")
    return report


def encode_route_event(event: RouteEvent) -> bytes:
    """The event as msgpack."""
    return msgspec.msgpack.encode(event)


def decode_route_event(raw: bytes) -> RouteEvent:
    """Reads and checks a route event. ContractError names the field, its value and what is allowed."""
    _size("route_event", raw, MAX_REPORT_BYTES)
    _major("route_event", raw, ROUTE_EVENT_VERSION)
    event: RouteEvent = _decode("route_event", raw, MSGPACK, RouteEvent)  # type: ignore[arg-type]
    check_route_id(event.route_id)
    if isinstance(event, RouteOpened):
        _check_key("route_opened.prompt_key", event.prompt_key)
        _check_counts("route_opened", event, *_OPENED_COUNTS)
        _check_seconds("route_opened", event, "opened_at", "lookup_seconds")
        replica = (event.stable_routing_id, event.dp_rank)
        _check_credits("route_opened", event, "expected_tokens")
        if len(event.sheet) > MAX_SHEET_LINES:
            raise ContractError("route_opened.sheet", len(event.sheet), f"at most {MAX_SHEET_LINES} lines")
        for line in event.sheet:
            _check_credits("route_opened.sheet", line, *_SHEET_CREDITS)
            _check_texts("route_opened.sheet", line, "filtered_by")
            _check_texts("route_opened.sheet", line, "replica", most=MAX_CLIENT_TEXT)
        if event.donor_id is not None:
            check_donor_id(event.donor_id)
        check_signals("route_opened.quality_signals", event.quality_signals)
        check_stable_routing_id(event.router, "route_opened.router")
        _check_texts("route_opened", event, *_OPENED_TEXTS)
        _check_texts("route_opened", event, *_OPENED_LONGER_TEXTS, most=MAX_CLIENT_TEXT)
    else:
        _check_counts("route_observed", event, "output_tokens", "engine_cached_tokens", "queued_tokens")
        _check_seconds("route_observed", event, "observed_at", "ttft_seconds")
        _check_texts("route_observed", event, "version", "end", "served_worker_id")
        replica = (event.served_stable_routing_id, event.served_dp_rank)
    if replica[0] is not None:
        check_stable_routing_id(replica[0])
    if replica[1] is not None:
        _check_rank("route_event.dp_rank", replica[1])
    return event


def encode_pack(pack: Pack) -> bytes:
    """Raises ContractError for what no reader would take."""
    _check_pack(pack)
    raw = msgspec.msgpack.encode(pack)
    _size("pack", raw, MAX_PACK_BYTES)
    return raw


def decode_pack(raw: bytes) -> Pack:
    """The records are bytes still: each is decoded, or refused, for itself."""
    _size("pack", raw, MAX_PACK_BYTES)
    _major("pack", raw, PACK_VERSION)
    pack = _decode("pack", raw, MSGPACK, Pack)
    _check_pack(pack)
    return pack


def _check_pack(pack: Pack) -> None:
    if not 1 <= len(pack.records) <= MAX_PACK_RECORDS:
        raise ContractError("pack.records", len(pack.records), f"1 to {MAX_PACK_RECORDS}")
    if pack.content_type == PACK:
        raise ContractError("pack.content_type", pack.content_type, "that of records: no pack is in a pack")


def encode_announcement(announcement: ReplicaAnnouncement) -> bytes:
    """The announcement as msgpack."""
    return msgspec.msgpack.encode(announcement)


def decode_announcement(raw: bytes) -> ReplicaAnnouncement:
    """Reads and checks an announcement. ContractError names the field, its value and what is allowed."""
    _size("announcement", raw, MAX_ANNOUNCEMENT_BYTES)
    _major("announcement", raw, ANNOUNCEMENT_VERSION)
    announcement = _decode("announcement", raw, MSGPACK, ReplicaAnnouncement)
    check_stable_routing_id(announcement.stable_routing_id)
    _check_rank("announcement.dp_rank", announcement.dp_rank)
    _check_counts("announcement", announcement, "slab_blocks", "resident_blocks", most=MAX_CREDIT)
    _check_generation("announcement", announcement.generation)
    if announcement.problem is not None and len(announcement.problem) > MAX_PROBLEM:
        raise ContractError("announcement.problem", len(announcement.problem), f"at most {MAX_PROBLEM} characters")
    return announcement


def encode_hint_delivery(delivery: HintDelivery) -> bytes:
    """The delivery as msgpack; ContractError where it is larger than a hint may be."""
    raw = msgspec.msgpack.encode(delivery)
    _size("hint_delivery", raw, hints.MAX_HINT_BYTES)
    return raw


def decode_hint_delivery(raw: bytes) -> HintDelivery:
    """Reads and checks a delivery. ContractError names the field, its value and what is allowed."""
    _size("hint_delivery", raw, hints.MAX_HINT_BYTES)
    _major("hint_delivery", raw, hints.HINT_DELIVERY_VERSION)
    delivery = _decode("hint_delivery", raw, MSGPACK, HintDelivery)
    check_stable_routing_id(delivery.stable_routing_id)
    _check_rank("hint_delivery.dp_rank", delivery.dp_rank)
    _check_key("hint_delivery.prompt_key", delivery.prompt_key)
    check_envelope(delivery.envelope)
    return delivery


def _check_key(field: str, key: bytes) -> None:
    if len(key) != KEY_BYTES:
        raise ContractError(field, len(key), f"{KEY_BYTES} bytes")


def _check_rank(field: str, rank: int) -> None:
    if not 0 <= rank <= DP_RANK_MAX:
        raise ContractError(field, rank, f"0 to {DP_RANK_MAX}")


_SHEET_CREDITS = ("total", "device", "host", "disk", "donor", "load", "decode", "extra")
_OPENED_TEXTS = (
    "version",
    "tenant",
    "mode",
    "lookup",
    "decision_reason",
    "worker_id",
    "donor_generation",
    "provider",
    "materialization",
    "config_hash",
    "traceparent",
)
_OPENED_LONGER_TEXTS = ("request_id", "model", "shadow_choice", "dynamo_choice")
_OPENED_COUNTS = (
    "attempt",
    "input_tokens",
    "exact_device_tokens",
    "exact_host_tokens",
    "evidence_tokens",
    "placed_tokens",
    "hinted_tokens",
    "proven_tokens",
    "sheet_rows",
)


def _check_counts(kind: str, message: object, *names: str, most: int = MAX_COUNT) -> None:
    """Totals are sums of these: one negative or absurd number would falsify all of them for ever."""
    for name in names:
        value = getattr(message, name)
        if value is not None and not 0 <= value <= most:
            raise ContractError(f"{kind}.{name}", value, f"0 to {most}")


def _check_credits(kind: str, message: object, *names: str) -> None:
    """Expected tokens, which may be negative. A page's JSON carries no number beyond 2**53 as one."""
    for name in names:
        value = getattr(message, name)
        if value is not None and not -MAX_CREDIT <= value <= MAX_CREDIT:
            raise ContractError(f"{kind}.{name}", value, f"-{MAX_CREDIT} to {MAX_CREDIT}")


def _check_seconds(kind: str, message: object, *names: str) -> None:
    """msgpack carries NaN and infinity, and numbers whose sum is; one of them in a sum or a deadline is there for
    ever."""
    for name in names:
        value = getattr(message, name)
        if value is not None and not 0.0 <= value <= MAX_SECONDS:
            raise ContractError(f"{kind}.{name}", value, f"0 to {MAX_SECONDS:g} seconds")


def envelope_to_plain(envelope: KvHintsEnvelope) -> dict[str, Any]:
    """The envelope as JSON-able dict, for a request's `extra_args` and for native envelope types."""
    plain: dict[str, Any] = msgspec.to_builtins(envelope)
    return plain


def envelope_from_plain(value: object) -> KvHintsEnvelope:
    """From a dict, or from any object with the attributes of the RFC's dataclasses (native types of an engine)."""
    try:
        envelope = msgspec.convert(value, KvHintsEnvelope, from_attributes=True)
    except (msgspec.ValidationError, ValueError) as error:
        raise ContractError("kv_hints", str(error), "a KvHintsEnvelope") from error
    check_envelope(envelope)
    return envelope


def check_envelope(envelope: KvHintsEnvelope) -> None:
    """Raises UnsupportedVersion for another protocol, ContractError for too many actions."""
    if envelope.protocol_version != hints.PROTOCOL_VERSION:
        raise UnsupportedVersion("kv_hints.protocol_version", envelope.protocol_version, hints.PROTOCOL_VERSION)
    if len(envelope.actions) > hints.MAX_ACTIONS:
        raise ContractError("kv_hints.actions", len(envelope.actions), f"at most {hints.MAX_ACTIONS}")


def donor_action(action_id: str, hint: DonorHint) -> KvHintAction:
    """The hint as an action of an envelope."""
    return KvHintAction(
        action_id=action_id,
        action_type=hints.DONOR_ACTION,
        action_version=hints.DONOR_VERSION,
        payload=msgspec.to_builtins(hint),
    )


def parse_donor_payload(action: KvHintAction) -> DonorHint:
    """Raises ContractError for a bad payload; the caller skips that action and goes on with the others."""
    hint = _payload(action, DonorHint)
    check_route_id(hint.route_id)
    check_donor_id(hint.donor_id)
    _check_counts(DONOR_ACTION, hint, "token_count", "exact_prefix_tokens")
    return hint


def parse_fetch_payload(action: KvHintAction) -> FetchHint:
    """The hint of a `kv.fetch` action; ContractError for what is none."""
    hint = _payload(action, FetchHint)
    if len(hint.block_hashes) > hints.MAX_BLOCK_HASHES:
        raise ContractError("kv.fetch.block_hashes", len(hint.block_hashes), f"at most {hints.MAX_BLOCK_HASHES}")
    return hint


def _payload(action: KvHintAction, kind: type[T]) -> T:
    try:
        return msgspec.convert(action.payload, kind)
    except (msgspec.ValidationError, ValueError) as error:
        name = f"{action.action_type}@{action.action_version}"
        raise ContractError(name, str(error), f"a {kind.__name__}") from error
