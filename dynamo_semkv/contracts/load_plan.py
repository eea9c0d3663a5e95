"""The load plan: what leader and ranks agree to copy (RFC semantic KV cache reuse, "update_state_after_alloc")."""

from __future__ import annotations

from enum import Enum

import msgspec

from dynamo_semkv.contracts.evidence import SemanticTrtBlockRef


class ExpectedMode(str, Enum):
    """How the KV of a plan may be used (RFC semantic KV cache reuse, modes)."""

    EXACT_EQUIVALENT = "exact_equivalent"
    SEMANTIC_EXPERIMENTAL = "semantic_experimental"


class SemanticTrtLoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a worker needs to load safely, and nothing else. Keyed by (request_id, epoch) and consumed once: an
    allocation that was destroyed and replayed has another epoch, so a stale plan can never be replayed onto new pages.

    `target_block_ids[i]` is the recipient-owned page slot of block `first_ordinal + i` of layer group 0 (other groups
    travel in the engine's own metadata); `donor_block_refs[i]` is the source of the same block.
    """

    request_id: int
    epoch: int
    route_id: str | None
    donor_id: str
    provider_generation: str
    cache_namespace: str
    """Hex digest."""
    expected_mode: ExpectedMode
    first_ordinal: int
    target_block_ids: tuple[int, ...]
    donor_block_refs: tuple[SemanticTrtBlockRef, ...]
    token_count: int
    semantic_score_bucket: str
