"""Decision -> envelope, and back through the codec."""

from __future__ import annotations

import json

import msgspec

from dynamo_semkv.advice.decision import Decision, DecisionReason
from dynamo_semkv.advice.hint import build_envelope
from dynamo_semkv.config.schema import PlacementMode
from dynamo_semkv.contracts.codec import envelope_from_plain, envelope_to_plain, parse_donor_payload
from dynamo_semkv.contracts.evidence import MatchType, SemanticTrtMatch
from dynamo_semkv.contracts.identity import ReplicaKey, new_route_id
from dynamo_semkv.contracts.load_plan import ExpectedMode
from dynamo_semkv.contracts.location import Tier, WorkerLocation

MATCH = SemanticTrtMatch(
    donor_id="d" * 32,
    reusable_token_count=900,
    exact_prefix_tokens=640,
    match_type=MatchType.EXACT_EQUIVALENT,
    location=WorkerLocation(worker_id=1, dp_rank=0, tier=Tier.HOST_PINNED),
    provider="fingerprint",
    provider_generation="g1",
    overlap=0.8,
)
PLACED = Decision(
    PlacementMode.ENFORCE,
    DecisionReason.PLACED,
    placed=ReplicaKey(1, 0),
    match=MATCH,
    evidence_tokens=900,
    placed_tokens=900,
    hinted_tokens=900,
)


def test_a_placed_request_carries_one_donor_action() -> None:
    route = new_route_id()
    envelope = build_envelope(PLACED, route_id=route, namespace_hex="ab" * 32, generation="g1")
    assert envelope is not None
    back = envelope_from_plain(json.loads(json.dumps(envelope_to_plain(envelope))))
    (action,) = back.actions
    hint = parse_donor_payload(action)
    assert (hint.route_id, hint.donor_id, hint.generation) == (route, "d" * 32, "g1")
    assert (hint.token_count, hint.exact_prefix_tokens) == (900, 640)
    assert hint.expected_mode is ExpectedMode.EXACT_EQUIVALENT
    assert back.message_id == route


def test_a_similar_donor_promises_no_exact_prefix() -> None:
    match = msgspec.structs.replace(MATCH, match_type=MatchType.SEMANTIC_CANDIDATE)
    envelope = build_envelope(
        msgspec.structs.replace(PLACED, match=match), route_id=new_route_id(), namespace_hex="", generation="g"
    )
    assert envelope is not None
    assert parse_donor_payload(envelope.actions[0]).exact_prefix_tokens == 0


def test_nothing_is_hinted_without_placement_donor_or_hints() -> None:
    for decision in (
        msgspec.structs.replace(PLACED, placed=None),
        msgspec.structs.replace(PLACED, match=None),
        msgspec.structs.replace(PLACED, hinted_tokens=0),
        Decision(PlacementMode.SHADOW, DecisionReason.SHADOW, shadow_choice=ReplicaKey(1, 0), match=MATCH),
    ):
        assert build_envelope(decision, route_id=new_route_id(), namespace_hex="", generation="g") is None
