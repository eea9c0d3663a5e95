"""Placement follows confirmations: a router on fakes, the real tracker and calibration behind it, and an engine that
does as it is told.

No processes and no time: requests go one after the other, and each route closes before the next one comes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest

from dynamo_semkv.config.load import build
from dynamo_semkv.contracts.evidence import MatchType
from dynamo_semkv.contracts.identity import ReplicaKey
from dynamo_semkv.contracts.report import REPORT_VERSION, MaterializationReport, Outcome, Reason
from dynamo_semkv.contracts.route_events import RouteOpened
from dynamo_semkv.outcome.calibration import Calibration
from dynamo_semkv.outcome.route_tracker import RouteTracker
from tests.router.fakes import A0, A1, B0, B1, STABLE, FakeEdge, FakeLookup, FakeRouter, Found, a_request, match

TOKENS = 4096
SETTINGS = {"scoring": {"calibration": {"half_life_routes": 50.0}}}
Engine = Callable[[RouteOpened], int]
"""How many of the hinted tokens it confirms."""


def declines(route: RouteOpened) -> int:
    return 0


def loads_exact(route: RouteOpened) -> int:
    return route.hinted_tokens if route.match_type is MatchType.EXACT_EQUIVALENT else 0


def loads_all(route: RouteOpened) -> int:
    return route.hinted_tokens


class World:
    """One donor of 4,000 tokens on `w-a/1`; Dynamo, left to itself, goes round the four ranks."""

    def __init__(self, kind: MatchType) -> None:
        self.calibration = Calibration(build(SETTINGS).scoring)
        self.closed: list[RouteOpened] = []
        self.tracker = RouteTracker(30.0, self.calibration.add, settle_seconds=0.0)
        self.edge = FakeEdge()
        self.fake = FakeRouter(
            SETTINGS,
            edge=self.edge,
            lookup=FakeLookup(Found([match(("w-a", 1), 4000, kind=kind)])),
            credit=self.calibration,
        )
        self._requests = 0

    def request(self, engine: Engine) -> str:
        """The reason of its decision."""
        self._requests += 1
        at = float(self._requests)
        self.edge.dynamos_choice = (A0, A1, B0, B1)[self._requests % 4]
        asyncio.run(self.fake.run(a_request(TOKENS), request_id=f"req-{self._requests}"))
        opened, observed = self.fake.journal.opens[-1], self.fake.journal.ends[-1]
        self.tracker.opened(opened, at)
        self.tracker.observed(observed, at)
        self.tracker.report(self._report(opened, engine), at)
        assert self.tracker.open_routes == 0
        self.closed.append(opened)
        return opened.decision_reason

    def run(self, count: int, engine: Engine) -> Counter[str]:
        return Counter(self.request(engine) for _ in range(count))

    def _report(self, opened: RouteOpened, engine: Engine) -> MaterializationReport:
        served: ReplicaKey = self.edge.dispatched[-1].replica or B1
        confirmed = engine(opened) if opened.hinted_tokens else 0
        return MaterializationReport(
            version=REPORT_VERSION,
            report_id=f"r-{self._requests}",
            stable_routing_id=STABLE[served.worker_id],
            dp_rank=served.dp_rank,
            generation="g1",
            prompt_key=opened.prompt_key,
            namespace="00" * 32,
            route_id=opened.route_id,
            request_id=self._requests,
            prompt_tokens=TOKENS,
            offered=confirmed,
            honoured=confirmed,
            copied=confirmed,
            confirmed=confirmed,
            outcome=Outcome.MATERIALIZED_EXACT if confirmed else Outcome.DECLINED,
            reason=Reason.OK if confirmed else Reason.NOT_IDENTICAL,
        )


def test_semantic_donors_that_are_always_declined_stop_being_placed_on() -> None:
    world = World(MatchType.SEMANTIC_CANDIDATE)
    assert world.request(loads_exact) == "placed"
    world.run(40, loads_exact)
    later = world.run(200, loads_exact)
    assert set(later) == {"placed", "below_minimum"}
    # What is left is exploration: the price of noticing that the engine has changed.
    assert later["placed"] <= 10


def test_exact_donors_that_are_always_declined_stop_being_placed_on() -> None:
    world = World(MatchType.EXACT_EQUIVALENT)
    first = world.run(60, declines)
    assert first["placed"] >= 20
    later = world.run(200, declines)
    assert later["below_minimum"] >= 120
    # Left to Dynamo, the requests go where it sends them: round the ranks.
    left = [opened for opened in world.closed if opened.decision_reason == "below_minimum"]
    assert all(opened.stable_routing_id is None and opened.placed_tokens == 0 for opened in left)


def test_exact_donors_that_are_loaded_keep_being_placed_on() -> None:
    world = World(MatchType.EXACT_EQUIVALENT)
    assert world.run(150, loads_exact) == {"placed": 150}
    (row,) = world.calibration.snapshot()["cells"]
    assert (row["replica"], row["match_type"]) == ("w-a/1", "exact_equivalent")
    assert row["share"] == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("kind", list(MatchType))
def test_an_engine_that_changes_its_mind_is_noticed_within_a_bounded_number_of_routes(kind: MatchType) -> None:
    world = World(kind)
    world.run(150, declines)
    # At most one half-life of the replica, which serves every fourth request; the slowest pace is 1.25 of it.
    world.run(250, loads_all)
    assert world.run(50, loads_all) == {"placed": 50}


def test_a_router_that_replays_the_routes_decides_the_same() -> None:
    world = World(MatchType.SEMANTIC_CANDIDATE)
    world.run(60, loads_exact)
    again = Calibration(build(SETTINGS).scoring)
    tracker = RouteTracker(30.0, again.add, settle_seconds=0.0)
    for number, (opened, observed) in enumerate(zip(world.fake.journal.opens, world.fake.journal.ends, strict=True)):
        tracker.opened(opened, float(number))
        tracker.observed(observed, float(number))
        confirmed = 0
        tracker.report(
            MaterializationReport(
                version=REPORT_VERSION,
                report_id=f"again-{number}",
                stable_routing_id=str(observed.served_stable_routing_id),
                dp_rank=int(observed.served_dp_rank or 0),
                generation="g1",
                prompt_key=opened.prompt_key,
                namespace="00" * 32,
                route_id=opened.route_id,
                prompt_tokens=TOKENS,
                confirmed=confirmed,
                outcome=Outcome.DECLINED,
                reason=Reason.NOT_IDENTICAL,
            ),
            float(number),
        )
    assert again.snapshot() == world.calibration.snapshot()
