"""Sends one request through Dynamo's KvRouter: pin, fall back, forward, name the replica that served.

The first chunk and the last one of a choice are inspected; all others are taken from Dynamo's own stream and only
counted.

Invariants:
* A pin is (worker, rank), both or none: a worker id alone names no replica when a worker has several ranks.
* A pin is our advice. When it cannot be followed and no chunk was sent, the request goes to Dynamo's own choice, once.
* After the first chunk a lost worker is reported as WORKER_LOST: the frontend alone knows what the client already has,
  so it alone can continue the stream.
* The frontend books its own attribution: it dispatched to this router, and a `worker_id` from us that differs from it
  is logged as an ERROR for every request. So the ids are taken out of `routing_data`, and the replica that served is
  named in `engine_data`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Protocol

import numpy as np

from dynamo_semkv.contracts.identity import ReplicaKey
from dynamo_semkv.contracts.keys import TokenArray, packed
from dynamo_semkv.router.runtime_errors import FailureKind, RequestFailed, classify, message
from dynamo_semkv.router.runtime_types import Chunk, ChunkStream, Request
from dynamo_semkv.telemetry.throttled import Throttled

logger = logging.getLogger(__name__)
_throttled = Throttled(logger)

SERVED_KEY = "semkv"
"""Key in a chunk's `engine_data` that names to the client the replica that served (with nvext.extra_fields
["engine_data"])."""

_INT32_MAX = 2**31 - 1

COMPLETE = frozenset({"stop", "length", "eos", "content_filter"})
"""Finish reasons after which a trailing error of the worker changes nothing for the client."""

HANDED_OVER = "handed_over"
"""The finish reason of a prefill worker's stream that gave its KV to a decode worker and named no other reason."""


Generate = Callable[[Request], Awaitable[ChunkStream]]
"""KvRouter.generate_from_request with its buffer size bound."""


def pinned_request(request: Request, pin: ReplicaKey) -> Request:
    """The request, routed to `pin`. Always sets both fields; the caller's request is left as it is."""
    routing = dict(request.get("routing") or {})
    routing["backend_instance_id"] = pin.worker_id
    routing["dp_rank"] = pin.dp_rank
    return {**request, "routing": routing}


def packed_request(request: Request, tokens: TokenArray) -> Request:
    """The request with its token ids as one little-endian i32 buffer, which Dynamo reads in a third of the time that a
    list takes (form: `dynamo.common.utils.token_ids`). Unchanged where an id needs more than 31 bits."""
    if not len(tokens) or int(np.maximum.reduce(tokens)) > _INT32_MAX:
        return request
    return {**request, "token_ids": packed(tokens)}


def take_replica(chunk: Chunk) -> ReplicaKey | None:
    """Remove the worker attribution from a first chunk's `routing_data` and return it.

    Id and rank come from the same phase, decode preferred: mixing phases would name a replica that does not exist.
    """
    routing_data = chunk.get("routing_data")
    if not isinstance(routing_data, dict):
        return None
    info = routing_data.pop("worker_id", None)
    if not routing_data:
        del chunk["routing_data"]
    if not isinstance(info, dict):
        return None
    for phase in ("decode", "prefill"):
        worker, rank = info.get(f"{phase}_worker_id"), info.get(f"{phase}_dp_rank")
        if isinstance(worker, int) and isinstance(rank, int):
            return ReplicaKey(worker, rank)
    return None


class Losses(Protocol):
    """Takes note of a worker that was lost, so that nothing is pinned to it until discovery knows."""

    def lost(self, worker_id: int) -> None:
        """Keeps the worker from being pinned to for a while. Does not wait."""
        ...


