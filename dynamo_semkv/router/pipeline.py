"""One request, from what is known about it to a decision and its RouteOpened event. Pure: no I/O, no clock, no state.

    narrow(facts, view, salt_key) -> Prompt         namespace, digest and keys of this request
    covers(exact, prompt, share) -> bool            is a donor lookup worth while
    weigh(prompt, exact, lookup, ...) -> Advice     evidence -> score sheet -> decision

Evidence has two sources, and neither is Dynamo's device overlap: donors that a provider found, and host-tier KV that
Dynamo's index knows of (provider `dynamo`) and the connector may load. Both must still be confirmed by the backend.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

import msgspec

from dynamo_semkv.advice.decision import Decision, DecisionReason
from dynamo_semkv.advice.gate import Candidate, decide, no_advice
from dynamo_semkv.config.schema import Config, PlacementMode
from dynamo_semkv.contracts.evidence import MatchType, SemanticTrtMatch
from dynamo_semkv.contracts.identity import ReplicaKey
from dynamo_semkv.contracts.keys import PromptKey, TokenArray, as_tokens, on_bytes, prompt_key
from dynamo_semkv.contracts.location import Tier, WorkerLocation
from dynamo_semkv.contracts.namespace import CacheNamespace, tenant_scope
from dynamo_semkv.router.facts import UNCONSTRAINED, Constraints, RequestFacts
from dynamo_semkv.router.replicas import ModelView, ReplicaDirectory, Standing
from dynamo_semkv.router.runtime_types import NOTHING, Exact, RankOverlap
from dynamo_semkv.router.sheet_rows import may_go, queues, views, worth_a_row
from dynamo_semkv.scoring.choose import ScoreSheet, choose
from dynamo_semkv.scoring.credit import Credit
from dynamo_semkv.scoring.extra import GuardedScorer

DYNAMO_PROVIDER = "dynamo"
HOST_TIER_DONOR = "host-tier"
"""Donor id of evidence that names no donor: blocks of this very prompt in the host tier of a replica."""
SKIPPED = "skipped"
_NAMESPACES_KEPT = 512


class Prompt(msgspec.Struct, frozen=True):
    """One request in the namespace it may share KV in."""

    tokens: TokenArray
    namespace: CacheNamespace
    digest: bytes
    key: PromptKey

    @property
    def length(self) -> int:
        """The prompt's length in tokens."""
        return len(self.tokens)


class Lookup(msgspec.Struct, frozen=True):
    """What the donor lookup of one request brought, or that there was none."""

    status: str = SKIPPED
    """A LookupStatus value."""
    asked: bool = False
    """False: exact overlap sufficed, so no provider was asked."""
    matches: Sequence[SemanticTrtMatch] = ()
    seconds: float = 0.0


class Advice(msgspec.Struct, frozen=True):
    """Everything that one attempt's record and dispatch need."""

    decision: Decision
    prompt: Prompt
    lookup: Lookup = Lookup()
    exact_device_tokens: int = 0
    exact_host_tokens: int = 0
    unresolved: int = 0
    """Matches on replicas that are not alive or not advisable."""
    sheet: ScoreSheet | None = None
    queued: Mapping[ReplicaKey, int | None] = {}
    """Prefill tokens that waited on each replica before this request."""


class DecisionContext(msgspec.Struct, frozen=True):
    """What all requests that are decided under one configuration share."""

    directory: ReplicaDirectory
    config: Config
    credit: Credit | None = None
    """What this router learned of the worth of claims; None: nothing yet, the prior counts."""
    scorers: Sequence[GuardedScorer] = ()


def no_advice_reason(facts: RequestFacts, view: ModelView, prompt: Prompt) -> DecisionReason | None:
    """Why nothing is looked up for a request at all; None: a lookup makes sense. A namespace with an unknown field
    equals no other."""
    if facts.client_pinned:
        return DecisionReason.CLIENT_PINNED
    if view.namespace is None:
        differs = view.standing is Standing.NAMESPACE_DIFFERS
        return DecisionReason.NAMESPACE_DIFFERS if differs else DecisionReason.NAMESPACE_UNKNOWN
    if prompt.namespace.tenant is None:
        return DecisionReason.SALT_UNKNOWN
    if prompt.namespace.lora_revision is None:
        return DecisionReason.ADAPTER_UNKNOWN
    if prompt.namespace.multimodal is None:
        return DecisionReason.MULTIMODAL_UNHASHED
    return DecisionReason.NO_EVIDENCE if prompt.length == 0 else None


