"""What can be learned from one closed route about the replica that it was placed on. Pure.

lessons(route) -> what share of its claim was confirmed, a Lesson for each match type that was part of it
load_lesson(route) -> what a loaded token saved, if the route loaded any and could be timed
"""

from __future__ import annotations

from typing import NamedTuple

from dynamo_semkv.contracts.evidence import Bucket, MatchType
from dynamo_semkv.contracts.identity import StableReplica
from dynamo_semkv.contracts.location import Tier
from dynamo_semkv.contracts.report import Outcome, Reason
from dynamo_semkv.outcome.closed import ClosedRoute, placed_on
from dynamo_semkv.outcome.join import replica_of, same_replica
from dynamo_semkv.scoring.credit import Kind, mode_of

_SILENT_OUTCOMES = frozenset(
    {
        Outcome.LOCAL_EXACT,
        Outcome.UNCONFIRMED,
        Outcome.REFUSED,
        Outcome.CANCELLED,
        Outcome.ORPHAN_REPORT,
        Outcome.UNKNOWN,
    }
)
"""Outcomes that say nothing about what the engine would have done: nothing had to be loaded, or nobody knows."""
_SILENT_REASONS = frozenset({Reason.CANCELLED, Reason.WRONG_REPLICA, Reason.WORKER_LOST, Reason.NO_REPORT})


class Lesson(NamedTuple):
    """One trial: the observed `share` (confirmed, of the claim; or saved, of the prefill) and the `weight` it counts
    with."""

    kind: Kind
    share: float
    weight: float


def lessons(route: ClosedRoute) -> tuple[Lesson, ...]:
    """What one closed route shows about the replica that it was placed on: nothing, or one trial.

    A claim may be part proven prefix and part only similar. They are separate cells, as they are separate terms of a
    donor's value, and share the trial by tokens: when an exact engine declines the rest, that says nothing against the
    prefix. What the engine's own cache turned out to hold beyond Dynamo's index is no part of the claim.
    """
    opened, report, placed = route.opened, route.report, placed_on(route.opened)
    hinted = route.funnel.hinted
    if report is None or placed is None or placed.dp_rank is None or hinted < 1:
        return ()
    if route.outcome in _SILENT_OUTCOMES or route.reason in _SILENT_REASONS:
        return ()
    if not same_replica(placed, replica_of(report)) or opened.match_type is None or opened.tier is None:
        return ()
    proven = opened.proven_tokens
    if proven is None:
        proven = hinted if opened.match_type is MatchType.EXACT_EQUIVALENT else 0
    proven = min(proven, hinted)
    local = min(max(0, report.local_tokens - opened.exact_device_tokens), hinted)
    exact, similar = max(0, proven - local), hinted - max(proven, local)
    confirmed = report.confirmed
    found = []
    for match_type, claimed, got in (
        (MatchType.EXACT_EQUIVALENT, exact, min(confirmed, exact)),
        (MatchType.SEMANTIC_CANDIDATE, similar, min(max(0, confirmed - exact), similar)),
    ):
        if claimed > 0:
            kind = Kind(match_type, opened.overlap, opened.tier, mode_of(opened.materialization))
            found.append(Lesson(kind, got / claimed, claimed / (exact + similar)))
    return tuple(found)


def load_lesson(route: ClosedRoute) -> tuple[StableReplica, Lesson] | None:
    """The replica that loaded, and what that saved. A load without a hint counts too, at its cost. It is booked under
    the claim that was made, or would have been made: with a hint the evidence's tier, without one the report's. Nothing
    is loaded from the device: where that was claimed, the KV had left it, and the report's tier counts."""
    saving, report, opened = route.saving, route.report, route.opened
    if saving is None or report is None:
        return None
    hinted = route.funnel.hinted > 0 and opened.match_type is not None
    tier = opened.tier if hinted and opened.tier not in (None, Tier.DEVICE) else report.tier
    if tier is None or opened.input_tokens < 1:
        return None
    reach = min(1.0, (report.local_tokens + report.confirmed) / opened.input_tokens)
    experimental = report.outcome is Outcome.MATERIALIZED_EXPERIMENTAL
    kind = Kind(
        MatchType.SEMANTIC_CANDIDATE if experimental else MatchType.EXACT_EQUIVALENT,
        opened.overlap if hinted else Bucket.of(reach),
        tier,
        mode_of(opened.materialization),
    )
    return StableReplica(report.stable_routing_id, report.dp_rank), Lesson(kind, saving.share, 1.0)
