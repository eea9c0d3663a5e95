"""The submitters of one rank's requests: who gets tokens, and who is told that a request ended."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from dynamo_semkv.telemetry.throttled import Throttled
from worker_connector.reference_engine.engine.outcome import OnOutput, RequestStats
from worker_connector.reference_engine.engine.request import LlmRequest

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)


@dataclass
class _Client:
    request: LlmRequest
    on_output: OnOutput
    on_end: Callable[[], None]
    logits: list[torch.Tensor] = field(default_factory=list)


class Clients:
    """Requests that have not ended for their submitters. Not thread-safe: the rank's thread owns it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._open: dict[int, _Client] = {}
        self._ended: list[Callable[[], None]] = []
        #: Output callbacks that raised.
        self.errors = 0

    @property
    def open(self) -> list[LlmRequest]:
        """The requests themselves."""
        return [client.request for client in self._open.values()]

    def add(self, request: LlmRequest, on_output: OnOutput, on_end: Callable[[], None]) -> None:
        """`on_output` gets tokens and the end; `on_end` is handed out by `take_ended` after the end."""
        self._open[request.request_id] = _Client(request, on_output, on_end)

    def take_ended(self) -> list[Callable[[], None]]:
        """`on_end` of the requests that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def keep_logits(self, request: LlmRequest, row: torch.Tensor) -> None:
        """`[vocab_size]` behind a generated token, for the final output."""
        client = self._open.get(request.request_id)
        if client is not None:
            client.logits.append(row.to("cpu", copy=True))

    def deliver(self, request: LlmRequest, tokens: list[int], reason: str | None, error: str | None = None) -> bool:
        """Hand out tokens or an end. False: the callback raised, so nobody waits for the request any more.

        Does nothing for a request that has ended already.
        """
        client = self._open.get(request.request_id)
        if client is None:  # ended in this iteration, before its token was handed out
            return True
        if reason is not None:
            self._ended.append(self._open.pop(request.request_id).on_end)
        stats = RequestStats(
            prompt_tokens=request.orig_prompt_len,
            cached_tokens=request.cached_tokens,
            device_reused_tokens=request.cached_on_device,
            connector_served_tokens=request.cached_tokens - request.cached_on_device,
            generated_tokens=request.num_generated_tokens,
            error=error,
            generation_logits=tuple(client.logits) if reason is not None else (),
        )
        try:
            client.on_output(tokens, reason, stats)
        except Exception:  # noqa: BLE001 - the submitter's code: its fault ends its own request only
            self.errors += 1
            _throttled.exception("rank %d: output callback of request %d failed", self._rank, request.request_id)
            return reason is not None
        return True
