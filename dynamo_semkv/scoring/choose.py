"""Replicas and matches -> ScoreSheet: one row a replica, in one unit, and which row is the best.

    total = device tokens + host and disk tokens x share(exact) x saving(tier)
          + donor tokens beyond those x share(exact or semantic) x saving(tier)
          - load_weight x queued prefill tokens above the idlest replica
          - decode_weight x tokens of KV that running requests hold above the replica with the fewest
          + what scorers of somebody else say (scoring/extra.py)

`share` and `saving` are the Credit's: of such a claim on this replica, what the backend confirms, and what a confirmed
token spares.

The sheet proposes; whether it is worth acting on is the gate's business, and Dynamo routes.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec

from dynamo_semkv.config.schema import ScoringConfig
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.evidence import SemanticTrtMatch
from dynamo_semkv.contracts.identity import ReplicaKey, StableReplica
from dynamo_semkv.scoring.credit import Credit, PriorCredit
from dynamo_semkv.scoring.donor_value import DonorValue, TokenValue, donor_value, exact_value
from dynamo_semkv.scoring.extra import GuardedScorer, share
from dynamo_semkv.scoring.filters import FilteredBy, filtered_by
from dynamo_semkv.scoring.replica_view import ReplicaView
from dynamo_semkv.scoring.scorers import SCORERS, Situation


class SheetReason(str, Enum):
    """Why the sheet has a best row or none. Closed."""

    CHOSEN = "chosen"
    NO_REPLICA = "no_replica"
    ALL_FILTERED = "all_filtered"


@dataclass(frozen=True, slots=True)
class Part:
    """One term of the sum: the scorer's value in [0, 1], and the expected tokens that it stands for (negative for
    load)."""

    name: str
    share: float
    value: TokenValue


class ScoreRow(msgspec.Struct, frozen=True):
    """One replica of one request: its value in expected tokens saved, and what that is made of."""

    replica: ReplicaKey
    stable: StableReplica | None
    total: TokenValue
    evidence: TokenValue
    """The part of `total` that still has to be confirmed: host, disk and donor."""
    match: SemanticTrtMatch | None
    """The strongest evidence on this replica; of equally strong ones the first by donor id."""
    claimed_tokens: int
    """Tokens that `match` claims beyond the replica's device prefix; 0 without one."""
    view: ReplicaView
    situation: Situation
    values: tuple[TokenValue, ...]
    """In the order of SCORERS, then of `extra`."""
    extra: tuple[str, ...]
    proven_tokens: int = 0
    """Of `claimed_tokens`, the ones of a proven common prefix."""
    filtered_by: FilteredBy | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        """`device`, `host`, `disk`, `donor`, `load`, `decode` and what extra scorers are called; their values add up to
        `total`. Made when somebody looks: a decision needs none of them."""
        view, at = self.view, self.situation
        found = [
            Part(name, scorer(view, self.match, at), value)
            for (name, scorer), value in zip(SCORERS.items(), self.values, strict=False)
        ]
        own = zip(self.extra, self.values[len(SCORERS) :], strict=True)
        return (*found, *(Part(name, share(value, at), value) for name, value in own))

    def part(self, name: str) -> Part:
        """The term of that name. Raises StopIteration if there is none."""
        return next(part for part in self.parts if part.name == name)


class ScoreSheet(msgspec.Struct, frozen=True):
    """All replicas of one request, scored."""

    rows: tuple[ScoreRow, ...]
    """Best first, filtered ones last."""
    best: ScoreRow | None
    reason: SheetReason


