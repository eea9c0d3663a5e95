"""RankAggregator: reduces the messages of several ranks to those of one, since the rest of the leader knows one rank.

* Ready: when all ranks are ready and hold the same kind of blocks. The smallest slab says how many slots there are.
* A load or a save succeeds when every rank's has succeeded. It fails when one rank's has failed, but is reported only
  when every rank's copy has ended: until then a slot may be read or written.
* A forward pass has run when every rank has reported it.
* A slot that is damaged on one rank is damaged.

A lost rank answers nothing: what waits for it fails, and nothing new may be promised until it is back. Answers of a
rank may come late, twice, and in another order than those of other ranks; each of them counts once.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Set
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from dynamo_semkv.contracts.report import Reason
from dynamo_semkv.telemetry.throttled import Throttled
from worker_connector.disk.messages import DISK_RESULTS
from worker_connector.ledger.plan import PlanKey
from worker_connector.link.channel import (
    ForwardDone,
    LoadDone,
    LoadGivenUp,
    RankReady,
    RankResult,
    SaveDone,
    SlotsDamaged,
)

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)

MISSING_SECONDS = 60.0
"""Between two warnings about ranks that are missing."""
ALL_RANKS = 0
"""The `rank` of a reduced message."""
_MAX_OPEN = 65_536
_MAX_CLOSED = 8_192

K = TypeVar("K", bound=Hashable)
_AGREED = ("tokens_per_block", "group_ids", "windows", "kv_dtype")


@dataclass
class _Answers:
    """The answers of some ranks to one order."""

    ranks: set[int] = field(default_factory=set)
    ok: bool = True
    seconds: float | None = None
    reason: Reason | None = None


class _Tally(Generic[K]):
    """Answers to one kind of order, by the order's key. Where too many orders are open, it forgets the oldest."""

    def __init__(self) -> None:
        self.open: OrderedDict[K, _Answers] = OrderedDict()
        self._closed: OrderedDict[K, None] = OrderedDict()

    def add(self, key: K, rank: int, ok: bool = True) -> _Answers | None:
        """Counts an answer. None for an order that is closed, or that this rank has answered before."""
        if key in self._closed:
            return None
        answers = self.open.setdefault(key, _Answers())
        if rank in answers.ranks:
            return None
        answers.ranks.add(rank)
        answers.ok = answers.ok and ok
        if len(self.open) > _MAX_OPEN:
            self.open.popitem(last=False)
        return answers

    def close(self, key: K, ranks: Set[int], lost: Set[int]) -> _Answers | None:
        """Closes the order if all of `ranks` have answered but for those that are lost, which is a failure. None while
        an answer is awaited."""
        answers = self.open[key]
        absent = ranks - answers.ranks
        if not absent <= lost:
            return None
        if absent:
            answers.ok = False
            answers.reason = answers.reason or Reason.WORKER_LOST
        del self.open[key]
        self._closed[key] = None
        if len(self._closed) > _MAX_CLOSED:
            self._closed.popitem(last=False)
        return answers


