"""GatewayAdvice: the same decision, hint and route id for a gateway that dispatches by itself, so no token of an answer
passes through us.

It is asked at the endpoint `<namespace>.<router component>.advise`, which takes a PreprocessedRequest as `generate`
does, or by `POST /engine/semkv/advise` on the status server, which takes

    {"token_ids": [...], "model": "...", "cache_salt": "...", "lora_name": "...", "request_id": "..."}
        all but token_ids optional

and both answer

    {"route_id": str, "decision": str, "mode": str, "evidence_tokens": int,
     "replica": {"worker_id": str, "dp_rank": int, "stable_routing_id": str} | null,     where to send it, if anywhere
     "dynamo": {"worker_id": str, "dp_rank": int} | null,       what Dynamo's KvRouter would choose, not booked
     "hint": envelope | null}                                   sent to the replica over the bus already

or {"error": str}: the field, the value and what is allowed; or `busy`, with more than LARGE_AT_ONCE prompts of more
than LARGE tokens.

Ids are decimal strings: they exceed 2^53. The gateway sends `worker_id` and `dp_rank` along in its own way (to Dynamo's
frontend in direct mode: the headers `x-dynamo-worker-instance-id` and `x-dynamo-dp-rank`), and reuse counts by the
worker's report only, as always.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from dynamo_semkv.config.load import Loaded
from dynamo_semkv.config.schema import PlacementMode
from dynamo_semkv.contracts.codec import envelope_to_plain
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.identity import ReplicaKey, new_route_id
from dynamo_semkv.router.facts import UNCONSTRAINED, constraints_of
from dynamo_semkv.router.fallback import within
from dynamo_semkv.router.ingress import strip_client_hints
from dynamo_semkv.router.runtime_errors import FailureKind, RequestFailed
from dynamo_semkv.router.runtime_types import CallContext, Chunk, Edge, Handler, Request
from dynamo_semkv.router.service import Advising, Prepared, RouterService
from dynamo_semkv.router.traced import TracedHandler, traced
from dynamo_semkv.telemetry import logs
from dynamo_semkv.telemetry.traceparent import of_call
from dynamo_semkv.telemetry.tracing import Tracing

logger = logging.getLogger(__name__)

MAX_TOKENS = 2**20
"""The most tokens of one prompt; the model's context length is the limit where its card names one that is lower."""
LARGE = 2**15
"""A prompt of more tokens is read in a thread, and only LARGE_AT_ONCE of them are handled at a time: streams need the
event loop's turns."""
LARGE_AT_ONCE = 2
_PART = 2**14
"""Tokens that are checked without letting another thread run."""
_FIELDS = ("token_ids", "model", "cache_salt", "lora_name", "request_id", "traceparent")


