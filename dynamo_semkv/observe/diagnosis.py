"""Findings of `doctor`: what a live graph lacks, as seen from outside. Pure.

    diagnose(config, bus, snapshot, now) -> list[Finding]

`bus` is what the broker holds (bus/inspection.py), or None where nothing named a broker; `snapshot` what a router's
page shows, or None where no page was asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dynamo_semkv.bus.inspection import BusInspection
from dynamo_semkv.bus.server_check import LENIENT, objection
from dynamo_semkv.bus.subscription import Message
from dynamo_semkv.config.schema import Config, Materialization
from dynamo_semkv.contracts import subjects
from dynamo_semkv.contracts.announcement import KvEvents, ReplicaAnnouncement
from dynamo_semkv.contracts.codec import decode_announcement
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.namespace import agreed_namespace, differing_field
from dynamo_semkv.observe.health import Level, listed

MAX_CLOCK_OFFSET_SECONDS = 5.0
"""Larger than the age of a page on a busy machine, which is some seconds."""
SILENT_BEATS = 3.0
ENOUGH_REQUESTS = 20
"""With fewer requests reuse is not judged."""
UNCONFIRMED_SHARE = 0.5
_OF_A_REQUEST = frozenset({"tenant", "lora", "lora_revision", "multimodal"})

_STANDINGS = {
    "no_stable_id": "set DYN_STABLE_ROUTING_ID for the worker, e.g. the pod's name",
    "stable_id_shared": "give each worker a DYN_STABLE_ROUTING_ID of its own, e.g. the pod's name: under one name "
    "nobody can tell whose KV is meant",
    "unannounced": "is the connector attached (kv_connector_config), and does it reach bus.url? Its log says what it "
    "refused at start",
    "block_size_mismatch": "the model card and the connector count different tokens per block: set "
    "kv_cache_config.tokens_per_block explicitly, and look whether the attention backend changes it",
    "model_differs": "the worker serves another model than the one this router offers: one router component a model",
    "namespace_differs": "the workers of one model must be equal in every field of the namespace (weights, dtype, "
    "layout, versions); while most are, they are advised and the others are not",
    "role_differs": "the worker does not compute the prompts that this router places (a decode worker, say); Dynamo "
    "may still choose it. Start workers of one role at each endpoint, and name it in dynamo.worker_component",
}


@dataclass(frozen=True)
class Finding:
    """The result of one check; `remedy` says what to do, empty where nothing is wrong."""

    check: str
    level: Level
    detail: str
    remedy: str = ""


_NOT_CHECKED = Finding(
    "bus",
    Level.WARN,
    "the broker and what workers announce on it were not checked: no file was given, and nothing else names a broker",
    "--config FILE (or SEMKV_CONFIG) with the file of routers and workers",
)

_ELSEWHERE = (
    "bus.url; a name of a cluster means nothing outside of it: run doctor in a router's pod, or forward the broker's "
    "port and set SEMKV_BUS__URL=nats://127.0.0.1:4222 (docs/deploy.md)"
)


def diagnose(
    config: Config,
    bus: BusInspection | None,
    snapshot: Mapping[str, Any] | None,
    now: float,
    *,
    page_read_at: float | None = None,
) -> list[Finding]:
    """All findings, in order of check. `now`: when the broker was read; `page_read_at`: when the page was (None: also
    then). Unix seconds of this machine."""
    found = list(_broker(config, bus)) if bus is not None else [_NOT_CHECKED]
    if bus is not None and bus.error is None and bus.jetstream_error is None:
        found += _announced(config, bus, now)
    if snapshot is not None:
        found += _page(snapshot, now if page_read_at is None else page_read_at)
    return found


def _broker(config: Config, bus: BusInspection) -> Iterator[Finding]:
    if bus.error is not None:
        remedy = _ELSEWHERE if bus.unknown_host else "bus.url, credentials, network policy"
        yield Finding("bus", Level.FAIL, f"no connection to {bus.address} ({bus.error})", remedy)
        return
    yield Finding("bus", Level.OK, f"connected to {bus.address}")
    yield from _server_version(bus)
    if bus.jetstream_error is not None:
        yield Finding(
            "jetstream",
            Level.FAIL,
            bus.jetstream_error,
            "switch it on (`jetstream {}`), let this user ask, and set bus.inbox_prefix to what this user may "
            "subscribe to; see docs/security.md",
        )
        return
    missing = [name for name, seen in bus.streams.items() if seen is None]
    if missing:
        remedy = (
            "they are made by the first router or worker that starts, or by `dynamo_semkv setup-bus`, which tells what "
            "the broker refuses and why: no room (`max_file` of its jetstream block against four times "
            "bus.stream_max_bytes), or no permission"
        )
        yield Finding("streams", Level.FAIL, f"not there: {', '.join(missing)}", remedy)
        for stream, other in bus.foreign.items():
            yield Finding(
                "streams",
                Level.FAIL,
                f"stream {other} has subjects of {stream}, so {stream} cannot be made",
                f"give {other} other subjects, or our processes an account of their own",
            )
    else:
        yield from _stream_limits(config, bus)
    offset = bus.clock_offset_seconds
    if offset is not None and abs(offset) > MAX_CLOCK_OFFSET_SECONDS:
        yield Finding(
            "clock",
            Level.WARN,
            f"the broker's clock and this machine's differ by {abs(offset):.1f} s",
            "synchronize clocks (NTP): ages and times on the page are off by that much; joins do not depend on it",
        )


def _server_version(bus: BusInspection) -> Iterator[Finding]:
    old = objection(bus.server_version)
    if old is not None:
        yield Finding(
            "broker", Level.FAIL, old, "upgrade nats-server: docs/security.md says what an older one lets a worker do"
        )
    elif bus.strict is False:
        yield Finding("broker", Level.FAIL, LENIENT, "set it, as deploy/nats/nats.conf does")


def _stream_limits(config: Config, bus: BusInspection) -> Iterator[Finding]:
    wanted = (config.bus.stream_max_age_seconds, config.bus.stream_max_bytes, config.bus.replicas)
    differing = [
        name
        for name, seen in bus.streams.items()
        if seen is not None and (seen.max_age_seconds, seen.max_bytes, seen.replicas) != wanted
    ]
    if differing:
        yield Finding(
            "streams",
            Level.WARN,
            f"other limits than bus.stream_* and bus.replicas say: {', '.join(differing)}",
            "one file for all processes, then `dynamo_semkv setup-bus`",
        )
    else:
        yield Finding("streams", Level.OK, f"{len(bus.streams)} streams")
    bare = [name for name, seen in bus.streams.items() if seen is not None and not seen.guarded]
    if bare:
        remedy = "`dynamo_semkv setup-bus` sets deny_purge and deny_delete"
        yield Finding("streams", Level.FAIL, f"their messages can be purged or deleted: {', '.join(bare)}", remedy)


def _announced(config: Config, bus: BusInspection, now: float) -> Iterator[Finding]:
    limit = SILENT_BEATS * config.connector.announce_interval_seconds
    announced: dict[str, ReplicaAnnouncement] = {}
    silent: list[str] = []
    for message in bus.announcements:
        announcement = _read(message)
        if isinstance(announcement, Finding):
            yield announcement
            continue
        name = f"{announcement.stable_routing_id}/{announcement.dp_rank}"
        if now + (bus.clock_offset_seconds or 0.0) - message.timestamp > limit:
            silent.append(name)
        else:
            announced[name] = announcement
    if silent:
        yield Finding(
            "announcements",
            Level.WARN,
            f"silent for more than {limit:.0f} s: {listed(silent)}",
            "gone, hung, or cut off from the broker; what was announced is forgotten after bus.stream_max_age_seconds",
        )
    if not announced:
        remedy = (
            "are workers up, with kv_connector_config, DYN_STABLE_ROUTING_ID and SEMKV_CONFIG? Their logs say what was "
            "refused"
        )
        yield Finding("connectors", Level.FAIL, "no worker's connector has announced itself", remedy)
        return
    yield Finding("connectors", Level.OK, f"{len(announced)} replicas announced: {listed(list(announced))}")
    yield from _namespaces(announced)
    yield from _materialization(config, announced)
    yield from _device_events(announced)
    versions = {announcement.connector_version for announcement in announced.values()} - {""}
    if len(versions) > 1:
        remedy = "blocks of one are nothing to the other: let the rolling upgrade end"
        yield Finding("versions", Level.WARN, f"connectors of several versions: {', '.join(sorted(versions))}", remedy)


def _read(message: Message) -> ReplicaAnnouncement | Finding:
    """The announcement, or why routers drop it."""
    try:
        announcement = decode_announcement(message.payload)
    except ContractError as error:
        remedy = "a connector of another version: upgrade it, or this"
        return Finding("announcements", Level.WARN, f"{message.subject}: {error}", remedy)
    if subjects.speaker(message.subject) != (announcement.stable_routing_id, announcement.dp_rank):
        detail = f"{message.subject} speaks for {announcement.stable_routing_id}; routers drop it"
        remedy = "two workers with one DYN_STABLE_ROUTING_ID, or a forger: see docs/security.md"
        return Finding("announcements", Level.WARN, detail, remedy)
    return announcement


def _namespaces(announced: Mapping[str, ReplicaAnnouncement]) -> Iterator[Finding]:
    by_model: dict[str, dict[str, ReplicaAnnouncement]] = {}
    for name, announcement in announced.items():
        by_model.setdefault(announcement.model, {})[name] = announcement
    for model, replicas in sorted(by_model.items()):
        unknown = sorted({f for a in replicas.values() for f in set(a.namespace.unknown_fields()) - _OF_A_REQUEST})
        if unknown:
            yield Finding(
                "namespace",
                Level.WARN,
                f"{model}: not known to the engine: {', '.join(unknown)}",
                "nothing is materialized until every field is known: the engine's settings or the model directory must "
                "say it",
            )
        common = agreed_namespace((a.stable_routing_id, a.namespace) for a in replicas.values())
        first_name, first = next(iter(replicas.items()))
        reference = common or first.namespace
        odd = {name: f for name, a in replicas.items() if (f := differing_field(reference, a.namespace)) is not None}
        if odd and common is not None:
            names = listed(f"{name} (in {field})" for name, field in odd.items())
            detail = f"{model}: not the namespace of most workers, so no advice for {names}"
            yield Finding("namespace", Level.WARN, detail, _STANDINGS["namespace_differs"])
        elif odd:
            name, field = next(iter(odd.items()))
            detail = f"{model}: {first_name} and {name} differ in {field}, and as many workers say the one as the other"
            yield Finding("namespace", Level.FAIL, detail, _STANDINGS["namespace_differs"])


def _materialization(config: Config, announced: Mapping[str, ReplicaAnnouncement]) -> Iterator[Finding]:
    wanted = config.connector.materialization
    ended = {name: a.problem for name, a in announced.items() if a.problem is not None}
    for name, problem in sorted(ended.items()):
        yield Finding(
            "materialization",
            Level.FAIL,
            f"{name} ended it by itself: {problem}",
            "kv_cache_config.tokens_per_block of the engine must be what its attention kernels really use; then "
            "restart it",
        )
    other = [name for name, a in announced.items() if a.materialization != wanted.value and name not in ended]
    if other:
        yield Finding(
            "materialization",
            Level.WARN,
            f"this file says {wanted.value}, {listed(other)} run with another",
            "SEMKV_CONFIG of the workers, and a restart: connectors read it once",
        )
    if wanted is Materialization.EXACT:
        without = [name for name, a in announced.items() if a.materialization == "exact" and not a.slab_blocks]
        if without:
            yield Finding("slab", Level.FAIL, f"no host memory: {listed(without)}", "connector.slab_bytes")


def _device_events(announced: Mapping[str, ReplicaAnnouncement]) -> Iterator[Finding]:
    """Whether connectors receive what their engines store and remove."""
    silent = [name for name, a in announced.items() if a.kv_events is KvEvents.SILENT]
    receiving = [name for name, a in announced.items() if a.kv_events is KvEvents.HEARD]
    if silent:
        yield Finding(
            "device_events",
            Level.WARN,
            f"no KV cache event of its engine has reached the connector of {listed(silent)}",
            "kv_cache_config.event_buffer_max_size above 0, and observe_kv_events where they are drained; or "
            "kv_cache_config.kv_events_config (docs/connector.md). Until then it is not known what the device holds",
        )
    elif receiving:
        yield Finding("device_events", Level.OK, f"{len(receiving)} connectors receive their engine's KV cache events")


def _page(snapshot: Mapping[str, Any], now: float) -> Iterator[Finding]:
    for check in snapshot.get("readiness", {}).get("checks", ()):
        if check["level"] != Level.OK.value:
            yield Finding(f"router: {check['name']}", Level(check["level"]), check["detail"])
    offset = snapshot.get("now", now) - now
    if abs(offset) > MAX_CLOCK_OFFSET_SECONDS:
        yield Finding(
            "clock",
            Level.WARN,
            f"the router's clock and this machine's differ by {abs(offset):.1f} s",
            "synchronize clocks (NTP)",
        )
    live = [row for row in snapshot.get("replicas", ()) if row.get("live")]
    for standing, remedy in _STANDINGS.items():
        kept_out = [row["name"] for row in live if row.get("standing") == standing]
        if kept_out:
            yield Finding("replicas", Level.WARN, f"{standing}: {listed(kept_out)}", remedy)
    if live and all(row.get("standing") == "ok" for row in live):
        yield Finding("replicas", Level.OK, f"{len(live)} live replicas, each announced")
    yield from _traffic(snapshot)


def _traffic(snapshot: Mapping[str, Any]) -> Iterator[Finding]:
    requests = snapshot.get("requests", 0)
    if requests < ENOUGH_REQUESTS:
        yield Finding("traffic", Level.OK, f"{requests} requests so far: too few to judge reuse")
        return
    beside = snapshot.get("beside", {})
    reused, loaded = beside.get("engine_cached_tokens", 0), beside.get("confirmed_tokens", 0)
    seen = beside.get("exact_device_tokens", 0)
    # An engine counts what a connector loaded as cached, and Dynamo's index does not contain that.
    own = max(0, reused - loaded)
    if own and not seen:
        yield Finding(
            "kv_events",
            Level.FAIL,
            f"engines reused {own} tokens of their own, and Dynamo's index saw none coming",
            "workers must publish KV events (--publish-kv-events) on the event plane that the routers use "
            "(DYN_EVENT_PLANE)",
        )
    elif not reused and not seen:
        yield Finding(
            "block_reuse",
            Level.WARN,
            f"no engine reused anything in {requests} requests",
            "kv_cache_config.enable_block_reuse, or prompts that share no beginning",
        )
    else:
        yield Finding(
            "kv_events", Level.OK, f"Dynamo's index foresaw {seen} of {own} tokens that engines reused of their own"
        )
    outcomes = snapshot.get("outcomes", ())
    unconfirmed = sum(row["routes"] for row in outcomes if row["outcome"] == "unconfirmed")
    owed = requests - sum(row["routes"] for row in outcomes if _owes_no_report(row))
    if unconfirmed > UNCONFIRMED_SHARE * owed:
        yield Finding(
            "feedback",
            Level.FAIL,
            f"{unconfirmed} of {owed} routes closed without a report that was owed",
            "the connectors' reports do not arrive: broker permissions, DYN_STABLE_ROUTING_ID, "
            "outcome.report_ttl_seconds",
        )
    else:
        yield Finding("feedback", Level.OK, f"{owed - unconfirmed} of {owed} routes that ran were reported on")


def _owes_no_report(row: Mapping[str, Any]) -> bool:
    return row["outcome"] == "refused" or row.get("reason") == "before_first_token"
