"""Every metric, defined once: name, type, unit, labels, what it means, and what to do when it moves. docs/metrics.md is
generated from it (`reference`).

Label values come from closed sets (the enumerations of contracts, evidence, advice and outcome); a value outside its
set is `other`. Never a label: request, route, donor, tenant, salt, prompt, text of an error.
"""

from __future__ import annotations

from dynamo_semkv.telemetry.metric_spec import MetricSpec


def _tokens(step: str, meaning: str, usage: str) -> MetricSpec:
    return MetricSpec(f"semkv_{step}_tokens_total", "counter", "tokens", (), meaning, usage)


_FAST = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1)
_TTFT = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.5, 5.0, 10.0, 20.0, 60.0)
_SAVED = (-5.0, -1.0, -0.25, -0.05, -0.01, 0.0, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
_LOAD = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)

INPUT = _tokens(
    "input",
    "Prompt tokens of closed routes.",
    "Denominator of the funnel. Flat under traffic: routes do not close (see semkv_open_routes).",
)
EVIDENCE = _tokens(
    "evidence",
    "Tokens that the best donor could save beyond what its replica has on the device.",
    "Low against input: the workload does not repeat, or donors are not registered (see semkv_catalog_donors).",
)
PLACED = _tokens(
    "placed",
    "Tokens of evidence on the replica that the request was pinned to.",
    "Low against evidence: semkv_placement_total says why. Zero in shadow mode.",
)
HINTED = _tokens(
    "hinted", "Tokens that a hint named to the engine.", "Low against placed: hints are off or could not be sent."
)
MATERIALIZED = _tokens(
    "materialized",
    "Hinted tokens that the backend confirmed: copied on every rank, and the forward pass started behind them.",
    "The only step that is reuse. Low against hinted: semkv_outcome_total says why.",
)
BEYOND_DYNAMO = _tokens(
    "beyond_dynamo",
    "Materialized tokens of routes that Dynamo's own router would have sent to another replica.",
    "What placement adds to Dynamo's router with the same connector. Near zero: Dynamo sees the same residency itself.",
)
UNHINTED = _tokens(
    "unhinted",
    "Tokens that the backend confirmed and that nobody had hinted.",
    "Reuse that Dynamo's own placement found in the host tier; in no step of the funnel. High in shadow mode: compare "
    "before you enforce.",
)

LOOKUPS = MetricSpec(
    "semkv_lookup_total",
    "counter",
    "requests",
    ("result",),
    "Donor lookups by result, one a request.",
    "`timeout` or `error` rising: a provider is slow or broken; requests are served without evidence.",
)
LOOKUP_SECONDS = MetricSpec(
    "semkv_lookup_seconds",
    "histogram",
    "seconds",
    (),
    "Duration of the donor lookups that were made.",
    "Near `evidence.deadline_ms`: raise the deadline, or look at the providers one by one.",
    _FAST,
)
PROVIDER_LOOKUPS = MetricSpec(
    "semkv_provider_lookup_total",
    "counter",
    "requests",
    ("provider", "result"),
    "Lookups by provider and result.",
    "`skipped` rising: the provider is stuck in an earlier lookup, or put aside after failures; readiness says which.",
)
PROVIDER_SECONDS = MetricSpec(
    "semkv_provider_lookup_seconds",
    "histogram",
    "seconds",
    ("provider",),
    "Duration of the lookups that a provider was asked for, what it embeds in this process included.",
    "One provider near `evidence.deadline_ms`: it holds up the others of its requests; make it smaller, or drop it.",
    _FAST,
)
DISCOVERY_ONLY = MetricSpec(
    "semkv_discovery_only_total",
    "counter",
    "requests",
    (),
    "Lookups that found a donor on which nothing was acted: a hit that was left to Dynamo, whatever the mode.",
    "All hits in shadow mode. In enforce mode semkv_placement_total says why; much of it is Dynamo being right by "
    "itself.",
)
PLACEMENTS = MetricSpec(
    "semkv_placement_total",
    "counter",
    "requests",
    ("mode", "result"),
    "Decisions by the mode the request really had, and why it was placed or left to Dynamo.",
    "`shadow` is what `enforce` would have placed. `below_minimum` or `below_margin` dominate: placement.min_tokens or "
    "placement.margin_tokens is too high for these prompts. `donor_unreachable`: see semkv_replicas.",
)
OUTCOMES = MetricSpec(
    "semkv_outcome_total",
    "counter",
    "routes",
    ("outcome", "reason"),
    "Closed routes of this router by outcome and reason; `orphan_report` counts reports that belong to no route.",
    "`unconfirmed`: reports do not arrive. `declined`: the reason says what the engine missed. Orphans are seen by "
    "every router: take the maximum, not the sum.",
)
CROSS_CHECKS = MetricSpec(
    "semkv_cross_check_total",
    "counter",
    "routes",
    ("result",),
    "The engine's own cached-token count against the connector's report.",
    "`differs` above zero: one of the two counts wrongly; trust neither until it is found.",
)
TTFT = MetricSpec(
    "semkv_time_to_first_token_seconds",
    "histogram",
    "seconds",
    ("class",),
    "Time to first token at the router by where most of the prompt's KV came from: cold, warm (device), loaded "
    "(connector).",
    "`loaded` not well below `cold`: loading costs more than it saves; raise connector.min_offer_tokens.",
    _TTFT,
)
TTFT_SAVED = MetricSpec(
    "semkv_ttft_saved_seconds",
    "histogram",
    "seconds",
    ("tier",),
    "Time to first token that a confirmed load saved against its replica's own cold rate (an estimate), by the tier it "
    "came from; below zero where loading made it later.",
    "Much of it at or below zero: loads cost what they save. Placement learns that (semkv_expected_saving); raise "
    "connector.min_offer_tokens, or look at semkv_load_seconds.",
    _SAVED,
)
LOAD_SECONDS = MetricSpec(
    "semkv_load_seconds",
    "histogram",
    "seconds",
    ("tier",),
    "Duration of confirmed loads by the tier they came from (`external`: pulled from another worker), as reported by "
    "the connectors: of the copies by the clock of the device, and of the read or pull that brought the blocks.",
    "Rising: the host is short of memory bandwidth, or a tier below, or the network between workers, is slow.",
    _LOAD,
)
FALLBACKS = MetricSpec(
    "semkv_fallback_total",
    "counter",
    "requests",
    ("reason",),
    "Requests that went without advice, hint, pin or record because of a fault of ours.",
    "Anything but zero deserves a look; no request failed for it.",
)