class RankAggregator:
    """Not thread-safe: the leader's lock covers it."""

    def __init__(self, world: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`world`: the number of ranks. A single rank's messages are passed on as they are."""
        self.world = world
        self.disagreement: str | None = None
        """Why ranks that are all ready cannot serve together; None where they can."""
        self.counts: Counter[str] = Counter()
        """`ranks_lost`, `late_results`."""
        self.complete = False
        """No rank is `missing` and they agree: loads may be promised and blocks saved. Read with every batch."""
        self._all = frozenset(range(world))
        self._lost: set[int] = set()
        self._ready: dict[int, RankReady] = {}
        self._reported_incarnations: tuple[str, ...] | None = None
        self._loads: _Tally[tuple[PlanKey, int]] = _Tally()
        self._saves: _Tally[int] = _Tally()
        self._forwards: _Tally[int] = _Tally()
        self._clock = clock
        self._missing_since: float | None = clock() if world > 1 else None

    @property
    def missing(self) -> list[int]:
        """Ranks that have not registered a pool, or are lost."""
        return sorted(self._all - (self._ready.keys() - self._lost))

    def take(self, result: RankResult) -> list[RankResult]:
        """Takes one rank's message. Returns the reduced messages that follow from it, often none."""
        if self.world == 1:
            if isinstance(result, RankReady):
                self._ready[0] = result
                self._update()
            return [result]
        if result.rank not in self._all:
            self.counts["late_results"] += 1
            return []
        if isinstance(result, RankReady):
            return self._take_ready(result)
        if isinstance(result, LoadDone):
            return self._take_load(result)
        if isinstance(result, SaveDone):
            return self._take_save(result)
        if isinstance(result, ForwardDone):
            return self._take_forward(result)
        # Answers of disk stores are reduced by the disk tier (disk/tier.py).
        return [result] if isinstance(result, (LoadGivenUp, SlotsDamaged, *DISK_RESULTS)) else []

    def connected(self, rank: int) -> list[RankResult]:
        """The rank has a connection, for the first time or again. No result was lost with the old one, so no message
        follows."""
        self._lost.discard(rank)
        self._update()
        return []

    def lost(self, rank: int) -> list[RankResult]:
        """The rank's connection has ended. Returns the failures of what waits for its answer."""
        self._lost.add(rank)
        self._update()
        self.counts["ranks_lost"] += 1
        results: list[RankResult] = []
        for key in list(self._loads.open):
            results.extend(self._finish_load(key))
        for save_id in list(self._saves.open):
            results.extend(self._finish_save(save_id))
        return results

    def describe(self) -> dict[str, Any]:
        """The state of the ranks for the leader's snapshot, JSON-able."""
        return {
            "world": self.world,
            "missing": self.missing,
            "lost": sorted(self._lost),
            "disagreement": self.disagreement,
            **self.counts,
        }

    def overdue(self) -> list[int]:
        """Ranks of which one at least has been missing for `MISSING_SECONDS`, once in that time; else none."""
        if self._missing_since is None or self._clock() - self._missing_since < MISSING_SECONDS:
            return []
        self._missing_since = self._clock()
        return self.missing

    def _update(self) -> None:
        missing = self.missing
        self.complete = not missing and self.disagreement is None
        if not missing:
            self._missing_since = None
        elif self._missing_since is None:
            self._missing_since = self._clock()

    # ready

    def _take_ready(self, ready: RankReady) -> list[RankResult]:
        self._ready[ready.rank] = ready
        pools = [self._ready[rank] for rank in sorted(self._ready)]
        if len(pools) == self.world:
            self.disagreement = _disagreement(pools)
        self._update()
        if len(pools) < self.world:
            return []
        if self.disagreement is not None:
            _throttled.error(
                "semkv connector: nothing is loaded or saved, the ranks do not agree: %s", self.disagreement
            )
            return []
        incarnations = tuple(pool.incarnation for pool in pools)
        if incarnations == self._reported_incarnations:
            return []
        self._reported_incarnations = incarnations
        return [_merged(pools)]

    # orders

    def _take_load(self, done: LoadDone) -> list[RankResult]:
        key = (done.key, done.iteration)
        answers = self._loads.add(key, done.rank, done.ok)
        if answers is None:
            self.counts["late_results"] += 1
            return []
        answers.reason = answers.reason or done.reason
        if done.seconds is not None:
            answers.seconds = max(done.seconds, answers.seconds or 0.0)
        return self._finish_load(key)

    def _finish_load(self, key: tuple[PlanKey, int]) -> list[RankResult]:
        answers = self._loads.close(key, self._all, self._lost)
        if answers is None:
            return []
        reason = None if answers.ok else answers.reason
        return [LoadDone(ALL_RANKS, key[1], key[0], answers.ok, answers.seconds, reason)]

    def _take_save(self, done: SaveDone) -> list[RankResult]:
        if self._saves.add(done.save_id, done.rank, done.ok) is None:
            self.counts["late_results"] += 1
            return []
        return self._finish_save(done.save_id)

    def _finish_save(self, save_id: int) -> list[RankResult]:
        answers = self._saves.close(save_id, self._all, self._lost)
        return [] if answers is None else [SaveDone(ALL_RANKS, save_id, answers.ok)]

    def _take_forward(self, done: ForwardDone) -> list[RankResult]:
        added = self._forwards.add(done.iteration, done.rank)
        if added is None or self._forwards.close(done.iteration, self._all, frozenset()) is None:
            return []
        return [ForwardDone(ALL_RANKS, done.iteration)]


def _disagreement(pools: list[RankReady]) -> str | None:
    for name in _AGREED:
        values = [getattr(pool, name) for pool in pools]
        if any(value != values[0] for value in values):
            return f"{name} is {', '.join(f'{value!r} on rank {rank}' for rank, value in enumerate(values))}"
    without = [pool.rank for pool in pools if pool.slots < 1]
    return f"ranks {without} have no slab" if without else None


def _merged(pools: list[RankReady]) -> RankReady:
    """One pool for all. Where heads do not divide evenly the ranks' layouts differ: then the layout is a digest of all
    of them in the order of the ranks."""
    layouts = [pool.kv_layout for pool in pools]
    layout = layouts[0]
    if any(other != layout for other in layouts):
        layout = hashlib.blake2b("\n".join(layouts).encode(), digest_size=8, person=b"semkv-ranks").hexdigest()
    return msgspec.structs.replace(
        pools[0],
        rank=ALL_RANKS,
        kv_layout=layout,
        bytes_per_block=max(pool.bytes_per_block for pool in pools),
        slots=min(pool.slots for pool in pools),
        incarnation="+".join(pool.incarnation for pool in pools),
    )


def warn_of_missing_ranks(missing: list[int], world: int) -> None:
    """Logs the ranks that `RankAggregator.overdue` returned, and the remedy."""
    _throttled.warning(
        "semkv connector: ranks %s of %d have not reported; nothing is loaded or saved, requests are served as "
        "without the connector. A rank connects with the first batch, to a socket of this machine: ranks on other "
        "machines cannot. Remedy: keep tensor_parallel_size within one machine, or set connector.materialization: off",
        missing,
        world,
    )
