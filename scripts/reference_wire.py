# ruff: noqa: E501 - paragraphs and tables of Markdown
"""Makes docs/reference/wire.md: every message, type and field that crosses a process boundary, from
dynamo_semkv/contracts."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from enum import Enum
from types import ModuleType
from typing import NamedTuple

import msgspec
from field_docs import cell, class_doc
from wire_words import FIELDS, VALUES

from dynamo_semkv import contracts
from dynamo_semkv.bus.streams import STREAMS, stream_config
from dynamo_semkv.cli.words import REASONS
from dynamo_semkv.config.schema import BusConfig
from dynamo_semkv.contracts import (
    announcement,
    codec,
    donor_events,
    evidence,
    hints,
    pack,
    report,
    route_events,
    subjects,
)
from dynamo_semkv.contracts.identity import StableReplica

INTRO = """\
# Wire contracts

Made by `python scripts/reference.py` from `dynamo_semkv/contracts`; tests keep it current and complete. All of it is encoded and decoded in one
place, `contracts/codec.py`, with the sizes below; `tests/contracts/golden.json` has one of each message as bytes, and every later release reads them.

Types are written as in Python. A field with a default may be absent. Counts of tokens are tokens of the prompt, sizes are bytes, times are seconds.
`Location` is a `WorkerLocation` or a `SharedLocation`, `PurgeScope` one of the three `Purge...`, `DonorEventData` one of the five kinds of event.
`stable_routing_id` is a worker's `DYN_STABLE_ROUTING_ID`; `bytes` is binary in msgpack, and in JSON base64 unless it says otherwise.

## Rules of versions

| what | rule for a reader |
|---|---|
| our own messages (`version`) | the major number must be the same. A newer minor is read, and fields that it adds are ignored. An older minor is read: what it lacks has a default |
| another major | dropped before the rest is parsed, counted (`semkv_stream_refused_total{kind="unsupported_version"}`), logged, named by `dynamo_semkv doctor`; no request fails |
| donor events (`schema_version`) | exactly 1; anything else is dropped and counted. Unknown fields are ignored |
| hint envelopes (`protocol_version`) | exactly 0.1; an unknown action, or a version of one, skips that action alone |
| packs (`version`, 2.x; content type `application/vnd.semkv.pack+msgpack`) | as our own messages. Each record in one is then read, or refused, for itself, by its own rule. Who knows no packs finds another major |
| values of `Outcome`, `Reason` and `KvEvents` | an unknown one reads as `unknown` |
| `CacheNamespace` | an unknown field refuses the whole message: it may decide whether KV is the same |
| keys, digests, sketches | no version: their algorithm is named in what they hash, and golden vectors fix it. Another algorithm finds nothing |

