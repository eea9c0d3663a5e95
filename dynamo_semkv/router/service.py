"""RouterService: one request, from the frontend to the worker and back.

    strip -> advise -> hint, record -> dispatch -> forward -> record

Invariants:
* The client's request never depends on us: what fails or is late here ends in Dynamo's own choice, counted by reason.
* A route is opened at most once an attempt and, once opened, observed exactly once, whatever ends it, cancellation at
  any await included (ai-dynamo/dynamo#12315).
* Nothing is done per chunk but forwarding.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from dynamo_semkv.advice.hint import build_envelope
from dynamo_semkv.config.load import Loaded
from dynamo_semkv.config.schema import PlacementMode
from dynamo_semkv.contracts.codec import envelope_to_plain
from dynamo_semkv.contracts.hints import EXTRA_ARGS_KEY, KvHintsEnvelope
from dynamo_semkv.contracts.identity import ReplicaKey, RouteId, StableReplica, new_route_id
from dynamo_semkv.contracts.keys import PromptKey
from dynamo_semkv.contracts.route_events import ADVISED, NO_WORKER
from dynamo_semkv.router.fallback import FallbackReason, Fallbacks
from dynamo_semkv.router.ingress import prefill_half, strip_client_hints, without_own_pin
from dynamo_semkv.router.pipeline import Advice
from dynamo_semkv.router.replicas import ReplicaDirectory
from dynamo_semkv.router.route_records import OpenRoute, RouteRecords
from dynamo_semkv.router.runtime_errors import ClientGone, FailureKind, RequestFailed
from dynamo_semkv.router.runtime_types import CallContext, Chunk, Dispatch, Edge, Request, WorkerRole
from dynamo_semkv.telemetry import logs

_ENDS = {
    FailureKind.WORKER_LOST: "worker_lost",
    FailureKind.NO_WORKER: "worker_lost",
    FailureKind.CANCELLED: "cancelled",
}


class Advising(Protocol):
    """The part of Advisor that is used here."""

    async def advise(self, request: Request, request_id: str) -> Advice | None:
        """Decides for one request. Raises nothing but its own cancellation; None: the request cannot be read."""
        ...


class Hints(Protocol):
    """The part of HintSender that is used here."""

    def send(
        self, replica: StableReplica, prompt_key: PromptKey, envelope: KvHintsEnvelope, traceparent: str | None = None
    ) -> bool:
        """Sends the hint without waiting. False: it was not sent."""
        ...


@dataclass(frozen=True)
class RouterIdentity:
    """Which router this is."""

    name: str
    """What route events call it."""
    instance_id: int | None = None
    """Its instance in Dynamo's discovery: the pin that a frontend sets on what it sends here. None: not registered."""
    role: WorkerRole = WorkerRole.UNKNOWN
    """What the workers behind it do."""


class Prepared(msgspec.Struct, frozen=True):
    """An attempt that is ready to be dispatched."""

    route_id: RouteId
    request: Request
    """With the hint in its `extra_args`, if it has one."""
    advice: Advice
    pinned: StableReplica | None
    hint: KvHintsEnvelope | None = None
    """What was sent over the bus; also in the request, unless its `extra_args` cannot carry it."""


