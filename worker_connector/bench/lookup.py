"""Measures the time of `get_num_new_matched_tokens` on the scheduler's thread, by length of the prompt and number of
resident prompts.

Every question is about a new request: half of them ask for a prompt that is resident whole, half for one that differs
from its middle on. The rows are real and have checksums, so checking those is part of the time.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass

from worker_connector.bench.rig import TOKENS_PER_BLOCK, Request, Rig, Tokens, quantile, random_tokens

GOAL_SECONDS = 1e-3
"""The goal for the p99 at 32k tokens."""


@dataclass(frozen=True)
class LookupCost:
    """Quantiles of the time of one question, in seconds. `own` is this thread's processor time, which a busy machine
    does not lengthen."""

    tokens: int
    resident_prompts: int
    tokens_as: str
    """`array` (`get_tokens_view`) or `list` (`get_tokens`)."""
    p50: float
    p99: float
    own_p50: float
    own_p99: float


def measure(
    tokens: int, resident_prompts: int, *, row_bytes: int = 32 * 1024, questions: int = 300
) -> list[LookupCost]:
    """One figure for each way in which engines hand out tokens."""
    blocks = resident_prompts * (tokens // TOKENS_PER_BLOCK)
    rig = Rig(row_bytes=row_bytes, blocks=blocks + 1, longest_prompt=tokens)
    try:
        prompts = [random_tokens(tokens, seed) for seed in range(resident_prompts)]
        for prompt in prompts:
            rig.serve(prompt)
        return [_cost(rig, prompts, view=view, questions=questions) for view in (True, False)]
    finally:
        rig.close()


def _cost(rig: Rig, prompts: list[Tokens], *, view: bool, questions: int) -> LookupCost:
    wall, own = [], []
    requests: list[tuple[Request, int]] = []
    for number in range(questions):
        prompt = prompts[number % len(prompts)]
        expected = (len(prompt) - 1) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
        if number % 2:
            middle = len(prompt) // 2 // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
            prompt, expected = prompt.copy(), middle
            prompt[middle] += 1
        requests.append((rig.request(prompt, view=view), expected))
    gc.collect()
    for request, expected in requests:
        started, mine = time.perf_counter(), time.thread_time()
        offered = rig.ask(request)
        own.append(time.thread_time() - mine)
        wall.append(time.perf_counter() - started)
        if offered != expected:
            raise RuntimeError(f"a prompt of {request.prompt_len} tokens was offered {offered}, not {expected}")
        rig.forget(request)
    return LookupCost(
        tokens=requests[0][0].prompt_len,
        resident_prompts=len(prompts),
        tokens_as="array" if view else "list",
        p50=quantile(wall, 0.5),
        p99=quantile(wall, 0.99),
        own_p50=quantile(own, 0.5),
        own_p99=quantile(own, 0.99),
    )
