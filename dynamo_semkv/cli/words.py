"""What the values of closed sets mean, in the words of the page (`dashboard/static/js/words.js`; a test keeps them
equal)."""

from __future__ import annotations

REASONS = {
    "ok": "The load completed and was used",
    "none": "Nothing was hinted and nothing was resident",
    "not_resident": "The host slab holds no block of this prompt, or never had it",
    "not_identical": "The donor is related, but this prompt's blocks are not its blocks",
    "token_mismatch": "Equal key, other tokens: refused",
    "checksum_mismatch": "The stored bytes were damaged: refused",
    "local_covers": "The engine's own cache already held it",
    "misaligned_local": "Local reuse ended inside a block",
    "prompt_too_short": "Less than one full block",
    "below_minimum": "Too few tokens to be worth a copy (connector.min_offer_tokens)",
    "materialization_off": "The connector is set to load nothing (connector.materialization)",
    "experimental_refused": "The engine cannot hold approximate KV for one request",
    "namespace_unknown": "A field that decides correctness is not known",
    "namespace_differs": "Donor and request may not share KV",
    "generation_stale": "The donor's engine has restarted since",
    "donor_evicted": "The donor's blocks were evicted between decision and load",
    "hint_expired": "The request came later than its hint lives in the engine (connector.hint_ttl_seconds)",
    "leases_exhausted": "Too many loads in flight (connector.max_leases)",
    "not_honoured": "The engine did not take what was offered",
    "copy_failed": "The copy did not complete",
    "load_timeout": "The copy took too long (connector.async_load_deadline_seconds)",
    "not_scheduled": "Copied, but the forward pass did not start behind it",
    "cancelled": "The request was cancelled",
    "multimodal_unhashed": "Media without a content hash",
    "adapter_unknown": "The adapter's revision is not known",
    "salt_unknown": "The cache salt cannot be told",
    "unsupported_request": "A kind of request that is not loaded for",
    "unsupported_layout": "A KV layout that is not loaded into",
    "internal_error": "A fault of the connector; its log says more",
    "request_refused": "The engine or Dynamo refused the request itself, so nothing ran",
    "no_report": "The connector said nothing in time",
    "before_first_token": "Cancelled before its first token, and no connector had it",
    "no_worker": "No worker could be given the request",
    "worker_lost": "The worker went away",
    "wrong_replica": "Another replica reported than the one that served",
}

DECISIONS = {
    "placed": "Placed on a donor's replica",
    "shadow": "Would have been placed (not acted on)",
    "mode_off": "Mode is off",
    "client_pinned": "The client had chosen a worker",
    "namespace_unknown": "No replica has announced itself",
    "namespace_differs": "Replicas disagree on their namespace",
    "salt_unknown": "Cache salt is empty",
    "adapter_unknown": "Adapter's revision is not known",
    "multimodal_unhashed": "Media without a content hash",
    "exact_covers": "Dynamo's exact overlap suffices",
    "no_evidence": "Nothing found that saves tokens",
    "lookup_skipped": "No provider could be asked",
    "overloaded": "Router too busy to weigh it",
    "lookup_timeout": "Lookup was late",
    "lookup_error": "Lookup failed",
    "exact_unknown": "Dynamo did not answer in time",
    "donor_unreachable": "Donor on a replica that may not be chosen",
    "dynamo_exact": "Dynamo's own choice is the best",
    "below_minimum": "Too few tokens to gain",
    "below_margin": "Not better by enough",
    "fault": "A fault of ours",
}

ENDS = {
    "complete": "Completed",
    "cancelled": "Cancelled",
    "worker_lost": "Cut off when the worker was lost",
    "no_worker": "No worker could be given it",
    "error": "Ended in an error",
}

CROSS_CHECKS = {
    "equal": "equal to the report",
    "differs": "not what the report says",
    "unknown": "no report to compare with",
}

MATCHES = {"exact_equivalent": "Exact prefix", "semantic_candidate": "Similar"}

TIERS = {"device": "Device", "host_pinned": "Host", "disk": "Disk", "external": "External"}
