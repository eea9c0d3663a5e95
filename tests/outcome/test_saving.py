"""Saved seconds: a rate from cold routes, what a load was worth against it, and a credit that follows measured
loads."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_semkv.config.schema import CalibrationConfig, MatchPriors, Materialization, ScoringConfig, TierCredit
from dynamo_semkv.contracts.evidence import Bucket, MatchType
from dynamo_semkv.contracts.identity import StableReplica
from dynamo_semkv.contracts.location import Tier
from dynamo_semkv.contracts.report import Outcome, Reason
from dynamo_semkv.outcome.calibration import Calibration
from dynamo_semkv.outcome.closed import ClosedRoute, JoinedBy, close_route
from dynamo_semkv.outcome.saving import NEEDED, SAMPLES, PrefillRates, cold_seconds_per_token, saving_of
from dynamo_semkv.outcome.totals import Totals
from dynamo_semkv.scoring.credit import Kind
from tests.outcome.build import observed, opened, report

EXACT = MatchType.EXACT_EQUIVALENT
A0, A1 = StableReplica("w-a", 0), StableReplica("w-a", 1)
CONFIG = ScoringConfig(
    prior=MatchPriors(exact_equivalent=0.9, semantic_candidate=0.1, strength=4.0),
    calibration=CalibrationConfig(half_life_routes=100.0),
    tier_credit=TierCredit(host_pinned=0.75, disk=0.5),
)
HOST = Kind(EXACT, Bucket.HIGH, Tier.HOST_PINNED)
DISK = Kind(EXACT, Bucket.HIGH, Tier.DISK)


def cold(number: int, *, seconds: float = 0.5, rank: int = 0, queued: int | None = 0, **ends: Any) -> ClosedRoute:
    """1,000 tokens that nobody had: at 0.5 s, 2,000 tokens a second."""
    start = opened(
        number, stable_routing_id=None, dp_rank=None, placed_tokens=0, hinted_tokens=0, evidence_tokens=0, donor_id=None
    )
    told = report(number, confirmed=0, outcome=Outcome.NO_DONOR, reason=Reason.NONE, dp_rank=rank)
    seen = observed(number, ttft_seconds=seconds, queued_tokens=queued, served_dp_rank=rank, **ends)
    return close_route(start, seen, told, JoinedBy.ROUTE_ID, float(number))


SOON = -1.0
"""The first token comes after 0.25 s, or when the load is over."""


def loaded(
    number: int,
    *,
    load: float | None = 0.1,
    ttft: float | None = SOON,
    rank: int = 0,
    tier: Tier | None = Tier.HOST_PINNED,
    said: dict[str, Any] | None = None,
    queued: int | None = 0,
    **fields: Any,
) -> ClosedRoute:
    """800 of 1,000 tokens hinted and loaded on `w-a`."""
    base = {"match_type": EXACT, "overlap": Bucket.HIGH, "tier": tier, "dp_rank": rank}
    start = opened(number, **{**base, **fields})
    told = report(number, confirmed=800, dp_rank=rank, load_seconds=load, tier=tier or Tier.HOST_PINNED, **(said or {}))
    first = max(0.25, load or 0.0) if ttft == SOON else ttft
    seen = observed(number, ttft_seconds=first, served_dp_rank=rank, queued_tokens=queued)
    return close_route(start, seen, told, JoinedBy.ROUTE_ID, float(number))


def close(of: Calibration, route: ClosedRoute) -> ClosedRoute:
    """As a router does it."""
    known = replace(route, saving=of.saving_of(route))
    of.add(known)
    return known


def taught(*routes: ClosedRoute, config: ScoringConfig = CONFIG) -> Calibration:
    made = Calibration(config)
    for route in routes:
        close(made, route)
    return made


COLD = tuple(cold(n) for n in range(1, 1 + NEEDED))


def test_the_rate_is_the_median_of_what_cold_routes_took_for_what_was_before_them() -> None:
    of = taught(cold(1), cold(2, seconds=1.0, queued=1_000), cold(3, seconds=60.0))
    (row,) = of.snapshot()["prefill"]
    assert row["replica"] == "w-a/0"
    assert row["tokens_per_second"] == pytest.approx(2_000.0)
    assert row["routes"] == 3


@pytest.mark.parametrize(
    "route",
    [
        cold(9, end="error"),
        replace(cold(9), outcome=Outcome.LOAD_FAILED),
        replace(cold(9), observed=None),
        cold(9, engine_cached_tokens=900),
        loaded(9),
    ],
)
def test_what_says_nothing_about_the_rate_does_not_move_it(route: ClosedRoute) -> None:
    before = taught(*COLD).snapshot()["prefill"]
    assert taught(*COLD, route).snapshot()["prefill"] == before


def test_a_short_prompt_is_no_measure() -> None:
    known = {"ttft_seconds": 0.5, "queued_tokens": None}
    assert cold_seconds_per_token(input_tokens=1_000, reused_tokens=0, **known) == 0.0005
    assert cold_seconds_per_token(input_tokens=1_000, reused_tokens=990, **known) is None
    assert cold_seconds_per_token(input_tokens=1_000, reused_tokens=0, ttft_seconds=0.0, queued_tokens=None) is None


@pytest.mark.parametrize("seconds", [5e-324, 1e-310, 1e-9])
def test_no_clock_shows_so_little_and_its_reciprocal_is_no_number(seconds: float) -> None:
    of = taught(*(cold(n, seconds=seconds) for n in range(1, 9)))
    assert of.snapshot()["prefill"] == []
    assert close(of, loaded(10)).saving is None


def test_old_routes_leave_the_rate_and_a_replica_without_one_has_the_fleets() -> None:
    rates = PrefillRates(max_replicas=2)
    assert rates.seconds_per_token(A0) is None
    for _ in range(SAMPLES):
        rates.add(A0, 1.0)
    assert rates.seconds_per_token(A1) == 1.0
    for _ in range(SAMPLES):
        rates.add(A0, 3.0)
    assert rates.seconds_per_token(A0) == 3.0
    for name in ("b", "c", "d"):
        rates.add(StableReplica(name, 0), 3.0)
    assert len(rates._rates) == 2


def test_no_worker_moves_the_rate_of_the_fleet_alone() -> None:
    """Ten thousand samples of one of three, on however many ranks."""
    rates = PrefillRates(max_replicas=16)
    for worker, seconds in (("a", 0.001), ("b", 0.002)):
        for _ in range(NEEDED):
            rates.add(StableReplica(worker, 0), seconds)
    rates.add(StableReplica("c", 0), 0.003)
    new = StableReplica("new", 0)
    assert rates.seconds_per_token(new) == 0.002
    for number in range(10_000):
        rates.add(StableReplica("c", number % 8), 1e9)
        assert number % 500 or rates.seconds_per_token(new) == 0.002
    assert rates.seconds_per_token(new) == 0.002
    assert rates.seconds_per_token(StableReplica("c", 0)) == 1e9, "its own figure is what it made it"


def test_three_cold_routes_in_all_make_a_rate_of_the_fleet() -> None:
    rates = PrefillRates(max_replicas=16)
    for number, worker in enumerate(("a", "b", "c")):
        assert rates.seconds_per_token(A0) is None
        rates.add(StableReplica(worker, 0), 0.001 * (number + 1))
    assert rates.seconds_per_token(A0) == 0.002
    assert list(rates.rows()) == []


def test_a_load_is_weighed_by_the_connectors_clock_and_the_first_token_beside_it() -> None:
    of = taught(*COLD)
    found = close(of, loaded(10, load=0.1, ttft=0.25)).saving
    assert found is not None
    # 800 tokens at 2,000 a second are 0.4 s; the load took a quarter of that. The prompt cold: 0.5 s.
    assert (found.cold_seconds, found.saved_seconds, found.share) == pytest.approx((0.5, 0.25, 0.75))
    waited = close(of, loaded(11, load=None, ttft=0.75, queued=1_000)).saving
    assert waited is not None
    assert (waited.cold_seconds, waited.saved_seconds, waited.share) == pytest.approx((1.0, 0.25, 0.625))
    worse = close(of, loaded(12, load=None, ttft=2.0)).saving
    assert worse is not None
    assert worse.saved_seconds == pytest.approx(-1.5)
    assert worse.share == -1.0, "bounded, however late"
    assert close(of, loaded(13, load=None, ttft=None)).saving is None, "nobody's clock saw it"


def test_before_a_rate_is_known_nothing_is_claimed() -> None:
    of = Calibration(CONFIG)
    assert close(of, loaded(1)).saving is None
    assert of.saving(A0, HOST) == 0.75
    assert of.snapshot()["prefill"] == []


def test_credit_moves_to_what_loads_cost_and_only_for_that_tier() -> None:
    of = taught(*COLD, *(loaded(n, load=0.6, tier=Tier.DISK) for n in range(10, 40)))
    # 0.6 s for what 0.4 s of prefill would have made: minus one half.
    assert of.saving(A0, DISK) == pytest.approx(-0.5, abs=0.15)
    assert of.saving(A0, HOST) == 0.75
    assert of.saving(A1, DISK) < 0.0, "the rest of the fleet begins with it"
    assert of.snapshot()["tiers"]["disk"]["saving"] == of.snapshot()["cells"][0]["saving"]
    fast = taught(*COLD, *(loaded(n, load=0.004) for n in range(10, 40)))
    assert fast.saving(A0, HOST) > 0.95
    peers = taught(*COLD, *(loaded(n, load=0.3, tier=Tier.EXTERNAL) for n in range(10, 40)))
    assert peers.saving(A0, Kind(EXACT, Bucket.HIGH, Tier.EXTERNAL)) == pytest.approx(0.25, abs=0.05)
    assert peers.saving(A0, DISK) == 0.5, "what was pulled from other workers says nothing of the disk"


def test_a_slow_replica_is_told_from_a_fast_one() -> None:
    both = (loaded(n, load=(0.02, 0.8)[n % 2], rank=n % 2) for n in range(10, 50))
    of = taught(*COLD, *(cold(n, rank=1) for n in range(4, 8)), *both)
    assert of.saving(A0, HOST) > 0.5
    assert of.saving(A1, HOST) < 0.0


def test_what_was_learned_fades_and_is_tried_again() -> None:
    of = taught(*COLD, *(loaded(n, load=0.8) for n in range(10, 30)))
    assert of.saving(A0, HOST) < -0.4
    for number in range(100, 1_500):
        close(of, cold(number))
    assert of.saving(A0, HOST) == pytest.approx(0.75, abs=0.02)


def test_replicas_that_never_come_back_do_not_keep_what_was_learned_of_the_fleet_from_fading() -> None:
    """Names of pods: forty that had slow loads and went, then one that is new."""
    of = taught(*COLD)
    for number in range(10, 50):
        close(of, cold_of(f"pod-{number}", number))
        close(of, loaded_of(f"pod-{number}", 1_000 + number, load=0.8))
    assert of.saving(StableReplica("new", 0), HOST) < 0.0
    close(of, loaded_of("stays", 2_000, load=0.1))
    for number in range(3_000, 12_500):
        of.add(cold_of("stays", number))
    assert of.snapshot()["replicas"] == 1
    assert of.forgotten == 40
    assert of.saving(StableReplica("new", 0), HOST) == pytest.approx(0.75, abs=0.02)


def cold_of(name: str, number: int) -> ClosedRoute:
    return renamed(cold(number), name)


def loaded_of(name: str, number: int, **fields: Any) -> ClosedRoute:
    return renamed(loaded(number, **fields), name)


def renamed(route: ClosedRoute, name: str) -> ClosedRoute:
    """The same on another worker."""
    start, seen, told = route.opened, route.observed, route.report
    assert seen is not None
    assert told is not None
    pinned = {"stable_routing_id": name} if start.stable_routing_id is not None else {}
    return replace(
        route,
        opened=msgspec.structs.replace(start, **pinned),
        observed=msgspec.structs.replace(seen, served_stable_routing_id=name),
        report=msgspec.structs.replace(told, stable_routing_id=name),
    )


def test_an_unhinted_load_teaches_what_loading_costs_and_nothing_of_hints() -> None:
    unhinted = {"stable_routing_id": None, "placed_tokens": 0, "hinted_tokens": 0, "match_type": None, "tier": None}
    of = taught(*COLD, *(loaded(n, load=0.8, **unhinted) for n in range(10, 20)))
    assert of.saving(A0, HOST) < 0.0
    assert of.share(A0, HOST) == 0.9
    assert all(row["trials"] == 0.0 and row["loads"] > 0.0 for row in of.snapshot()["cells"])


def test_modes_are_cells_of_their_own_and_off_is_worth_nothing() -> None:
    of = taught(*COLD, *(loaded(n, load=0.8, materialization="experimental") for n in range(10, 30)))
    experimental = HOST._replace(mode=Materialization.EXPERIMENTAL)
    assert of.saving(A0, experimental) < 0.0 < of.saving(A0, HOST)
    assert of.share(A0, experimental) > of.share(A0, HOST) == 0.9
    assert of.share(A0, HOST._replace(mode=Materialization.OFF)) == 0.0
    assert {row["mode"] for row in of.snapshot()["cells"]} == {"experimental"}


def test_switched_off_it_is_the_configuration() -> None:
    off = replace_calibration(CONFIG, enabled=False)
    of = taught(*COLD, *(loaded(n, load=0.8) for n in range(10, 30)), config=off)
    assert of.saving(A0, HOST) == 0.75
    of.reload(CONFIG)
    assert of.saving(A0, HOST) < 0.0, "what was observed meanwhile counts again"


def replace_calibration(config: ScoringConfig, **changes: Any) -> ScoringConfig:
    return ScoringConfig(
        prior=config.prior,
        calibration=CalibrationConfig(half_life_routes=config.calibration.half_life_routes, **changes),
        tier_credit=config.tier_credit,
    )


def test_a_replay_of_the_same_routes_knows_the_same() -> None:
    rng = random.Random(7)
    routes = [
        cold(n, seconds=rng.uniform(0.2, 0.9), rank=n % 2)
        if rng.random() < 0.4
        else loaded(n, load=rng.uniform(0.01, 0.6), rank=n % 2, tier=rng.choice([Tier.HOST_PINNED, Tier.DISK]))
        for n in range(1, 200)
    ]
    assert taught(*routes).snapshot() == taught(*routes).snapshot()


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 1e9), st.floats(0.0, 1e9), st.integers(0, 10**9)), max_size=60))
@settings(max_examples=60, deadline=None)
def test_whatever_is_told_credit_stays_in_its_bounds(told: list[tuple[bool, float, float, int]]) -> None:
    of = Calibration(CONFIG)
    for number, (is_cold, seconds, load, queued) in enumerate(told, 1):
        close(
            of,
            cold(number, seconds=seconds, queued=queued)
            if is_cold
            else loaded(number, load=load, ttft=seconds, queued=queued),
        )
    for row in of.snapshot()["cells"]:
        assert -1.0 <= row["saving"] <= 1.0
        assert 0.0 <= row["share"] <= 1.0


def test_the_saving_of_nothing_is_none() -> None:
    known = {"input_tokens": 100, "local_tokens": 0, "queued_tokens": 0, "ttft_seconds": 1.0, "load_seconds": 0.1}
    assert saving_of(seconds_per_token=0.001, confirmed_tokens=0, **known) is None
    assert saving_of(seconds_per_token=0.0, confirmed_tokens=50, **known) is None


def test_totals_sum_what_each_replica_saved() -> None:
    of, totals = taught(*COLD), Totals()
    for route in (loaded(10), loaded(11, ttft=0.75), loaded(12, ttft=None)):
        totals.add(close(of, route))
    row = totals.replicas["w-a/0"]
    assert (row.timed_loads, row.saved_seconds) == (2, pytest.approx(0.25 - 0.25))
