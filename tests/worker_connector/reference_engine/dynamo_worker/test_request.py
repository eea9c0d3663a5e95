"""A Dynamo request as the engine is asked it: every field that changes the answer is honoured or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_semkv.contracts.codec import envelope_to_plain
from dynamo_semkv.contracts.hints import KvHintAction, KvHintsEnvelope
from worker_connector.reference_engine.dynamo_worker.request import (
    BadRequest,
    Submission,
    merged_hints,
    route_of,
    submission,
)

TOKENS = [1, 2, 3]


def read(request: dict[str, Any], tokens: list[int] = TOKENS) -> Submission:
    return submission(request, tokens, token_limit=100, data_parallel_size=2)


def test_a_bare_request_is_greedy_and_fills_the_room() -> None:
    asked = read({})
    assert asked.token_ids == TOKENS
    assert asked.max_new_tokens == 97
    assert asked.sampling.temperature == 0.0
    assert (asked.dp_rank, asked.cache_salt, asked.min_tokens) == (None, None, 0)
    assert asked.stop_token_ids == frozenset()


def test_everything_at_once() -> None:
    asked = read(
        {
            "stop_conditions": {"max_tokens": 5, "min_tokens": 2, "stop_token_ids_hidden": [7], "stop_token_ids": [8]},
            "sampling_options": {"temperature": 0.5, "top_p": 0.9, "top_k": -1, "seed": 3, "n": 1},
            "eos_token_ids": [9],
            "routing": {"dp_rank": 1, "cache_salt": "t1", "backend_instance_id": 5},
            "extra_args": {"nvext": {"cache_salt": "t1"}},
            "output_options": {"logprobs": None, "skip_special_tokens": True},
        }
    )
    assert asked.max_new_tokens == 5
    assert asked.min_tokens == 2
    assert asked.stop_token_ids == {7, 8, 9}
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.top_k) == (0.5, 0.9, 0)
    assert asked.sampling.seed == 3
    assert (asked.dp_rank, asked.cache_salt) == (1, "t1")


def test_more_than_fits_is_cut_to_what_fits() -> None:
    assert read({"stop_conditions": {"max_tokens": 10_000}}).max_new_tokens == 97


def test_ignore_eos_keeps_what_the_client_asked_for() -> None:
    stop = {"ignore_eos": True, "stop_token_ids_hidden": [7], "stop_token_ids": [8]}
    assert read({"stop_conditions": stop, "eos_token_ids": [9]}).stop_token_ids == {8}


def test_one_sampling_option_makes_the_others_neutral() -> None:
    sampling = read({"sampling_options": {"top_p": 0.5}}).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 0.5, 0)


SALTS = [
    ({"routing": {"cache_salt": "a"}}, "a"),
    ({"extra_args": {"nvext": {"cache_salt": "a"}}}, "a"),
    ({"routing": {"cache_salt": ""}, "extra_args": {"nvext": {"cache_salt": "a"}}}, "a"),
    ({"routing": {"cache_salt": "a"}, "extra_args": {"nvext": {"cache_salt": ""}}}, "a"),
    ({"routing": {"cache_salt": ""}}, None),
    ({"routing": None, "extra_args": None}, None),
]


@pytest.mark.parametrize(("request_", "salt"), SALTS)
def test_an_empty_salt_is_none(request_: dict[str, Any], salt: str | None) -> None:
    assert read(request_).cache_salt == salt


def test_two_salts_are_refused_and_not_shown() -> None:
    with pytest.raises(BadRequest, match=r"routing\.cache_salt.*nvext\.cache_salt") as caught:
        read({"routing": {"cache_salt": "secret-a"}, "extra_args": {"nvext": {"cache_salt": "secret-b"}}})
    assert "secret" not in str(caught.value)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"multi_modal_data": {"image": []}, "routing": {}}, "multi_modal_data"),
    ({"sampling_options": {"n": 2}}, "sampling_options.n"),
    ({"sampling_options": {"presence_penalty": 0.1}}, "sampling_options.presence_penalty"),
    ({"sampling_options": {"frequency_penalty": 0.1}}, "sampling_options.frequency_penalty"),
    ({"sampling_options": {"repetition_penalty": 1.1}}, "sampling_options.repetition_penalty"),
    ({"sampling_options": {"min_p": 0.1}}, "sampling_options.min_p"),
    ({"sampling_options": {"guided_decoding": {"json": {}}}}, "sampling_options.guided_decoding"),
    ({"sampling_options": {"temperature": -1}}, "sampling_options"),
    ({"sampling_options": {"temperature": "hot"}}, "sampling_options"),
    ({"sampling_options": 7}, "sampling_options"),
    ({"stop_conditions": {"max_tokens": 0}}, "stop_conditions.max_tokens"),
    ({"stop_conditions": {"min_tokens": -1}}, "stop_conditions.min_tokens"),
    ({"stop_conditions": {"stop_token_ids": ["a"]}}, "stop_conditions.stop_token_ids"),
    ({"eos_token_ids": 7}, "eos_token_ids"),
    ({"stop_conditions": {"max_tokens": "many"}}, "stop_conditions.max_tokens"),
    ({"routing": {"dp_rank": 2}}, "routing.dp_rank"),
    ({"routing": {"dp_rank": -1}}, "routing.dp_rank"),
    ({"routing": {"dp_rank": True}}, "routing.dp_rank"),
    ({"routing": {"lora_name": "adapter"}}, "routing.lora_name"),
    ({"routing": {"cache_salt": 7}}, "routing.cache_salt"),
    ({"output_options": {"logprobs": 1}}, "output_options.logprobs"),
    ({"output_options": {"prompt_logprobs": 0}}, "output_options.prompt_logprobs"),
]


@pytest.mark.parametrize(("request_", "field"), REFUSED)
def test_what_is_not_done_is_refused_by_name(request_: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest, match=rf"^{field}: got .*, allowed: ."):
        read(request_)


NEUTRAL = {"n": 1, "presence_penalty": 0.0, "frequency_penalty": 0, "repetition_penalty": 1.0, "min_p": 0.0}


def test_neutral_values_are_taken() -> None:
    assert read({"sampling_options": {**NEUTRAL, "guided_decoding": None}}).sampling.temperature == 0.0


@pytest.mark.parametrize("tokens", [[], [1] * 100])
def test_prompts_that_do_not_fit_are_refused(tokens: list[int]) -> None:
    with pytest.raises(BadRequest, match=rf"^token_ids: got '{len(tokens)} tokens', allowed: 1 to 99 tokens"):
        read({}, tokens)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ("stop_conditions", "sampling_options", "routing", "extra_args", "output_options", "eos_token_ids", "kv_hint")
INNER = ("max_tokens", "min_tokens", "stop_token_ids", "temperature", "top_k", "seed", "dp_rank", "cache_salt", "semkv")


@given(
    st.dictionaries(
        st.sampled_from(FIELDS), JSON | st.dictionaries(st.sampled_from(INNER), JSON, max_size=4), max_size=5
    )
)
def test_no_request_breaks_the_reader(request_: dict[str, Any]) -> None:
    try:
        read(request_)
        merged_hints(request_)
    except BadRequest:
        pass


def envelope(*types: str, version: str = "0.1") -> dict[str, Any]:
    actions = [KvHintAction(action_id=t, action_type=t, action_version="1.0", payload={}) for t in types]
    return envelope_to_plain(KvHintsEnvelope(protocol_version=version, message_id="m-" + types[0], actions=actions))


def test_both_envelopes_become_one() -> None:
    request = {"kv_hint": envelope("kv.fetch"), "extra_args": {"semkv": envelope("semkv.donor")}}
    hints, refused = merged_hints(request)
    assert hints is not None
    assert not refused
    assert [action.action_type for action in hints.actions] == ["semkv.donor", "kv.fetch"]
    assert hints.message_id == "m-semkv.donor"


def test_a_refused_envelope_costs_only_itself() -> None:
    hints, refused = merged_hints(
        {"kv_hint": envelope("kv.fetch", version="9"), "extra_args": {"semkv": envelope("a")}}
    )
    assert hints is not None
    assert [action.action_type for action in hints.actions] == ["a"]
    assert len(refused) == 1
    assert "protocol_version" in refused[0]


def test_no_envelope_is_none() -> None:
    assert merged_hints({}) == (None, [])


@pytest.mark.parametrize(
    ("extra_args", "route_id"),
    [
        ({"semkv": {"message_id": "a1" * 16}}, "a1" * 16),
        ({"semkv": {"message_id": "a line\nof somebody else's"}}, None),
        ({"semkv": {"message_id": 7}}, None),
        ({"semkv": "text"}, None),
        ({}, None),
        ("text", None),
        (None, None),
    ],
)
def test_the_route_for_the_log_is_a_route_or_none(extra_args: Any, route_id: str | None) -> None:
    assert route_of({"extra_args": extra_args}) == route_id
