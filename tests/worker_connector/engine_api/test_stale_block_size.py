"""An engine whose settings say another block size than its pool has (NVIDIA/TensorRT-LLM#13320).

A pool that is registered as one tensor does not say how many tokens a block holds, so the number comes from settings
that an attention backend may have overruled. The first report of a request shows the contradiction: so many tokens do
not take so many blocks.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.worker_connector.harness import Bench, ended, engine, prompt, quiet, run, settings
from worker_connector.engine_api.pages import block_size_fault
from worker_connector.scheduler import SemkvConnectorScheduler
from worker_connector.worker import SemkvConnectorWorker


def says(llm_args: Any, tokens_per_block: int) -> Any:
    """The same object: both halves of a connector find each other by it."""
    object.__setattr__(llm_args.kv_cache_config, "tokens_per_block", tokens_per_block)
    return llm_args


def misinformed(tokens_per_block: int) -> tuple[type[SemkvConnectorScheduler], type[SemkvConnectorWorker]]:
    class Scheduler(SemkvConnectorScheduler):
        def __init__(self, llm_args: Any) -> None:
            super().__init__(says(llm_args, tokens_per_block))

    class Worker(SemkvConnectorWorker):
        def __init__(self, llm_args: Any) -> None:
            super().__init__(says(llm_args, tokens_per_block))

    return Scheduler, Worker


@pytest.mark.parametrize(("said", "is_really"), [(16, 32), (32, 16), (64, 32)])
@pytest.mark.parametrize("chunk", [256, 64])
def test_nothing_is_loaded_or_saved_and_every_announcement_says_why(said: int, is_really: int, chunk: int) -> None:
    tokens = prompt(97)
    with engine(None, tokens_per_block=is_really, max_num_tokens=chunk) as plain:
        expected = run(plain, tokens)[1].token_ids
    bench = Bench(settings(min_offer_tokens=1, min_donor_tokens=16))
    options: dict[str, Any] = {"tokens_per_block": is_really, "max_num_tokens": chunk, "kv_cache_manager": "v1"}
    with engine(bench, spec=bench.spec(*misinformed(said)), **options) as running:
        for turn in range(3):
            request_id, generation = run(running, tokens)
            assert generation.token_ids == expected, f"turn {turn}"
            ended(bench)
            assert bench.report_of(request_id).confirmed == 0
            running.reset_prefix_cache()
        quiet(bench)
        numbers = bench.schedulers[0].snapshot()
        assert numbers["counts"]["block_size_differs"] >= 1
        assert numbers["tokens"].get("offered", 0) == 0
        assert numbers["ledger"]["resident"] == 0
        last = bench.sink.announcements[-1]
        assert last.materialization == "off"
        assert last.problem is not None
        assert f"{said} tokens in a block" in last.problem
        assert bench.report_of(request_id).reason.value == "unsupported_layout"


def test_the_right_size_goes_on_as_before() -> None:
    bench = Bench(settings(min_offer_tokens=1, min_donor_tokens=16))
    with engine(bench, kv_cache_manager="v1") as running:
        tokens = prompt(97)
        run(running, tokens)
        running.reset_prefix_cache()
        request_id, _ = run(running, tokens)
        quiet(bench)
        assert bench.report_of(request_id).confirmed == 96
        assert bench.sink.announcements[-1].problem is None


@pytest.mark.parametrize(
    ("reported", "tokens", "pass_end", "whole_prompt", "wrong"),
    [
        (7, 97, 97, True, False),
        (4, 97, 97, True, True),
        (8, 97, 97, True, True),
        (7, 97, 32, True, False),
        (4, 97, 32, True, True),
        (1, 16, 16, True, False),
        (1, 17, 17, True, True),
        (0, 97, 97, True, False),
        (2, 97, 32, False, False),
        (7, 97, 32, False, False),
        (1, 97, 32, False, True),
        (0, 97, 32, False, False),
    ],
)
def test_blocks_of_16_tokens_against_what_was_reported(
    reported: int, tokens: int, pass_end: int, whole_prompt: bool, wrong: bool
) -> None:
    fault = block_size_fault(reported, tokens, pass_end, 16, whole_prompt=whole_prompt)
    assert (fault is not None) == wrong
