"""The choice of the next token."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from worker_connector.reference_engine import SamplingParams
from worker_connector.reference_engine.models.sampling import Sampler

LOGITS = torch.tensor([0.60, 0.10, 0.25, 0.05]).log()


def choices(count: int = 400, **params: Any) -> Counter[int]:
    sampler = Sampler(SamplingParams(seed=3, **params))
    return Counter(sampler.choose(LOGITS) for _ in range(count))


def test_greedy_takes_the_best() -> None:
    assert choices(3) == {0: 3}


def test_temperature_one_draws_from_the_distribution() -> None:
    found = choices(4000, temperature=1.0)
    for token, share in enumerate((0.60, 0.10, 0.25, 0.05)):
        assert found[token] / 4000 == pytest.approx(share, abs=0.04)


def test_top_k_and_top_p_cut_the_tail() -> None:
    assert set(choices(temperature=1.0, top_k=2)) == {0, 2}
    assert set(choices(temperature=1.0, top_p=0.5)) == {0}
    assert set(choices(temperature=1.0, top_p=0.7)) == {0, 2}
    assert set(choices(temperature=1.0, top_k=3, top_p=0.9)) == {0, 2, 1}


def test_low_temperature_sharpens() -> None:
    assert choices(temperature=0.05)[0] > 395


def test_equal_seeds_choose_equally() -> None:
    one, two = (Sampler(SamplingParams(temperature=1.0, seed=9)) for _ in range(2))
    assert [one.choose(LOGITS) for _ in range(20)] == [two.choose(LOGITS) for _ in range(20)]


@pytest.mark.parametrize(
    ("params", "names"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_k": -1}, "top_k is -1"),
    ],
)
def test_bad_parameters_name_the_field(params: dict[str, Any], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        SamplingParams(**params)
