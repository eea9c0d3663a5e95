"""Readiness, in words. Pure.

Liveness is that the process answers; it depends on nothing. Readiness is about advice: a router that is not ready still
serves, with Dynamo's own choices. The broker alone can never make a router unready for long: after START_SECONDS its
absence is a degradation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.identity import stable_worker_id
from dynamo_semkv.observe.state import ReplicaStatus, RouterState

START_SECONDS = 30.0
"""How long the first replay may take before it counts as degraded only."""
DONOR_GRACE_SECONDS = 60.0
"""How long after the router's start a replica may send no donor events (ai-dynamo/dynamo#12095)."""
DROP_SECONDS = 15.0
"""After so many seconds without another drop, messages count as flowing again."""
VERSION_SECONDS = 600.0
"""How long a message of another version is reported after it came: announcements come every few seconds, reports with
requests."""
_NAMED = 5


class Level(str, Enum):
    """How serious the result of a check is. Closed: only FAIL makes a router unready."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """The result of one check, with its `detail` in words for operators."""

    name: str
    level: Level
    detail: str


@dataclass(frozen=True)
class Readiness:
    """All checks of a router at one moment."""

    checks: tuple[Check, ...]

    @property
    def ready(self) -> bool:
        """Whether no check failed."""
        return all(check.level is not Level.FAIL for check in self.checks)

    @property
    def state(self) -> str:
        """`ready`, `degraded` or `not_ready`."""
        if not self.ready:
            return "not_ready"
        return "ready" if all(check.level is Level.OK for check in self.checks) else "degraded"

    def plain(self) -> dict[str, Any]:
        """JSON-able: `state`, `ready` and `checks`."""
        checks = [{"name": c.name, "level": c.level.value, "detail": c.detail} for c in self.checks]
        return {"state": self.state, "ready": self.ready, "checks": checks}


def readiness(state: RouterState) -> Readiness:
    """Runs every check, in a fixed order."""
    return Readiness(
        (
            _workers(state),
            _stable_ids(state),
            _advice(state),
            _bus(state),
            _replay(state),
            _versions(state),
            _donor_events(state),
            _catalog(state),
            _providers(state),
            _configuration(state),
        )
    )


def _workers(state: RouterState) -> Check:
    if not state.replicas:
        return Check("workers", Level.FAIL, "no live replica: no worker has registered its model card")
    workers = len({replica.worker_id for replica in state.replicas})
    return Check("workers", Level.OK, f"{len(state.replicas)} replicas on {workers} workers")


def _stable_ids(state: RouterState) -> Check:
    carriers: dict[str, set[int]] = {}
    for replica in state.replicas:
        if replica.standing == "stable_id_shared" and replica.stable_routing_id is not None:
            carriers.setdefault(replica.stable_routing_id, set()).add(replica.worker_id)
    if not carriers:
        return Check("stable_ids", Level.OK, "no two workers carry one DYN_STABLE_ROUTING_ID")
    named = listed(f"{stable} (instances {listed(map(str, workers))})" for stable, workers in carriers.items())
    return Check("stable_ids", Level.WARN, f"one DYN_STABLE_ROUTING_ID for several workers: {named}")


def _advice(state: RouterState) -> Check:
    if state.mode == "off":
        return Check("advice", Level.OK, "placement.mode is off: requests pass through")
    kept_out = [replica for replica in state.replicas if replica.standing != "ok"]
    if not kept_out:
        return Check("advice", Level.OK, "every live replica may be advised")
    why = {f"{r.name} ({r.standing}{f': {r.differs_in}' if r.differs_in else ''})" for r in kept_out}
    return Check("advice", Level.WARN, f"no advice for {listed(why)}")


def _bus(state: RouterState) -> Check:
    sides = {"publish": state.publisher, "subscribe": state.subscriber}
    away = [side for side, stats in sides.items() if stats is not None and not stats.connected]
    if away:
        return Check("bus", Level.WARN, f"not connected to the broker ({', '.join(away)}): served without new evidence")
    if state.publisher is not None and state.publisher.refused_streams:
        named = listed(f"{stream}: {words}" for stream, words in state.publisher.refused_streams.items())
        return Check("bus", Level.WARN, f"connected, and the broker does not keep what is sent: {named}")
    if state.publisher is None or not state.publisher.dropped:
        return Check("bus", Level.OK, "connected")
    # Lost messages stay lost and counted; the warning ends when no message was lost for a while.
    since = state.publisher.seconds_since_drop
    recent = since is not None and since < DROP_SECONDS
    return Check(
        "bus", Level.WARN if recent else Level.OK, f"connected; {state.publisher.dropped} messages were dropped"
    )


def _replay(state: RouterState) -> Check:
    behind = [stream.name for stream in state.streams if not stream.caught_up]
    if state.replayed and not behind:
        return Check("replay", Level.OK, "everything that the bus kept was read")
    level = Level.FAIL if state.uptime_seconds < START_SECONDS and not state.replayed else Level.WARN
    return Check("replay", level, f"still reading {', '.join(behind) or 'what the bus kept'}")


def _versions(state: RouterState) -> Check:
    strange = [(s.name, s.unsupported[1], s.unsupported_version) for s in state.streams if s.unsupported is not None]
    if not strange:
        return Check("versions", Level.OK, "every message is of a version that this release reads")
    now = [s.unsupported is not None and s.unsupported[0] < VERSION_SECONDS for s in state.streams]
    named = listed(f"{name} (version {version[:20]}, {count} dropped)" for name, version, count in strange)
    detail = (
        f"{named}: routers and workers are releases apart, upgrade the older ones (docs/releasing.md); requests are "
        "served"
    )
    return Check("versions", Level.WARN if any(now) else Level.OK, detail)


def _donor_events(state: RouterState) -> Check:
    streams = {(row["worker_id"], row["dp_rank"]) for row in state.catalog.get("streams", ())}
    silent = [replica for replica in state.replicas if replica.standing == "ok" and not _has_stream(replica, streams)]
    if not silent or state.mode == "off":
        return Check("donor_events", Level.OK, f"{len(streams)} donor streams")
    if state.uptime_seconds < DONOR_GRACE_SECONDS:
        return Check("donor_events", Level.OK, f"waiting for {len(silent)} replicas")
    return Check("donor_events", Level.WARN, f"no donor events from {listed(r.name for r in silent)}")


def _has_stream(replica: ReplicaStatus, streams: set[tuple[str, int]]) -> bool:
    return any((name, replica.dp_rank) in streams for name in wire_ids(replica))


def wire_ids(replica: ReplicaStatus) -> list[str]:
    """The worker ids, in decimal, under which a replica's donor events may come: its instance id, and the one made of
    its stable id."""
    names = [str(replica.worker_id)]
    if replica.stable_routing_id is not None:
        try:
            names.append(str(stable_worker_id(replica.stable_routing_id)))
        except ContractError:
            pass  # an id that our wire types cannot carry: events come under the instance id only
    return names


def _catalog(state: RouterState) -> Check:
    donors = state.catalog.get("donors", 0)
    fenced = [f"{r['worker_id']}/{r['dp_rank']}" for r in state.catalog.get("streams", ()) if r["quarantined"]]
    if fenced:
        return Check("catalog", Level.WARN, f"events are missing, no credit until a reset: {listed(fenced)}")
    return Check("catalog", Level.OK, f"{donors} donors")


def _providers(state: RouterState) -> Check:
    bad = []
    for name, provider in state.providers.items():
        breaker = provider.get("breaker", "closed")
        if provider.get("stuck"):
            bad.append(f"{name} is stuck in a lookup")
        elif breaker != "closed":
            bad.append(f"{name} is put aside ({breaker}; {provider.get('last_error') or 'late'})")
    if bad:
        return Check("providers", Level.WARN, "; ".join(bad))
    return Check("providers", Level.OK, ", ".join(state.providers) or "none configured")


def _configuration(state: RouterState) -> Check:
    error, restart = state.configuration.get("last_reload_error"), state.configuration.get("restart_needed", ())
    if error:
        return Check("configuration", Level.WARN, f"{state.config_hash} stays in force, the file is refused: {error}")
    if restart:
        return Check("configuration", Level.WARN, f"takes effect only after a restart: {listed(restart)}")
    return Check("configuration", Level.OK, f"{state.config_hash} is in force")


def listed(names: Iterable[str]) -> str:
    """The first few names in order, and how many more there are."""
    all_names = sorted(names)
    more = len(all_names) - _NAMED
    return ", ".join(all_names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
