"""Every toggle of both packages, with its default and its range.

A field is declared once, with its limits in the annotation. They are checked when a file is read and when a struct is
built by hand (tests, embedding programs), and both name the full path. Nothing else in the project reads a policy from
the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from dynamo_semkv.config import forms
from dynamo_semkv.config.evidence import EvidenceConfig
from dynamo_semkv.config.fetch import FetchConfig
from dynamo_semkv.config.limits import check_limits
from dynamo_semkv.config.section import GIB, MIB, Count, FilePath, Host, Name, Seconds, Section, Share, Text
from dynamo_semkv.contracts.errors import ContractError


class PlacementMode(str, Enum):
    """How far placement acts (README, "Modes")."""

    OFF = "off"
    """Requests pass through; no lookup, no decision."""
    SHADOW = "shadow"
    """Decide and record; Dynamo's own choice is dispatched."""
    CANARY = "canary"
    """`enforce` for `canary_percent` of the requests, `shadow` for the rest."""
    ENFORCE = "enforce"


class Materialization(str, Enum):
    """What the connector may load."""

    OFF = "off"
    EXACT = "exact"
    EXPERIMENTAL = "experimental"
    """Approximate KV for one request. Refused by every engine that does not advertise request-local KV."""


class ModelConfig(Section, frozen=True):
    """The model that the router serves."""

    PATH: ClassVar[str] = "model"

    name: Text | None = None
    """Name that clients put in `model`. None: the name on the workers' model card."""
    path: FilePath | None = None
    """Model directory with tokenizer and chat template for the public card. None: what the workers' card names."""


class KvRouterOptions(Section, frozen=True):
    """Dynamo's own KvRouter, which makes every choice that we leave to it; the names are Dynamo's."""

    PATH: ClassVar[str] = "dynamo.kv_router"

    router_temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0
    overlap_score_credit: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0
    host_cache_hit_weight: Share = 0.75
    disk_cache_hit_weight: Share = 0.25
    router_replica_sync: bool = True
    """Routers under one name tell each other what they booked; without it each knows its own share of the load only.
    False spares a router that is alone three messages a request."""
    router_queue_threshold: Annotated[float, Meta(ge=0.0, le=1_000.0)] | None = None
    router_predicted_ttl_seconds: Annotated[float, Meta(ge=0.0, le=120.0)] | None = None
    """How long Dynamo takes the blocks of a prompt that it has just placed for cached there (predict-on-route,
    ai-dynamo/dynamo#8276)."""
    session_affinity_ttl_seconds: Annotated[int, Meta(ge=1, le=604_800)] | None = None
    active_decode_blocks_threshold: Share | None = None
    """Share of a worker's blocks in use from which Dynamo calls it busy and refuses pins to it. null: never."""


class DynamoConfig(Section, frozen=True):
    """Where workers and routers are in Dynamo's discovery."""

    PATH: ClassVar[str] = "dynamo"

    namespace: Name = "dynamo"
    worker_component: Name = "backend"
    worker_endpoint: Name = "generate"
    router_component: Name = "semkv"
    router_endpoint: Name = "generate"
    offer_model: bool = True
    """Offer the model to clients. False: only the `advise` endpoint, for a gateway that dispatches by itself."""
    wait_for_workers_seconds: Annotated[float, Meta(ge=0.0, le=86_400.0)] = 0.0
    """How long `serve` waits for the first worker before it gives up. 0: for ever."""
    poll_seconds: Annotated[float, Meta(ge=0.05, le=60.0)] = 0.5
    """How often live instances and their model cards are read."""
    drain_seconds: Annotated[float, Meta(ge=0.0, le=3_600.0)] = 30.0
    """How long a stopping router lets running streams end."""
    kv_router: KvRouterOptions = KvRouterOptions()


