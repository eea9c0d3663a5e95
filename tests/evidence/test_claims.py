"""What a provider says is possible for the prompt, and of the types that the contract says, before anybody else sees
it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from dynamo_semkv.contracts.evidence import SemanticTrtSegment
from dynamo_semkv.contracts.location import SharedLocation, Tier, WorkerLocation
from dynamo_semkv.evidence.deadline import LookupStatus
from dynamo_semkv.testing import ScriptedProvider
from tests.evidence.test_deadline import QUERY, Runners, match, runner

__all__ = ["runner"]


@pytest.mark.parametrize(
    "unsound",
    [
        match(overlap=math.nan),
        match(confidence=math.inf),
        match(overlap=1.5),
        match(confidence=-0.1),
        match(reusable_token_count=0),
        match(reusable_token_count=257),
        match(exact_prefix_tokens=-1),
        match(exact_prefix_tokens=257),
        match(segments=(SemanticTrtSegment(target_start=200, donor_start=0, token_count=57),)),
        match(segments=(SemanticTrtSegment(target_start=0, donor_start=0, token_count=1),) * 257),
        match(segments=[]),
        match(segments=(None,)),
        match(overlap="0.5"),
        match(reusable_token_count=1.5),
        match(location=[1]),
        match(donor_id=[]),
        match(donor_id="two words"),
        match(donor_id="d" * 129),
        match(provider="p" * 257),
        match(provider="\ud800"),
        match(provider_generation="g" * 257),
        match(location=WorkerLocation([], 0, Tier.HOST_PINNED)),
        match(location=WorkerLocation(1, 0, "host_pinned")),
        match(location=SharedLocation([], Tier.DISK, "x")),
        match(match_type="semantic_candidate"),
        match(quality_signals={"similarity": math.nan}),
        match(quality_signals={"similarity": 1e300}),
        match(quality_signals={"similarity": "high"}),
        match(quality_signals={"sure": True}),
        match(quality_signals={1: 1.0}),
        match(quality_signals={"s" * 33: 1.0}),
        match(quality_signals={"é": 1.0}),
        match(quality_signals={f"s{n}": 1.0 for n in range(9)}),
        match(quality_signals=[("similarity", 1.0)]),
        match(quality_signals=None),
        match(metadata={"text": "x" * 257}),
        match(metadata={"tokens": [1, 2]}),
        "not a match",
        None,
    ],
    ids=str,
)
async def test_an_impossible_claim_is_not_believed(runner: Runners, unsound: Any) -> None:
    target = runner(ScriptedProvider([unsound, match("sound")], [unsound]))
    result = await target.lookup(QUERY)
    assert [m.donor_id for m in result.matches] == ["sound"]
    assert (await target.lookup(QUERY)).status is LookupStatus.ERROR
    assert target.snapshot()["scripted"]["lookups"]["unsound_matches"] == 2


async def test_signals_and_metadata_come_through_as_plain_numbers(runner: Runners) -> None:
    said = match(
        quality_signals={"similarity": np.float32(0.5), "windows": np.int64(4)},
        metadata={"donor_tokens": np.int32(7), "source": "books"},
    )
    (found,) = (await runner(ScriptedProvider([said])).lookup(QUERY)).matches
    assert found.quality_signals == {"similarity": 0.5, "windows": 4.0}
    assert found.metadata == {"donor_tokens": 7.0, "source": "books"}
    assert all(type(value) in (float, int) for value in found.quality_signals.values())