def narrow(facts: RequestFacts, view: ModelView, salt_key: bytes) -> Prompt:
    """The request in its namespace. An unknown tenant (empty salt), an adapter without a revision and media without
    hashes are `None` in the namespace, which then equals no other request's: there is no evidence for such a request
    and the engine materializes nothing for it."""
    tenant = None if facts.salt_is_empty else tenant_scope(facts.salt, salt_key)
    namespace, digest = _narrowed(view.namespace or CacheNamespace(), tenant, facts.lora_name, facts.multimodal)
    # On bytes: they are what is hashed and what Dynamo is sent, and nobody can write into them.
    tokens = on_bytes(as_tokens(facts.token_ids))
    return Prompt(tokens, namespace, digest, prompt_key(digest, tokens))


@lru_cache(maxsize=_NAMESPACES_KEPT)
def _narrowed(
    shared: CacheNamespace, tenant: str | None, lora: str | None, multimodal: tuple[str, ...] | None
) -> tuple[CacheNamespace, bytes]:
    """The namespace of a request and its digest. Cached: all requests of a tenant share one, and hashing it costs as
    much as hashing the prompt."""
    namespace = shared.for_request(
        tenant=tenant, lora=lora or "", lora_revision=None if lora else "", multimodal=multimodal
    )
    return namespace, namespace.digest()


def covers(exact: Exact, prompt: Prompt, share: float) -> bool:
    """Whether the best device overlap leaves less of the prompt than a donor would be worth."""
    ranks, length = exact.overlap.ranks, len(prompt.tokens)
    best = max([rank.device for rank in ranks.values()]) if ranks else 0
    return length > 0 and best * exact.overlap.block_size >= share * length


def host_evidence(directory: ReplicaDirectory, view: ModelView, exact: Exact, prompt: Prompt) -> list[SemanticTrtMatch]:
    """Host-tier residency of this prompt's own blocks, per replica that may be advised. No evidence in a namespace with
    an unknown field: the engine loads nothing there."""
    if not any(rank.host_pinned_extension for rank in exact.overlap.ranks.values()):
        return []
    if prompt.namespace.unknown_fields():
        return []
    size = exact.overlap.block_size
    found = []
    for replica in sorted(view.eligible):
        overlap = exact.of(replica)
        if overlap.host_pinned_extension < 1:
            continue
        prefix = min((overlap.device + overlap.host_pinned_extension) * size, prompt.length)
        found.append(
            SemanticTrtMatch(
                donor_id=HOST_TIER_DONOR,
                reusable_token_count=prefix,
                exact_prefix_tokens=prefix,
                match_type=MatchType.EXACT_EQUIVALENT,
                location=WorkerLocation(worker_id=replica.worker_id, dp_rank=replica.dp_rank, tier=Tier.HOST_PINNED),
                provider=DYNAMO_PROVIDER,
                provider_generation=directory.generation_of(replica) or "",
                overlap=prefix / prompt.length,
                # Where evidence is equal, the match that names its donor is preferred.
                confidence=0.0,
            )
        )
    return found


def reachable(
    matches: Sequence[SemanticTrtMatch], directory: ReplicaDirectory, view: ModelView
) -> list[tuple[SemanticTrtMatch, ReplicaKey]]:
    """Matches whose donor is on a live replica that may be advised. KV in a shared store is on no replica, so it leads
    to no placement."""
    found = []
    for match in matches:
        if not isinstance(match.location, WorkerLocation):
            continue
        replica = directory.resolve(match.location.worker_id, match.location.dp_rank)
        if replica is not None and replica in view.eligible:
            found.append((match, replica))
    return found


