"""What a preprocessed request says, whichever shape the frontend gave it."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.router.facts import UNCONSTRAINED, request_facts, token_list

PLAIN: dict[str, Any] = {"model": "m", "token_ids": [1, 2, 3], "routing": None, "extra_args": None, "annotations": []}


def facts(**changes: Any):  # type: ignore[no-untyped-def]
    return request_facts({**PLAIN, **changes})


def test_plain_request() -> None:
    got = facts()
    assert (got.model, list(got.token_ids), got.salt, got.lora_name, got.multimodal) == ("m", [1, 2, 3], None, None, ())
    assert not got.client_pinned
    assert not got.salt_is_empty


def test_packed_token_ids_are_integers_and_not_bytes() -> None:
    packed = struct.pack("<3i", 1, 70_000, 3)
    assert token_list(packed) == [1, 70_000, 3]
    assert list(facts(token_ids=packed).token_ids) == [1, 70_000, 3]
    assert token_list((4, 5)) == [4, 5]
    for bad in (b"abc", None, "text", 3):
        with pytest.raises(ContractError, match="token_ids"):
            token_list(bad)


@pytest.mark.parametrize(
    "changes",
    [
        {"routing": {"backend_instance_id": 0}},
        {"routing": {"decode_worker_id": 7}},
        {"routing": {"prefill_worker_id": 7}},
        {"routing": {"dp_rank": 0}},
        {"nvext": {"backend_instance_id": 5}},
        {"extra_args": {"nvext": {"decode_worker_id": 5}}},
        {"extra_args": {"nvext": {"dp_rank": 1}}},
        {"dp_rank": 1},
        {"agent_context": {"session_id": "s"}},
        {"prefill_result": {"disaggregated_params": {}}},
        {"annotations": ["query_instance_id:"]},
    ],
    ids=str,
)
def test_what_a_client_pinned_is_seen(changes: dict[str, Any]) -> None:
    assert facts(**changes).client_pinned


@pytest.mark.parametrize(
    "changes",
    [
        {"routing": {"backend_instance_id": None, "allowed_worker_ids": [], "priority_jump": 1.0, "cache_salt": "s"}},
        {"extra_args": {"nvext": {"extra_fields": ["worker_id"]}}},
        {"agent_context": {"session_id": None}},
        {"agent_context": {"session_id": ""}},
        {"annotations": ["ttft"]},
    ],
    ids=str,
)
def test_what_names_no_worker_is_no_pin(changes: dict[str, Any]) -> None:
    assert not facts(**changes).client_pinned


def test_constraints_of_all_places_hold_together() -> None:
    asked = {"required_taints": ["a"]}
    got = facts(
        routing={"allowed_worker_ids": [1, 2], "routing_constraints": asked},
        nvext={"allowed_worker_ids": [2, 3], "routing_constraints": {"required_taints": ["b"]}},
    )
    assert not got.client_pinned
    assert (got.constraints.workers, got.constraints.required_taints) == ({2}, {"a", "b"})
    assert [got.constraints.allow(worker) for worker in (1, 2, 3)] == [False, True, False]
    assert facts().constraints is UNCONSTRAINED
    assert UNCONSTRAINED.allow(7)


def test_salt_of_routing_else_of_nvext() -> None:
    assert facts(routing={"cache_salt": "a"}).salt == "a"
    assert facts(extra_args={"nvext": {"cache_salt": "b"}}).salt == "b"
    assert facts(routing={"cache_salt": "a"}, extra_args={"nvext": {"cache_salt": "a"}}).salt == "a"
    assert facts(routing={"cache_salt": ""}).salt_is_empty


def test_dynamo_8197_two_salts_are_refused_and_not_shown() -> None:
    with pytest.raises(ContractError, match="cache_salt") as caught:
        facts(routing={"cache_salt": "tenant-a"}, extra_args={"nvext": {"cache_salt": "tenant-b"}})
    assert "tenant-" not in str(caught.value)
    with pytest.raises(ContractError, match=r"routing\.cache_salt"):
        facts(routing={"cache_salt": 3})


def test_lmcache_4086_media_without_a_hash_is_unknown() -> None:
    media = {"multi_modal_data": {"image_url": [{"Url": "http://x"}, {"Url": "http://y"}]}}
    assert facts(**media).multimodal is None
    assert facts(**media, extra_args={"mm_hashes": ["h1", "h2"]}).multimodal == ("h1", "h2")
    assert facts(**media, extra_args={"mm_hashes": ["h1"]}).multimodal is None
    assert facts(**media, extra_args={"mm_hashes": ["h1", None]}).multimodal is None
    assert facts(prompt_embeds="AAAA").multimodal is None
    assert facts(multi_modal_data={}).multimodal == ()


def test_lora_name() -> None:
    assert facts(routing={"lora_name": "a"}).lora_name == "a"
    assert facts(routing={"lora_name": ""}).lora_name is None
