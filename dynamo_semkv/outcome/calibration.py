"""Calibration: what claims turn out to be worth, learned per (replica, match type, overlap, tier, mode): two shares and
a rate.

    Calibration(config)   .saving_of(route)   .add(route)   .share(replica, kind)   .saving(replica, kind)
                          .reload(config)   .snapshot()

`share`: what part of its claim a hinted donor turns into confirmed tokens. `saving`: what part of its prefill a
confirmed token saves, after the cost of loading it (`saving.py`). The prefill rate of each replica turns both into
seconds.

Each cell is a posterior: its start value counts as `scoring.prior.strength` routes, a hinted route adds one trial of
`share`, a route that loaded one of `saving`. Trials fade by half every `half_life_routes` routes that the replica
serves, hinted or not, so a cell on which nothing is placed any more goes back to its prior and is tried again: that is
the whole exploration, and it costs a bounded share of a replica's routes however large the fleet. The pace of each cell
is spread by `scoring.seed`; otherwise every cell of a fleet would be tried again at once.

A fleet runs one configuration more often than not, so a cell starts from what other cells of the same match type, tier
and mode observed (on any replica, at any overlap; for `saving` of any match type): their posterior, with the same
strength, takes the place of the configured share. One worker counts there with at most OF_ONE_WORKER times as many
routes as the prior does (`pool.py`), however many it served. An engine that declines everything then costs trials once,
not once a cell; a replica that differs from the rest needs as many routes as the prior counts.

How long a load took is taken from the connector's report as long as the first token is consistent with it
(`load_clock.py`). What was learned by a replica's clock is forgotten when that clock is not believed any more; from
then on the replica's loads count by the first token alone, and start as worth nothing: what the loads of others save
says nothing of a replica whose loads did not.

Pure: no clock, no I/O. The same routes in the same order give the same state, so a router that replays the bus learns
the same again. Two routers may close neighbouring routes in the opposite order; a route that moves by d places changes
the weight of its trial by at most a factor of `2 ** (d / (0.75 * half_life_routes))`, and nothing else.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from dynamo_semkv.config.schema import Materialization, ScoringConfig
from dynamo_semkv.contracts.evidence import Bucket, MatchType
from dynamo_semkv.contracts.identity import StableReplica
from dynamo_semkv.contracts.location import Tier
from dynamo_semkv.contracts.report import Outcome
from dynamo_semkv.outcome.closed import ClosedRoute, ReplicaName, TtftClass, placed_on
from dynamo_semkv.outcome.lessons import Lesson, lessons, load_lesson
from dynamo_semkv.outcome.load_clock import LoadClock, by_clock, by_first_token
from dynamo_semkv.outcome.pool import Pool, Sums
from dynamo_semkv.outcome.saving import PrefillRates, Saving, cold_seconds_per_token, saving_of
from dynamo_semkv.scoring.credit import Kind, prior_saving, prior_share

MAX_REPLICAS = 1_024
"""At this limit the replica that served longest ago is forgotten: it falls back to the prior. The cells of one replica
are bounded by closed sets."""
ABSENT = 2.0
"""A replica is forgotten too, with what was learned from it, after so many half-lives of the fleet without a route of
its own. The fleet's half-life grows with its replicas, so replicas that never come back (named after pods) would
otherwise keep what was once learned of all from fading."""
OF_ONE_WORKER = 4.0
"""How many trials of one worker count at most where the cells of others start, as a multiple of the prior's strength.
With 1, four replicas that decline everything are tried twice as often in the replay as without a bound; with 4 no
oftener."""
MAX_ROWS = 256
_SLOWEST, _SPREAD = 0.75, 0.5


@dataclass
class _Track:
    """One learned quantity of one cell."""

    own: Sums
    """Faded by the clock of its replica."""
    in_fleet: Sums
    """The same trials, faded by the fleet's clock: its part of the pool."""
    routes: int = 0


@dataclass
class _Cell:
    half_life_factor: float
    """The cell's half-life, as a multiple of the configured one."""
    share: _Track | None = None
    saving: _Track | None = None

    @property
    def at(self) -> float:
        """When something was last learned for the cell, by the clock of its replica."""
        return max(track.own.at for track in (self.share, self.saving) if track is not None)