def weigh(
    prompt: Prompt,
    exact: Exact,
    lookup: Lookup,
    *,
    context: DecisionContext,
    view: ModelView,
    mode: PlacementMode,
    seed_material: bytes,
    constraints: Constraints = UNCONSTRAINED,
) -> Advice:
    """Evidence -> score sheet -> decision. Without evidence there is no sheet. `seed_material`: orders replicas that
    score alike; at least 8 bytes, other ones for each request."""
    directory, scorers, scoring = context.directory, context.scorers, context.config.scoring
    matches = [*lookup.matches, *(host_evidence(directory, view, exact, prompt) if exact.overlap.ranks else ())]
    live = directory.live()
    queued = queues(live, exact)
    if not matches and not scorers:
        # There is nothing that Dynamo does not weigh itself: its choice stands, and a sheet would only repeat it.
        return _advice(no_advice(mode, _without_evidence(lookup)), prompt, exact, lookup, queued)
    pairs = reachable(matches, directory, view)
    wanted: Collection[ReplicaKey] = live

    def barred(replica: ReplicaKey) -> bool:
        card, load = live[replica], exact.loads[replica]
        full = 0 < (card.total_kv_blocks or 0) <= load.decode_blocks
        return full or not may_go(replica, card, directory, constraints)

    if not scorers:  # a plugged-in scorer may raise the score of any replica
        turn = int.from_bytes(seed_material[-8:], "little")
        wanted = worth_a_row(live, exact, queued, {replica for _, replica in pairs}, turn, barred)
    rows = views(
        directory, exact, prompt.length, context.config.placement.max_load_gap_tokens, constraints, queued, wanted
    )
    size = exact.overlap.block_size
    sheet = choose(rows, pairs, prompt.length, scoring, seed_material, context.credit, scorers, block_size=size)
    if matches and not pairs:
        decision = no_advice(mode, DecisionReason.DONOR_UNREACHABLE)
    else:
        decision = _decision(sheet, lookup, context.config, mode)
    return _advice(decision, prompt, exact, lookup, queued, unresolved=len(matches) - len(pairs), sheet=sheet)


def _decision(sheet: ScoreSheet, lookup: Lookup, config: Config, mode: PlacementMode) -> Decision:
    """The gate's decision; DONOR_UNREACHABLE where the filters took every replica with donor tokens."""
    claiming = [row for row in sheet.rows if row.match is not None and row.claimed_tokens > 0]
    if claiming and all(row.filtered_by is not None for row in claiming):
        return no_advice(mode, DecisionReason.DONOR_UNREACHABLE)
    return decide(
        [
            Candidate(row.replica, row.total, row.evidence, row.match, row.claimed_tokens, row.proven_tokens)
            for row in sheet.rows
            if row.filtered_by is None
        ],
        sheet.best.replica if sheet.best is not None else None,
        mode=mode,
        config=config.placement,
        hints_enabled=config.hints.enabled,
        otherwise=_without_evidence(lookup),
    )


def _advice(
    decision: Decision,
    prompt: Prompt,
    exact: Exact,
    lookup: Lookup,
    queued: Mapping[ReplicaKey, int | None],
    *,
    unresolved: int = 0,
    sheet: ScoreSheet | None = None,
) -> Advice:
    device = host = 0
    if exact.overlap.ranks:
        shown = decision.placed or decision.shadow_choice
        overlap = exact.of(shown) if shown is not None else _best_device(exact)
        size, length = exact.overlap.block_size, len(prompt.tokens)
        device = min(overlap.device * size, length)
        host = min(overlap.host_pinned_extension * size, length - device)
    return Advice(decision, prompt, lookup, device, host, unresolved, sheet, queued)


def _best_device(exact: Exact) -> RankOverlap:
    return max(
        exact.overlap.ranks.values(), key=lambda rank: (rank.device, rank.host_pinned_extension), default=NOTHING
    )


_BY_STATUS = {
    SKIPPED: DecisionReason.LOOKUP_SKIPPED,
    "timeout": DecisionReason.LOOKUP_TIMEOUT,
    "error": DecisionReason.LOOKUP_ERROR,
}


def _without_evidence(lookup: Lookup) -> DecisionReason:
    if not lookup.asked:
        return DecisionReason.EXACT_COVERS
    return _BY_STATUS.get(lookup.status, DecisionReason.NO_EVIDENCE)
