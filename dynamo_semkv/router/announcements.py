"""The last announcement of each replica, in a bounded table where no worker can use up the room of the others. Pure.

Announcements of live replicas are kept however many others come. A live worker has the ranks of its model card: an
announcement of any other rank of it is dropped and counted. Announcements of workers that discovery does not list (yet)
are bounded, and the worker with most of them loses its own first.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

from dynamo_semkv.contracts.announcement import ReplicaAnnouncement
from dynamo_semkv.contracts.identity import StableReplica
from dynamo_semkv.evidence.shares import Shares
from dynamo_semkv.telemetry.throttled import Throttled

_throttled = Throttled(logging.getLogger(__name__))

MAX_WAITING = 16_384
"""How many announcements of replicas that are not alive are kept."""


class Announcements:
    """The last announcement by stable replica, for live replicas and, bounded, for others."""

    def __init__(self) -> None:
        self._last: dict[StableReplica, ReplicaAnnouncement] = {}
        self._listed: dict[str, set[int]] = {}
        """The ranks of each live worker."""
        self._waiting: Shares[str, int] = Shares()
        self.counts: Counter[str] = Counter()
        """`unlisted_rank`, `dropped`."""

    @property
    def waiting(self) -> int:
        """How many are kept of replicas that are not alive."""
        return self._waiting.sizes.total

    def get(self, stable: StableReplica | None) -> ReplicaAnnouncement | None:
        """The replica's last announcement; None without one, and for None."""
        return self._last.get(stable) if stable is not None else None

    def put(self, announcement: ReplicaAnnouncement) -> bool:
        """Keeps an announcement. False: it is of a rank that the worker's card does not have, so it is not kept."""
        stable = StableReplica(announcement.stable_routing_id, announcement.dp_rank)
        ranks = self._listed.get(stable.stable_routing_id)
        if ranks is not None and stable.dp_rank not in ranks:
            self._unlisted(stable, ranks)
            return False
        self._last[stable] = announcement
        if ranks is None:
            self._waiting.use(*stable)
            self._make_room()
        return True

    def list(self, live: Iterable[StableReplica]) -> None:
        """Takes over which replicas are alive now. Announcements of other ranks of these workers are dropped."""
        before, self._listed = self._listed, {}
        for stable_id, rank in live:
            self._listed.setdefault(stable_id, set()).add(rank)
        for stable_id, ranks in self._listed.items():
            for rank in self._waiting.of(stable_id):
                self._waiting.drop(stable_id, rank)
                if rank not in ranks:
                    self._unlisted(StableReplica(stable_id, rank), ranks)
        for stable_id, ranks in before.items():
            for rank in ranks - self._listed.get(stable_id, set()):
                self._last.pop(StableReplica(stable_id, rank), None)  # it may be another process when it comes back

    def _unlisted(self, stable: StableReplica, ranks: set[int]) -> None:
        self._last.pop(stable, None)
        self.counts["unlisted_rank"] += 1
        _throttled.warning(
            "an announcement of %s, rank %d, is dropped: its model card has the ranks %d to %d",
            *stable,
            min(ranks),
            max(ranks),
            key=stable.stable_routing_id,
        )

    def _make_room(self) -> None:
        while self.waiting > MAX_WAITING:
            victim = self._waiting.victim()
            assert victim is not None
            self._waiting.drop(*victim)
            del self._last[StableReplica(*victim)]
            self.counts["dropped"] += 1
