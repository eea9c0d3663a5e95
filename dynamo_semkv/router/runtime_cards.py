"""Reads the workers' model cards into replicas.

A card is JSON text keyed by worker id. A worker with a card we cannot use is left out and reported once per text: the
router must not pin to a replica whose ranks or block size it does not know, and Dynamo's own choice still serves the
request.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from dynamo_semkv.contracts.identity import ReplicaKey
from dynamo_semkv.router.runtime_types import ReplicaCard, WorkerRole
from dynamo_semkv.telemetry.throttled import Throttled

logger = logging.getLogger(__name__)
_throttled = Throttled(logger)

MAX_RANKS = 1024
PLACED = frozenset({WorkerRole.AGGREGATED, WorkerRole.PREFILL})
"""Roles of workers that compute prompts."""


class CardError(ValueError):
    """A model card that lacks what a pin needs; the text names the field."""


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def parse_card(text: str) -> ReplicaCard:
    """One worker's card. CardError for one without block size, or with ranks outside [0, 1024)."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CardError(f"model card: not JSON ({error})") from None
    if not isinstance(body, dict):
        raise CardError(f"model card: expected an object, got {type(body).__name__}")
    runtime = body.get("runtime_config")
    runtime = runtime if isinstance(runtime, dict) else {}
    block_size = _positive(body.get("kv_cache_block_size"))
    if block_size is None:
        raise CardError(f"kv_cache_block_size: {body.get('kv_cache_block_size')!r:.100}, expected a positive integer")
    start = runtime.get("data_parallel_start_rank", 0)
    size = _positive(runtime.get("data_parallel_size", 1))
    if not isinstance(start, int) or isinstance(start, bool) or start < 0 or size is None or start + size > MAX_RANKS:
        raise CardError(
            f"data_parallel_start_rank {start!r:.100}, data_parallel_size {size!r:.100}: expected ranks in [0, "
            f"{MAX_RANKS})"
        )
    data = runtime.get("runtime_data")
    taints = runtime.get("taints")
    return ReplicaCard(
        model=str(body.get("display_name", "")),
        source_path=str(body.get("source_path", "")),
        block_size=block_size,
        data_parallel_size=size,
        data_parallel_start_rank=start,
        stable_routing_id=_text(runtime.get("stable_routing_id")),
        total_kv_blocks=_positive(runtime.get("total_kv_blocks")),
        max_num_seqs=_positive(runtime.get("max_num_seqs")),
        max_num_batched_tokens=_positive(runtime.get("max_num_batched_tokens")),
        context_length=_positive(body.get("context_length")),
        tool_call_parser=_text(runtime.get("tool_call_parser")),
        reasoning_parser=_text(runtime.get("reasoning_parser")),
        runtime_data=data if isinstance(data, dict) else {},
        role=_role(body.get("worker_type")),
        taints=frozenset(it for it in taints if isinstance(it, str)) if isinstance(taints, list) else frozenset(),
    )


def _role(value: Any) -> WorkerRole:
    try:
        return WorkerRole(value.lower()) if isinstance(value, str) else WorkerRole.UNKNOWN
    except ValueError:
        return WorkerRole.UNKNOWN


def role_before(cards: Iterable[ReplicaCard]) -> WorkerRole:
    """The role of a router in front of these workers: PREFILL or AGGREGATED, or UNKNOWN where no card says. Decode
    workers beside aggregated ones are left to Dynamo. CardError where none of them computes prompts, or some are
    prefill and others aggregated workers."""
    roles = {card.role for card in cards} - {WorkerRole.UNKNOWN}
    ours = roles & PLACED
    if not roles:
        return WorkerRole.UNKNOWN
    if len(ours) != 1:
        found = ", ".join(sorted(role.value for role in roles))
        raise CardError(
            f"worker_type: {found} workers at one endpoint, expected prefill workers or aggregated ones "
            "(dynamo.worker_component says in front of which workers this router is)"
        )
    return next(iter(ours))


def none_to_place(cards: Iterable[ReplicaCard]) -> bool:
    """Whether cards name roles, but none of a worker that computes prompts: such workers may still come."""
    roles = {card.role for card in cards} - {WorkerRole.UNKNOWN}
    return bool(roles) and not roles & PLACED


def card_of(cards: Iterable[ReplicaCard], role: WorkerRole) -> ReplicaCard:
    """The first card of the role, else the first of all: its values are offered to clients, not those of a decode
    worker beside."""
    known = list(cards)
    return next((card for card in known if card.role is role), known[0])


class CardTable:
    """Makes replicas of cards, with each text parsed once. Forgets the texts of workers that are gone, so it stays
    bounded."""

    def __init__(self) -> None:
        self._block_size: int | None = None
        self._parsed: dict[str, ReplicaCard | None] = {}
        self._replicas: dict[ReplicaKey, ReplicaCard] = {}
        self._workers: dict[str, str] = {}

    def require_block_size(self, block_size: int) -> None:
        """Leave out workers that come later with another block size: the router hashes prompts in one size only."""
        self._block_size = block_size

    def update(self, cards: Mapping[str, str]) -> Mapping[ReplicaKey, ReplicaCard]:
        """Replicas of `cards` (worker id as decimal text -> card text)."""
        if cards == self._workers:
            return self._replicas
        self._parsed = {
            text: self._parsed[text] if text in self._parsed else self._parse(text) for text in cards.values()
        }
        replicas: dict[ReplicaKey, ReplicaCard] = {}
        for worker, text in cards.items():
            card = self._parsed[text]
            if card is None:
                continue
            first = card.data_parallel_start_rank
            for rank in range(first, first + card.data_parallel_size):
                replicas[ReplicaKey(int(worker), rank)] = card
        self._workers = dict(cards)
        self._replicas = replicas
        return replicas

    def _parse(self, text: str) -> ReplicaCard | None:
        try:
            card = parse_card(text)
            if self._block_size not in (None, card.block_size):
                raise CardError(
                    f"kv_cache_block_size: {card.block_size}, expected {self._block_size} as the other workers have"
                )
        except CardError as error:
            _throttled.warning("a worker is left out of placement, Dynamo still routes to it: %s", error)
            return None
        return card