class RequestDispatch:
    """`Dispatch` (runtime_types.py) over one KvRouter."""

    def __init__(
        self,
        generate: Generate,
        request: Request,
        pin: ReplicaKey | None,
        *,
        unpinned: Request | None,
        annotate: Mapping[str, Any] | None,
        losses: Losses,
        tokens: TokenArray | None = None,
    ) -> None:
        self._generate = generate
        self._request = request
        self._pin = pin
        self._unpinned = request if unpinned is None else unpinned
        self._tokens = tokens
        self._annotate = annotate
        sampling = request.get("sampling_options")
        choices = sampling.get("n") if isinstance(sampling, Mapping) else None
        # The engine refuses a value that is no count; it is no reason to fail here.
        self._choices_open = choices if isinstance(choices, int) and choices > 0 else 1
        self._losses = losses
        self._stream: ChunkStream = _NO_STREAM
        self.replica: ReplicaKey | None = None
        self.pinned = False
        self.fallback: str | None = None
        self.chunks = 0
        self.finish_reason: str | None = None
        self.engine_data: Mapping[str, Any] | None = None
        self.usage: Mapping[str, Any] | None = None
        self.timing: Mapping[str, Any] | None = None

    async def first(self) -> Chunk | None:
        """Sends the request, to the pin and, when the pin fails, to Dynamo's choice. None: an empty answer."""
        self._stream, chunk = await self._first()
        if chunk is None:
            return None
        self.chunks = 1
        self.replica = take_replica(chunk)
        self._name_replica(chunk)
        if chunk.get("finish_reason") is not None:
            self._last(chunk)
        elif chunk.get("disaggregated_params") is not None:
            self._last({**chunk, "finish_reason": HANDED_OVER})
        return chunk

    async def next(self) -> Chunk | None:
        """The next chunk; None: there are no more. RequestFailed when the worker failed before its answer was
        complete."""
        try:
            chunk = await self._stream.__anext__()
        except StopAsyncIteration:
            return None
        except Exception as error:
            if self._choices_open <= 0:
                _throttled.info("worker failed after a complete answer: %s", error)
                return None
            raise self._failed(error) from error
        self.chunks += 1
        if chunk.get("finish_reason") is not None:
            self._last(chunk)
        return chunk

    async def _first(self) -> tuple[ChunkStream, Chunk | None]:
        """The stream and its first chunk; falls back from our pin to Dynamo's choice, once."""
        if self._pin is not None:
            try:
                stream = await self._send(pinned_request(self._request, self._pin))
            except Exception as error:  # noqa: BLE001 - no chunk was sent: whatever refused our pin, Dynamo's choice may serve
                self._give_up_pin(error)
            else:
                try:
                    chunk = await _next(stream)
                except Exception as error:
                    # From here the worker has the request. Its refusal of the request itself stands (a retry would only
                    # run the same request twice); a worker that is lost or full did not refuse it.
                    if classify(error) not in (FailureKind.WORKER_LOST, FailureKind.OVERLOADED, FailureKind.NO_WORKER):
                        raise self._failed(error) from error
                    self._give_up_pin(error)
                else:
                    self.pinned = True
                    return stream, chunk
        try:
            stream = await self._send(self._unpinned)
            return stream, await _next(stream)
        except Exception as error:
            raise self._failed(error) from error

    def _send(self, request: Request) -> Awaitable[ChunkStream]:
        return self._generate(request if self._tokens is None else packed_request(request, self._tokens))

    def _give_up_pin(self, error: Exception) -> None:
        assert self._pin is not None
        kind = classify(error)
        self.fallback = kind.value
        if kind in (FailureKind.WORKER_LOST, FailureKind.NO_WORKER):
            self._losses.lost(self._pin.worker_id)
        _throttled.info("pin to worker %d rank %d given up (%s): %s", *self._pin, kind.value, error, key=kind.value)

    def _failed(self, error: Exception) -> RequestFailed:
        kind = classify(error)
        if kind is FailureKind.WORKER_LOST and self.replica is not None:
            self._losses.lost(self.replica.worker_id)
        return RequestFailed(kind, message(error))

    async def close(self) -> None:
        """Gives the stream back: as long as somebody holds it, Dynamo has the request booked."""
        self._stream = _NO_STREAM

    def _last(self, chunk: Chunk) -> None:
        """Reads the last chunk of one choice (a request with n > 1 has n of them), and writes into it who served."""
        reason = chunk["finish_reason"]
        self.finish_reason = reason if isinstance(reason, str) else "error"
        if self.finish_reason in COMPLETE or self.finish_reason == HANDED_OVER:
            self._choices_open -= 1
        engine_data = chunk.get("engine_data")
        if isinstance(engine_data, dict):
            self.engine_data = {key: value for key, value in engine_data.items() if key != SERVED_KEY}
        usage = chunk.get("completion_usage")
        if isinstance(usage, dict):
            self.usage = usage
        routing_data = chunk.get("routing_data")
        if isinstance(routing_data, dict) and isinstance(routing_data.get("timing"), dict):
            self.timing = routing_data["timing"]
        self._name_replica(chunk)

    def _name_replica(self, chunk: Chunk) -> None:
        """Writes who served into the chunk's engine_data (a unary response keeps that of the last chunk, a stream shows
        the first's)."""
        if self.replica is None:
            return
        engine_data = chunk.get("engine_data")
        if engine_data is None:
            engine_data = chunk["engine_data"] = {}
        if isinstance(engine_data, dict):
            # u64 ids do not fit a JSON number everywhere (53 bits), hence text.
            engine_data[SERVED_KEY] = {
                "worker_id": str(self.replica.worker_id),
                "dp_rank": self.replica.dp_rank,
                **(self._annotate or {}),
            }


class _NoStream:
    """A stream without chunks."""

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        raise StopAsyncIteration


_NO_STREAM = _NoStream()


async def _next(stream: ChunkStream) -> Chunk | None:
    try:
        return await stream.__anext__()
    except StopAsyncIteration:
        return None
