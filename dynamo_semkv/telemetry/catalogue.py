"""The metrics of both sides that the router's state does not hold: spans, and what a connector says about itself.

Label values come from the closed sets of `label_sets.py`. Every series of a connector has `dp_rank`. Through a Dynamo
worker's status server Dynamo adds its own labels (dynamo_namespace, dynamo_component, dynamo_endpoint, worker_id in
hex, model).
"""

from __future__ import annotations

from dynamo_semkv.telemetry.metric_spec import SPANS, MetricSpec

_RANK = ("dp_rank",)
_FAST = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
_COPY = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


def _connector(name: str, kind: str, unit: str, labels: tuple[str, ...], meaning: str, usage: str) -> MetricSpec:
    return MetricSpec(f"semkv_connector_{name}", kind, unit, (*_RANK, *labels), meaning, usage)


def _seconds(name: str, meaning: str, usage: str, buckets: tuple[float, ...]) -> MetricSpec:
    return MetricSpec(f"semkv_connector_{name}_seconds", "histogram", "seconds", _RANK, meaning, usage, buckets)


INFO = _connector(
    "info",
    "gauge",
    "",
    ("generation", "materialization", "connector"),
    "Always 1: the generation of the cache, what is materialized, and the connector's version.",
    "The generation changes often: the engine is restarted, its cache reset, or donor events were lost (see "
    "semkv_connector_anomalies_total).",
)
TOKENS = _connector(
    "tokens_total",
    "counter",
    "tokens",
    ("step",),
    "Tokens of reported attempts by how far they came; only `confirmed` is reuse.",
    "`honoured` below `offered`: the engine took less than it was offered. `copied` below `honoured`: copies fail. "
    "`confirmed` below `copied`: requests are cancelled between the copy and their forward pass.",
)
OUTCOMES = _connector(
    "outcome_total",
    "counter",
    "attempts",
    ("outcome", "reason"),
    "Reported attempts by outcome and reason, those without a route too.",
    "As semkv_outcome_total, of one engine. `load_failed` above zero: read this worker's log.",
)
ATTEMPTS = _connector(
    "attempts_total",
    "counter",
    "attempts",
    ("event",),
    "Questions of the engine, those put again before a batch, those put again after their pages were taken away, and "
    "ends.",
    "`replayed` rising: the engine runs out of pages and takes them away from requests that run.",
)
OPEN_ATTEMPTS = _connector(
    "open_attempts",
    "gauge",
    "attempts",
    (),
    "Attempts that have no end yet.",
    "Far above the engine's batch size for long: ends are not reported (see `vanished`).",
)
TRACKED = _connector(
    "tracked_requests",
    "gauge",
    "requests",
    (),
    "Running requests whose pages are known.",
    "Zero while the engine serves: the connector is not attached.",
)
PARKED = _connector(
    "parked_requests",
    "gauge",
    "requests",
    (),
    "Requests that the engine has parked while what they were offered is copied.",
    "Rising: the copies do not keep up; raise connector.async_load_min_tokens.",
)
RANKS = _connector(
    "ranks",
    "gauge",
    "ranks",
    ("state",),
    "Tensor-parallel ranks behind this leader: expected, missing (silent so far, or lost), and lost.",
    "`missing` or `lost` above zero: nothing is saved or loaded; read the logs of the engine's other rank processes.",
)
RANKS_AGREE = _connector(
    "ranks_agree",
    "gauge",
    "",
    (),
    "0 while the ranks disagree on the layout of the cache, and nothing is saved or loaded.",
    "0: read this worker's log, it names the difference.",
)
OPEN_SAVES = _connector(
    "open_saves",
    "gauge",
    "orders",
    (),
    "Save orders that are not sealed yet.",
    "Rising: the host cannot keep up with sealing; blocks become offerable late.",
)
LEASES = _connector(
    "leases",
    "gauge",
    "attempts",
    (),
    "Attempts that hold a lease on blocks of the slab.",
    "At connector.max_leases further offers are declined as `leases_exhausted`.",
)
ASK_SECONDS = _seconds(
    "ask",
    "How long the engine's scheduler waited for an offer.",
    "The engine stands still for as long: above a few milliseconds, prompts are very long or the machine is short of "
    "cores.",
    _FAST,
)
BUILD_SECONDS = _seconds(
    "build_metadata",
    "How long the engine's scheduler waited for the metadata of a batch: offers bound to pages, copies ordered.",
    "Once an iteration, so it is a tax on every token: above a few milliseconds, batches are very wide or the machine "
    "is short of cores.",
    _FAST,
)
LOAD_SECONDS = _seconds(
    "load",
    "Time from the order to the ranks until the copies of a load have landed.",
    "Rising: host memory bandwidth is short, or several loads share the copy stream.",
    _COPY,
)
SAVE_SECONDS = _seconds(
    "save",
    "Time from a save order until its blocks have landed in host memory and are sealed.",
    "Rising: as semkv_connector_open_saves.",
    _COPY,
)
COPIED_BLOCKS = _connector(
    "copied_blocks_total",
    "counter",
    "blocks",
    ("direction",),
    "Blocks copied from host memory to the engine's pages, and from there to host memory.",
    "`saved` far above `loaded`: the workload seldom repeats what it left; semkv_connector_tokens_total says what "
    "reuse there is.",
)
SLAB_BLOCKS = _connector(
    "slab_blocks",
    "gauge",
    "blocks",
    ("state",),
    "Slots of the host slab: free, resident (may be offered), pending (being saved), retired (removed, and still being "
    "read).",
    "`free` at zero is normal; see semkv_connector_evicted_blocks_total for whether it is too small.",
)
LEASED_BLOCKS = _connector(
    "leased_blocks",
    "gauge",
    "blocks",
    (),
    "Blocks of the slab that are promised or being read, and those before them in their prompts: none of them can be "
    "evicted.",
    "Near the number of slots: offers hold the slab; lower connector.max_leases or raise connector.slab_bytes.",
)
EVICTED = _connector(
    "evicted_blocks_total",
    "counter",
    "blocks",
    (),
    "Blocks that left the slab for others.",
    "As fast as semkv_connector_save_events_total{event=admitted}: the slab is smaller than the working set, raise "
    "connector.slab_bytes.",
)
EVICTED_TWINS = _connector(
    "evicted_device_copies_total",
    "counter",
    "blocks",
    (),
    "Of the evicted blocks, those that went before older ones because the device held them too, by the engine's KV "
    "cache events.",
    "Most of semkv_connector_evicted_blocks_total: the slab holds little that the device does not; raise "
    "connector.slab_bytes.",
)
REFUSED_BLOCKS = _connector(
    "refused_blocks_total",
    "counter",
    "blocks",
    (),
    "Blocks that found no slot, because everything else was leased or pending.",
    "Rising: as semkv_connector_leased_blocks.",
)
COLLISIONS = _connector(
    "key_collisions_total",
    "counter",
    "blocks",
    (),
    "Blocks whose key was that of other tokens; they were told apart, and not shared.",
    "Above zero: somebody makes colliding prompts, or a bug.",
)
SAVES = _connector(
    "save_events_total",
    "counter",
    "events",
    ("event",),
    "Saving: blocks that were ordered, there already, without a slot, admitted, withdrawn, failed or reported too "
    "early; and requests of which a page was missing, a window had passed, or the chain was evicted.",
    "`failed`: read this worker's log. `no_slot`, `chain_evicted`: raise connector.slab_bytes.",
)
CHECKS = _connector(
    "checked_blocks_total",
    "counter",
    "blocks",
    ("result",),
    "Sealed blocks whose checksum was read again in the background, and those found damaged.",
    "`damaged` above zero: memory of this host is not to be trusted. `checked` flat: the slab's thread stands still.",
)
SEALED = _connector(
    "sealed_blocks",
    "gauge",
    "blocks",
    (),
    "Slots that have a seal; only these are offered.",
    "Far below `resident` of semkv_connector_slab_blocks: sealing lags.",
)
DISK_BLOCKS = _connector(
    "disk_blocks",
    "gauge",
    "blocks",
    (),
    "Blocks in files below `connector.disk_path`. No series without that tier, so with the two that follow.",
    "At its ceiling with `evicted` rising: raise connector.disk_bytes.",
)
DISK_CHANGES = _connector(
    "disk_events_total",
    "counter",
    "events",
    ("event",),
    "Blocks written behind and staged back into host memory, wishes for them, and what became of both.",
    "`spill_dropped`: the disk does not keep up. `stage_failed`: see semkv_connector_disk_files_total. `no_slot`: the "
    "slab is too small to stage into, raise connector.slab_bytes.",
)
DISK_FILES = _connector(
    "disk_files_total",
    "counter",
    "files",
    ("event",),
    "What the store of files did.",
    "`damaged`, `*_errors`: the disk is not to be trusted. `no_room`: the file system is full.",
)
DISK_HOLDS = _connector(
    "disk_holds_total",
    "counter",
    "requests",
    ("result",),
    "Requests whose prompt goes on on disk, behind what is in host memory: held at the worker's door until it was "
    "there (`arrived`), all that could come was (`partly`), connector.disk_wait_ms were over (`late`) or the client "
    "left; or not held, and why. No series where that door is off.",
    "`late`: raise connector.disk_wait_ms. `slower`: reading would take longer than computing, so a faster disk or "
    "none. `crowded`: 64 requests wait already. `too_little`: less than would be offered. `failed`: a bug. `hanging`: "
    "the disk answered nothing for a second. `partly`: see semkv_connector_disk_files_total, and `no_slot` of "
    "semkv_connector_disk_events_total.",
)
DISK_HOLD_SECONDS = _seconds(
    "disk_hold",
    "Time for which requests were held for blocks from disk.",
    "At connector.disk_wait_ms: as `late` of semkv_connector_disk_holds_total.",
    _COPY,
)
DEVICE_BLOCKS = _connector(
    "device_blocks",
    "gauge",
    "blocks",
    (),
    "Blocks that the engine's own KV cache events say are on the device.",
    "Zero under traffic: events are off in the engine, or are not handed over.",
)
DEVICE_EVENTS = _connector(
    "kv_events_total",
    "counter",
    "events",
    ("event",),
    "KV cache events of the engine by what they did.",
    "All zero under traffic: events are off in the engine, or are not handed over. `gap`, `quarantined`, `overflow`: "
    "events are lost, and what the device holds is unknown until it is stored again.",
)
DEVICE_STANDING = _connector(
    "kv_events_fresh",
    "gauge",
    "",
    (),
    "1 while no KV cache event of this rank is missing.",
    "0 that stays: as `gap` of semkv_connector_kv_events_total.",
)
DONORS = _connector(
    "donors",
    "gauge",
    "donors",
    (),
    "Donors that this rank has registered.",
    "Zero under traffic: prompts are shorter than connector.min_donor_tokens, or nothing is saved.",
)
DONOR_CHANGES = _connector(
    "donor_events_total",
    "counter",
    "events",
    ("event",),
    "What happened to donors.",
    "`unsent`: the bus did not take their events. `crowded_out`: raise connector.max_donors. `invalid`: a bug.",
)
HINTS = _connector(
    "hints_total",
    "counter",
    "hints",
    ("event",),
    "Hints received over the bus, taken by a request, expired unused; and what was in them.",
    "`expired` as fast as `received`: requests come later than connector.hint_ttl_seconds, or to another engine. "
    "`misdirected`, `undecodable`, `bad_*`, `unknown_*`: a router of another version, or a foreign publisher.",
)
PULLS = _connector(
    "fetch_pulls_total",
    "counter",
    "pulls",
    ("result",),
    "Pulls from other workers on Dynamo's kv.fetch hints, by how they ended. No series without "
    "connector.fetch.enabled, so with the others named fetch.",
    "`unauthorized`: the workers' secrets differ. `address_not_allowed`: connector.fetch.allowed_networks is too "
    "narrow, or somebody sends hints. `foreign`: workers of other models, weights or layouts, or one that was told "
    "`reset_cache` and not `weights_changed`; `own_reset`: this one was. `timeout`: raise connector.fetch.deadline_ms. "
    "`wrong_*`: distrust that host.",
)
FETCH_BLOCKS = _connector(
    "fetch_blocks_total",
    "counter",
    "blocks",
    ("direction",),
    "Blocks pulled from other workers into the slab, served to them, and not served because they did not hold what was "
    "sealed.",
    "`pulled` without semkv_connector_fetched_tokens_total rising: requests do not wait long enough "
    "(connector.fetch.wait_ms).",
)
FETCH_SERVING = _connector(
    "fetch_serving_total",
    "counter",
    "events",
    ("event",),
    "What other workers did at this one's door.",
    "`unauthorized`, `malformed`: somebody without the secret connects. `busy`: raise connector.fetch.max_connections.",
)
FETCHED_TOKENS = _connector(
    "fetched_tokens_total",
    "counter",
    "tokens",
    (),
    "Confirmed tokens that were served from blocks pulled from another worker; part of `confirmed` of "
    "semkv_connector_tokens_total.",
    "What pulling is worth.",
)
FETCH_SECONDS = _seconds(
    "fetch",
    "Time from a hint until its pull has ended.",
    "Above connector.fetch.wait_ms: blocks come for the next request rather than for this one.",
    _COPY,
)
REPORTS = _connector(
    "reports_total",
    "counter",
    "reports",
    ("result",),
    "Reports handed to the bus, refused by it (away, or full), and dropped before because too many waited.",
    "`refused` or `dropped`: their routes close as `unconfirmed`. See semkv_connector_bus_connected, and "
    "connector.report_buffer.",
)
ANNOUNCEMENTS = _connector(
    "announcements_total",
    "counter",
    "announcements",
    (),
    "How often this rank announced itself.",
    "Flat for longer than connector.announce_interval_seconds: the background thread stands still.",
)
ANOMALIES_TOTAL = _connector(
    "anomalies_total",
    "counter",
    "events",
    ("kind",),
    "What should be rare; `restated` is routine.",
    "Anything else that rises: read this worker's log. `tokens_differ`, `misread_reports`: this version of the engine "
    "reports otherwise than the connector expects.",
)
FAULTS = _connector(
    "faults_total",
    "counter",
    "faults",
    ("callback",),
    "Exceptions that were caught in a callback of the engine.",
    "A bug, of this connector or of its fit with this engine; requests went on without reuse. The log has the "
    "traceback.",
)
BUS_CONNECTED = _connector(
    "bus_connected",
    "gauge",
    "",
    (),
    "1 while the connector is connected to the broker.",
    "0: requests are served, their reports wait.",
)
BUS_BUFFERED = _connector(
    "bus_buffered_messages",
    "gauge",
    "messages",
    (),
    "Messages that wait for the broker; a pack counts as the records in it.",
    "At bus.max_buffered_messages the next ones are dropped.",
)
BUS_DROPPED = _connector(
    "bus_dropped_messages_total",
    "counter",
    "messages",
    (),
    "Messages that were dropped.",
    "Above zero: donors were registered anew, reports are missing. The broker was away for longer than the buffer "
    "lasts.",
)
BUS_RECONNECTS = _connector(
    "bus_reconnects_total",
    "counter",
    "",
    (),
    "Connections made again.",
    "Rising: look at the broker and at the network to it.",
)
CONNECTOR_SPANS = _connector(
    "spans_total",
    "counter",
    "spans",
    ("state",),
    "As semkv_spans_total, of this connector.",
    "As there.",
)

CONNECTOR: tuple[MetricSpec, ...] = tuple(
    value
    for name, value in dict(globals()).items()
    if isinstance(value, MetricSpec) and value.name.startswith("semkv_connector_")
)
CATALOGUE: tuple[MetricSpec, ...] = (SPANS, *CONNECTOR)
