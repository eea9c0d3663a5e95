"""Advisor: what to do with one request, within a deadline, whatever happens.

    exact overlap and load from Dynamo -> donor lookup, where it can help -> weigh -> Advice

It waits at most `evidence.exact_deadline_ms + evidence.deadline_ms`, plus what hashing the tokens takes, and it raises
nothing but its own cancellation: a fault is an Advice without a placement, counted by reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from dynamo_semkv.advice.decision import DecisionReason
from dynamo_semkv.advice.gate import effective_mode, no_advice
from dynamo_semkv.config.schema import Config, PlacementMode
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.identity import ReplicaKey
from dynamo_semkv.contracts.keys import BlockChain
from dynamo_semkv.contracts.namespace import DEFAULT_SALT_KEY
from dynamo_semkv.evidence.deadline import LookupResult, LookupStatus
from dynamo_semkv.evidence.provider import LookupQuery
from dynamo_semkv.router.facts import RequestFacts, request_facts
from dynamo_semkv.router.fallback import FallbackReason, Fallbacks, Late, within
from dynamo_semkv.router.pipeline import (
    Advice,
    DecisionContext,
    Lookup,
    Prompt,
    covers,
    narrow,
    no_advice_reason,
    weigh,
)
from dynamo_semkv.router.replicas import ModelView, ReplicaDirectory
from dynamo_semkv.router.runtime_types import Edge, Exact, ReplicaCard, Request
from dynamo_semkv.scoring.credit import Credit
from dynamo_semkv.scoring.extra import GuardedScorer

LOOKUP_SLACK = 2.0
"""The lookup runner keeps its own deadline; the request stops waiting for the runner after this many times that
deadline."""


class LookupRunner(Protocol):
    """The part of evidence.deadline.DeadlineRunner that is used here."""

    async def lookup(self, query: LookupQuery) -> LookupResult:
        """Asks all providers, under the runner's own deadline."""
        ...


class Advisor:
    """Makes the advice for each request. One event loop."""

    def __init__(
        self,
        *,
        edge: Edge,
        directory: ReplicaDirectory,
        lookup: LookupRunner,
        config: Config,
        fallbacks: Fallbacks,
        salt_key: bytes = DEFAULT_SALT_KEY,
        credit: Credit | None = None,
        scorers: Sequence[GuardedScorer] = (),
    ) -> None:
        self._edge = edge
        self._directory = directory
        self._lookup = lookup
        self._context = DecisionContext(directory, config, credit, scorers)
        self._fallbacks = fallbacks
        self._salt_key = salt_key
        self._live: Mapping[ReplicaKey, ReplicaCard] | None = None
        self._weighing = 0

    def reload(self, config: Config) -> None:
        """For requests from now on; those that are being weighed keep the configuration that they began with."""
        self._context = msgspec.structs.replace(self._context, config=config)

    def refresh(self) -> None:
        """Takes over what discovery lists now; cheap when nothing changed. Called for each request and on every
        beat."""
        live = self._edge.live_replicas()
        if live is not self._live:
            self._directory.update_live(live)
            self._live = live

    async def advise(self, request: Request, request_id: str) -> Advice | None:
        """What to do with the request; None when even its tokens could not be read. Raises nothing but its own
        cancellation."""
        context = self._context
        config = context.config
        mode = effective_mode(config.placement, request_id)
        prompt: Prompt | None = None
        try:
            self.refresh()
            facts = request_facts(request)
            view = self._directory.view_of(facts.model)
            prompt = narrow(facts, view, self._salt_key)
            reason = no_advice_reason(facts, view, prompt)
            if reason is not None:
                return Advice(no_advice(mode, reason), prompt)
            if self._weighing >= config.evidence.max_inflight:
                # Waiting for Dynamo and for providers costs turns of the event loop, which every stream needs: requests
                # go first.
                return Advice(no_advice(mode, DecisionReason.OVERLOADED), prompt)
            self._weighing += 1
            try:
                return await self._weigh(facts, view, prompt, context, mode, request_id)
            finally:
                self._weighing -= 1
        except ContractError as error:
            self._fallbacks.add(FallbackReason.REQUEST_UNREADABLE, error)
        except Exception as error:  # noqa: BLE001 - a fault of ours may not fail the request; counted and logged
            self._fallbacks.add(FallbackReason.ADVICE_ERROR, error)
        return Advice(no_advice(mode, DecisionReason.FAULT), prompt) if prompt is not None else None

    async def _weigh(
        self,
        facts: RequestFacts,
        view: ModelView,
        prompt: Prompt,
        context: DecisionContext,
        mode: PlacementMode,
        request_id: str,
    ) -> Advice:
        config = context.config
        exact = await self._exact(facts, config.evidence.exact_deadline_ms / 1000)
        if exact is None:
            return Advice(no_advice(mode, DecisionReason.EXACT_UNKNOWN), prompt)
        lookup = Lookup()
        if not covers(exact, prompt, config.evidence.skip_when_exact_covers):
            lookup = await self._look_up(prompt, exact.overlap.block_size, config.evidence.deadline_ms / 1000)
        return weigh(
            prompt,
            exact,
            lookup,
            context=context,
            view=view,
            mode=mode,
            seed_material=config.scoring.seed.to_bytes(8, "little") + request_id.encode(),
            constraints=facts.constraints,
        )

    async def _exact(self, facts: RequestFacts, deadline: float) -> Exact | None:
        try:
            return Exact(*await within(deadline, self._edge.exact(facts.token_ids, facts.salt, facts.lora_name)))
        except Late as late:
            self._fallbacks.add(FallbackReason.EXACT_TIMEOUT, late)
        except Exception as error:  # noqa: BLE001 - Dynamo's bindings raise plain Exception; without an answer there is no advice
            self._fallbacks.add(FallbackReason.EXACT_ERROR, error)
        return None

    async def _look_up(self, prompt: Prompt, block_size: int, deadline: float) -> Lookup:
        # Several providers read the tokens at a time, each in its thread: one that writes into them would change what
        # the others look for. It is a copy, since torch writes into a read-only array too, and the prompt's own tokens
        # are what the engine is sent.
        tokens = prompt.tokens.copy()
        tokens.flags.writeable = False
        query = LookupQuery(
            tokens=tokens,
            namespace=prompt.namespace,
            digest=prompt.digest,
            chain=BlockChain(prompt.digest, prompt.tokens, block_size),
        )
        try:
            result = await within(deadline * LOOKUP_SLACK, self._lookup.lookup(query))
        except Late as late:
            self._fallbacks.add(FallbackReason.LOOKUP_TIMEOUT, late)
            return Lookup("timeout", asked=True, seconds=deadline * LOOKUP_SLACK)
        except Exception as error:  # noqa: BLE001 - a provider may raise what it likes; a miss with a reason
            self._fallbacks.add(FallbackReason.LOOKUP_ERROR, error)
            return Lookup("error", asked=True)
        if result.status is LookupStatus.TIMEOUT:
            self._fallbacks.add(FallbackReason.LOOKUP_TIMEOUT, "provider late")
        elif result.status is LookupStatus.ERROR:
            self._fallbacks.add(FallbackReason.LOOKUP_ERROR, "provider failed")
        return Lookup(result.status._value_, asked=True, matches=result.matches, seconds=result.seconds)
