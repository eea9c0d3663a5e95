"""Decision -> KvHintsEnvelope with one `semkv.donor@1.0` action."""

from __future__ import annotations

from dynamo_semkv.advice.decision import Decision
from dynamo_semkv.contracts.codec import donor_action
from dynamo_semkv.contracts.evidence import MatchType
from dynamo_semkv.contracts.hints import PROTOCOL_VERSION, DonorHint, KvHintsEnvelope
from dynamo_semkv.contracts.identity import RouteId
from dynamo_semkv.contracts.load_plan import ExpectedMode

ACTION_ID = "semkv-1"


def build_envelope(
    decision: Decision, *, route_id: RouteId, namespace_hex: str, generation: str, traceparent: str | None = None
) -> KvHintsEnvelope | None:
    """The envelope of a placed request; None when there is nothing to hint (not placed, no donor, or hints are off).

    `generation`: of the donor's engine, as the evidence knew it. The expected mode is always exact: approximate KV is
    never asked for.
    """
    match = decision.match
    if decision.placed is None or match is None or decision.hinted_tokens < 1:
        return None
    hint = DonorHint(
        route_id=route_id,
        donor_id=match.donor_id,
        expected_mode=ExpectedMode.EXACT_EQUIVALENT,
        generation=generation,
        namespace=namespace_hex,
        token_count=match.reusable_token_count,
        exact_prefix_tokens=match.exact_prefix_tokens if match.match_type is MatchType.EXACT_EQUIVALENT else 0,
        score_bucket=match.overlap_bucket,
        traceparent=traceparent,
    )
    return KvHintsEnvelope(
        protocol_version=PROTOCOL_VERSION, message_id=route_id, actions=[donor_action(ACTION_ID, hint)]
    )
