"""Who may be placed on, whatever evidence says: each condition alone keeps a perfect donor from being followed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from dynamo_semkv.contracts.identity import ReplicaKey
from dynamo_semkv.router.pipeline import Advice
from dynamo_semkv.router.runtime_types import ReplicaCard, WorkerRole
from dynamo_semkv.scoring.filters import FilteredBy
from tests.router.fakes import (
    A0,
    A1,
    B0,
    B1,
    NAMESPACE,
    FakeEdge,
    FakeRouter,
    a_request,
    announcement,
    card,
    donor_on_a1,
)

CARDS = {A0: card("w-a"), A1: card("w-a"), B0: card("w-b"), B1: card("w-b")}


def fake(cards: dict[ReplicaKey, ReplicaCard] | None = None) -> FakeRouter:
    """A donor of nearly the whole prompt on A1, and nothing against it."""
    return FakeRouter(edge=FakeEdge(live=cards or CARDS), lookup=donor_on_a1())


async def advice(made: FakeRouter, **changes: Any) -> Advice:
    found = await made.advisor.advise(a_request(**changes), "req-1")
    assert found is not None
    return found


async def test_with_nothing_against_it_the_donor_s_replica_is_chosen() -> None:
    found = await advice(fake())
    assert (found.decision.reason.value, found.decision.placed) == ("placed", A1)


def with_cards(**changes: Any) -> dict[ReplicaKey, ReplicaCard]:
    """`changes` on the donor's worker."""
    return {replica: replace(it, **changes) if replica.worker_id == 11 else it for replica, it in CARDS.items()}


def dead(made: FakeRouter) -> None:
    made.edge.live = {B0: CARDS[B0], B1: CARDS[B1]}


def unannounced(made: FakeRouter) -> None:
    made.directory.update_live(CARDS)
    made.directory.update_live({B0: CARDS[B0], B1: CARDS[B1]})  # what it announced before it went does not count
    made.directory.update_live(CARDS)


def other_model(made: FakeRouter) -> None:
    for rank in (0, 1):
        made.directory.announce(announcement("w-a", rank, model="m2"))


def other_namespace(made: FakeRouter) -> None:
    made.directory.announce(announcement("w-a", 1, namespace=msgspec.structs.replace(NAMESPACE, kv_dtype="fp8")))


def decodes(made: FakeRouter) -> None:
    made.edge.live = with_cards(role=WorkerRole.DECODE)
    made.directory.serve_as("m", WorkerRole.AGGREGATED)


def busy(made: FakeRouter) -> None:
    made.edge.queued = {A1: made.config.placement.max_load_gap_tokens + 1}


@pytest.mark.parametrize(
    ("against", "reason"),
    [
        (dead, "donor_unreachable"),
        (unannounced, "donor_unreachable"),
        (other_model, "donor_unreachable"),
        (other_namespace, "donor_unreachable"),
        (decodes, "donor_unreachable"),
        (busy, "donor_unreachable"),
    ],
)
async def test_what_keeps_a_replica_from_being_chosen(against: Callable[[FakeRouter], None], reason: str) -> None:
    made = fake()
    against(made)
    found = await advice(made)
    assert (found.decision.reason.value, found.decision.placed) == (reason, None)


@pytest.mark.parametrize(
    ("changes", "cards", "filtered"),
    [
        ({"routing": {"allowed_worker_ids": [22]}}, CARDS, FilteredBy.NOT_ALLOWED),
        ({"routing": {"allowed_worker_ids": []}}, CARDS, FilteredBy.NOT_ALLOWED),
        ({"routing": {"routing_constraints": {"required_taints": ["gpu/h200"]}}}, CARDS, FilteredBy.LACKS_TAINT),
        (
            {"routing": {"routing_constraints": {"required_taints": ["gpu/h200", "rack/1"]}}},
            with_cards(taints=frozenset({"gpu/h200"})),
            FilteredBy.LACKS_TAINT,
        ),
        ({"extra_args": {"nvext": {"routing_constraints": {"required_taints": ["x"]}}}}, CARDS, FilteredBy.LACKS_TAINT),
    ],
    ids=["other worker allowed", "no worker allowed", "taint of none", "one taint of two", "taint in nvext"],
)
async def test_what_the_request_rules_out_is_not_chosen_and_the_sheet_says_why(
    changes: dict[str, Any], cards: dict[ReplicaKey, ReplicaCard], filtered: FilteredBy
) -> None:
    found = await advice(fake(cards), **changes)
    assert (found.decision.reason.value, found.decision.placed) == ("donor_unreachable", None)
    assert found.sheet is not None
    assert next(row for row in found.sheet.rows if row.replica == A1).filtered_by is filtered


