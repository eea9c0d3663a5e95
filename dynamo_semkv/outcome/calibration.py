"""Calibration: what share of its claim a hinted donor turns into confirmed tokens, learned per (replica, match type, overlap, tier).

    Calibration(config)   .add(route)   .share(replica, match_type, overlap, tier) -> [0, 1]   .reload(config)   .snapshot()

Each cell is a Beta posterior: the prior counts as `scoring.prior.strength` routes with the share of the prior, a hinted route adds one
trial whose success is the confirmed share of what was hinted. Trials fade by half every `half_life_routes` routes that the replica serves,
hinted or not, so a cell on which nothing is placed any more goes back to its prior and is tried again: that is the whole exploration, and
it costs a bounded share of a replica's routes however large the fleet. The pace of each cell is spread by `scoring.seed`, or every cell of
a fleet would be tried again at once.

A fleet runs one configuration more often than not, so what other cells of the same match type and tier observed (on any replica, at any
overlap) is where a cell begins: their posterior, with the same strength, takes the place of the configured share. An engine that declines
everything is then found out once, not once a cell; a replica that differs from the rest needs as many routes as the prior counts.

Pure: no clock, no I/O. The same routes in the same order give the same state, so a router that replays the bus knows what it knew. Two
routers may close neighbouring routes the other way round; a route that moves by d places changes the weight of its trial by at
most a factor of `2 ** (d / (0.75 * half_life_routes))`, and nothing else.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dynamo_semkv.config.schema import ScoringConfig
from dynamo_semkv.contracts.evidence import Bucket, MatchType
from dynamo_semkv.contracts.identity import StableReplica
from dynamo_semkv.contracts.location import Tier
from dynamo_semkv.contracts.report import Outcome, Reason
from dynamo_semkv.outcome.closed import ClosedRoute, placed_on
from dynamo_semkv.outcome.join import replica_of, same_replica
from dynamo_semkv.scoring.credit import prior_share

MAX_REPLICAS = 1_024
"""Those that were learned of longest ago are forgotten: they fall back to the prior. Cells of one replica are bounded by closed sets."""
MAX_ROWS = 256
_SLOWEST, _SPREAD = 0.75, 0.5

_SILENT_OUTCOMES = frozenset(
    {Outcome.LOCAL_EXACT, Outcome.UNCONFIRMED, Outcome.CANCELLED, Outcome.ORPHAN_REPORT, Outcome.UNKNOWN}
)
"""They say nothing about what the engine would have done: nothing had to be loaded, or nobody knows."""
_SILENT_REASONS = frozenset({Reason.CANCELLED, Reason.WRONG_REPLICA, Reason.WORKER_LOST, Reason.NO_REPORT})


class Kind(NamedTuple):
    match_type: MatchType
    overlap: Bucket
    tier: Tier


class Lesson(NamedTuple):
    """`share` of the claim was confirmed; `weight` of one trial."""

    kind: Kind
    share: float
    weight: float


def lessons(route: ClosedRoute) -> tuple[Lesson, ...]:
    """What one closed route teaches about the replica that it was placed on: nothing, or one trial.

    A claim may be part proven prefix and part only similar. They are separate cells, as they are separate terms of a donor's value, and
    share the trial by tokens: that an exact engine declines the rest says nothing against the prefix. What the engine's own cache turned
    out to hold beyond Dynamo's index is no part of the claim.
    """
    opened, report, placed = route.opened, route.report, placed_on(route.opened)
    hinted = route.funnel.hinted
    if report is None or placed is None or placed.dp_rank is None or hinted < 1:
        return ()
    if route.outcome in _SILENT_OUTCOMES or route.reason in _SILENT_REASONS:
        return ()
    if not same_replica(placed, replica_of(report)) or opened.match_type is None or opened.tier is None:
        return ()
    proven = opened.proven_tokens
    if proven is None:
        proven = hinted if opened.match_type is MatchType.EXACT_EQUIVALENT else 0
    proven = min(proven, hinted)
    local = min(max(0, report.local_tokens - opened.exact_device_tokens), hinted)
    exact, similar = max(0, proven - local), hinted - max(proven, local)
    confirmed = report.confirmed
    found = []
    for match_type, claimed, got in (
        (MatchType.EXACT_EQUIVALENT, exact, min(confirmed, exact)),
        (MatchType.SEMANTIC_CANDIDATE, similar, min(max(0, confirmed - exact), similar)),
    ):
        if claimed > 0:
            kind = Kind(match_type, opened.overlap, opened.tier)
            found.append(Lesson(kind, got / claimed, claimed / (exact + similar)))
    return tuple(found)


@dataclass
class _Sums:
    """Faded sums, as of `at`."""

    confirmed: float = 0.0
    trials: float = 0.0
    at: int = 0

    def faded(self, now: int, half_life: float) -> tuple[float, float]:
        """(confirmed, trials) as of `now`."""
        weight = float(2.0 ** (-(now - self.at) / half_life))
        return self.confirmed * weight, self.trials * weight

    def add(self, lesson: Lesson, now: int, half_life: float) -> None:
        confirmed, trials = self.faded(now, half_life)
        self.confirmed, self.trials, self.at = confirmed + lesson.share * lesson.weight, trials + lesson.weight, now


@dataclass
class _Cell:
    pace: float
    """Its half-life, as a multiple of the configured one."""
    own: _Sums
    """By the clock of its replica."""
    in_fleet: _Sums
    """The same by the fleet's clock: its part of the fleet's sums."""
    routes: int = 0


@dataclass
class _Replica:
    routes: int = 0
    """Served since something was learned of it: its clock."""
    cells: dict[Kind, _Cell] = field(default_factory=dict)


class Calibration:
    """One thread. Implements scoring.credit.Credit."""

    def __init__(self, config: ScoringConfig, *, max_replicas: int = MAX_REPLICAS) -> None:
        self.taught = 0
        """Routes that taught something."""
        self.forgotten = 0
        """Replicas dropped to keep memory bounded."""
        self._config = config
        self._max_replicas = max_replicas
        self._replicas: OrderedDict[StableReplica, _Replica] = OrderedDict()
        self._fleet: dict[tuple[MatchType, Tier], _Sums] = {}
        self._fleet_routes = 0

    def reload(self, config: ScoringConfig) -> None:
        """Prior, strength, half-life and switch take effect at once; what was observed stays."""
        self._config = config

    def add(self, route: ClosedRoute) -> None:
        """Each closed route once: that is the book's promise."""
        served = route.replica
        if served is not None and served.dp_rank is not None:
            known = self._replicas.get(StableReplica(served.stable_routing_id, served.dp_rank))
            if known is not None:
                known.routes += 1
                self._fleet_routes += 1
        learned, placed = lessons(route), placed_on(route.opened)
        if not learned or placed is None or placed.dp_rank is None:
            return
        self.taught += 1
        name = StableReplica(placed.stable_routing_id, placed.dp_rank)
        replica = self._replicas.setdefault(name, _Replica())
        self._replicas.move_to_end(name)
        while len(self._replicas) > self._max_replicas:
            self._replicas.popitem(last=False)
            self.forgotten += 1
        half_life, slow = self._config.calibration.half_life_routes, self._fleet_half_life()
        for lesson in learned:
            kind = lesson.kind
            cell = replica.cells.get(kind)
            if cell is None:
                own, in_fleet = _Sums(at=replica.routes), _Sums(at=self._fleet_routes)
                cell = replica.cells[kind] = _Cell(self._pace(name, kind), own, in_fleet)
            cell.own.add(lesson, replica.routes, half_life * cell.pace)
            cell.in_fleet.add(lesson, self._fleet_routes, slow)
            cell.routes += 1
            fleet = self._fleet.setdefault((kind.match_type, kind.tier), _Sums(at=self._fleet_routes))
            fleet.add(lesson, self._fleet_routes, slow)

    def share(self, replica: StableReplica | None, match_type: MatchType, overlap: Bucket, tier: Tier) -> float:
        """The posterior mean; exactly the prior where nothing was observed."""
        prior = prior_share(self._config.prior, match_type)
        if replica is None or not self._config.calibration.enabled:
            return prior
        known = self._replicas.get(replica)
        kind = Kind(match_type, overlap, tier)
        cell = known.cells.get(kind) if known is not None else None
        begins = self._begins(prior, kind, cell)
        return self._posterior(begins, cell, known.routes)[0] if cell is not None and known is not None else begins

    def snapshot(self) -> dict[str, Any]:
        """JSON-able. `cells`: those that were learned of last come first. `match_types`: the mean over all cells, weighted by the trials
        that are left; the prior where nothing was observed."""
        rows: list[dict[str, Any]] = []
        weighted = {match_type: [0.0, 0.0] for match_type in MatchType}
        for name, replica in reversed(self._replicas.items()):
            for kind, cell in sorted(replica.cells.items(), key=lambda item: (-item[1].own.at, item[0])):
                prior = prior_share(self._config.prior, kind.match_type)
                begins = self._begins(prior, kind, cell)
                share, trials = self._posterior(begins, cell, replica.routes)
                weighted[kind.match_type][0] += share * trials
                weighted[kind.match_type][1] += trials
                if len(rows) >= MAX_ROWS:
                    continue
                rows.append(
                    {
                        "replica": f"{name.stable_routing_id}/{name.dp_rank}",
                        "match_type": kind.match_type.value,
                        "overlap": kind.overlap.value,
                        "tier": kind.tier.value,
                        "share": share,
                        "prior": prior,
                        "begins": begins,
                        "trials": trials,
                        "routes": cell.routes,
                    }
                )
        return {
            "enabled": self._config.calibration.enabled,
            "half_life_routes": self._config.calibration.half_life_routes,
            "strength": self._config.prior.strength,
            "routes": self.taught,
            "replicas": len(self._replicas),
            "forgotten": self.forgotten,
            "match_types": {
                match_type.value: {
                    "share": total / trials if trials > 0 else prior_share(self._config.prior, match_type),
                    "trials": trials,
                }
                for match_type, (total, trials) in weighted.items()
            },
            "cells": rows,
        }

    def _posterior(self, begins: float, cell: _Cell, now: int) -> tuple[float, float]:
        """(mean, trials that are left)."""
        confirmed, trials = cell.own.faded(now, self._config.calibration.half_life_routes * cell.pace)
        strength = self._config.prior.strength
        return (begins * strength + confirmed) / (strength + trials), trials

    def _begins(self, prior: float, kind: Kind, cell: _Cell | None) -> float:
        """The share with which a cell begins: the configured one, moved by what all other cells of its match type and tier observed."""
        fleet = self._fleet.get((kind.match_type, kind.tier))
        if fleet is None:
            return prior
        slow, strength = self._fleet_half_life(), self._config.prior.strength
        confirmed, trials = fleet.faded(self._fleet_routes, slow)
        if cell is not None:
            mine, my_trials = cell.in_fleet.faded(self._fleet_routes, slow)
            confirmed, trials = max(0.0, confirmed - mine), max(0.0, trials - my_trials)
        return (prior * strength + min(confirmed, trials)) / (strength + trials)

    def _fleet_half_life(self) -> float:
        """In routes of the whole fleet: it fades in the time in which a replica's own does."""
        return self._config.calibration.half_life_routes * max(1, len(self._replicas))

    def _pace(self, replica: StableReplica, kind: Kind) -> float:
        name = "\0".join((replica.stable_routing_id, str(replica.dp_rank), *(part.value for part in kind)))
        key = self._config.seed.to_bytes(8, "little")
        lot = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4, key=key).digest(), "little")
        return _SLOWEST + _SPREAD * lot / 2**32
