"""May this request be served from the slab, and if not, why? Pure functions; no I/O, no state, no clock.

Exact reuse needs no hint: it is decided by tokens and namespace alone. A hint says which donor the router had in mind,
and so only refines *why* nothing was offered (RFC semantic KV cache reuse, "Quality and Profitability Gates": bounded
reasons, one outcome each).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from dynamo_semkv.contracts.hints import DonorHint
from dynamo_semkv.contracts.load_plan import ExpectedMode
from dynamo_semkv.contracts.namespace import CacheNamespace, first_difference
from dynamo_semkv.contracts.report import Outcome, Reason
from worker_connector.ledger.ledger import MatchEnd


class Question(NamedTuple):
    """One request as the leader sees it when the engine asks. Counts in tokens unless they say blocks."""

    prompt_tokens: int
    local_tokens: int
    """What the engine's own cache holds."""
    tokens_per_block: int
    problem: Reason | None = None
    """Why nothing may be materialized for this request whatever is resident: mode, namespace, kind of request."""
    min_offer_tokens: int = 1
    leases_left: bool = True

    @property
    def limit_blocks(self) -> int:
        """Whole blocks of the prompt that may be served at all: at least one token is left to compute, or the engine
        has no logits to sample from (LMCache#3322, NVIDIA/TensorRT-LLM#7228)."""
        return max(self.prompt_tokens - 1, 0) // self.tokens_per_block

    @property
    def local_blocks(self) -> int:
        """Full blocks of the prompt that the engine has itself."""
        return self.local_tokens // self.tokens_per_block


class Accept(NamedTuple):
    """The decision to offer blocks."""

    blocks: int
    """Blocks of the prompt, counted from its start, that are local or offered; more than `local_blocks`."""


class Decline(NamedTuple):
    """The decision to offer nothing, and why; `differing_field` names the namespace field where that is the reason."""

    outcome: Outcome
    reason: Reason
    differing_field: str | None = None


def before_lookup(question: Question) -> Decline | None:
    """What can be said without looking into the ledger; None: look."""
    if question.problem is not None:
        return Decline(Outcome.DECLINED, question.problem)
    if question.limit_blocks == 0:
        return Decline(Outcome.NO_DONOR, Reason.PROMPT_TOO_SHORT)
    if question.local_blocks >= question.limit_blocks:
        return Decline(Outcome.LOCAL_EXACT, Reason.LOCAL_COVERS)
    if question.local_tokens % question.tokens_per_block:
        return Decline(Outcome.DECLINED, Reason.MISALIGNED_LOCAL)
    return None


def judge(question: Question, matched_blocks: int, end: MatchEnd, damaged: bool = False) -> Accept | Decline:
    """`matched_blocks`: resident, token-verified and undamaged blocks from the start of the prompt. `damaged`: the
    match ended at a block whose bytes are not what was sealed."""
    blocks = min(matched_blocks, question.limit_blocks)
    offer = (blocks - question.local_blocks) * question.tokens_per_block
    if offer <= 0:
        if damaged:
            return Decline(Outcome.DECLINED, Reason.CHECKSUM_MISMATCH)
        if end is MatchEnd.TOKENS_DIFFER:
            return Decline(Outcome.DECLINED, Reason.TOKEN_MISMATCH)
        if question.local_tokens > 0:
            return Decline(Outcome.LOCAL_EXACT, Reason.LOCAL_COVERS)
        return Decline(Outcome.NO_DONOR, Reason.NOT_RESIDENT)
    if offer < question.min_offer_tokens:
        return Decline(Outcome.DECLINED, Reason.BELOW_MINIMUM)
    if not question.leases_left:
        return Decline(Outcome.DECLINED, Reason.LEASES_EXHAUSTED)
    return Accept(blocks)


@dataclass(frozen=True)
class HintFacts:
    """What the leader knows when it explains a decline to whoever hinted."""

    digest_hex: str
    namespace: CacheNamespace | None
    generation: str
    """Of this engine's cache now."""
    donor_known: bool
    donor_namespace: CacheNamespace | None = None


# Said of the request or the engine before anything was looked up.
_PREVENTED = frozenset(
    {
        Reason.MATERIALIZATION_OFF,
        Reason.NAMESPACE_UNKNOWN,
        Reason.MULTIMODAL_UNHASHED,
        Reason.ADAPTER_UNKNOWN,
        Reason.SALT_UNKNOWN,
        Reason.UNSUPPORTED_REQUEST,
        Reason.UNSUPPORTED_LAYOUT,
        Reason.INTERNAL_ERROR,
    }
)
# True whatever donor was in mind.
_OWN = _PREVENTED | frozenset(
    {
        Reason.MISALIGNED_LOCAL,
        Reason.COPY_FAILED,
        Reason.CHECKSUM_MISMATCH,
        Reason.TOKEN_MISMATCH,
        Reason.BELOW_MINIMUM,
        Reason.LEASES_EXHAUSTED,
    }
)