@dataclass
class _Replica:
    routes: int = 0
    """Routes served since something was learned of it: the replica's clock."""
    seen: float = 0.0
    """The fleet's clock when the replica served, or something was learned of it, last."""
    cells: dict[Kind, _Cell] = field(default_factory=dict)
    clock: LoadClock = field(default_factory=LoadClock)


class Calibration:
    """Learns from closed routes and answers with shares. One thread. Implements scoring.credit.Credit."""

    def __init__(self, config: ScoringConfig, *, max_replicas: int = MAX_REPLICAS) -> None:
        self.routes_learned_from = 0
        """Routes from which something was learned."""
        self.forgotten = 0
        """Replicas dropped to keep memory bounded."""
        self._config = config
        self._max_replicas = max_replicas
        self._replicas: OrderedDict[StableReplica, _Replica] = OrderedDict()
        self._pools: dict[tuple[str, ...], Pool] = {}
        self._age = 0.0
        """The fleet's clock, in half-lives."""
        self._rates = PrefillRates(max_replicas)

    def reload(self, config: ScoringConfig) -> None:
        """Prior, strength, half-life and switch take effect at once; what was observed stays."""
        self._config = config

    @property
    def _cap(self) -> float:
        return OF_ONE_WORKER * self._config.prior.strength

    def saving_of(self, route: ClosedRoute) -> Saving | None:
        """What the route's load was worth, at the rate that its replica has shown so far. None: nothing was loaded, no
        rate is known yet, or the worker was lost."""
        report, observed = route.report, route.observed
        if report is None or report.confirmed < 1:
            return None
        replica = StableReplica(report.stable_routing_id, report.dp_rank)
        rate, known = self._rates.seconds_per_token(replica), self._replicas.get(replica)
        if rate is None or (observed is not None and observed.end == "worker_lost"):
            return None
        return saving_of(
            seconds_per_token=rate,
            input_tokens=route.opened.input_tokens,
            local_tokens=report.local_tokens,
            confirmed_tokens=report.confirmed,
            queued_tokens=observed.queued_tokens if observed is not None else None,
            ttft_seconds=observed.ttft_seconds if observed is not None else None,
            load_seconds=report.load_seconds if known is None or known.clock.believed else None,
        )

    def add(self, route: ClosedRoute) -> None:
        """Learns from a closed route; each comes once, by the tracker's contract, and with the `saving` that
        `saving_of` gave before."""
        self._learn_rate(route)
        served = route.replica
        if served is not None and served.dp_rank is not None:
            name = StableReplica(served.stable_routing_id, served.dp_rank)
            known = self._replicas.get(name)
            if known is not None:
                known.routes += 1
                self._age += 1.0 / (self._config.calibration.half_life_routes * max(1, len(self._replicas)))
                self._mark_present(name, known)
        placed, learned, load = placed_on(route.opened), lessons(route), load_lesson(route)
        if learned and placed is not None and placed.dp_rank is not None:
            name = StableReplica(placed.stable_routing_id, placed.dp_rank)
            for lesson in learned:
                self._learn(name, lesson, "share")
        if load is not None and not self._discredits_clock(load[0], route):
            self._learn(*load, "saving")
        self.routes_learned_from += bool(learned or load is not None)

    def share(self, replica: StableReplica | None, kind: Kind) -> float:
        """The posterior mean of the share, in [0, 1]; exactly the prior where nothing was observed."""
        prior = prior_share(self._config.prior, kind)
        if replica is None or not self._config.calibration.enabled or kind.mode is Materialization.OFF:
            return prior
        known = self._replicas.get(replica)
        cell = known.cells.get(kind) if known is not None else None
        return self._mean(prior, _share_key(kind), cell, cell.share if cell is not None else None, replica)[0]

    def saving(self, replica: StableReplica | None, kind: Kind) -> float:
        """The posterior mean of the saving, in [-1, 1]; exactly the prior where nothing was observed."""
        prior = prior_saving(self._config.tier_credit, kind.tier)
        if replica is None or not self._config.calibration.enabled:
            return prior
        known = self._replicas.get(replica)
        cell = known.cells.get(kind) if known is not None else None
        return self._mean(prior, _saving_key(kind), cell, cell.saving if cell is not None else None, replica)[0]

    def snapshot(self) -> dict[str, Any]:
        """What was learned, JSON-able. `cells`: those of replicas that served last come first. `match_types` and
        `tiers`: the mean over all cells, weighted by the trials that are left; the prior where nothing was observed.
        `prefill`: tokens per second of each replica with a known rate. `clocks_not_believed`: replicas whose loads took
        longer than they report."""
        rows: list[dict[str, Any]] = []
        shares = {match_type: [0.0, 0.0] for match_type in MatchType}
        savings = {tier: [0.0, 0.0] for tier in Tier}
        for name, replica in reversed(self._replicas.items()):
            for kind, cell in sorted(replica.cells.items(), key=lambda item: (-item[1].at, item[0])):
                row = self._row(name, kind, cell)
                for sums, mean, trials in (
                    (shares[kind.match_type], row["share"], row["trials"]),
                    (savings[kind.tier], row["saving"], row["loads"]),
                ):
                    sums[0] += mean * trials
                    sums[1] += trials
                if len(rows) < MAX_ROWS:
                    rows.append(row)
        prior, credit = self._config.prior, self._config.tier_credit
        return {
            "enabled": self._config.calibration.enabled,
            "half_life_routes": self._config.calibration.half_life_routes,
            "strength": prior.strength,
            "routes": self.routes_learned_from,
            "replicas": len(self._replicas),
            "forgotten": self.forgotten,
            "match_types": {
                match_type.value: {
                    "share": total / trials
                    if trials > 0
                    else prior_share(prior, Kind(match_type, Bucket.NONE, Tier.DEVICE)),
                    "trials": trials,
                }
                for match_type, (total, trials) in shares.items()
            },
            "tiers": {
                tier.value: {"saving": total / loads if loads > 0 else prior_saving(credit, tier), "loads": loads}
                for tier, (total, loads) in savings.items()
                if tier is not Tier.DEVICE
            },
            "prefill": [
                {"replica": str(ReplicaName(*name)), "tokens_per_second": 1.0 / seconds, "routes": routes}
                for (name, seconds, routes), _ in zip(self._rates.rows(), range(MAX_ROWS), strict=False)
            ],
            "clocks_not_believed": [
                str(ReplicaName(*name)) for name, replica in self._replicas.items() if not replica.clock.believed
            ][:MAX_ROWS],
            "cells": rows,
        }

    def _row(self, name: StableReplica, kind: Kind, cell: _Cell) -> dict[str, Any]:
        share_prior = prior_share(self._config.prior, kind)
        saving_prior = prior_saving(self._config.tier_credit, kind.tier)
        share, begins, trials = self._mean(share_prior, _share_key(kind), cell, cell.share, name)
        saving, _, loads = self._mean(saving_prior, _saving_key(kind), cell, cell.saving, name)
        return {
            "replica": str(ReplicaName(*name)),
            "match_type": kind.match_type.value,
            "overlap": kind.overlap.value,
            "tier": kind.tier.value,
            "mode": kind.mode.value,
            "share": share,
            "prior": share_prior,
            "begins": begins,
            "trials": trials,
            "saving": saving,
            "saving_prior": saving_prior,
            "loads": loads,
            "routes": cell.share.routes if cell.share is not None else 0,
        }

    def _learn_rate(self, route: ClosedRoute) -> None:
        """Learns the replica's prefill rate from a cold route."""
        observed, served = route.observed, route.replica
        if route.ttft_class is not TtftClass.COLD or observed is None or observed.ttft_seconds is None:
            return
        if served is None or served.dp_rank is None or observed.end == "error" or route.outcome is Outcome.LOAD_FAILED:
            return
        local = route.report.local_tokens + route.report.confirmed if route.report is not None else 0
        rate = cold_seconds_per_token(
            ttft_seconds=observed.ttft_seconds,
            input_tokens=route.opened.input_tokens,
            reused_tokens=max(local, observed.engine_cached_tokens or 0),
            queued_tokens=observed.queued_tokens,
        )
        if rate is not None:
            self._rates.add(StableReplica(served.stable_routing_id, served.dp_rank), rate)

    def _learn(self, name: StableReplica, lesson: Lesson, what: str) -> None:
        replica = self._replicas.setdefault(name, _Replica())
        self._mark_present(name, replica)
        half_life, kind = self._config.calibration.half_life_routes, lesson.kind
        cell = replica.cells.get(kind)
        if cell is None:
            cell = replica.cells[kind] = _Cell(self._half_life_factor(name, kind))
        track: _Track | None = getattr(cell, what)
        if track is None:
            track = _Track(Sums(at=replica.routes), Sums(at=self._age))
            setattr(cell, what, track)
        track.own.add(lesson, replica.routes, half_life * cell.half_life_factor)
        track.in_fleet.add(lesson, self._age)
        track.routes += 1
        pool = self._pools.setdefault(_key(what, kind), Pool())
        pool.add(name.stable_routing_id, lesson, self._age, self._cap, new_cell=track.routes == 1)

    def _discredits_clock(self, name: StableReplica, route: ClosedRoute) -> bool:
        """True when, with this load, the replica's clock is not believed any more: what was learned by it is
        forgotten."""
        saving = route.saving
        if saving is None or not self._rates.is_own(name):
            return False
        claimed, seen = by_clock(saving, route), by_first_token(saving, route)
        if claimed is None or seen is None:
            return False
        replica = self._replicas.setdefault(name, _Replica())
        if not replica.clock.compare(claimed, seen):
            return False
        for kind, cell in replica.cells.items():
            self._drop(name, kind, cell, "saving")
        replica.cells = {kind: cell for kind, cell in replica.cells.items() if cell.share is not None}
        return True

    def _drop(self, name: StableReplica, kind: Kind, cell: _Cell, what: str) -> None:
        """Forgets what one cell has learned of one quantity, here and in the pool."""
        track: _Track | None = getattr(cell, what)
        if track is None:
            return
        setattr(cell, what, None)
        key = _key(what, kind)
        self._pools[key].drop(name.stable_routing_id, track.in_fleet, self._age, self._cap)
        if not len(self._pools[key]):
            del self._pools[key]

    def _mark_present(self, name: StableReplica, replica: _Replica) -> None:
        """Marks the replica as present, and forgets those that were absent for long or exceed the limit."""
        replica.seen = self._age
        self._replicas.move_to_end(name)
        while len(self._replicas) > self._max_replicas or (
            self._age - next(iter(self._replicas.values())).seen > ABSENT
        ):
            gone, forgotten = self._replicas.popitem(last=False)
            for kind, cell in forgotten.cells.items():
                self._drop(gone, kind, cell, "share")
                self._drop(gone, kind, cell, "saving")
            self.forgotten += 1

    def _mean(
        self, prior: float, key: tuple[str, ...], cell: _Cell | None, track: _Track | None, name: StableReplica
    ) -> tuple[float, float, float]:
        """(posterior mean, the cell's start value, its own trials that are left)."""
        begins, replica = self._start_value(prior, key, track, name), self._replicas.get(name)
        if cell is None or track is None or replica is None:
            return begins, begins, 0.0
        half_life = self._config.calibration.half_life_routes * cell.half_life_factor
        total, trials = track.own.faded(replica.routes, half_life)
        strength = self._config.prior.strength
        return (begins * strength + total) / (strength + trials), begins, trials

    def _start_value(self, prior: float, key: tuple[str, ...], track: _Track | None, name: StableReplica) -> float:
        """The start value of a cell: the configured share, moved by what all other cells of its kind observed."""
        pool, known = self._pools.get(key), self._replicas.get(name)
        if key[0] == "saving" and known is not None and not known.clock.believed:
            return 0.0
        if pool is None:
            return prior
        cell, strength = track.in_fleet if track is not None else None, self._config.prior.strength
        total, trials = pool.around(name.stable_routing_id, cell, self._age)
        # A difference of floats is clamped to what its trials can add up to.
        least = 0.0 if key[0] == "share" else -trials
        return (prior * strength + max(least, min(total, trials))) / (strength + trials)

    def _half_life_factor(self, replica: StableReplica, kind: Kind) -> float:
        claim = (kind.match_type.value, kind.overlap.value, kind.tier.value)
        name = "\0".join((replica.stable_routing_id, str(replica.dp_rank), *claim))
        key = self._config.seed.to_bytes(8, "little")
        lot = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4, key=key).digest(), "little")
        return _SLOWEST + _SPREAD * lot / 2**32


def _key(what: str, kind: Kind) -> tuple[str, ...]:
    return _share_key(kind) if what == "share" else _saving_key(kind)


def _share_key(kind: Kind) -> tuple[str, ...]:
    return ("share", kind.match_type.value, kind.tier.value, kind.mode.value)


def _saving_key(kind: Kind) -> tuple[str, ...]:
    return ("saving", kind.tier.value, kind.mode.value)
