"""From the engine's question to an attempt: read the request, look into the ledger, verify, decide. Runs on the
scheduler's thread, so it does no I/O; its cost is packing the tokens, one step per matched block and the bounded check
of checksums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo_semkv.contracts.keys import BlockKey
from dynamo_semkv.contracts.report import Reason
from worker_connector.engine_api.request_view import request_tokens, scope_of, unsupported
from worker_connector.ledger.block import BlockEntry, Chain
from worker_connector.ledger.ledger import Ledger, MatchEnd
from worker_connector.ledger.plan import LoadPlan, PlanKey
from worker_connector.requests.attempt import Attempt
from worker_connector.requests.engine_namespace import RequestNamespaces
from worker_connector.requests.hints import HintReader
from worker_connector.requests.load_decision import Decline, Question, before_lookup, judge

Verify = Callable[[Sequence[int]], list[int]]
"""Slots -> those of them that may not be offered; within a bounded time (see memory/slab.py)."""


OnMiss = Callable[[bytes, bytes, int, int, BlockKey], None]
"""(namespace digest, packed tokens, ordinal of the missing block, blocks that may be served, its key)"""


@dataclass(frozen=True)
class LookupLimits:
    """What bounds an offer; tokens as in the configuration's section `connector`."""

    tokens_per_block: int
    min_offer_tokens: int
    async_load_min_tokens: int | None
    max_leases: int


class PrefixLookup:
    """Not thread-safe: the leader's lock covers it."""

    def __init__(
        self,
        ledger: Ledger | None,
        namespaces: RequestNamespaces,
        hints: HintReader,
        limits: LookupLimits,
        *,
        verify: Verify,
        on_damaged: Callable[[BlockEntry], None],
    ) -> None:
        """`ledger` None: materialization is off."""
        self._ledger = ledger
        self._namespaces = namespaces
        self._hints = hints
        self._tokens_per_block = limits.tokens_per_block
        self._min_offer_tokens = limits.min_offer_tokens
        self._async_load_min_tokens = limits.async_load_min_tokens
        self._max_leases = limits.max_leases
        self._verify = verify
        self._on_damaged = on_damaged
        self.on_miss: OnMiss | None = None
        """Told where a prompt's resident chain ends at a block that nobody has entered; must be quick."""

    def attempt(
        self,
        request: Any,
        computed: int,
        epoch: int,
        iteration: int,
        leases: int,
        refused: Reason | None = None,
    ) -> Attempt:
        """May raise what reading a strange request raises; changes nothing but the order of use of what it matched."""
        tokens = request_tokens(request)
        namespace, digest, problem = self._namespaces.of(scope_of(request))
        problem = (
            problem or unsupported(request) or refused or (Reason.MATERIALIZATION_OFF if self._ledger is None else None)
        )
        prompt_tokens = min(len(tokens) // 4, int(getattr(request, "prompt_len", len(tokens) // 4)))
        question = Question(
            prompt_tokens=prompt_tokens,
            local_tokens=min(max(computed, 0), prompt_tokens),
            tokens_per_block=self._tokens_per_block,
            problem=problem,
            min_offer_tokens=self._min_offer_tokens,
            leases_left=leases < self._max_leases,
        )
        attempt = Attempt(
            key=PlanKey(int(request.request_id), epoch),
            tokens=tokens,
            namespace=namespace,
            digest=digest,
            question=question,
            asked=iteration,
            hints=self._hints.of_request(request),
        )
        if self._hints.on_fetch is not None:
            self._hints.on_fetch(attempt)
        found = before_lookup(question) or self._look(attempt)
        if isinstance(found, Decline):
            attempt.decline = found
        else:
            attempt.plan = found
        return attempt

    def _look(self, attempt: Attempt) -> LoadPlan | Decline:
        assert self._ledger is not None
        question = attempt.question
        match = self._ledger.match(attempt.digest, attempt.tokens, question.limit_blocks)
        tip, end, damaged = match.tip, match.end, False
        if match.missing is not None and self.on_miss is not None:
            self.on_miss(attempt.digest, attempt.tokens, match.blocks, question.limit_blocks, match.missing)
        while True:
            verdict = judge(question, 0 if tip is None else tip.ordinal + 1, end, damaged)
            if isinstance(verdict, Decline):
                return verdict
            assert tip is not None
            chain = Chain(tip)
            sound = self._sound(chain, question.local_blocks)
            if sound == len(chain):
                self._ledger.touch(tip)
                size, least = self._tokens_per_block, self._async_load_min_tokens
                offered = sound * size - question.local_tokens
                return LoadPlan(
                    attempt.key, chain, question.local_tokens, size, is_async=least is not None and offered >= least
                )
            tip, end, damaged = chain[sound - 1] if sound else None, MatchEnd.NOT_RESIDENT, True

    def _sound(self, chain: Chain, first: int) -> int:
        """How many blocks of the chain may be offered: those before the first damaged one, which leaves the ledger."""
        wrong = set(self._verify(chain.slots(first)))
        if not wrong:
            return len(chain)
        sound = next(index for index in range(first, len(chain)) if chain[index].slot in wrong)
        for entry in chain[sound:]:
            if not entry.removed and entry.slot in wrong:
                self._on_damaged(entry)
        return sound