class RouterService:
    """Serves the public model: `handle` is what the edge calls. One event loop."""

    def __init__(
        self,
        edge: Edge,
        advisor: Advising,
        hints: Hints,
        records: RouteRecords,
        directory: ReplicaDirectory,
        fallbacks: Fallbacks,
        loaded: Loaded,
        identity: RouterIdentity,
    ) -> None:
        self.counts: Counter[str] = Counter()
        """`requests`, `spent`, `passed_through`, `hints_stripped`, `decided_<DecisionReason>`, `ended_<end>`."""
        self._edge = edge
        self._advisor = advisor
        self._hints = hints
        self._records = records
        self._directory = directory
        self._fallbacks = fallbacks
        self._config, self._config_hash = loaded.config, loaded.hash
        self._identity = identity

    def reload(self, loaded: Loaded) -> None:
        """For requests from now on."""
        self._config, self._config_hash = loaded.config, loaded.hash

    async def handle(self, request: Request, call: CallContext) -> AsyncIterator[Chunk]:
        """The chunks of one attempt, yielded or sent (`CallContext.send`). Raises RequestFailed as the dispatch does,
        and ClientGone where a chunk cannot be sent; a fault of ours is never raised."""
        arrived = time.monotonic()
        if not isinstance(request, Mapping):
            raise RequestFailed(
                FailureKind.INVALID_REQUEST, f"request: got {type(request).__name__}, allowed: a mapping with token_ids"
            )
        if is_spent(request):
            self.counts["spent"] += 1
            yield {"token_ids": [], "finish_reason": "length"}
            return
        self.counts["requests"] += 1
        logs.bind(fresh=True, request_id=call.request_id, traceparent=call.traceparent)
        request = self._stripped(request)
        config_hash = self._config_hash  # of the configuration that decides, whatever is reloaded meanwhile
        advice = None
        if self._config.placement.mode is not PlacementMode.OFF:
            advice = await self._advisor.advise(request, call.request_id)
        # Nothing waits from here to the `try`, so no cancellation can fall between the opening record and its end.
        dispatch, route = self._dispatch(request, call, advice, arrived, config_hash)
        send = call.send
        end = "error"
        try:
            chunk = await dispatch.first()
            if chunk is not None and route is not None:
                route.begun(dispatch, self._directory, has_tokens=bool(chunk.get("token_ids")))
            while chunk is not None:
                if send is None:
                    yield chunk
                else:
                    try:
                        send(chunk)
                    except RuntimeError as error:
                        raise ClientGone(str(error)) from error
                chunk = await dispatch.next()
            end = _end_of(dispatch, call)
        except RequestFailed as failure:
            end = _failed_end(failure.kind, dispatch)
            raise
        except (asyncio.CancelledError, GeneratorExit, ClientGone):
            end = "cancelled"
            raise
        finally:
            if route is not None:
                self.counts[f"ended_{end}"] += 1
                self._records.ended(route, dispatch, end)
            # Closed here, not by the garbage collector: what the stream holds in Dynamo is given back now.
            await dispatch.close()

    def _stripped(self, request: Request) -> Request:
        """The request as we advise on it: without hints of clients, and without the frontend's pin to this router."""
        half = prefill_half(request) if self._identity.role is WorkerRole.PREFILL else request
        stripped, found = strip_client_hints(without_own_pin(half, self._identity.instance_id))
        self.counts["hints_stripped"] += found
        return stripped

    def _dispatch(
        self, request: Request, call: CallContext, advice: Advice | None, arrived: float, config_hash: str
    ) -> tuple[Dispatch, OpenRoute | None]:
        """Adds the hint, prepares the dispatch, records. The dispatch is sent by `first`, so the record comes
        before."""
        route: OpenRoute | None = None
        try:
            if advice is not None:
                prepared = self.prepare(request, call, advice, config_hash)
                route = OpenRoute(prepared.route_id, arrived, prepared.pinned, advice.queued)
                decision = prepared.advice.decision
                dispatch = self._edge.dispatch(
                    prepared.request,
                    decision.placed,
                    unpinned=request,
                    annotate={"route_id": prepared.route_id, "reason": decision.reason._value_},
                    tokens=prepared.advice.prompt.tokens,
                )
                return dispatch, route
        except Exception as error:  # noqa: BLE001 - whatever of ours fails here, the request goes as it came; counted and logged
            self._fallbacks.add(FallbackReason.ADVICE_ERROR, error)
        if route is None:
            self.counts["passed_through"] += 1
        return self._edge.dispatch(request, None), route

    def prepare(self, request: Request, call: CallContext, advice: Advice, config_hash: str) -> Prepared:
        """Hints and records one attempt. Whoever dispatches it must also record its end."""
        route_id = new_route_id()
        logs.bind(route_id=route_id)
        pinned = self._stable(advice.decision.placed)
        hinted, advice, hint = self._hint(request, call, advice, route_id, pinned)
        self.counts[f"decided_{advice.decision.reason._value_}"] += 1
        self._records.opened(advice, route_id, call, str(request.get("model") or ""), config_hash)
        return Prepared(route_id, hinted, advice, pinned, hint)

    def hand_over(self, request: Request, call: CallContext, advice: Advice, config_hash: str) -> Prepared | None:
        """`prepare` for a caller that dispatches by itself: the route ends here, its report alone says what became of
        it. None: a fault of ours, counted; there is no advice then."""
        try:
            prepared = self.prepare(request, call, advice, config_hash)
        except Exception as error:  # noqa: BLE001 - no advice is an answer too; counted and logged
            self._fallbacks.add(FallbackReason.ADVICE_ERROR, error)
            return None
        self.counts[f"ended_{ADVISED}"] += 1
        self._records.advised(prepared.route_id)
        return prepared

    def _hint(
        self, request: Request, call: CallContext, advice: Advice, route_id: RouteId, pinned: StableReplica | None
    ) -> tuple[Request, Advice, KvHintsEnvelope | None]:
        """The request with the envelope in its `extra_args`; the envelope also goes over the bus to the pinned
        replica's connector. Without an envelope, or where neither way took it, the advice counts no hinted tokens."""
        envelope = self._envelope(advice, route_id, call.traceparent) if pinned is not None else None
        if envelope is None or pinned is None:
            return request, _unhinted(advice), None
        sent = False
        try:
            sent = self._hints.send(pinned, advice.prompt.key, envelope, call.traceparent)
            if not sent:
                self._fallbacks.add(FallbackReason.HINT_NOT_SENT, f"{pinned.stable_routing_id}/{pinned.dp_rank}")
        except Exception as error:  # noqa: BLE001 - the hint in the request is still there; counted and logged
            self._fallbacks.add(FallbackReason.HINT_NOT_SENT, error)
        given = request.get("extra_args")
        if given is not None and not isinstance(given, Mapping):
            # The engine refuses or ignores a client's field that is no mapping: it passes unchanged.
            self._fallbacks.add(FallbackReason.HINT_ERROR, f"extra_args is {type(given).__name__}, no mapping")
            return (request, advice, envelope) if sent else (request, _unhinted(advice), None)
        extra_args = {**(given or {}), EXTRA_ARGS_KEY: envelope_to_plain(envelope)}
        return {**request, "extra_args": extra_args}, advice, envelope

    def _envelope(self, advice: Advice, route_id: RouteId, traceparent: str | None) -> KvHintsEnvelope | None:
        match = advice.decision.match
        try:
            return build_envelope(
                advice.decision,
                route_id=route_id,
                namespace_hex=advice.prompt.digest.hex(),
                generation=match.provider_generation if match is not None else "",
                traceparent=traceparent,
            )
        except Exception as error:  # noqa: BLE001 - without its hint the request is still served; counted and logged
            self._fallbacks.add(FallbackReason.HINT_ERROR, error)
            return None

    def _stable(self, replica: ReplicaKey | None) -> StableReplica | None:
        return self._directory.stable_of(replica) if replica is not None else None

    def snapshot(self) -> dict[str, Any]:
        """JSON-able counters for metrics and the page."""
        return {
            "open_routes": self._records.open_routes,
            "counts": dict(self.counts),
            "fallbacks": {reason.value: self._fallbacks.counts[reason] for reason in FallbackReason},
        }


