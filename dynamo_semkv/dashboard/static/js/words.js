// What the closed sets mean, in an operator's words. A value that is not here shows as itself.

export const STEPS = {
  input: ["Input", "All prompt tokens of closed routes: the denominator of every share here"],
  evidence: ["Evidence", "The best donor that was found could save these"],
  placed: ["Placed", "The request was pinned to the replica that has them"],
  hinted: ["Hinted", "The engine was told of them"],
  beyond_dynamo: ["Beyond Dynamo", "Of these, where Dynamo’s own router, with its weights, would have sent the request elsewhere: what is ours"],
  materialized: ["Materialized", "The backend confirmed: copied on every rank, and the forward pass started behind them"],
};

export const OUTCOMES = {
  materialized_exact: ["Materialized", "good"],
  materialized_experimental: ["Materialized, experimental", "good"],
  local_exact: ["Local reuse", "calm"],
  no_donor: ["No donor", "calm"],
  declined: ["Declined", "warn"],
  stale_donor: ["Stale donor", "warn"],
  namespace_mismatch: ["Namespace mismatch", "bad"],
  load_failed: ["Load failed", "bad"],
  unconfirmed: ["Unconfirmed", "warn"],
  cancelled: ["Cancelled", "calm"],
  refused: ["Refused", "calm"],
  orphan_report: ["Orphan report", "warn"],
  unknown: ["Unknown", "warn"],
};

export const REASONS = {
  ok: "The load completed and was used",
  none: "Nothing was hinted and nothing was resident",
  not_resident: "The host slab holds no block of this prompt, or never had it",
  not_identical: "The donor is related, but this prompt’s blocks are not its blocks",
  token_mismatch: "Equal key, other tokens: refused",
  checksum_mismatch: "The stored bytes were damaged: refused",
  local_covers: "The engine’s own cache already held it",
  misaligned_local: "Local reuse ended inside a block",
  prompt_too_short: "Less than one full block",
  below_minimum: "Too few tokens to be worth a copy (connector.min_offer_tokens)",
  materialization_off: "The connector is set to load nothing (connector.materialization)",
  experimental_refused: "The engine cannot hold approximate KV for one request",
  namespace_unknown: "A field that decides correctness is not known",
  namespace_differs: "Donor and request may not share KV",
  generation_stale: "The donor’s engine has restarted since",
  donor_evicted: "The donor’s blocks were evicted between decision and load",
  hint_expired: "The request came later than its hint lives in the engine (connector.hint_ttl_seconds)",
  leases_exhausted: "Too many loads in flight (connector.max_leases)",
  not_honoured: "The engine did not take what was offered",
  copy_failed: "The copy did not complete",
  load_timeout: "The copy took too long (connector.async_load_deadline_seconds)",
  not_scheduled: "Copied, but the forward pass did not start behind it",
  cancelled: "The request was cancelled",
  multimodal_unhashed: "Media without a content hash",
  adapter_unknown: "The adapter’s revision is not known",
  salt_unknown: "The cache salt cannot be told",
  unsupported_request: "A kind of request that is not loaded for",
  unsupported_layout: "A KV layout that is not loaded into",
  internal_error: "A fault of the connector; its log says more",
  request_refused: "The engine or Dynamo refused the request itself, so nothing ran",
  no_report: "The connector said nothing in time",
  before_first_token: "Cancelled before its first token, and no connector had it",
  no_worker: "No worker could be given the request",
  worker_lost: "The worker went away",
  wrong_replica: "Another replica reported than the one that served",
};

export const DECISIONS = {
  placed: "Placed on a donor’s replica",
  shadow: "Would have been placed (not acted on)",
  mode_off: "Mode is off",
  client_pinned: "The client had chosen a worker",
  namespace_unknown: "No replica has announced itself",
  namespace_differs: "Replicas disagree on their namespace",
  salt_unknown: "Cache salt is empty",
  adapter_unknown: "Adapter’s revision is not known",
  multimodal_unhashed: "Media without a content hash",
  exact_covers: "Dynamo’s exact overlap suffices",
  no_evidence: "Nothing found that saves tokens",
  lookup_skipped: "No provider could be asked",
  overloaded: "Router too busy to weigh it",
  lookup_timeout: "Lookup was late",
  lookup_error: "Lookup failed",
  exact_unknown: "Dynamo did not answer in time",
  donor_unreachable: "Donor on a replica that may not be chosen",
  dynamo_exact: "Dynamo’s own choice is the best",
  below_minimum: "Too few tokens to gain",
  below_margin: "Not better by enough",
  fault: "A fault of ours",
};

export const DYNAMO = {
  best_eligible: ["Best eligible", "Cached on the worker that has most of the prompt"],
  selected: ["Selected", "Cached where the request was sent"],
  worker_reused: ["Worker reused", "What workers said in their streams, loaded blocks included where the engine counts them"],
};

export const MATCHES = {
  exact_equivalent: "Exact prefix",
  semantic_candidate: "Similar",
};

export const TIERS = {
  device: "Device",
  host_pinned: "Host",
  disk: "Disk",
  external: "External",
};

export const STREAMS = {
  ok: ["In order", "good"],
  quarantined: ["Quarantined", "bad"],
  absent: ["Worker gone", "calm"],
};

export const LOOKUPS = { hit: "Hit", miss: "Miss", timeout: "Timeout", error: "Error", skipped: "Skipped" };

export const MODES = {
  off: "requests pass through",
  shadow: "decides and records, changes nothing",
  canary: "acts on a share of the requests",
  enforce: "acts on every request",
};

export const TTFT = {
  cold: ["Cold", "nothing reused"],
  warm: ["Warm", "from the engine’s device cache"],
  loaded: ["Loaded", "from host memory, by the connector"],
};

export const CHECKS = {
  workers: "Workers",
  stable_ids: "Stable ids",
  advice: "Advice",
  bus: "Broker",
  replay: "Replay",
  versions: "Versions",
  donor_events: "Donor events",
  catalog: "Catalog",
  providers: "Providers",
  configuration: "Configuration",
};

export const STANDINGS = {
  ok: ["Advised", "good"],
  no_stable_id: ["No stable id", "warn"],
  stable_id_shared: ["Stable id shared", "bad"],
  unannounced: ["Not announced", "warn"],
  block_size_mismatch: ["Block size differs", "bad"],
  model_differs: ["Other model", "warn"],
  namespace_differs: ["Namespace differs", "bad"],
  role_differs: ["Other role", "warn"],
};

export const word = (words, key) => {
  const found = Object.hasOwn(words, key) ? words[key] : undefined;
  return found === undefined ? String(key) : found;
};
