"""Model cards -> replicas: ranks a worker owns, cards that cannot be pinned to, and the memory of it."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from dynamo_semkv.contracts.identity import ReplicaKey
from dynamo_semkv.router.runtime_cards import CardError, CardTable, card_of, none_to_place, parse_card, role_before
from dynamo_semkv.router.runtime_types import WorkerRole

BIG = 2**64 - 1


def card(block_size: Any = 32, **runtime: Any) -> str:
    return json.dumps(
        {
            "display_name": "m",
            "source_path": "/models/m",
            "kv_cache_block_size": block_size,
            "context_length": 4096,
            "runtime_config": {"data_parallel_size": 2, "data_parallel_start_rank": 0, **runtime},
        }
    )


def test_every_field() -> None:
    parsed = parse_card(
        card(
            stable_routing_id="w0",
            total_kv_blocks=100,
            max_num_seqs=8,
            max_num_batched_tokens=8192,
            tool_call_parser="hermes",
            reasoning_parser=None,
            runtime_data={"router_hint": True},
        )
    )
    assert (parsed.model, parsed.source_path, parsed.block_size, parsed.context_length) == ("m", "/models/m", 32, 4096)
    assert (parsed.stable_routing_id, parsed.total_kv_blocks) == ("w0", 100)
    assert (parsed.max_num_seqs, parsed.max_num_batched_tokens) == (8, 8192)
    assert (parsed.tool_call_parser, parsed.reasoning_parser) == ("hermes", None)
    assert parsed.runtime_data == {"router_hint": True}


@pytest.mark.parametrize(
    ("says", "role"),
    [("prefill", WorkerRole.PREFILL), ("Decode", WorkerRole.DECODE), ("aggregated", WorkerRole.AGGREGATED)]
    + [(other, WorkerRole.UNKNOWN) for other in (None, "thinker", 3)],
)
def test_role_of_the_card(says: Any, role: WorkerRole) -> None:
    assert parse_card(json.dumps({"kv_cache_block_size": 16, "worker_type": says})).role is role


def test_taints_of_the_card() -> None:
    assert parse_card(card(taints=["a", "dynamo.topology/zone=1"])).taints == {"a", "dynamo.topology/zone=1"}
    assert parse_card(card()).taints == parse_card(card(taints="a")).taints == frozenset()


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ([], "unknown"),
        (["nobody says"], "unknown"),
        (["prefill", "prefill", "nobody says"], "prefill"),
        (["aggregated", "decode"], "aggregated"),
        (["decode"], None),
        (["prefill", "aggregated"], None),
    ],
)
def test_role_of_a_router_in_front_of_these_workers(roles: list[str], expected: str | None) -> None:
    cards = [parse_card(json.dumps({"kv_cache_block_size": 16, "worker_type": role})) for role in roles]
    if expected is None:
        with pytest.raises(CardError, match=f"worker_type: .*{roles[0]}.*dynamo.worker_component"):
            role_before(cards)
    else:
        assert role_before(cards).value == expected


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ([], False),
        (["nobody says"], False),
        (["decode", "nobody says"], True),
        (["decode", "encode"], True),
        (["decode", "aggregated"], False),
        (["prefill"], False),
    ],
)
def test_workers_that_compute_no_prompts_are_not_all_that_come(roles: list[str], expected: bool) -> None:
    cards = [parse_card(json.dumps({"kv_cache_block_size": 16, "worker_type": role})) for role in roles]
    assert none_to_place(cards) is expected


def test_what_is_offered_is_what_the_workers_of_the_role_say() -> None:
    decode, aggregated, silent = (
        parse_card(json.dumps({"kv_cache_block_size": 16, "worker_type": role, "display_name": f"of {role}"}))
        for role in ("decode", "aggregated", None)
    )
    assert card_of([decode, aggregated], WorkerRole.AGGREGATED).model == "of aggregated"
    assert card_of([silent], WorkerRole.UNKNOWN).model == "of None"


def test_a_worker_owns_its_own_ranks_only() -> None:
    replicas = CardTable().update({str(BIG): card(data_parallel_start_rank=4, data_parallel_size=3)})
    assert set(replicas) == {ReplicaKey(BIG, 4), ReplicaKey(BIG, 5), ReplicaKey(BIG, 6)}


def test_one_rank_when_the_card_does_not_say() -> None:
    text = json.dumps({"kv_cache_block_size": 16})
    assert set(CardTable().update({"7": text})) == {ReplicaKey(7, 0)}
    assert parse_card(text).stable_routing_id is None


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("{", "not JSON"),
        ("[]", "object"),
        (card(block_size=None), "kv_cache_block_size"),
        (card(block_size=0), "kv_cache_block_size"),
        (card(block_size=True), "kv_cache_block_size"),
        (card(data_parallel_size=0), "data_parallel_size"),
        (card(data_parallel_start_rank=-1), "data_parallel_start_rank"),
        (card(data_parallel_size=2000), "data_parallel_size"),
    ],
)
def test_a_card_that_cannot_be_pinned_to_names_its_field(text: str, names: str) -> None:
    with pytest.raises(CardError, match=names):
        parse_card(text)


def test_bad_cards_leave_the_others_and_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    table = CardTable()
    with caplog.at_level(logging.WARNING):
        for stable in ("a", "b", "a"):
            replicas = table.update({"1": card(block_size=0), "2": card(stable_routing_id=stable)})
            assert set(replicas) == {ReplicaKey(2, 0), ReplicaKey(2, 1)}
            assert replicas[ReplicaKey(2, 0)].stable_routing_id == stable
    assert len(caplog.records) == 1


def test_another_block_size_is_left_out_once_one_is_required() -> None:
    table = CardTable()
    assert len(table.update({"1": card(32)})) == 2
    table.require_block_size(32)
    assert set(table.update({"1": card(32), "2": card(64)})) == {ReplicaKey(1, 0), ReplicaKey(1, 1)}


def test_texts_of_workers_that_are_gone_are_forgotten() -> None:
    table = CardTable()
    for number in range(50):
        table.update({str(number): card(stable_routing_id=f"w{number}")})
    assert len(table._parsed) == 1
    assert table.update({}) == {}
    assert not table._parsed