class BusConfig(Section, frozen=True):
    """The NATS broker, and what may wait for it."""

    PATH: ClassVar[str] = "bus"

    url: Annotated[str, Meta(min_length=1, max_length=4096, extra=forms.extra(forms.BROKERS))] = "nats://127.0.0.1:4222"
    """NATS server, or several separated by commas."""
    credentials_file: FilePath | None = None
    """NATS `.creds` file."""
    tls_ca: FilePath | None = None
    """PEM file of the certificate authority; with it, TLS is required."""
    max_buffered_messages: Annotated[int, Meta(ge=1, le=10_000_000)] = 10_000
    """Kept while the broker is away; more are dropped, counted and, for donor events, made good by a generation
    reset."""
    max_buffered_bytes: Annotated[int, Meta(ge=1024, le=16 * GIB)] = 64 * MIB
    stream_max_age_seconds: Seconds = 6 * 3_600.0
    """How long JetStream keeps donor events, reports and route events."""
    stream_max_bytes: Annotated[int, Meta(ge=MIB, le=1024 * GIB)] = 256 * MIB
    """Per stream."""
    pack_records: bool = True
    """Routes and reports of a busy router or worker go to the broker several in a message. False where routers of
    before packs still read them (docs/releasing.md)."""
    replicas: Annotated[int, Meta(ge=1, le=5)] = 1
    """JetStream replicas per stream; more than 1 needs a NATS cluster."""
    manage_streams: bool = True
    """Create the streams, or bring them to these settings. False where the broker's permissions leave that to another
    user."""
    inbox_prefix: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")] = "_INBOX"
    """First token of the subjects on which answers come. One for each user, where users may not read each other's
    answers."""


class SecurityConfig(Section, frozen=True):
    """Files with keys and tokens."""

    PATH: ClassVar[str] = "security"

    salt_key_file: FilePath | None = None
    """File with the 1 to 64 byte key under which cache salts are digested; the same on routers and engines.
    None: tenants are kept apart, but who guesses a salt can recognise its digest."""
    advise_token_file: FilePath | None = None
    """File with the token that a gateway sends with each question to `/engine/semkv/advise` (docs/gateway.md), and
    whoever asks `/engine/semkv/explain`. None: these routes answer only where DYN_SYSTEM_HOST is a loopback address."""


class MatchPriors(Section, frozen=True):
    """Expected share of a donor's tokens that the backend will confirm, before anything was observed."""

    PATH: ClassVar[str] = "scoring.prior"

    exact_equivalent: Share = 0.9
    semantic_candidate: Share = 0.1
    strength: Annotated[float, Meta(ge=0.01, le=1_000_000.0)] = 4.0
    """How many hinted routes the prior counts as against what was observed."""


class CalibrationConfig(Section, frozen=True):
    """What is learned from outcomes."""

    PATH: ClassVar[str] = "scoring.calibration"

    enabled: bool = True
    """Learn from outcomes what share is confirmed, and what a confirmed token spares. false: prior and tier credit,
    always."""
    half_life_routes: Annotated[float, Meta(ge=1.0, le=1e9)] = 200.0
    """Routes served by a replica after which an observation on it counts half. Shorter: a replica whose donors were
    declined is tried again sooner."""


class TierCredit(Section, frozen=True):
    """Share of the prefill time that a token saves when it comes from this tier, before any load from there was
    measured."""

    PATH: ClassVar[str] = "scoring.tier_credit"

    device: Share = 1.0
    host_pinned: Share = 0.75
    disk: Share = 0.5
    external: Share = 0.25


class ScoringConfig(Section, frozen=True):
    """What a claim is worth on a replica, and what its load costs."""

    PATH: ClassVar[str] = "scoring"

    load_weight: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0
    """Tokens of credit that one queued prefill token on a replica costs it."""
    decode_weight: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0
    """Tokens of credit that one token of KV held by running requests costs a replica. 1: as Dynamo's own router weighs
    it."""
    prior: MatchPriors = MatchPriors()
    calibration: CalibrationConfig = CalibrationConfig()
    tier_credit: TierCredit = TierCredit()
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    """Spreads ties; the same seed and request give the same choice."""