@pytest.mark.parametrize(
    ("changes", "cards"),
    [
        ({"routing": {"allowed_worker_ids": [11]}}, CARDS),
        ({"routing": {"routing_constraints": {"required_taints": []}}}, CARDS),
        (
            {"routing": {"routing_constraints": {"required_taints": ["gpu/h200"], "preferred_taints": {}}}},
            with_cards(taints=frozenset({"gpu/h200", "rack/1"})),
        ),
    ],
    ids=["allowed worker", "no taint required", "required taint"],
)
async def test_what_fulfils_the_constraints_is_chosen_within_them(
    changes: dict[str, Any], cards: dict[ReplicaKey, ReplicaCard]
) -> None:
    made = fake(cards)
    await made.run(a_request(**changes))
    assert made.dispatch.pin == A1
    sent = made.dispatch.request["routing"]
    assert {name: sent[name] for name in changes["routing"]} == changes["routing"], "Dynamo checks them again"


@pytest.mark.parametrize(
    "changes",
    [
        {"routing": {"backend_instance_id": 22}},
        {"routing": {"dp_rank": 0}},
        {"routing": {"decode_worker_id": 22}},
        {"routing": {"prefill_worker_id": 22}},
        {"routing": {"prefill_dp_rank": 0}},
        {"routing": {"routing_constraints": {"preferred_taints": {"gpu/h200": 1.0}}}},
        {"routing": {"routing_constraints": {"required_taints": "gpu/h200"}}},
        {"routing": {"routing_constraints": {"some_day": ["x"]}}},
        {"routing": {"routing_constraints": "x"}},
        {"routing": {"allowed_worker_ids": "all"}},
        {"routing": {"allowed_worker_ids": [True]}},
        {"agent_context": {"session_id": "s"}},
        {"bootstrap_info": {"bootstrap_room": 1}},
        {"prefill_result": {"disaggregated_params": {}}},
    ],
    ids=str,
)
async def test_a_client_s_own_choice_is_never_overridden(changes: dict[str, Any]) -> None:
    made = fake()
    await made.run(a_request(**changes))
    assert made.opened.decision_reason == "client_pinned"
    assert made.dispatch.pin is None
    assert made.lookup.queries == []
    for name, value in changes.items():
        assert made.dispatch.request[name] == value, "and Dynamo gets it as it came"


async def test_an_adapter_whose_revision_nobody_can_tell_gets_no_advice() -> None:
    found = await advice(fake(), routing={"lora_name": "a"})
    assert (found.decision.reason.value, found.decision.placed) == ("adapter_unknown", None)


async def test_a_worker_that_does_not_say_its_role_is_treated_as_ever() -> None:
    made = fake(with_cards(role=WorkerRole.UNKNOWN))
    made.directory.serve_as("m", WorkerRole.PREFILL)
    assert (await advice(made)).decision.placed == A1


async def test_a_prefill_router_places_on_prefill_workers_whatever_the_client_said_of_decoding() -> None:
    made = FakeRouter(
        edge=FakeEdge(live={replica: replace(it, role=WorkerRole.PREFILL) for replica, it in CARDS.items()}),
        lookup=donor_on_a1(),
        role=WorkerRole.PREFILL,
        instance_id=77,
    )
    # As the frontend's prefill router sends it: our own id, and the client's decode worker.
    await made.run(
        a_request(routing={"prefill_worker_id": 77, "decode_worker_id": 99, "dp_rank": 3, "cache_salt": "t"})
    )
    assert made.dispatch.pin == A1
    assert made.dispatch.request["routing"] == {"cache_salt": "t"}


async def test_an_aggregated_router_leaves_a_named_decode_worker_to_dynamo() -> None:
    made = fake()
    await made.run(a_request(routing={"decode_worker_id": 99, "dp_rank": 3}))
    assert made.dispatch.pin is None
    assert made.dispatch.request["routing"] == {"decode_worker_id": 99, "dp_rank": 3}


async def test_a_queue_is_measured_against_replicas_that_the_request_may_go_to() -> None:
    """An idle decode worker beside aggregated ones, or one outside the constraints, is no alternative: nobody is
    overloaded by it."""
    behind = FakeRouter().config.placement.max_load_gap_tokens + 1
    cards = {replica: replace(it, role=WorkerRole.AGGREGATED) for replica, it in CARDS.items()}
    idle = {
        replica: replace(it, role=WorkerRole.DECODE) if replica.worker_id == 22 else it for replica, it in cards.items()
    }
    made = fake(idle)
    made.directory.serve_as("m", WorkerRole.AGGREGATED)
    made.edge.queued = {A0: behind, A1: behind}
    assert (await advice(made)).decision.placed == A1
    made = fake()
    made.edge.queued = {A0: behind, A1: behind}
    assert (await advice(made)).decision.placed is None
    assert (await advice(made, routing={"allowed_worker_ids": [11]})).decision.placed == A1