READY = MetricSpec(
    "semkv_ready",
    "gauge",
    "",
    (),
    "1 ready, 0.5 ready but degraded, 0 not ready.",
    "`/readyz` has the checks in words.",
)
CONFIG = MetricSpec(
    "semkv_config_info",
    "gauge",
    "",
    ("mode", "config_hash"),
    "Always 1: the placement mode and the hash of the configuration.",
    "More than one hash over the routers of one component: a roll-out is under way, or stuck.",
)
RELOAD_REFUSED = MetricSpec(
    "semkv_config_reload_refused",
    "gauge",
    "",
    (),
    "1 while the configuration file is one that was refused; the last good one is in force.",
    "The log and `/readyz` name the field, its value and what is allowed.",
)
EXPECTED_SHARE = MetricSpec(
    "semkv_expected_share",
    "gauge",
    "",
    ("match_type",),
    "Share of a donor's tokens that replicas are expected to confirm: the mean of what was learned, by recent trials; "
    "the prior where nothing was.",
    "Falling: engines decline what they are hinted; semkv_outcome_total says why. Far from its prior for long: set "
    "scoring.prior to it.",
)
EXPECTED_SAVING = MetricSpec(
    "semkv_expected_saving",
    "gauge",
    "",
    ("tier",),
    "Share of its prefill that a token from this tier is expected to spare, after its load: the mean of what was "
    "learned, by recent loads; scoring.tier_credit where nothing was.",
    "Below zero: loading costs more than computing, so nothing is placed for that tier. Far from its start for long: "
    "set scoring.tier_credit to it.",
)
REPLICAS = MetricSpec(
    "semkv_replicas",
    "gauge",
    "replicas",
    ("standing",),
    "Live replicas (worker and rank) by whether they may be advised.",
    "Anything but `ok`: readiness says which replica and why. No series at all: no worker has registered.",
)
OPEN_ROUTES = MetricSpec(
    "semkv_open_routes", "gauge", "routes", (), "Routes without an outcome yet.", "Rising: ends or reports are lost."
)
HELD_REPORTS = MetricSpec(
    "semkv_held_reports",
    "gauge",
    "reports",
    (),
    "Reports whose route is not known yet.",
    "Rising: route events are lost.",
)
BOOK_EVENTS = MetricSpec(
    "semkv_outcome_events_total",
    "counter",
    "events",
    ("event",),
    "What the route tracker did: opened, observed, reports, closed, orphans, duplicates, superseded, evicted_routes, "
    "unmatched_ends, callback_errors, implausible_loads (a load that took longer than the first token, whose time is "
    "dropped).",
    "`evicted_routes`: raise outcome.max_open_routes. `callback_errors`: a bug. `implausible_loads`: a clock is wrong, "
    "or a worker lies.",
)
CATALOG_DONORS = MetricSpec(
    "semkv_catalog_donors",
    "gauge",
    "donors",
    (),
    "Donors in the catalog.",
    "Zero under traffic: no donor events arrive; look at the connectors and at the broker.",
)
CATALOG_STREAMS = MetricSpec(
    "semkv_catalog_streams",
    "gauge",
    "streams",
    ("state",),
    "Donor event streams (one a rank): ok, quarantined (a gap, no credit until a reset), absent (its worker is gone).",
    "`quarantined` that stays: events are lost and the engine does not reset.",
)
CATALOG_EVENTS = MetricSpec(
    "semkv_catalog_events_total",
    "counter",
    "events",
    ("verdict",),
    "Donor events by what they did.",
    "`lost`: events are missing, the stream is quarantined. `evicted_full`: raise evidence.fingerprint.max_donors. "
    "`expired`: their connector has not said them again within their time to live: it hangs or does not reach the "
    "broker. `bad_sketch`, `malformed_namespace`, `foreign_*`: a peer of another version, or a foreign publisher.",
)
BUS_CONNECTED = MetricSpec(
    "semkv_bus_connected",
    "gauge",
    "",
    ("side",),
    "1 while connected to the broker, by side (publish, subscribe).",
    "0: requests are served, but no evidence is new and no outcome is confirmed.",
)
BUS_BUFFERED = MetricSpec(
    "semkv_bus_buffered_messages",
    "gauge",
    "messages",
    (),
    "Messages that wait for the broker; a pack counts as the records in it.",
    "At bus.max_buffered_messages the next ones are dropped.",
)
BUS_DROPPED = MetricSpec(
    "semkv_bus_dropped_messages_total",
    "counter",
    "messages",
    (),
    "Messages that were dropped.",
    "Above zero: routes are missing in the history of every router. The broker was away for longer than the buffer "
    "lasts.",
)
BUS_RECONNECTS = MetricSpec(
    "semkv_bus_reconnects_total",
    "counter",
    "",
    ("side",),
    "Connections made again.",
    "Rising: look at the broker and at the network to it.",
)
STREAM_CAUGHT_UP = MetricSpec(
    "semkv_stream_caught_up",
    "gauge",
    "",
    ("stream",),
    "1 when all that the stream kept was read, by stream.",
    "0 for long: replay is slow, or the broker is away.",
)
STREAM_MESSAGES = MetricSpec(
    "semkv_stream_messages_total",
    "counter",
    "messages",
    ("stream",),
    "Messages read from the bus; a pack counts as the records in it.",
    "Flat under traffic: its publishers are silent, or the broker is away.",
)
STREAM_REFUSED = MetricSpec(
    "semkv_stream_refused_total",
    "counter",
    "messages",
    ("stream", "kind"),
    "Messages that were dropped: malformed, of an unsupported version, or about another sender than their subject "
    "names.",
    "A peer of another version, or a foreign publisher.",
)

