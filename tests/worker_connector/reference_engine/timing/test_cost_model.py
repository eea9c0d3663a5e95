"""What work takes on the GPU of a profile, against figures that are worked out here by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from worker_connector.reference_engine.timing.cost_model import CostModel, Rows
from worker_connector.reference_engine.timing.profile import GpuProfile, known_profiles, load_profile

ROUND = GpuProfile(
    name="round",
    parameters=1e9,
    layers=10,
    heads=4,
    kv_heads=1,
    head_dim=25,
    weight_bytes=1e10,
    kv_bytes_per_element=2,
    flops_per_second=1e12,
    flops_utilisation=0.5,
    memory_bytes_per_second=1e12,
    memory_utilisation=0.5,
    bus_bytes_per_second=1e7,
    bus_utilisation=0.5,
    pass_overhead_seconds=0.001,
    kv_memory_bytes=1e7,
    max_seq_len=10_000,
    max_num_tokens=512,
    max_batch_size=8,
)
"""A token: 2e9 operations, 4e3 more for each token before it and itself, 1,000 bytes of KV."""


def test_a_prefill_takes_what_its_operations_take() -> None:
    seconds = CostModel(ROUND).pass_seconds([Rows(0, 100)])
    assert seconds == pytest.approx(0.001 + (2e9 * 100 + 4e3 * 5_050) / 5e11)


def test_a_chunk_behind_others_attends_to_them_too() -> None:
    model = CostModel(ROUND)
    whole = model.pass_seconds([Rows(0, 200)]) - 0.001
    parts = [model.pass_seconds([Rows(start, 100)]) - 0.001 for start in (0, 100)]
    assert sum(parts) == pytest.approx(whole)
    assert parts[1] > parts[0]


def test_a_decode_takes_what_reading_weights_and_context_takes() -> None:
    seconds = CostModel(ROUND).pass_seconds([Rows(999, 1), Rows(1_999, 1)])
    assert seconds == pytest.approx(0.001 + (1e10 + 3_000 * 1_000) / 5e11)


def test_an_empty_pass_takes_nothing() -> None:
    assert CostModel(ROUND).pass_seconds([]) == 0.0


def test_copies_take_the_bus() -> None:
    assert CostModel(ROUND).copy_seconds(100) == pytest.approx(100 * 1_000 / 5e6)


def test_slower_stretches_everything_alike() -> None:
    once, thrice = CostModel(ROUND), CostModel(ROUND, slower=3)
    assert thrice.pass_seconds([Rows(0, 100)]) == pytest.approx(3 * once.pass_seconds([Rows(0, 100)]))
    assert thrice.copy_seconds(10) == pytest.approx(3 * once.copy_seconds(10))
    for slower in (0.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"slower is {slower}; it must be positive and finite"):
            CostModel(ROUND, slower=slower)


@pytest.mark.parametrize("name", known_profiles())
def test_every_profile_is_read_and_says_where_its_figures_are_from(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert profile.kv_tokens > profile.max_seq_len, "the longest prompt fits"
    assert profile.page_config.max_position_embeddings == profile.max_seq_len
    text = (Path(load_profile.__code__.co_filename).parent / "profiles" / f"{name}.yaml").read_text()
    assert "data sheet" in text
    assert "ssumed" in text


def test_an_8b_model_reads_its_weights_once_a_decode() -> None:
    profile = load_profile("llama-8b-h200")
    assert profile.kv_bytes_per_token == 131_072
    fastest = profile.weight_bytes / profile.memory_bytes_per_second
    assert CostModel(profile).pass_seconds([Rows(100, 1)]) > fastest


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("layers", 0, "layers is 0; it must be positive and finite"),
        ("kv_memory_bytes", math.inf, "kv_memory_bytes is inf; it must be positive and finite"),
        ("bus_utilisation", 1.5, "bus_utilisation is 1.5; it must be at most 1"),
        ("layers", "many", "Expected `int`, got `str` - at `$.layers`"),
        ("colour", 1, "unknown field `colour`"),
    ],
)
def test_a_wrong_profile_is_refused_by_field(tmp_path: Path, field: str, value: Any, why: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_bytes(msgspec.yaml.encode({**msgspec.to_builtins(ROUND), field: value}))
    with pytest.raises(ValueError, match=r"mine\.yaml") as refused:
        load_profile(str(file))
    assert why in str(refused.value)


def test_an_unknown_profile_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match="profile is 'b200'; it must be a YAML file or one of llama-70b"):
        load_profile("b200")