class PlacementConfig(Section, frozen=True):
    """Whether, and above which gain, the router places a request."""

    PATH: ClassVar[str] = "placement"

    mode: PlacementMode = PlacementMode.SHADOW
    canary_percent: Annotated[float, Meta(ge=0.0, le=100.0)] = 5.0
    """Share of requests that `canary` acts on; the same request id is always on the same side."""
    min_tokens: Count = 256
    """Expected prefill tokens saved below which the choice is left to Dynamo."""
    margin_tokens: Count = 128
    """By how much our choice must beat the best replica without donor evidence."""
    max_load_gap_tokens: Count = 32_768
    """A replica with this many more queued prefill tokens than the idlest one is never pinned to."""


class OutcomeConfig(Section, frozen=True):
    """How long routes wait for their reports, and how many are kept."""

    PATH: ClassVar[str] = "outcome"

    report_ttl_seconds: Seconds = 30.0
    """How long after its end a route waits for its report; then it closes as `unconfirmed`."""
    history_size: Annotated[int, Meta(ge=1, le=10_000_000)] = 10_000
    max_open_routes: Annotated[int, Meta(ge=1, le=10_000_000)] = 100_000


class HintsConfig(Section, frozen=True):
    """Hints to the engines."""

    PATH: ClassVar[str] = "hints"

    enabled: bool = True
    """Send `semkv.donor` hints with a placed request, in the request and over the bus."""


class DashboardConfig(Section, frozen=True):
    """The page."""

    PATH: ClassVar[str] = "dashboard"

    enabled: bool = True
    host: Host = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535)] = 0
    """0: chosen by the system and logged."""
    token_file: FilePath | None = None
    """File with a bearer token; needed when `host` is not a loopback address."""


class ObserveConfig(Section, frozen=True):
    """Spans and what goes with them."""

    PATH: ClassVar[str] = "observe"

    otlp_endpoint: Annotated[str, Meta(min_length=1, max_length=1024, extra=forms.extra(forms.COLLECTOR))] | None = None
    """Collector that takes OTLP over HTTP, such as http://127.0.0.1:4318, for spans of routers and connectors. null:
    what OpenTelemetry's environment variables say, together with Dynamo's OTEL_EXPORT_ENABLED; nothing said, no
    spans."""


_DOTTED = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*"
_Imports = Annotated[
    str, Meta(pattern=rf"^{_DOTTED}:{_DOTTED}(\s*,\s*{_DOTTED}:{_DOTTED})*$", min_length=1, max_length=4096)
]


class PluginsConfig(Section, frozen=True):
    """Code of yours that the router imports when it starts: `module:name`, several separated by commas."""

    PATH: ClassVar[str] = "plugins"

    providers: _Imports | None = None
    """Evidence providers besides ours (docs/writing-a-provider.md)."""
    scorers: _Imports | None = None
    """Scorers besides ours (docs/writing-a-scorer.md)."""