def _unhinted(advice: Advice) -> Advice:
    if advice.decision.hinted_tokens == 0:
        return advice
    replace = msgspec.structs.replace
    return replace(advice, decision=replace(advice.decision, hinted_tokens=0))


def is_spent(request: Request) -> bool:
    """Whether no token is left to generate: a worker or router died between the last token and the end of the stream.
    Engines refuse the continued request, but its answer is complete and only has to be ended."""
    stop = request.get("stop_conditions")
    tokens = stop.get("max_tokens") if isinstance(stop, Mapping) else None
    return isinstance(tokens, int) and not isinstance(tokens, bool) and tokens == 0


def _failed_end(kind: FailureKind, dispatch: Dispatch) -> str:
    """The end of a stream that failed. NO_WORKER only before the first chunk and unless a lost worker may have run
    it."""
    if kind is FailureKind.NO_WORKER and dispatch.chunks == 0 and dispatch.fallback != FailureKind.WORKER_LOST.value:
        return NO_WORKER
    return _ENDS.get(kind, "error")


def _end_of(dispatch: Dispatch, call: CallContext) -> str:
    """The end of a stream that ended without an exception."""
    if dispatch.finish_reason is None:
        return "cancelled" if call.is_stopped() else "error"
    return dispatch.finish_reason if dispatch.finish_reason in ("cancelled", "error") else "complete"
