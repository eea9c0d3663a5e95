"""Which stable ids several live instances carry at once: a restart, if for some seconds, a misconfiguration if it
stays. Pure.

Two engines with one `DYN_STABLE_ROUTING_ID` announce themselves, register donors, report and get hints under one name,
so nobody can tell whose KV is meant. A stable id with another rank is another name: ranks of one worker share its
stable id by design.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from dynamo_semkv.contracts.identity import ReplicaKey, StableReplica

logger = logging.getLogger(__name__)

RESTART_SECONDS = 20.0
"""How long a killed worker may stay listed beside the one that took its place: Dynamo's lease is 10 s, and its end was
seen after 13 s."""


class SharedIds:
    """Remembers since when each id is shared, and which are shared for longer than RESTART_SECONDS."""

    def __init__(self) -> None:
        self._since: dict[StableReplica, dict[int, float]] = {}
        """For each shared id its instances, and when each was first seen beside another one (monotonic seconds)."""
        self._lasting: frozenset[StableReplica] = frozenset()

    def __contains__(self, stable: StableReplica) -> bool:
        """Whether it has been shared for longer than a restart takes."""
        return stable in self._lasting

    def update(self, live: Iterable[tuple[ReplicaKey, StableReplica | None]], now: float) -> bool:
        """Takes over who is alive at `now`, monotonic seconds. True when that changed which ids count as shared."""
        owners: dict[StableReplica, list[int]] = {}
        for replica, stable in live:
            if stable is not None:
                owners.setdefault(stable, []).append(replica.worker_id)
        shared = {stable: workers for stable, workers in owners.items() if len(workers) > 1}
        known = self._since
        self._since = {
            stable: {worker: known.get(stable, {}).get(worker, now) for worker in workers}
            for stable, workers in shared.items()
        }
        before = self._lasting
        # The second first-seen time counts: a worker that dies again and again is always listed beside its predecessor,
        # which is another instance each time.
        self._lasting = frozenset(
            stable for stable, seen in self._since.items() if now - sorted(seen.values())[1] >= RESTART_SECONDS
        )
        for stable in sorted(self._lasting - before):
            logger.warning(
                "stable id %s, rank %d, is carried by the instances %s at once: no advice for them until each worker "
                "has a DYN_STABLE_ROUTING_ID of its own",
                *stable,
                ", ".join(map(str, sorted(shared[stable]))),
            )
        for stable in sorted(before - self._lasting):
            logger.info("stable id %s, rank %d, is carried by one instance again", *stable)
        return self._lasting != before