class ConnectorConfig(Section, frozen=True):
    """The connector in the engines."""

    PATH: ClassVar[str] = "connector"

    materialization: Materialization = Materialization.EXACT
    slab_bytes: Annotated[int, Meta(ge=MIB, le=64 * 1024 * GIB)] = GIB
    """Host memory per rank in which full blocks are kept."""
    disk_path: FilePath | None = None
    """Directory of a tier below the slab, for blocks that outlive it and the process; null: none."""
    disk_bytes: Annotated[int, Meta(ge=MIB, le=1024 * 1024 * GIB)] = 16 * GIB
    """Bytes of files per rank below `disk_path`."""
    disk_wait_ms: Annotated[float, Meta(ge=0.0, le=60_000.0)] = 200.0
    """How long a request may be held, before the engine sees it, for blocks of its prompt to come from disk. 0: not at
    all."""
    min_offer_tokens: Count = 32
    """Offers below this are declined: the copy would cost more than it saves."""
    max_leases: Annotated[int, Meta(ge=1, le=1_000_000)] = 4_096
    async_load_min_tokens: Count | None = None
    """Offers of at least this many tokens are loaded while the engine has their request parked; null: all in front of
    the forward pass."""
    async_load_deadline_seconds: Seconds = 2.0
    """After this a parked load is finished in front of the forward pass, or its request computed, where the engine can
    do that."""
    restarts_failed_loads: bool | None = None
    """Does the engine ask the worker for requests whose load failed, and compute them? null: found out from the engine
    itself. False where it is said wrongly: a failed load then ends the executor instead of running on unwritten
    pages."""
    trust_layer_hooks: bool = False
    """Let each layer wait for its own loads only. True only where no CUDA graph, whole or piecewise, covers a pass with
    a new request."""
    hint_ttl_seconds: Seconds = 10.0
    max_hints: Annotated[int, Meta(ge=1, le=10_000_000)] = 10_000
    announce_interval_seconds: Seconds = 10.0
    report_buffer: Annotated[int, Meta(ge=1, le=10_000_000)] = 10_000
    min_donor_tokens: Count = 64
    """Prompts shorter than this are not registered as donors."""
    max_donors: Annotated[int, Meta(ge=1, le=10_000_000)] = 10_000
    metrics_port: Annotated[int, Meta(ge=0, le=65_535)] | None = None
    """Serve the connector's metrics from the engine process at `/metrics` of this port; data-parallel rank r takes this
    port plus r. 0: chosen by the system and logged. null: not at all, where the worker's status server has them."""
    metrics_host: Host = "127.0.0.1"
    fetch: FetchConfig = FetchConfig()

    def __post_init__(self) -> None:
        check_limits(self.PATH, self)
        if self.fetch.enabled and self.materialization is Materialization.OFF:
            raise ContractError(
                "connector.fetch.enabled",
                True,
                "false, as connector.materialization is off: there is no slab to pull into",
            )


class Config(Section, frozen=True):
    """The whole file. Every section and every field may be left out."""

    model: ModelConfig = ModelConfig()
    dynamo: DynamoConfig = DynamoConfig()
    bus: BusConfig = BusConfig()
    security: SecurityConfig = SecurityConfig()
    evidence: EvidenceConfig = EvidenceConfig()
    scoring: ScoringConfig = ScoringConfig()
    placement: PlacementConfig = PlacementConfig()
    outcome: OutcomeConfig = OutcomeConfig()
    hints: HintsConfig = HintsConfig()
    dashboard: DashboardConfig = DashboardConfig()
    observe: ObserveConfig = ObserveConfig()
    plugins: PluginsConfig = PluginsConfig()
    connector: ConnectorConfig = ConnectorConfig()

    def __post_init__(self) -> None:
        check_limits(self.PATH, self)
        if not forms.is_loopback(self.dashboard.host) and self.dashboard.enabled and self.dashboard.token_file is None:
            raise ContractError(
                "dashboard.host", self.dashboard.host, "127.0.0.1, ::1 or localhost, unless dashboard.token_file is set"
            )


def plain(config: Section) -> Mapping[str, Any]:
    """JSON-able dict of a config or section, every field present."""
    value: dict[str, Any] = msgspec.to_builtins(config)
    return value


def require_request_local_kv(config: Config, *, advertised: bool) -> None:
    """Refuses `connector.materialization: experimental` on an engine that does not advertise request-local KV
    (ContractError).

    Without that capability approximate KV would enter exact reuse and be served to later requests as if it were exact.
    """
    if config.connector.materialization is Materialization.EXPERIMENTAL and not advertised:
        raise ContractError(
            "connector.materialization",
            Materialization.EXPERIMENTAL.value,
            "off or exact: the engine does not advertise request-local KV, so approximate KV could enter exact reuse",
        )
