"""Requests that nothing may be offered to, by whichever attribute of the engine's request says so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_semkv.contracts.report import Outcome, Reason
from tests.worker_connector.scripted import ScriptedEngine, make
from worker_connector.engine_api.request_view import scope_of, unsupported

TOKENS = list(range(41))
IMAGE = {"image": {"pixel_values": object()}}


def served_twice(first: dict[str, Any], second: dict[str, Any]) -> tuple[int, Any, ScriptedEngine]:
    """(tokens offered to the second of two equal prompts, its report, the engine)."""
    engine = make()
    requests = [engine.request(TOKENS) for _ in range(2)]
    offered = 0
    for request, attributes in zip(requests, (first, second), strict=True):
        for name, value in attributes.items():
            setattr(request, name, value)
        offered = engine.prefill(request)
        request.tokens.append(1)
        engine.finish(request)
    engine.check_balance()
    return offered, engine.report_of(requests[1]), engine


@pytest.mark.parametrize(
    "media",
    [
        {"py_multimodal_data": IMAGE},
        {"py_multimodal_data": {"multimodal_embedding": object()}},
        {"py_multimodal_data": {"mrope_config": {"mrope_position_ids": object()}}},
        {"multimodal_embedding": object()},
        {"py_mm_encoder_state": object()},
        {"mrope_rotary_cos_sin": object()},
        {"multimodal_positions": [3]},
        {"multimodal_lengths": [5]},
        {"multimodal_hashes": [[1] * 8], "multimodal_positions": [3, 20]},
    ],
)
def test_media_without_a_hash_are_never_reused(media: dict[str, Any]) -> None:
    """LMCache#4086, NVIDIA/TensorRT-LLM#13579: equal placeholders, other images."""
    assert scope_of(SimpleNamespace(**media)).multimodal is None
    other = {name: dict(value) if isinstance(value, dict) else value for name, value in media.items()}
    offered, report, engine = served_twice(media, other)
    assert offered == 0
    assert report.reason is Reason.MULTIMODAL_UNHASHED
    assert engine.leader.snapshot()["ledger"]["resident"] == 0, "nor is anything of them saved"
    offered, _, _ = served_twice({}, media)
    assert offered == 0, "KV of the text alone is not that of the media"


def test_media_with_hashes_are_reused_by_hash() -> None:
    hashed = {"py_multimodal_data": IMAGE, "multimodal_hashes": [[1] * 8], "multimodal_positions": [3]}
    assert served_twice(hashed, hashed)[0] == 40
    assert served_twice(hashed, hashed | {"multimodal_hashes": [[2] * 8]})[0] == 0


@pytest.mark.parametrize(
    "nothing", [{"py_multimodal_data": None}, {"py_multimodal_data": {}}, {"multimodal_hashes": []}]
)
def test_attributes_that_carry_no_media_change_nothing(nothing: dict[str, Any]) -> None:
    assert served_twice(nothing, nothing)[0] == 40


@pytest.mark.parametrize(
    "wanted",
    [
        {"py_return_context_logits": True},
        {"return_context_logits": True},
        {"py_additional_outputs": ["hidden_states"]},
        {"position_ids": [0, 1]},
        {"encoder_tokens": [1, 2]},
        {"py_encoder_input_features": object()},
        {"prompt_embedding_table": object()},
        {"is_generation_only_request": lambda: True},
    ],
)
def test_a_request_that_needs_its_whole_context_is_offered_nothing(wanted: dict[str, Any]) -> None:
    """Of a token whose KV is loaded no logits are computed."""
    assert unsupported(SimpleNamespace(**wanted)) is Reason.UNSUPPORTED_REQUEST
    offered, report, _ = served_twice({}, wanted)
    assert offered == 0
    assert (report.outcome, report.reason) == (Outcome.NO_DONOR, Reason.UNSUPPORTED_REQUEST)


@pytest.mark.parametrize(
    "wanted",
    [
        {"py_return_context_logits": False, "py_additional_outputs": None},
        {"py_additional_outputs": [], "position_ids": None},
        {"py_return_generation_logits": True, "py_return_log_probs": True},
    ],
)
def test_what_concerns_generated_tokens_only_changes_nothing(wanted: dict[str, Any]) -> None:
    assert unsupported(SimpleNamespace(**wanted)) is None
    assert served_twice({}, wanted)[0] == 40