class GatewayAdvice:
    """Answers a gateway's questions. One event loop, beside `RouterService`, whose records and counters it shares."""

    def __init__(
        self,
        service: RouterService,
        advisor: Advising,
        edge: Edge,
        loaded: Loaded,
        *,
        model: str,
        context_length: int | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """`model`: what a question that names none is about. `context_length`: of that model, in tokens."""
        self._service = service
        self._advisor = advisor
        self._edge = edge
        self._config, self._config_hash = loaded.config, loaded.hash
        self._model = model
        self._max_tokens = min(MAX_TOKENS, context_length) if context_length and context_length > 0 else MAX_TOKENS
        self._large = 0
        self.endpoint: Handler = traced(self.handle, TracedHandler, tracing)
        """`handle`, in a span where spans are made: what our endpoint and the status server's route call."""

    def reload(self, loaded: Loaded) -> None:
        """For questions from now on."""
        self._config, self._config_hash = loaded.config, loaded.hash

    async def handle(self, request: Request, call: CallContext) -> AsyncIterator[Chunk]:
        """Yields one chunk, the answer. RequestFailed: INVALID_REQUEST for what is no request, OVERLOADED ("busy") for
        a large prompt beyond LARGE_AT_ONCE."""
        try:
            if not isinstance(request, Mapping):
                raise ContractError(
                    "request", type(request).__name__, "a PreprocessedRequest: a mapping with token_ids"
                )
            count = self._bounded(_count(request.get("token_ids")))
            with self._slot(count):
                answer = await self.advise(request, call)
        except ContractError as error:
            raise RequestFailed(FailureKind.INVALID_REQUEST, str(error)) from error
        yield answer

    async def answer_body(self, body: Any) -> dict[str, Any]:
        """For the status server: an `error` instead of an exception, which Dynamo would show as a fault of the
        router."""
        try:
            request, call = await self._read(body)
            (answer,) = [chunk async for chunk in self.endpoint(request, call)]
            return answer
        except (ContractError, RequestFailed) as error:
            return {"error": str(error)}

    async def advise(self, request: Request, call: CallContext) -> dict[str, Any]:
        """The answer to one question; there is always one, if only "no advice"."""
        logs.bind(fresh=True, request_id=call.request_id, traceparent=call.traceparent)
        request, _ = strip_client_hints(request)
        advice, prepared = None, None
        if self._config.placement.mode is not PlacementMode.OFF:
            advice = await self._advisor.advise(request, call.request_id)
        choice = await self._dynamos_choice(request)
        if advice is not None:
            prepared = self._service.hand_over(request, call, advice, self._config_hash)
        return self._answer(prepared, choice)

    def _answer(self, prepared: Prepared | None, choice: ReplicaKey | None) -> dict[str, Any]:
        answer: dict[str, Any] = {
            "route_id": new_route_id(),
            "decision": "no_advice",
            "mode": self._config.placement.mode.value,
            "evidence_tokens": 0,
            "replica": None,
            "dynamo": _plain(choice),
            "hint": None,
        }
        if prepared is None:
            return answer
        decision = prepared.advice.decision
        replica = _plain(decision.placed)
        if replica is not None and prepared.pinned is not None:
            replica["stable_routing_id"] = prepared.pinned.stable_routing_id
        return answer | {
            "route_id": prepared.route_id,
            "decision": decision.reason.value,
            "mode": decision.mode.value,
            "evidence_tokens": decision.evidence_tokens,
            "replica": replica,
            "hint": envelope_to_plain(prepared.hint) if prepared.hint is not None else None,
        }

    async def _dynamos_choice(self, request: Request) -> ReplicaKey | None:
        given = request.get("routing")
        routing: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
        seconds = self._config.evidence.exact_deadline_ms / 1000
        try:
            constraints = constraints_of(request) or UNCONSTRAINED
            choice = await within(
                seconds,
                self._edge.best_choice(
                    request["token_ids"],
                    routing.get("cache_salt"),
                    routing.get("lora_name"),
                    constraints.required_taints,
                ),
            )
        except Exception as error:  # noqa: BLE001 - the gateway has its own choice; said in the log, and null in the answer
            logger.debug("advise: Dynamo's own choice: %s", error)
            return None
        # Dynamo cannot be asked for its choice among allowed workers only: no choice is better than one that it would
        # refuse.
        return choice.replica if constraints.allow(choice.replica.worker_id) else None

    def _bounded(self, count: int) -> int:
        if count > self._max_tokens:
            raise ContractError("token_ids", count, f"at most {self._max_tokens} token ids")
        return count

    @contextmanager
    def _slot(self, count: int) -> Iterator[None]:
        large = count > LARGE
        if large and self._large >= LARGE_AT_ONCE:
            raise RequestFailed(FailureKind.OVERLOADED, "busy")
        self._large += large
        try:
            yield
        finally:
            self._large -= large

    async def _read(self, body: Any) -> tuple[Request, CallContext]:
        if not isinstance(body, dict):
            raise ContractError("body", type(body).__name__, f"a JSON object with {', '.join(_FIELDS)}")
        unknown = sorted(map(str, body.keys() - set(_FIELDS)))
        if unknown:
            raise ContractError("body", unknown[0], f"only {', '.join(_FIELDS)}")
        tokens = body.get("token_ids")
        if not isinstance(tokens, list) or not 1 <= len(tokens) <= self._max_tokens:
            shown = len(tokens) if isinstance(tokens, list) else type(tokens).__name__
            raise ContractError("token_ids", shown, f"a list of 1 to {self._max_tokens} token ids")
        with self._slot(len(tokens)):
            sound = await asyncio.to_thread(_are_ids, tokens) if len(tokens) > LARGE else _are_ids(tokens)
        if not sound:
            raise ContractError("token_ids", "another value", "integers from 0 to 2147483647 only")
        text = {name: body.get(name) for name in _FIELDS[1:]}
        for name, value in text.items():
            if value is not None and not (isinstance(value, str) and len(value) <= 1024):
                raise ContractError(
                    name, type(value).__name__, "text of at most 1024 characters", secret=name == "cache_salt"
                )
        routing = {name: text[name] for name in ("cache_salt", "lora_name") if text[name] is not None}
        request: Request = {"model": text["model"] or self._model, "token_ids": tokens, "routing": routing}
        call = CallContext(text["request_id"] or "", {}, of_call(text["traceparent"], {}), lambda: False)
        return request, call


def _count(tokens: object) -> int:
    """How many token ids these are: packed ids have four bytes each. What is no prompt at all has none, and gets no
    advice."""
    if isinstance(tokens, (bytes, bytearray, memoryview)):
        return memoryview(tokens).nbytes // 4
    return len(tokens) if isinstance(tokens, Sequence) else 0


def _are_ids(tokens: list[Any]) -> bool:
    """Whether all are ids of 31 bits. They are checked part by part: one call into C over all of them would hold the
    interpreter, and so the event loop, as long in a thread as without one."""
    for at in range(0, len(tokens), _PART):
        part = tokens[at : at + _PART]
        # `true` is an int to Python, and 1 to numpy; only the type tells them apart.
        if set(map(type, part)) != {int} or min(part) < 0 or max(part) >= 2**31:
            return False
    return True


def _plain(replica: ReplicaKey | None) -> dict[str, Any] | None:
    return {"worker_id": str(replica.worker_id), "dp_rank": replica.dp_rank} if replica is not None else None