def choose(
    views: Sequence[ReplicaView],
    matches: Sequence[tuple[SemanticTrtMatch, ReplicaKey]],
    input_tokens: int,
    config: ScoringConfig,
    seed_material: bytes,
    credit: Credit | None = None,
    extra: Sequence[GuardedScorer] = (),
    *,
    block_size: int = 0,
) -> ScoreSheet:
    """Independent of the order of `views` and `matches`. Equal totals are spread over the replicas by `seed_material`.
    `credit` None: the prior of `config`. `block_size`: tokens in a KV block; 0: unknown, and what running requests hold
    costs nothing.

    Raises ContractError when two views name one replica: which of them is true is not for us to guess.
    """
    by_replica = {view.replica: view for view in views}
    if len(by_replica) < len(views):
        raise ContractError("views", f"{len(views)} views of {len(by_replica)} replicas", "one view a replica")
    donors: dict[ReplicaKey, list[SemanticTrtMatch]] = {}
    for match, replica in matches:
        donors.setdefault(replica, []).append(match)
    filters = [filtered_by(view) for view in views]
    free = [view for view, reason in zip(views, filters, strict=True) if reason is None]
    situation = _situation(free or views, input_tokens, block_size)
    credit = credit if credit is not None else PriorCredit(config)
    exact_values = [exact_value(view, input_tokens, config, credit) for view in views]
    strongest = [
        _strongest(view, donors[view.replica], input_tokens, credit, exact) if view.replica in donors else None
        for view, exact in zip(views, exact_values, strict=True)
    ]
    names = tuple(scorer.name for scorer in extra)
    matched = [donor.match if donor is not None else None for donor in strongest] if extra else []
    by_scorer = [scorer.values(views, matched, situation) for scorer in extra]
    by_view = list(zip(*by_scorer, strict=True)) or [()] * len(views)
    rows = [
        _row(view, exact, donor, situation, reason, config, names, more)
        for view, exact, donor, reason, more in zip(views, exact_values, strongest, filters, by_view, strict=True)
    ]
    _sort(rows, seed_material)
    if not rows:
        return ScoreSheet((), None, SheetReason.NO_REPLICA)
    best = rows[0] if rows[0].filtered_by is None else None
    return ScoreSheet(tuple(rows), best, SheetReason.CHOSEN if best else SheetReason.ALL_FILTERED)


def _situation(views: Sequence[ReplicaView], input_tokens: int, block_size: int) -> Situation:
    known = [view.queued_prefill_tokens for view in views if view.queued_prefill_tokens is not None]
    least_active = min([view.active_decode_blocks for view in views], default=0)
    usual = sum(known) / len(known) if known else 0.0
    return Situation(input_tokens, min(known, default=0), usual, least_active, block_size)


_NO_DONOR = (None, TokenValue(0.0), TokenValue(0.0), 0, 0)
"""Stands in for a DonorValue where no donor claims anything."""


def _row(
    view: ReplicaView,
    exact_values: tuple[TokenValue, TokenValue, TokenValue],
    strongest: DonorValue | None,
    situation: Situation,
    filtered: FilteredBy | None,
    config: ScoringConfig,
    extra: tuple[str, ...],
    extra_values: tuple[TokenValue, ...],
) -> ScoreRow:
    """`extra`: names of the plugins' scorers, and in `extra_values`, in the same order, their values for this
    replica."""
    device, host, disk = exact_values
    match, donor, _, claimed, proven = strongest if strongest is not None else _NO_DONOR
    load = TokenValue(-config.load_weight * situation.excess(view))
    decode = TokenValue(-config.decode_weight * situation.excess_active(view))
    values = (device, host, disk, donor, load, decode, *extra_values)
    return ScoreRow(
        view.replica,
        view.stable,
        TokenValue(sum(values)),
        TokenValue(host + disk + donor),
        match,
        claimed,
        view,
        situation,
        values,
        extra,
        proven,
        filtered,
    )


def _strongest(
    view: ReplicaView,
    matches: Sequence[SemanticTrtMatch],
    input_tokens: int,
    credit: Credit,
    exact_values: tuple[TokenValue, TokenValue, TokenValue],
) -> DonorValue | None:
    """The best donor alone: donors on one replica do not add up, since they mostly hold the same text."""
    values = [donor_value(match, view, input_tokens, credit, exact_values) for match in matches]
    return min(values, key=_strength, default=None)


def _strength(value: DonorValue) -> tuple[float, float, int, float, str, str, str]:
    match = value.match
    return (
        -value.beyond_exact,
        -value.explains,
        -value.claimed_tokens,
        -match.confidence,
        match.donor_id,
        match.provider,
        match.provider_generation,
    )


def _sort(rows: list[ScoreRow], seed_material: bytes) -> None:
    """Sorts rows by total, filtered ones last. Only equal rows are ordered by a hash of the seed."""
    at = {row.replica: (row.filtered_by is not None, -round(row.total, 6)) for row in rows}
    equal = Counter(at.values())
    seed = b"" if len(equal) == len(rows) else hashlib.blake2b(seed_material).digest()
    rows.sort(key=lambda row: (*at[row.replica], _lot(row.replica, seed) if equal[at[row.replica]] > 1 else b""))


def _lot(replica: ReplicaKey, seed: bytes) -> bytes:
    name = f"{replica.worker_id}/{replica.dp_rank}".encode()
    return hashlib.blake2b(name, digest_size=8, key=seed).digest()
