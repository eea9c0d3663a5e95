"""Bus subjects and streams, once. Segments that come from outside are escaped, so no id can add a token or a
wildcard."""

from __future__ import annotations

from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.identity import StableReplica, check_stable_routing_id

DONOR_EVENTS = "semantic-kv-events"
"""The subject SemBlend's emitter uses; ours publish on `semantic-kv-events.<replica>`, both are in one stream."""
REPORTS = "semkv.reports"
ANNOUNCEMENTS = "semkv.announcements"
HINTS = "semkv.hints"
ROUTES = "semkv.routes"
"""Route events of all routers; each appends its own name: `semkv.routes.<router>`."""

DONOR_STREAM = "SEMKV_DONORS"
REPORT_STREAM = "SEMKV_REPORTS"
ANNOUNCEMENT_STREAM = "SEMKV_ANNOUNCEMENTS"
ROUTE_STREAM = "SEMKV_ROUTES"


def _escape(name: str) -> str:
    return check_stable_routing_id(name).replace("_", "__").replace(".", "_d").replace(":", "_c")


def _replica(replica: StableReplica) -> str:
    return f"{_escape(replica.stable_routing_id)}.{replica.dp_rank}"


_ESCAPES = {"_": "_", "d": ".", "c": ":"}


def _unescape(token: str) -> str | None:
    out: list[str] = []
    characters = iter(token)
    for character in characters:
        if character == "_":
            escaped = _ESCAPES.get(next(characters, ""))
            if escaped is None:
                return None
            character = escaped
        out.append(character)
    return "".join(out)


def speaker(subject: str) -> StableReplica | None:
    """Whose subject this is: the replica at its end. None for `semantic-kv-events` itself, for a router's and for
    anything malformed.

    A broker with permissions per user (deploy/nats) lets a worker publish under its own name only, so what a message
    says of its sender counts only if the subject says the same.
    """
    parts = subject.rsplit(".", 2)
    if len(parts) != 3 or parts[0] not in (DONOR_EVENTS, REPORTS, ANNOUNCEMENTS, HINTS):
        return None
    name = _unescape(parts[1])
    if name is None or not parts[2].isascii() or not parts[2].isdecimal() or len(parts[2]) > 5:
        return None
    try:
        return StableReplica(check_stable_routing_id(name), int(parts[2]))
    except ContractError:
        return None


def donor_events(replica: StableReplica) -> str:
    """Where a replica's donor events go."""
    return f"{DONOR_EVENTS}.{_replica(replica)}"


def reports(replica: StableReplica) -> str:
    """Where a replica's materialization reports go."""
    return f"{REPORTS}.{_replica(replica)}"


def announcements(replica: StableReplica) -> str:
    """Where a replica announces itself."""
    return f"{ANNOUNCEMENTS}.{_replica(replica)}"


def hints(replica: StableReplica) -> str:
    """Where hints for a replica go."""
    return f"{HINTS}.{_replica(replica)}"


def routes(router_name: str) -> str:
    """Where a router's route events go."""
    return f"{ROUTES}.{_escape(router_name)}"