FALLBACK_REASONS = (
    "request_unreadable",
    "exact_timeout",
    "exact_error",
    "lookup_timeout",
    "lookup_error",
    "advice_error",
    "scorer_error",
    "hint_error",
    "hint_not_sent",
    "journal_error",
    "pin_worker_lost",
    "pin_overloaded",
    "pin_invalid",
    "pin_error",
)
"""The values of router.fallback.FallbackReason and, in STANDINGS, of router.replicas.Standing: this package may not
import router, so a test keeps them equal."""
STANDINGS = (
    "ok",
    "no_stable_id",
    "stable_id_shared",
    "unannounced",
    "block_size_mismatch",
    "model_differs",
    "namespace_differs",
    "role_differs",
)
CATALOG_NOTES = ("evicted_full", "expired", "unknown_segment", "listener_error")
"""What DonorCatalog counts besides the verdict of each event."""

_REPLICA = ("worker_id", "dp_rank")
REPLICA_PREFILL = MetricSpec(
    "semkv_replica_queued_prefill_tokens",
    "gauge",
    "tokens",
    _REPLICA,
    "Prompt tokens queued on the replica, as Dynamo books them.",
    "High on one replica while semkv_placement_total places: raise scoring.load_weight, or placement.margin_tokens.",
)
REPLICA_RATE = MetricSpec(
    "semkv_replica_prefill_tokens_per_second",
    "gauge",
    "tokens per second",
    _REPLICA,
    "Prefill rate of the replica, measured: the median over its last cold routes of computed and waiting tokens over "
    "time to first token.",
    "One replica well below the others: it is slower, or served by traffic that does not come through the routers.",
)
REPLICA_DECODE = MetricSpec(
    "semkv_replica_active_decode_blocks",
    "gauge",
    "blocks",
    _REPLICA,
    "Device blocks in use by running requests, as Dynamo books them.",
    "Near the replica's total: it evicts, so its device cache helps less and the host slab more.",
)
REPLICA_SLAB = MetricSpec(
    "semkv_replica_resident_blocks",
    "gauge",
    "blocks",
    _REPLICA,
    "Blocks that the replica's connector holds in host memory, as it announced.",
    "Zero under traffic: nothing is saved, so nothing can be loaded.",
)

CATALOGUE: tuple[MetricSpec, ...] = tuple(
    value for name, value in dict(globals()).items() if isinstance(value, MetricSpec) and not name.startswith("_")
)
