"""The record of one attempt's decision: what it was, on what evidence, and what Dynamo's own router would have chosen.
Pure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from dynamo_semkv.config.schema import KvRouterOptions
from dynamo_semkv.contracts.evidence import SemanticTrtMatch
from dynamo_semkv.contracts.identity import ReplicaKey, RouteId
from dynamo_semkv.contracts.route_events import MAX_CLIENT_TEXT, RouteOpened
from dynamo_semkv.router.pipeline import Advice
from dynamo_semkv.router.replicas import ReplicaDirectory, ReplicaProfile
from dynamo_semkv.router.sheet_lines import dynamo_choice, sheet_lines

DEFAULT_KV_ROUTER = KvRouterOptions()


class Attempt(msgspec.Struct, frozen=True):
    """One dispatch of one request, as its record names it."""

    route_id: RouteId
    request_id: str
    """Dynamo's context id; a client may have chosen it. Empty: a call without a context."""
    router: str
    number: int
    """0 for the first dispatch of the request, 1 after its first migration, ..."""
    model: str
    """As the request names it."""
    opened_at: float
    """Unix seconds."""
    config_hash: str
    traceparent: str | None


def opened_event(
    advice: Advice, attempt: Attempt, directory: ReplicaDirectory, kv_router: KvRouterOptions = DEFAULT_KV_ROUTER
) -> RouteOpened:
    """The RouteOpened of an advice. Texts that a client chose are cut to MAX_CLIENT_TEXT."""
    decision, sheet = advice.decision, advice.sheet
    placed, shadow = decision.placed, decision.shadow_choice
    profiles = directory.profiles()
    dynamo = dynamo_choice(sheet, kv_router) if sheet is not None else None
    announced = directory.announcement_of(placed) if placed is not None else None
    stable = directory.stable_of(placed) if placed is not None else None
    return RouteOpened(
        route_id=attempt.route_id,
        request_id=attempt.request_id[:MAX_CLIENT_TEXT] or None,
        router=attempt.router,
        attempt=attempt.number,
        model=attempt.model[:MAX_CLIENT_TEXT],
        mode=decision.mode._value_,
        opened_at=attempt.opened_at,
        prompt_key=advice.prompt.key,
        tenant=advice.prompt.namespace.tenant,
        input_tokens=len(advice.prompt.tokens),
        exact_device_tokens=advice.exact_device_tokens,
        exact_host_tokens=advice.exact_host_tokens,
        evidence_tokens=decision.evidence_tokens,
        placed_tokens=decision.placed_tokens,
        hinted_tokens=decision.hinted_tokens,
        proven_tokens=decision.proven_tokens,
        lookup=advice.lookup.status,
        lookup_seconds=advice.lookup.seconds,
        decision_reason=decision.reason._value_,
        stable_routing_id=stable.stable_routing_id if stable is not None else None,
        dp_rank=placed.dp_rank if placed is not None else None,
        worker_id=str(placed.worker_id) if placed is not None else None,
        materialization=announced.materialization if announced is not None else None,
        expected_tokens=_expected(advice),
        shadow_choice=_name(shadow, profiles) if shadow is not None else None,
        dynamo_choice=_name(dynamo.replica, profiles) if dynamo is not None else None,
        sheet=sheet_lines(sheet, dynamo, partial(_name, profiles=profiles)) if sheet is not None else (),
        sheet_rows=len(sheet.rows) if sheet is not None else 0,
        config_hash=attempt.config_hash,
        traceparent=attempt.traceparent,
        **(_match_fields(decision.match) if decision.match is not None else {}),
    )


def _match_fields(match: SemanticTrtMatch) -> dict[str, Any]:
    """The fields of the record that say on which donor the decision rests."""
    return {
        "donor_id": match.donor_id,
        "donor_generation": match.provider_generation,
        "match_type": match.match_type,
        "overlap": match.overlap_bucket,
        "tier": match.location.tier,
        "provider": match.provider,
        "quality_signals": dict(match.quality_signals),
    }


def _expected(advice: Advice) -> int | None:
    chosen = advice.decision.placed or advice.decision.shadow_choice
    if chosen is None or advice.sheet is None:
        return None
    for row in advice.sheet.rows:
        if row.replica == chosen:
            return round(row.evidence)
    return None


def _name(replica: ReplicaKey, profiles: Mapping[ReplicaKey, ReplicaProfile]) -> str:
    """`stable_routing_id/dp_rank`."""
    profile = profiles.get(replica)
    return profile.name if profile is not None else f"{replica.worker_id}/{replica.dp_rank}"