def explain(
    decline: Decline, question: Question, hint: DonorHint | None, facts: HintFacts, *, hint_expired: bool = False
) -> Decline:
    """The decline as it is reported. Without a hint, a request that may not be served from the slab simply had no
    donor, unless one was hinted and the hint was too old when the request came (`hint_expired`)."""
    if hint is None:
        said = _unhinted(decline, question)
        if hint_expired and said.outcome is Outcome.NO_DONOR:
            reason = Reason.HINT_EXPIRED if said.reason is Reason.NOT_RESIDENT else said.reason
            return Decline(Outcome.DECLINED, reason)
        return said
    return next(found for check in _CHECKS if (found := check(decline, question, hint, facts)) is not None)


def _unhinted(decline: Decline, question: Question) -> Decline:
    if decline.reason not in _PREVENTED:
        return decline
    if question.local_tokens > 0:
        return Decline(Outcome.LOCAL_EXACT, Reason.LOCAL_COVERS)
    return Decline(Outcome.NO_DONOR, decline.reason)


def _local(decline: Decline, question: Question, hint: DonorHint, facts: HintFacts) -> Decline | None:
    """The placement was right and nothing had to be loaded: the engine's own cache holds all that was hinted."""
    claimed = min(_claimed(hint, question.tokens_per_block), question.limit_blocks * question.tokens_per_block)
    claimed -= claimed % question.tokens_per_block
    if question.local_tokens > 0 and question.local_tokens >= claimed:
        return Decline(Outcome.LOCAL_EXACT, Reason.LOCAL_COVERS)
    return None


def _own(decline: Decline, question: Question, hint: DonorHint, facts: HintFacts) -> Decline | None:
    return Decline(Outcome.DECLINED, decline.reason) if decline.reason in _OWN else None


def _namespace(decline: Decline, question: Question, hint: DonorHint, facts: HintFacts) -> Decline | None:
    if hint.namespace == facts.digest_hex:
        return None
    field = None
    if facts.namespace is not None and facts.donor_namespace is not None:
        field = first_difference(facts.donor_namespace, facts.namespace)
    return Decline(Outcome.NAMESPACE_MISMATCH, Reason.NAMESPACE_DIFFERS, field)


def _stale(decline: Decline, question: Question, hint: DonorHint, facts: HintFacts) -> Decline | None:
    """Generations are compared for equality only. A donor that is registered is as fresh as it gets, whatever the hint
    says."""
    if facts.donor_known or not hint.generation:
        return None
    reason = Reason.DONOR_EVICTED if hint.generation == facts.generation else Reason.GENERATION_STALE
    return Decline(Outcome.STALE_DONOR, reason)


def _approximate(decline: Decline, question: Question, hint: DonorHint, facts: HintFacts) -> Decline | None:
    if hint.expected_mode is ExpectedMode.SEMANTIC_EXPERIMENTAL:
        return Decline(Outcome.DECLINED, Reason.EXPERIMENTAL_REFUSED)
    return None


def _short(decline: Decline, question: Question, hint: DonorHint, facts: HintFacts) -> Decline | None:
    return Decline(Outcome.DECLINED, decline.reason) if decline.reason is Reason.PROMPT_TOO_SHORT else None


def _not_there(decline: Decline, question: Question, hint: DonorHint, facts: HintFacts) -> Decline:
    """The donor lives and the chain ends all the same: related, but not identical beyond what the engine has itself."""
    exact = hint.exact_prefix_tokens > question.local_tokens
    return Decline(Outcome.DECLINED, Reason.NOT_RESIDENT if exact or not facts.donor_known else Reason.NOT_IDENTICAL)


_Check = Callable[[Decline, Question, DonorHint, HintFacts], "Decline | None"]
_CHECKS: tuple[_Check, ...] = (_local, _own, _namespace, _stale, _approximate, _short, _not_there)


def _claimed(hint: DonorHint, tokens_per_block: int) -> int:
    """What the placement was made for. A claim of a block or more beyond the exact prefix is one of similar text: a
    prefix that both share, such as a chat template's first block, does not redeem it."""
    if hint.token_count - hint.exact_prefix_tokens >= tokens_per_block:
        return hint.token_count
    return hint.exact_prefix_tokens
