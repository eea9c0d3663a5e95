"""How a plan ended, in the words and numbers of a report."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_semkv.contracts.location import Tier
from dynamo_semkv.contracts.report import Outcome, Reason
from worker_connector.ledger.plan import LoadPlan, PlanState


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
