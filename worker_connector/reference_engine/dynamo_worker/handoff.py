"""Disaggregated serving with the reference engine: what a prefill worker hands over, and what a decode worker makes of
it.

    prefill   the prompt and one token    -> {"first_token", "prompt_tokens"} in `disaggregated_params`
    decode    `prefill_result` of Dynamo  -> the stream, from the first token on

No KV moves between the processes: the decode worker computes the prompt again, behind the token that the prefill worker
found. So an answer tells whether prefill was right (its first token is the prefill worker's), and says nothing about a
transfer.

Pure: no Dynamo, no engine. Field names are those of Dynamo's PreprocessedRequest and LLMEngineOutput.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from worker_connector.reference_engine.dynamo_worker.request import BadRequest, Submission
from worker_connector.reference_engine.engine.outcome import LENGTH, STOP

Chunk = dict[str, Any]


class Role(str, Enum):
    """A worker's role; the values of `--disaggregation-mode` are those of Dynamo's mocker."""

    AGGREGATED = "agg"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class Handoff:
    """What a prefill worker handed over for one request."""

    first_token: int
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that the prefill worker did not compute."""


def context_only(asked: Submission) -> Submission:
    """The prompt and one token, whatever that token is: the hand-over must not depend on where a client wants to
    stop."""
    return replace(asked, max_new_tokens=1, min_tokens=0, stop_token_ids=frozenset())


async def handed_over(chunks: AsyncIterator[Chunk], prompt_tokens: int) -> AsyncGenerator[Chunk, None]:
    """The chunks of a prefill; the one with a token carries the hand-over."""
    async for chunk in chunks:
        if chunk.get("token_ids"):
            params = {"first_token": chunk["token_ids"][0], "prompt_tokens": prompt_tokens}
            chunk = {**chunk, "disaggregated_params": params}
        yield chunk


def handoff_of(request: Mapping[str, Any], prompt_tokens: int) -> Handoff | None:
    """None: the request was not prefilled elsewhere, so this worker does all of it. Raises BadRequest for another
    engine's hand-over, and for one of another prompt."""
    result = request.get("prefill_result")
    if result is None:
        return None
    params = result.get("disaggregated_params") if isinstance(result, Mapping) else None
    first, count = (
        (params.get("first_token"), params.get("prompt_tokens")) if isinstance(params, Mapping) else (None, None)
    )
    if type(first) is not int or type(count) is not int or first < 0:
        raise BadRequest(
            f"prefill_result.disaggregated_params: got {params!r}, allowed: first_token and prompt_tokens, as this "
            "engine's prefill says"
        )
    if count != prompt_tokens:
        raise BadRequest(
            f"prefill_result.disaggregated_params.prompt_tokens: got {count}, allowed: {prompt_tokens}, as in token_ids"
        )
    details = result.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
    return Handoff(first, count, cached if type(cached) is int else 0)


def _stops(asked: Submission, handoff: Handoff) -> bool:
    """Whether the first token ends the answer by itself."""
    return handoff.first_token in asked.stop_token_ids and asked.min_tokens <= 1


def continued(asked: Submission, handoff: Handoff) -> Submission | None:
    """What is left to generate; None: the first token was the last."""
    if asked.max_new_tokens <= 1 or _stops(asked, handoff):
        return None
    return replace(
        asked,
        token_ids=[*asked.token_ids, handoff.first_token],
        max_new_tokens=asked.max_new_tokens - 1,
        min_tokens=max(0, asked.min_tokens - 1),
    )


async def from_first_token(
    chunks: AsyncIterator[Chunk] | None, asked: Submission, handoff: Handoff
) -> AsyncGenerator[Chunk, None]:
    """The stream of a decode worker. `chunks` are those of what `continued` left to generate (None: nothing); the
    counts in the last one are those of the whole request."""
    first: Chunk = {"token_ids": [handoff.first_token]}
    if chunks is None:
        yield {
            **first,
            "finish_reason": STOP if _stops(asked, handoff) else LENGTH,
            "completion_usage": _usage(handoff, 1),
        }
        return
    yield first
    async for chunk in chunks:
        usage = chunk.get("completion_usage")
        if usage is not None:
            chunk = {**chunk, "completion_usage": _usage(handoff, usage["completion_tokens"] + 1)}
        yield chunk


def _usage(handoff: Handoff, generated: int) -> dict[str, Any]:
    return {
        "prompt_tokens": handoff.prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": handoff.prompt_tokens + generated,
        "prompt_tokens_details": {"cached_tokens": handoff.cached_tokens},
    }
