"""What the engine tells a submitter about a request, and an operator about a rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

#: The model emitted one of the request's end tokens (which is among the output).
STOP = "stop"
#: max_new_tokens were generated.
LENGTH = "length"
CANCELLED = "cancelled"
ERROR = "error"


@dataclass(frozen=True)
class RequestStats:
    """The engine's own account of one request, in tokens."""

    prompt_tokens: int
    #: Prompt tokens that were not computed: device reuse plus what the connector served.
    cached_tokens: int
    device_reused_tokens: int
    connector_served_tokens: int
    generated_tokens: int
    #: Why the request failed; only with finish reason "error".
    error: str | None = None
    #: `[vocab_size]` per generated token, in the final output of a request that asked for them.
    generation_logits: tuple[torch.Tensor, ...] = ()


#: `on_output(new token ids, finish reason or None, stats)`, called on the engine thread of the request's rank. The call
#: with a finish reason is the last one; its token list is empty for "cancelled" and "error". If `on_output` raises, the
#: request ends as "cancelled", and the last call says so.
OnOutput = Callable[[list[int], "str | None", RequestStats], None]


@dataclass(frozen=True)
class RankStats:
    """The numbers of one rank at the end of its last iteration."""

    rank: int
    total_blocks: int
    #: Pages held by requests, including ended ones whose save still runs.
    active_blocks: int
    #: Pages that only the reuse tree holds; they can be evicted.
    cached_blocks: int
    waiting_requests: int
    #: Admitted requests, including those that wait for an asynchronous load.
    running_requests: int
    #: Requests that wait for an asynchronous load, or have ended and still save.
    parked_requests: int
    iterations: int
    #: Prompt tokens that went through a forward pass.
    computed_prompt_tokens: int
    generated_tokens: int
    #: Callbacks of submitters that raised.
    output_errors: int
    #: KV events lost because nobody polled.
    dropped_events: int
