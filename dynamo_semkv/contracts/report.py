"""Materialization report: what the backend really did with one request, and the closed sets that describe it.

Offered, honoured, copied and confirmed are four numbers (tokens), always `confirmed <= copied <= honoured <= offered`.
Only `confirmed` is reuse: the copy completed on every rank *and* the forward pass started from that position.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.location import Tier

REPORT_VERSION = "1.0"


class Outcome(str, Enum):
    """How a route ended. The first group comes from the connector, the second from the router's own ledger."""

    MATERIALIZED_EXACT = "materialized_exact"
    MATERIALIZED_EXPERIMENTAL = "materialized_experimental"
    DECLINED = "declined"
    """A donor was hinted, or KV was offered, and it was not used; the reason says why."""
    STALE_DONOR = "stale_donor"
    NAMESPACE_MISMATCH = "namespace_mismatch"
    LOAD_FAILED = "load_failed"
    LOCAL_EXACT = "local_exact"
    """The engine's own cache already held it: exact local reuse wins, nothing had to be loaded."""
    NO_DONOR = "no_donor"
    """Nothing was hinted and nothing was resident: an ordinary cold request."""

    UNCONFIRMED = "unconfirmed"
    """A report was owed, and none came before the route's time was over."""
    REFUSED = "refused"
    """It ended in an error before its first token: the engine or Dynamo refused it, so nothing ran and no report was
    owed."""
    CANCELLED = "cancelled"
    ORPHAN_REPORT = "orphan_report"
    """A report that belongs to no open route."""

    UNKNOWN = "unknown"

    @classmethod
    def _missing_(cls, value: object) -> Outcome:
        return cls.UNKNOWN


class Reason(str, Enum):
    """Why. Closed: metrics use it as a label. A value of a newer peer reads as `unknown`."""

    OK = "ok"
    NONE = "none"
    NOT_RESIDENT = "not_resident"
    """No block of this prompt's chain is in the slab beyond what the engine has itself."""
    NOT_IDENTICAL = "not_identical"
    """The hinted donor is related, but this prompt's blocks are not its blocks; exact engines cannot load it."""
    TOKEN_MISMATCH = "token_mismatch"
    CHECKSUM_MISMATCH = "checksum_mismatch"
    LOCAL_COVERS = "local_covers"
    MISALIGNED_LOCAL = "misaligned_local"
    PROMPT_TOO_SHORT = "prompt_too_short"
    BELOW_MINIMUM = "below_minimum"
    MATERIALIZATION_OFF = "materialization_off"
    EXPERIMENTAL_REFUSED = "experimental_refused"
    NAMESPACE_UNKNOWN = "namespace_unknown"
    NAMESPACE_DIFFERS = "namespace_differs"
    GENERATION_STALE = "generation_stale"
    DONOR_EVICTED = "donor_evicted"
    HINT_EXPIRED = "hint_expired"
    """A hint came for this prompt and was past its time to live when the request did; nothing was resident either."""
    LEASES_EXHAUSTED = "leases_exhausted"
    NOT_HONOURED = "not_honoured"
    COPY_FAILED = "copy_failed"
    LOAD_TIMEOUT = "load_timeout"
    NOT_SCHEDULED = "not_scheduled"
    """Copied, but the forward pass did not start from there."""
    CANCELLED = "cancelled"
    MULTIMODAL_UNHASHED = "multimodal_unhashed"
    ADAPTER_UNKNOWN = "adapter_unknown"
    SALT_UNKNOWN = "salt_unknown"
    UNSUPPORTED_REQUEST = "unsupported_request"
    UNSUPPORTED_LAYOUT = "unsupported_layout"
    INTERNAL_ERROR = "internal_error"
    NO_REPORT = "no_report"
    BEFORE_FIRST_TOKEN = "before_first_token"
    """Cancelled before its first token, and no connector told of it: as far as anybody knows, it never ran."""
    NO_WORKER = "no_worker"
    """No worker could be given the request."""
    REQUEST_REFUSED = "request_refused"
    """The engine or Dynamo refused the request itself: a prompt that is too long, say."""
    WORKER_LOST = "worker_lost"
    WRONG_REPLICA = "wrong_replica"
    UNKNOWN = "unknown"

    @classmethod
    def _missing_(cls, value: object) -> Reason:
        return cls.UNKNOWN


class MaterializationReport(msgspec.Struct, frozen=True, kw_only=True):
    """One per request and allocation epoch, published by the connector's leader. All counts in tokens."""

    version: str
    report_id: str
    """Unique: delivery is at least once, so the intake drops a second one."""
    stable_routing_id: str
    dp_rank: int
    generation: str
    prompt_key: bytes
    namespace: str
    """Hex digest; says nothing about the salt to who does not know the key."""
    route_id: str | None = None
    donor_id: str | None = None
    request_id: int = 0
    """The engine's own number: for its logs only."""
    epoch: int = 0
    prompt_tokens: int
    local_tokens: int = 0
    """What the engine's own cache held before it asked the connector."""
    offered: int = 0
    honoured: int = 0
    copied: int = 0
    confirmed: int = 0
    outcome: Outcome
    reason: Reason
    tier: Tier | None = None
    load_seconds: float | None = None
    differing_field: str | None = None
    """With `namespace_differs`: the first field of CacheNamespace that differs."""
    traceparent: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.confirmed <= self.copied <= self.honoured <= self.offered:
            raise ContractError(
                "report.counts",
                (self.confirmed, self.copied, self.honoured, self.offered),
                "0 <= confirmed <= copied <= honoured <= offered",
            )
        if self.local_tokens < 0 or self.local_tokens + self.offered > self.prompt_tokens:
            raise ContractError(
                "report.tokens",
                (self.local_tokens, self.offered, self.prompt_tokens),
                "local_tokens + offered <= prompt_tokens",
            )
