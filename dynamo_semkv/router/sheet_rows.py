"""The rows of a score sheet: which replicas have one, and what is known of each. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping

from dynamo_semkv.contracts.identity import ReplicaKey
from dynamo_semkv.router.facts import UNCONSTRAINED, Constraints
from dynamo_semkv.router.replicas import ReplicaDirectory
from dynamo_semkv.router.runtime_types import NOTHING, Exact, ReplicaCard
from dynamo_semkv.scoring.replica_view import ReplicaView

MANY = 24
"""Up to this many live replicas, each has its row in every sheet."""
IDLEST = 8
"""How many rows the replicas get together that hold nothing of a prompt, where there are more than MANY replicas."""


def queues(live: Iterable[ReplicaKey], exact: Exact) -> dict[ReplicaKey, int | None]:
    """Prefill tokens that wait on each live replica; None where Dynamo says nothing."""
    loads = exact.loads
    return {replica: loads[replica].prefill_tokens if replica in loads else None for replica in live}


def worth_a_row(
    live: Mapping[ReplicaKey, ReplicaCard],
    exact: Exact,
    queued: Mapping[ReplicaKey, int | None],
    evidenced: Collection[ReplicaKey],
    turn: int,
    barred: Callable[[ReplicaKey], bool],
) -> Collection[ReplicaKey]:
    """The replicas that can matter to the decision: those that hold a part of the prompt, those with evidence of it,
    and the idlest of the others.

    The others differ in their load alone, so an idler one can replace any of them, as the choice or as its rival. Where
    there are not many replicas, or the load of one is unknown, all have a row. `turn`: picks among equally idle ones,
    spread over requests. `barred`: whether a replica may not be chosen, whatever its load.
    """
    if len(live) <= MANY or None in queued.values():
        return live
    ranks = exact.overlap.ranks
    holding = {replica for replica in live if any(ranks.get(replica, NOTHING))} | {r for r in evidenced if r in live}
    bare = [replica for replica in live if replica not in holding]
    at = turn % len(bare) if bare else 0

    def busy(replica: ReplicaKey) -> tuple[bool, int]:
        load = exact.loads.get(replica)
        held = load.decode_blocks * exact.overlap.block_size if load is not None else 0
        return barred(replica), (queued[replica] or 0) + held

    idlest = heapq.nsmallest(IDLEST, bare[at:] + bare[:at], key=busy)
    return holding.union(idlest)


def views(
    directory: ReplicaDirectory,
    exact: Exact,
    length: int,
    max_load_gap: int,
    constraints: Constraints = UNCONSTRAINED,
    queued: Mapping[ReplicaKey, int | None] | None = None,
    wanted: Collection[ReplicaKey] | None = None,
) -> list[ReplicaView]:
    """One view per live replica, or per replica in `wanted`. A replica that is too far behind the idlest one that the
    request may go to counts as overloaded: no donor is worth that wait.

    `length`: of the prompt, in tokens. `max_load_gap`: prefill tokens. `queued`: of all live replicas; None: `queues`.
    """
    queued = queues(directory.live(), exact) if queued is None else queued
    idlest = _shortest_queue(queued, directory, constraints)
    profiles, anywhere = directory.profiles(), constraints is UNCONSTRAINED
    size, ranks, loads = exact.overlap.block_size, exact.overlap.ranks, exact.loads
    found = []
    for replica in profiles if wanted is None else wanted:
        profile, waiting = profiles[replica], queued[replica]
        card, load, overlap = profile.card, loads.get(replica), ranks.get(replica)
        device = host = disk = 0
        if overlap is not None:
            device = overlap.device * size
            host = max(0, min(overlap.host_pinned_extension * size, length - device))
            device, disk = min(device, length), overlap.disk_extension * size
        found.append(
            ReplicaView(
                replica=replica,
                stable=profile.stable,
                device_tokens=device,
                host_tokens=host,
                disk_tokens=disk,
                queued_prefill_tokens=waiting,
                active_decode_blocks=load.decode_blocks if load else 0,
                total_blocks=card.total_kv_blocks or 0,
                needed_blocks=-(-(length - device) // size) if size else 0,
                overloaded=(waiting or 0) - idlest > max_load_gap,
                mode=profile.mode,
                wrong_role=not profile.fits,
                not_allowed=not (anywhere or constraints.allow(replica.worker_id)),
                lacks_taint=not (anywhere or constraints.required_taints <= card.taints),
            )
        )
    return found


def _shortest_queue(
    queued: Mapping[ReplicaKey, int | None], directory: ReplicaDirectory, constraints: Constraints
) -> int:
    """The fewest prefill tokens that wait on a replica that the request may go to; 0 where Dynamo says nothing of any
    of them."""
    live, profiles = directory.live(), directory.profiles()
    anywhere = constraints is UNCONSTRAINED
    known = [
        tokens
        for replica, tokens in queued.items()
        if tokens is not None
        and (profiles[replica].fits if anywhere else may_go(replica, live[replica], directory, constraints))
    ]
    return min(known) if known else 0


def may_go(
    replica: ReplicaKey, card: ReplicaCard, directory: ReplicaDirectory, constraints: Constraints = UNCONSTRAINED
) -> bool:
    """Whether nothing about the replica itself rules it out, whatever its load."""
    return directory.fits(card) and (
        constraints is UNCONSTRAINED
        or (constraints.allow(replica.worker_id) and constraints.required_taints <= card.taints)
    )