What a release changes, and in which order routers and workers are upgraded: [releasing](../releasing.md).
"""

UNITS = {
    "schema_version": "version",
    "event_id": "count, from 0 for each stream of events",
    "worker_id": "u64",
    "dp_rank": "rank, 0 to 65535",
    "request_id": "the engine's own number",
    "epoch": "count",
    "attempt": "count, from 0",
    "ordinal": "blocks, from 0",
    "first_ordinal": "blocks, from 0",
    "block_size": "tokens a block",
    "tokens_per_block": "tokens a block",
    "digest": "u64 hash",
    "block_hashes": "u64 hashes",
    "segments": "count",
    "segment_id": "number or text",
    "token_range": "tokens, half-open",
    "target_start": "tokens",
    "donor_start": "tokens",
    "target_block_ids": "page slots",
    "provider_generation": "number or text",
    "generation": "number or text",
    "ttl": "seconds",
    "provider_metadata": "bytes; in JSON a list of numbers 0 to 255",
    "overlap": "share, 0 to 1",
    "confidence": "share, 0 to 1",
    "sheet_rows": "count",
    "quality_signals": "by the provider's own names",
    "metadata": "by the provider's own names",
    **dict.fromkeys(("total", "device", "host", "disk", "donor", "load", "decode", "extra"), "tokens"),
    **dict.fromkeys(("offered", "honoured", "copied", "confirmed"), "tokens"),
}
ENDINGS = {
    "_tokens": "tokens",
    "token_count": "tokens",
    "_blocks": "blocks",
    "_seconds": "seconds",
    "_at": "Unix seconds",
    "dp_rank": "rank, 0 to 65535",
}


def modules() -> Iterator[ModuleType]:
    """Every module of the contracts, by name."""
    for found in sorted(pkgutil.iter_modules(contracts.__path__), key=lambda module: module.name):
        yield importlib.import_module(f"{contracts.__name__}.{found.name}")


def types() -> Iterator[type]:
    """Structures and enumerations in the order of their modules and lines, without private ones."""
    for module in modules():
        own = [
            kind
            for kind in vars(module).values()
            if inspect.isclass(kind)
            and kind.__module__ == module.__name__
            and issubclass(kind, (msgspec.Struct, Enum))
            and not kind.__name__.startswith("_")
        ]
        yield from sorted(own, key=lambda kind: inspect.getsourcelines(kind)[1])


def unit(name: str, annotation: str) -> str:
    """Unit of a field that holds a number or bytes; empty for text and structures."""
    if not any(word in annotation for word in ("int", "float", "bytes")):
        return ""
    if name in UNITS and ("int" in annotation or "float" in annotation):
        return UNITS[name]
    for ending, words in ENDINGS.items():
        if name.endswith(ending):
            return words
    return "16 bytes" if name.endswith("_key") else ("bytes" if "bytes" in annotation else "")


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    if field.default_factory is not msgspec.NODEFAULT:
        return f"`{msgspec.json.encode(field.default_factory()).decode()}`"
    return f"`{msgspec.json.encode(field.default).decode()}`"


def struct_page(kind: type[msgspec.Struct]) -> str:
    """Markdown of one structure, a row for each field."""
    documented = class_doc(kind)
    lines = [f"### `{kind.__name__}`", ""]
    if documented.text:
        lines += [documented.text, ""]
    config = kind.__struct_config__
    if config.tag is not None:
        lines += [f'On the wire `"{config.tag_field}": "{config.tag}"` says which it is.', ""]
    fields = msgspec.structs.fields(kind)
    if fields:
        lines += ["| field | type | unit | default | meaning |", "|---|---|---|---|---|"]
    for field in fields:
        doc = documented.fields[field.name]
        lines.append(
            f"| `{field.encode_name}` | `{cell(doc.annotation)}` | {unit(field.name, doc.annotation)} | "
            f"{_default(field)} | {cell(doc.text or FIELDS.get(field.name, ''))} |"
        )
    return "\n".join(lines) + "\n"


def enum_page(kind: type[Enum]) -> str:
    """Markdown of one enumeration, a row for each member."""
    documented = class_doc(kind)
    meanings = VALUES
    if kind is report.Reason:
        meanings = {**VALUES, **{reason: f"{words}." for reason, words in REASONS.items()}}
    lines = [f"### `{kind.__name__}`", ""]
    if documented.text:
        lines += [documented.text, ""]
    lines += ["| value | meaning |", "|---|---|"]
    lines += [
        f"| `{member.value}` | {cell(documented.constants[member.name] or meanings.get(member.value, ''))} |"
        for member in kind
    ]
    return "\n".join(lines) + "\n"


class Message(NamedTuple):
    """A row of the table of messages, as Markdown."""

    where: str
    what: str
    encoding: str
    stream: str
    """Of JetStream; several after a comma. Empty: it is not kept."""
    version: str
    max_bytes: int
    writer: str
    reader: str


def _of_replica(make: Callable[[StableReplica], str]) -> str:
    return make(StableReplica("REPLICA", 0)).removesuffix(".0") + ".RANK"


def _kept(stream: str) -> str:
    if stream not in STREAMS:
        return stream or "none"
    config = stream_config(stream, BusConfig())
    return f"{stream}, the last of each subject" if config.max_msgs_per_subject == 1 else stream


MESSAGES = (
    Message(
        f"`{subjects.DONOR_EVENTS}`, `{_of_replica(subjects.donor_events)}`",
        "`DonorEvent`",
        "JSON, or msgpack where the header `content-type` says so",
        subjects.DONOR_STREAM,
        str(donor_events.SCHEMA_VERSION),
        donor_events.MAX_EVENT_BYTES,
        "workers (the first subject: SemBlend's emitter)",
        "routers",
    ),
    Message(
        f"`{_of_replica(subjects.reports)}`",
        "`MaterializationReport`",
        "msgpack",
        subjects.REPORT_STREAM,
        report.REPORT_VERSION,
        codec.MAX_REPORT_BYTES,
        "workers",
        "routers",
    ),
    Message(
        f"`{_of_replica(subjects.announcements)}`",
        "`ReplicaAnnouncement`",
        "msgpack",
        subjects.ANNOUNCEMENT_STREAM,
        announcement.ANNOUNCEMENT_VERSION,
        codec.MAX_ANNOUNCEMENT_BYTES,
        "workers",
        "routers, `doctor`",
    ),
    Message(
        f"`{subjects.routes('ROUTER')}`",
        "`RouteOpened`, `RouteObserved`",
        "msgpack",
        subjects.ROUTE_STREAM,
        route_events.ROUTE_EVENT_VERSION,
        codec.MAX_REPORT_BYTES,
        "routers",
        "routers",
    ),
    Message(
        "the two of reports and routes, where several wait at a time and `bus.pack_records` says so",
        "`Pack` of such messages",
        f"msgpack, with the header `content-type: {pack.PACK}`",
        f"{subjects.REPORT_STREAM}, {subjects.ROUTE_STREAM}",
        pack.PACK_VERSION,
        pack.MAX_PACK_BYTES,
        "workers, routers",
        "routers",
    ),
    Message(
        f"`{_of_replica(subjects.hints)}`",
        "`HintDelivery`",
        "msgpack",
        "",
        hints.HINT_DELIVERY_VERSION,
        hints.MAX_HINT_BYTES,
        "routers",
        "that worker",
    ),
    Message(
        f"`extra_args.{hints.EXTRA_ARGS_KEY}` of a request",
        "`KvHintsEnvelope`",
        "JSON",
        "",
        hints.PROTOCOL_VERSION,
        hints.MAX_HINT_BYTES,
        "routers",
        "that worker",
    ),
)


def messages() -> str:
    """Markdown of the table of messages, with their subjects, streams, versions and bounds."""
    lines = [
        "\n## Messages\n",
        "In a subject `REPLICA` is the stable routing id, with `_`, `.` and `:` written `__`, `_d` and `_c`. Streams "
        "are JetStream's, kept for",
        "`bus.stream_max_age_seconds` and at most `bus.stream_max_bytes`; a message without a stream is not kept.\n",
        "| where | what | encoding | stream | version | at most, bytes | who writes | who reads |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {it.where} | {it.what} | {it.encoding} | {_kept(it.stream)} | {it.version} | {it.max_bytes:,} "
        f"| {it.writer} | {it.reader} |"
        for it in MESSAGES
    ]
    lines += [
        "",
        f"Further bounds: {hints.MAX_ACTIONS} actions an envelope, {hints.MAX_BLOCK_HASHES:,} block hashes a "
        f"`{hints.FETCH_ACTION}`, {donor_events.MAX_SEGMENTS} segments a donor, {pack.MAX_PACK_RECORDS} records a "
        f"pack, {announcement.MAX_PROBLEM} characters in the `problem` of an announcement; {evidence.MAX_SIGNALS} "
        f"`quality_signals` a match, between minus and plus 2^63; counts of a request at most {codec.MAX_COUNT:,}, "
        f"texts of a report or route event {codec.MAX_TEXT:,} characters, those that clients choose (and names of "
        f"replicas with a rank) {route_events.MAX_CLIENT_TEXT:,}, expected tokens of a score sheet between minus and "
        f"plus {codec.MAX_CREDIT:,}.",
        f"Actions: `{hints.DONOR_ACTION}@{hints.DONOR_VERSION}` carries a `DonorHint`, "
        f"`{hints.FETCH_ACTION}@{hints.FETCH_VERSION}` a `FetchHint`.",
    ]
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole page as Markdown."""
    parts = [INTRO, messages(), "\n## Types\n"]
    for kind in types():
        if issubclass(kind, msgspec.Struct):
            parts.append(struct_page(kind))
        elif issubclass(kind, Enum):
            parts.append(enum_page(kind))
    parts.append(
        "## Inside one machine\n\nRanks of one engine talk, and a worker's KV cache events travel, over local sockets of the "
        "engine's user (`worker_connector/link/wire.py`,\n`donors/kv_event_socket.py`), and the disk tier writes files "
        "(`disk/block_file.py`). These are between processes of one release on one machine and no contract:\na file of "
        "another format is left alone, a frame of another one is refused.\n"
    )
    return "\n".join(parts).rstrip("\n") + "\n"
