"""MaterializationReport: from what the leader saw of one attempt to what it tells the routers. Pure, but for the random
report id.

An attempt is one (request, allocation epoch) that the engine asked about. Each gets exactly one report, whatever
happens to it.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from dynamo_semkv.contracts.identity import Generation, StableReplica
from dynamo_semkv.contracts.keys import PromptKey
from dynamo_semkv.contracts.location import Tier
from dynamo_semkv.contracts.report import REPORT_VERSION, MaterializationReport, Outcome, Reason
from worker_connector.ledger.plan import LoadPlan, PlanKey, PlanState
from worker_connector.requests.hints import ParsedHints
from worker_connector.requests.load_decision import Decline


@dataclass(frozen=True)
class Ending:
    """How a plan ended, in the report's words and numbers (tokens)."""

    offered: int
    honoured: int
    copied: int
    confirmed: int
    outcome: Outcome
    reason: Reason
    load_seconds: float | None
    """Of the copies into pages, and of what came up from another tier for them. None: nothing was copied."""
    tier: Tier | None = None
    """Where the confirmed tokens came from: the furthest tier that a block of them came up from, if it served nobody
    before."""


_OUTCOMES = {
    Reason.OK: Outcome.MATERIALIZED_EXACT,
    Reason.COPY_FAILED: Outcome.LOAD_FAILED,
    Reason.LOAD_TIMEOUT: Outcome.LOAD_FAILED,
    Reason.WORKER_LOST: Outcome.LOAD_FAILED,
    Reason.CHECKSUM_MISMATCH: Outcome.LOAD_FAILED,
    Reason.CANCELLED: Outcome.CANCELLED,
    Reason.GENERATION_STALE: Outcome.STALE_DONOR,
}


_FURTHER = (Tier.HOST_PINNED, Tier.DISK, Tier.EXTERNAL)


def ending_of(plan: LoadPlan) -> Ending:
    """Of a plan that has ended."""
    reason = plan.reason if plan.state in (PlanState.CONFIRMED, PlanState.DROPPED) else Reason.INTERNAL_ERROR
    reason = reason or Reason.INTERNAL_ERROR
    tier, seconds = None, plan.load_seconds
    if plan.confirmed:
        origins = [block.origin for block in plan.served if block.origin is not None]
        tier = max((origin.tier for origin in origins), key=_FURTHER.index, default=Tier.HOST_PINNED)
        seconds = None if seconds is None else seconds + sum(origin.seconds for origin in origins)
    return Ending(
        plan.offered,
        plan.honoured,
        plan.copied,
        plan.confirmed,
        _OUTCOMES.get(reason, Outcome.DECLINED),
        reason,
        seconds,
        tier,
    )


def build_report(
    *,
    replica: StableReplica,
    generation: Generation,
    key: PlanKey,
    prompt_key: PromptKey,
    namespace_hex: str,
    prompt_tokens: int,
    local_tokens: int,
    ending: Ending | Decline,
    hints: ParsedHints | None,
    route_is_ours: bool,
    traceparent: str | None = None,
) -> MaterializationReport:
    """`route_is_ours`: this attempt is the first to use the hint; a later one of an equal prompt may not close the same
    route. `traceparent`: of the span made of this attempt; else the report carries the one that came with the hint."""
    donor = hints.donor if hints is not None else None
    counts = ending if isinstance(ending, Ending) else Ending(0, 0, 0, 0, ending.outcome, ending.reason, None)
    return MaterializationReport(
        version=REPORT_VERSION,
        report_id=secrets.token_hex(16),
        stable_routing_id=replica.stable_routing_id,
        dp_rank=replica.dp_rank,
        generation=generation,
        prompt_key=prompt_key,
        namespace=namespace_hex,
        route_id=donor.route_id if donor is not None and route_is_ours else None,
        donor_id=donor.donor_id if donor is not None else None,
        request_id=key.request_id,
        epoch=key.epoch,
        prompt_tokens=prompt_tokens,
        local_tokens=local_tokens,
        offered=counts.offered,
        honoured=counts.honoured,
        copied=counts.copied,
        confirmed=counts.confirmed,
        outcome=counts.outcome,
        reason=counts.reason,
        tier=counts.tier,
        load_seconds=counts.load_seconds,
        differing_field=ending.differing_field if isinstance(ending, Decline) else None,
        traceparent=traceparent or (hints.traceparent if hints is not None else None),
    )
