"""ReplicaAnnouncement: what a connector says about itself, so that a router can speak its namespace.

Published at start, on a generation change and at a steady beat, and kept as the last message per replica, so a
restarted router knows every replica at once. It is evidence of life only together with Dynamo's discovery: a replica
that discovery does not list is dead.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from dynamo_semkv.contracts.namespace import CacheNamespace

ANNOUNCEMENT_VERSION = "1.0"
MAX_PROBLEM = 500


class KvEvents(str, Enum):
    """What the connector hears of the engine's own KV cache events. A value of a newer peer reads as `unknown`."""

    HEARD = "heard"
    """Some have come."""
    WAITING = "waiting"
    """None has come, and the engine has served too little to expect one."""
    SILENT = "silent"
    """None has come, though prompts were served whose blocks the engine must have stored."""
    UNKNOWN = "unknown"
    """The connector does not say, or says what this version does not know."""

    @classmethod
    def _missing_(cls, value: object) -> KvEvents:
        return cls.UNKNOWN


class ReplicaAnnouncement(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank says of itself, at its start and whenever it changes."""

    version: str
    stable_routing_id: str
    dp_rank: int
    generation: str
    model: str
    """The name under which the engine serves: what a request's `model` says."""
    namespace: CacheNamespace
    """Without a request in it: tenant, adapter and media are `None`."""
    materialization: str
    """`off`, `exact` or `experimental`."""
    request_local_kv: bool = False
    """The engine can hold approximate KV for one request without entering it into exact reuse."""
    slab_blocks: int = 0
    resident_blocks: int = 0
    connector_version: str = ""
    problem: str | None = None
    """Why `materialization` is `off` though the connector was configured otherwise; at most `MAX_PROBLEM`
    characters."""
    kv_events: KvEvents = KvEvents.UNKNOWN
    """Whether the engine's own KV cache events arrive; `unknown` of a connector that does not say."""
