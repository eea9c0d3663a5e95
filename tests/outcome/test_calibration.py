"""Calibration: what a closed route teaches, that it fades, that a replay gives the same, that memory is bounded."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_semkv.config.schema import CalibrationConfig, MatchPriors, ScoringConfig
from dynamo_semkv.contracts.evidence import Bucket, MatchType
from dynamo_semkv.contracts.identity import StableReplica
from dynamo_semkv.contracts.location import Tier
from dynamo_semkv.contracts.report import Outcome, Reason
from dynamo_semkv.outcome.calibration import OF_ONE_WORKER, Calibration
from dynamo_semkv.outcome.closed import ClosedRoute, JoinedBy, close_route
from dynamo_semkv.outcome.lessons import Lesson, lessons
from dynamo_semkv.scoring.credit import Kind
from tests.outcome.build import observed, opened, report

EXACT, SEMANTIC = MatchType.EXACT_EQUIVALENT, MatchType.SEMANTIC_CANDIDATE
A0, A1 = StableReplica("w-a", 0), StableReplica("w-a", 1)
CONFIG = ScoringConfig(
    prior=MatchPriors(exact_equivalent=0.9, semantic_candidate=0.1, strength=4.0),
    calibration=CalibrationConfig(half_life_routes=100.0),
)


def closed(number: int = 1, *, confirmed: int = 800, said: dict[str, Any] | None = None, **fields: Any) -> ClosedRoute:
    """Pinned to and served by `w-a/0`; 800 of 1,000 tokens hinted, all of them of a proven prefix unless `fields` says
    otherwise."""
    base = {"match_type": EXACT, "overlap": Bucket.HIGH, "tier": Tier.HOST_PINNED}
    start = opened(number, **{**base, **fields})
    replica = (
        {"stable_routing_id": start.stable_routing_id, "dp_rank": start.dp_rank} if start.stable_routing_id else {}
    )
    served = {f"served_{name}": value for name, value in replica.items()}
    told = report(number, confirmed=confirmed, **{**replica, **(said or {})})
    return close_route(start, observed(number, **served), told, JoinedBy.ROUTE_ID, float(number))


def served_only(number: int = 1) -> ClosedRoute:
    """A route that was left to Dynamo and served by `w-a/0`."""
    return closed(number, confirmed=0, stable_routing_id=None, dp_rank=None, placed_tokens=0, hinted_tokens=0)


def share(of: Calibration, match_type: MatchType = EXACT, replica: StableReplica | None = A0) -> float:
    return of.share(replica, Kind(match_type, Bucket.HIGH, Tier.HOST_PINNED))


def taught(*routes: ClosedRoute, config: ScoringConfig = CONFIG, **options: Any) -> Calibration:
    made = Calibration(config, **options)
    for route in routes:
        made.add(route)
    return made


def test_without_observations_it_is_exactly_the_prior() -> None:
    for match_type, expected in ((EXACT, 0.9), (SEMANTIC, 0.1)):
        for overlap in Bucket:
            for tier in Tier:
                for replica in (None, A0):
                    assert taught().share(replica, Kind(match_type, overlap, tier)) == expected


def test_one_decline_and_one_success_move_it_as_a_beta_posterior() -> None:
    assert share(taught(closed(confirmed=0))) == pytest.approx(0.9 * 4 / 5)
    assert share(taught(closed(confirmed=800))) == pytest.approx((0.9 * 4 + 1) / 5)
    assert share(taught(closed(confirmed=200))) == pytest.approx((0.9 * 4 + 0.25) / 5)


def test_other_match_types_and_tiers_do_not_move() -> None:
    of = taught(closed(confirmed=0))
    assert share(of) < 0.9
    assert share(of, SEMANTIC) == 0.1
    assert share(of, replica=None) == 0.9
    assert of.share(A0, Kind(EXACT, Bucket.HIGH, Tier.DISK)) == 0.9


def test_a_new_cell_begins_with_what_the_others_of_its_kind_saw_and_its_own_routes_count_once() -> None:
    of = taught(*(closed(n, confirmed=0) for n in range(8)))
    mean = 0.9 * 4 / 12
    assert share(of) == pytest.approx(mean, rel=0.05)  # nobody else has spoken: it begins with the configured share
    assert share(of, replica=A1) == pytest.approx(mean, rel=0.05)
    assert of.share(A0, Kind(EXACT, Bucket.FULL, Tier.HOST_PINNED)) == pytest.approx(mean, rel=0.05)
    for number in range(8, 16):
        of.add(closed(number, confirmed=800, dp_rank=1))
    # Eight confirmed routes of its own say more than what it began with, and it in turn lifts the other.
    assert share(of, replica=A1) > 0.7
    assert mean < share(of) < 0.5


def test_an_engine_that_declines_everything_is_found_out_once_and_not_once_a_cell() -> None:
    of = taught(*(closed(n, confirmed=0, stable_routing_id=f"w-{n % 8}") for n in range(64)))
    assert all(share(of, replica=StableReplica(f"w-{n}", 0)) < 0.03 for n in range(8))
    assert share(of, replica=StableReplica("w-new", 0)) < 0.07


@pytest.mark.parametrize(("confirmed", "ranks"), [(0, 1), (0, 4), (800, 1)])
def test_one_worker_moves_where_the_others_begin_by_no_more_than_its_cap(confirmed: int, ranks: int) -> None:
    """Ten thousand routes that it declines, or claims, on however many ranks; three honest ones confirm half of a
    thousand."""
    cap, strength = OF_ONE_WORKER * CONFIG.prior.strength, CONFIG.prior.strength
    of, without, new = taught(), taught(), StableReplica("w-new", 0)
    for number in range(1, 10_001):
        evil = {"stable_routing_id": "w-evil", "dp_rank": number % ranks, "match_type": SEMANTIC}
        of.add(closed(number, confirmed=confirmed, **evil))
        # Once each, so that it is known and time goes on for the fleet; then it is served without a hint.
        without.add(closed(number, confirmed=400, **evil, hinted_tokens=800 if number <= ranks else 0))
        if number % 10 == 0:
            honest = closed(20_000 + number, confirmed=400, stable_routing_id=f"w-{number % 3}", match_type=SEMANTIC)
            of.add(honest)
            without.add(honest)
        if number % 500 == 0:
            (pool,) = without._pools.values()
            _, trials = pool.around("w-new", None, without._age)
            moved = share(of, SEMANTIC, new) - share(without, SEMANTIC, new)
            assert 0.0 < abs(moved) < cap / (cap + trials + strength)
    assert trials > 2 * cap, "there are others, and the bound says something"
    evils = share(of, SEMANTIC, StableReplica("w-evil", 0))
    assert evils == pytest.approx(confirmed / 800, abs=0.1), "its own figures are what it made them"


def test_of_a_worker_that_is_forgotten_nothing_is_left() -> None:
    of = taught(*(closed(n, confirmed=0, stable_routing_id=f"w-{n}") for n in range(1, 8)), max_replicas=3)
    kept = taught(*(closed(n, confirmed=0, stable_routing_id=f"w-{n}") for n in range(5, 8)), max_replicas=3)
    new = StableReplica("w-new", 0)
    assert share(of, replica=new) == pytest.approx(share(kept, replica=new))
    assert [len(pool) for pool in of._pools.values()] == [3]


KIND, SIMILAR = Kind(EXACT, Bucket.HIGH, Tier.HOST_PINNED), Kind(SEMANTIC, Bucket.HIGH, Tier.HOST_PINNED)


@pytest.mark.parametrize(
    ("route", "expected"),
    [
        (closed(confirmed=800), (Lesson(KIND, 1.0, 1.0),)),
        (closed(confirmed=0, match_type=SEMANTIC), (Lesson(SIMILAR, 0.0, 1.0),)),
        # The prefix was loaded and the rest declined: nothing is said against the prefix.
        (closed(confirmed=600, proven_tokens=600), (Lesson(KIND, 1.0, 0.75), Lesson(SIMILAR, 0.0, 0.25))),
        (closed(confirmed=300, proven_tokens=600), (Lesson(KIND, 0.5, 0.75), Lesson(SIMILAR, 0.0, 0.25))),
        (closed(confirmed=800, proven_tokens=600), (Lesson(KIND, 1.0, 0.75), Lesson(SIMILAR, 1.0, 0.25))),
        # The engine had 400 of them itself, so only 400 could be loaded.
        (closed(confirmed=200, said={"local_tokens": 400}), (Lesson(KIND, 0.5, 1.0),)),
        # What is confirmed beyond the claim is no more than the claim.
        (closed(confirmed=900, exact_device_tokens=0), (Lesson(KIND, 1.0, 1.0),)),
    ],
)
def test_what_a_route_teaches(route: ClosedRoute, expected: tuple[Lesson, ...]) -> None:
    assert lessons(route) == expected


@pytest.mark.parametrize(
    "route",
    [
        served_only(),
        closed(hinted_tokens=0),
        closed(confirmed=0, said={"outcome": Outcome.LOCAL_EXACT, "reason": Reason.LOCAL_COVERS}),
        closed(confirmed=0, said={"reason": Reason.CANCELLED}),
        closed(confirmed=0, said={"outcome": Outcome.UNKNOWN}),
        closed(confirmed=0, said={"local_tokens": 900}),
        closed(said={"dp_rank": 1}),
        closed(match_type=None),
        closed(tier=None),
        close_route(closed().opened, observed(), None, JoinedBy.NONE, 1.0),
        close_route(closed().opened, observed(end="cancelled"), None, JoinedBy.NONE, 1.0),
        close_route(closed().opened, None, None, JoinedBy.NONE, 1.0),
    ],
)
def test_what_teaches_nothing(route: ClosedRoute) -> None:
    assert lessons(route) == ()
    of = taught(route)
    assert (of.routes_learned_from, share(of), share(of, SEMANTIC)) == (0, 0.9, 0.1)


def test_it_goes_back_to_the_prior_by_half_each_half_life_of_the_replica() -> None:
    of = taught(*(closed(n, confirmed=0) for n in range(50)))
    (row,) = of.snapshot()["cells"]
    before = row["trials"]
    for number in range(50, 150):
        of.add(served_only(number))
    (row,) = of.snapshot()["cells"]
    # One half-life of the configuration, at a pace of 0.75 to 1.25 of it.
    assert 0.5 ** (1 / 0.75) <= row["trials"] / before <= 0.5 ** (1 / 1.25)
    for number in range(150, 2_500):
        of.add(served_only(number))
    assert share(of) == pytest.approx(0.9, abs=0.001)


def test_the_summary_is_the_mean_over_cells_by_trials() -> None:
    assert {name: row["share"] for name, row in taught().snapshot()["match_types"].items()} == {
        "exact_equivalent": 0.9,
        "semantic_candidate": 0.1,
    }
    of = taught(closed(1, confirmed=0), closed(2, confirmed=800, stable_routing_id="w-b"))
    summary = of.snapshot()["match_types"]
    assert summary["exact_equivalent"]["share"] == pytest.approx((4.6 / 5 * 4 / 5 + (0.72 * 4 + 1) / 5) / 2)
    assert summary["exact_equivalent"]["trials"] == pytest.approx(2.0)
    assert summary["semantic_candidate"] == {"share": 0.1, "trials": 0.0}


def test_routes_of_another_replica_do_not_age_it() -> None:
    of = taught(closed(1, confirmed=0))
    for number in range(2, 400):
        of.add(closed(number, stable_routing_id="w-b"))
    rows = {row["replica"]: row for row in of.snapshot()["cells"]}
    assert rows["w-a/0"]["trials"] == 1.0
    assert share(of) == pytest.approx(rows["w-a/0"]["begins"] * 4 / 5)


def test_cells_do_not_all_come_back_at_once_and_the_seed_says_when() -> None:
    def paces(seed: int) -> list[float]:
        config = ScoringConfig(calibration=CONFIG.calibration, seed=seed)
        of = taught(*(closed(n, confirmed=0, stable_routing_id=f"w-{n}") for n in range(20)), config=config)
        for number in range(20, 2_020):
            of.add(closed(number, confirmed=0, hinted_tokens=0, stable_routing_id=f"w-{number % 20}"))
        return [row["trials"] for row in of.snapshot()["cells"]]

    assert paces(1) == paces(1) != paces(2)
    assert len(set(paces(1))) == 20


def test_switched_off_it_is_the_prior_and_a_reload_takes_effect_at_once() -> None:
    of = taught(closed(confirmed=0))
    learned = share(of)
    of.reload(ScoringConfig(prior=CONFIG.prior, calibration=CalibrationConfig(enabled=False)))
    assert share(of) == 0.9
    of.reload(ScoringConfig(prior=MatchPriors(exact_equivalent=0.5, strength=1.0), calibration=CONFIG.calibration))
    assert share(of) == pytest.approx(0.25)
    of.reload(CONFIG)
    assert share(of) == learned


def test_memory_is_bounded_and_what_was_learned_of_longest_ago_goes_first() -> None:
    of = taught(*(closed(n, confirmed=0, stable_routing_id=f"w-{n % 12}") for n in range(24)), max_replicas=5)
    rows = of.snapshot()["cells"]
    assert [row["replica"] for row in rows] == [f"w-{n}/0" for n in (11, 10, 9, 8, 7)]
    assert of.forgotten == 24 - 5
    assert "w-0/0" not in {row["replica"] for row in rows}


route_lists = st.lists(
    st.tuples(
        st.sampled_from(["w-a", "w-b", None]),
        st.sampled_from([EXACT, SEMANTIC]),
        st.integers(0, 800),
        st.integers(0, 800),
        st.integers(0, 800),
        st.sampled_from([Bucket.HIGH, Bucket.FULL]),
    ),
    max_size=40,
)


def build(drawn: list[tuple[Any, ...]]) -> list[ClosedRoute]:
    return [
        served_only(number)
        if worker is None
        else closed(
            number,
            confirmed=confirmed,
            stable_routing_id=worker,
            match_type=match_type,
            hinted_tokens=hinted,
            proven_tokens=proven,
            overlap=overlap,
        )
        for number, (worker, match_type, confirmed, hinted, proven, overlap) in enumerate(drawn)
    ]


@given(route_lists)
@settings(max_examples=60, deadline=None)
def test_shares_stay_shares_and_a_replay_gives_the_same_state(drawn: list[tuple[Any, ...]]) -> None:
    routes = build(drawn)
    once, again = taught(*routes), taught(*routes)
    assert once.snapshot() == again.snapshot()
    json.dumps(once.snapshot(), allow_nan=False)
    for row in once.snapshot()["cells"]:
        assert 0.0 <= row["share"] <= 1.0
        assert 0.0 <= row["trials"] <= row["routes"]
    for route in routes:
        found = lessons(route)
        assert sum(lesson.weight for lesson in found) == pytest.approx(1.0 if found else 0.0)
        assert all(0.0 <= lesson.share <= 1.0 for lesson in found)


@given(route_lists, st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_another_order_changes_weights_by_a_bounded_factor_and_nothing_else(
    drawn: list[tuple[Any, ...]], seed: int
) -> None:
    routes = build(drawn)
    shuffled = random.Random(seed).sample(routes, len(routes))
    left, right = (
        {(r["replica"], r["match_type"], r["overlap"]): r for r in taught(*order).snapshot()["cells"]}
        for order in (routes, shuffled)
    )
    assert left.keys() == right.keys()
    bound = 2 ** (len(routes) / (0.75 * 100.0))
    for name, row in left.items():
        assert row["routes"] == right[name]["routes"]
        assert row["trials"] <= right[name]["trials"] * bound * (1 + 1e-9)


@given(st.lists(st.integers(0, 800), min_size=1, max_size=60), st.integers(0, 59))
@settings(max_examples=60, deadline=None)
def test_more_confirmed_never_gives_less_credit(confirmed: list[int], where: int) -> None:
    where %= len(confirmed)
    better = [800 if index == where else tokens for index, tokens in enumerate(confirmed)]
    low, high = (
        share(taught(*(closed(n, confirmed=c) for n, c in enumerate(tokens)))) for tokens in (confirmed, better)
    )
    assert high >= low - 1e-12
