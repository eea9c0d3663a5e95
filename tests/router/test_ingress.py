"""Client hints never pass: every place, every name, and nothing else is touched."""

from __future__ import annotations

import copy

import pytest

from dynamo_semkv.router.ingress import HINT_KEYS, prefill_half, strip_client_hints, without_own_pin

REQUEST = {
    "model": "m",
    "token_ids": [1, 2, 3],
    "sampling_options": {"temperature": 0.5},
    "routing": {"cache_salt": "tenant"},
    "extra_args": {"nvext": {"cache_salt": "tenant", "extra_fields": ["engine_data"]}, "other": 1},
    "annotations": ["a"],
}


def places() -> list[tuple[str, ...]]:
    return [(), ("extra_args",), ("nvext",), ("extra_args", "nvext")]


@pytest.mark.parametrize("place", places())
@pytest.mark.parametrize("key", sorted(HINT_KEYS))
def test_a_hint_is_removed_from_every_place(place: tuple[str, ...], key: str) -> None:
    request = copy.deepcopy(REQUEST)
    request.setdefault("nvext", {"keep": True})
    target = request
    for step in place:
        target = target[step]
    target[key] = {"actions": [{"payload": "donor of another tenant"}]}
    given = copy.deepcopy(request)

    stripped, count = strip_client_hints(request)

    assert count == 1
    assert "donor of another tenant" not in repr(stripped)
    assert request == given, "the caller's request was changed"
    del target[key]
    assert stripped == request, "something else than the hint was changed"


def test_all_places_at_once_are_counted() -> None:
    request = {
        "kv_hint": 1,
        "kv_hints": 2,
        "extra_args": {"semkv": 3, "nvext": {"semantic_donor": 4}},
        "nvext": {"kv_transfer_params": 5},
    }
    assert strip_client_hints(request) == ({"extra_args": {"nvext": {}}, "nvext": {}}, 5)


def test_a_request_without_hints_is_equal_and_shares_its_parts() -> None:
    stripped, count = strip_client_hints(REQUEST)
    assert count == 0
    assert stripped == REQUEST
    assert stripped is not REQUEST
    assert stripped["token_ids"] is REQUEST["token_ids"]


@pytest.mark.parametrize("odd", [None, [], "text", 7])
def test_parts_of_another_type_are_left_alone(odd: object) -> None:
    request = {"extra_args": odd, "nvext": odd}
    assert strip_client_hints(request) == (request, 0)
    nested = {"extra_args": {"nvext": odd}}
    assert strip_client_hints(nested) == (nested, 0)


def test_a_pin_to_this_router_is_none_and_any_other_stays() -> None:
    request = {"token_ids": [1], "routing": {"backend_instance_id": 7, "dp_rank": 1, "cache_salt": "s"}}
    assert without_own_pin(request, 7) == {"token_ids": [1], "routing": {"dp_rank": 1, "cache_salt": "s"}}
    assert request["routing"] == {"backend_instance_id": 7, "dp_rank": 1, "cache_salt": "s"}
    assert without_own_pin(request, 8) is request
    assert without_own_pin({"routing": None}, 7) == {"routing": None}


def test_the_prefill_half_of_a_request_names_no_decode_worker() -> None:
    whole = {
        "token_ids": [1],
        "routing": {"decode_worker_id": 5, "dp_rank": 1, "prefill_dp_rank": 2, "cache_salt": "s"},
    }
    kept = dict(whole["routing"])  # type: ignore[call-overload]
    assert prefill_half(whole) == {"token_ids": [1], "routing": {"prefill_dp_rank": 2, "cache_salt": "s"}}
    assert whole["routing"] == kept
    for untouched in ({"routing": {"dp_rank": 1}}, {"routing": None}, {"routing": {"decode_worker_id": None}}, {}):
        assert prefill_half(untouched) is untouched
