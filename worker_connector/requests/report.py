"""MaterializationReport: from what the leader saw of one attempt to what it tells the routers. Pure, but for the random
report id.

An attempt is one (request, allocation epoch) that the engine asked about. Each gets exactly one report, whatever
happens to it.
"""

from __future__ import annotations

import secrets

from dynamo_semkv.contracts.identity import StableReplica
from dynamo_semkv.contracts.keys import PromptKey
from dynamo_semkv.contracts.report import REPORT_VERSION, MaterializationReport
from worker_connector.requests.attempt import ClosedAttempt
from worker_connector.requests.ending import Ending
from worker_connector.requests.hints import ParsedHints
from worker_connector.requests.load_decision import Decline


def build_report(
    *,
    replica: StableReplica,
    closed: ClosedAttempt,
    prompt_key: PromptKey,
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
        generation=closed.generation,
        prompt_key=prompt_key,
        namespace=closed.digest.hex(),
        route_id=donor.route_id if donor is not None and route_is_ours else None,
        donor_id=donor.donor_id if donor is not None else None,
        request_id=closed.key.request_id,
        epoch=closed.key.epoch,
        prompt_tokens=closed.question.prompt_tokens,
        local_tokens=closed.question.local_tokens,
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
