"""Route events: what a router decided and what it saw, so that outcomes outlive the router that made them.

Every router publishes its own and reads all. The join of a route with its report is a pure function of these events and
the reports, so each router, and one that starts again, arrives at the same outcomes.
"""

from __future__ import annotations

import msgspec

from dynamo_semkv.contracts.evidence import Bucket, MatchType
from dynamo_semkv.contracts.location import Tier

ROUTE_EVENT_VERSION = "1.0"
ADVISED = "advised"
"""How a route ends for us whose request a gateway dispatches."""
NO_WORKER = "no_worker"
"""How a route ends whose request no worker could be given."""


MAX_SHEET_LINES = 8
MAX_CLIENT_TEXT = 512
"""Characters of what a client may choose: a request id, the name of a model. A router cuts what is longer before it
writes it down."""


class SheetLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One replica of the score sheet, in expected tokens of prefill saved (`load` and sums may be negative)."""

    replica: str
    """`stable_routing_id/dp_rank`."""
    total: int
    """What the replica was compared by: the sum of the others."""
    device: int = 0
    """On the device, by Dynamo's index."""
    host: int = 0
    """In host memory beyond those, by Dynamo's index."""
    disk: int = 0
    """On disk beyond both, by Dynamo's index."""
    donor: int = 0
    """Of the best donor beyond all of these."""
    load: int = 0
    """Queued prefill above the idlest replica, negative."""
    decode: int = 0
    """KV that running requests hold above the replica with the fewest, negative."""
    extra: int = 0
    """What plugged scorers said."""
    filtered_by: str | None = None
    """Why it might not be chosen: closed set FilteredBy. None: it might."""


class RouteOpened(msgspec.Struct, frozen=True, tag_field="kind", tag="opened", kw_only=True):
    """Published before the request is dispatched. Token counts share one denominator, `input_tokens`."""

    version: str = ROUTE_EVENT_VERSION
    route_id: str
    request_id: str | None = None
    """Dynamo's context id, the one in `chatcmpl-<id>`: what a user can ask about, cut to MAX_CLIENT_TEXT. Shared by the
    attempts of a request, and by whatever other requests whose clients chose the same (`x-dynamo-request-id`)."""
    tenant: str | None = None
    """Digest of the request's salt (`contracts.namespace.tenant_scope`), `""` without one: clients choose request ids,
    so only this tells requests of one id apart. None: not known, or an older router."""
    router: str
    attempt: int
    """0 for the first dispatch of a request, 1 after its first migration, ..."""
    model: str
    mode: str
    """`off`, `shadow`, `canary`, `enforce`: the mode this request really had (a canary request outside the share is
    `shadow`)."""
    opened_at: float
    """Unix seconds of the router; for display and for the time-to-live only."""
    prompt_key: bytes
    input_tokens: int
    exact_device_tokens: int = 0
    """Dynamo's best device overlap on the replica that was chosen, or on the best one where the choice was left to
    Dynamo."""
    exact_host_tokens: int = 0
    """What the host tier adds beyond that."""
    evidence_tokens: int = 0
    placed_tokens: int = 0
    hinted_tokens: int = 0
    proven_tokens: int | None = None
    """Of `placed_tokens`, those of a proven common prefix; the rest is only similar. None: an older router did not
    say."""
    lookup: str = "skipped"
    """`hit`, `miss`, `timeout`, `error`, `skipped`: closed set LookupStatus of the evidence stage."""
    lookup_seconds: float = 0.0
    decision_reason: str = "none"
    stable_routing_id: str | None = None
    """The replica that the request was pinned to; `None` when Dynamo chose."""
    dp_rank: int | None = None
    worker_id: str | None = None
    """Decimal string: instance ids exceed 2^53."""
    donor_id: str | None = None
    donor_generation: str | None = None
    match_type: MatchType | None = None
    overlap: Bucket = Bucket.NONE
    tier: Tier | None = None
    provider: str | None = None
    quality_signals: dict[str, float] = msgspec.field(default_factory=dict)
    """What the provider's judgement of the donor rests on, by its own names: at most 8 finite numbers."""
    materialization: str | None = None
    """`off`, `exact` or `experimental`: the mode of the pinned replica's connector, as announced. None: no pin, or an
    older router."""
    expected_tokens: int | None = None
    """Prefill tokens that the evidence was expected to save on the chosen replica, by what had been learned then; may
    be negative."""
    shadow_choice: str | None = None
    """`stable_routing_id/dp_rank` that we would have chosen, when we did not act on it."""
    dynamo_choice: str | None = None
    """`stable_routing_id/dp_rank` that Dynamo's own router would choose, by its cost and the weights that it was given.
    None: nothing was weighed (there was no evidence, so the choice was Dynamo's alone), or an older router did not
    say."""
    sheet: tuple[SheetLine, ...] = ()
    """The best lines of the score sheet, best first, at most 8; the one of `dynamo_choice` is among them."""
    sheet_rows: int = 0
    """Lines that the sheet had."""
    config_hash: str = ""
    traceparent: str | None = None


class RouteObserved(msgspec.Struct, frozen=True, tag_field="kind", tag="observed", kw_only=True):
    """Published when the token stream has ended, whatever the end."""

    version: str = ROUTE_EVENT_VERSION
    route_id: str
    observed_at: float
    end: str
    """`complete`, `cancelled`, `worker_lost`, `no_worker`, `error`; `advised`: a gateway dispatches by itself, no token
    passes through us."""
    served_stable_routing_id: str | None = None
    served_dp_rank: int | None = None
    served_worker_id: str | None = None
    ttft_seconds: float | None = None
    """From arrival at the router to the first chunk."""
    queued_tokens: int | None = None
    """Prefill tokens that waited on the replica that served when the router looked, before it decided. None: not
    known."""
    output_tokens: int = 0
    engine_cached_tokens: int | None = None
    """The engine's own count from the last chunk: the cross-check of the connector's report."""


RouteEvent = RouteOpened | RouteObserved
