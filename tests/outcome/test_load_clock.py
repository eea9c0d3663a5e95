"""A connector's word of its load is held against the first token that the router saw: who lies is found out, and noise
condemns nobody."""

from __future__ import annotations

import random

import pytest

from dynamo_semkv.contracts.identity import StableReplica
from dynamo_semkv.outcome.calibration import Calibration
from dynamo_semkv.outcome.closed import ClosedRoute
from dynamo_semkv.outcome.load_clock import NEEDED
from tests.outcome.test_saving import A0, A1, COLD, CONFIG, HOST, close, cold, loaded, loaded_of, taught

RATE = 2_000.0
"""Tokens a second: 0.4 s for the 800 that a route of `loaded` loads."""


def believed(of: Calibration) -> bool:
    return of.snapshot()["clocks_not_believed"] == []


def lie(number: int, *, rank: int = 0) -> ClosedRoute:
    """It says that it loaded at a quarter of the cost, and computed: the first token comes as if nothing had been
    there."""
    return loaded(number, load=0.1, ttft=0.5, rank=rank)


def test_a_replica_that_says_it_loads_and_computes_is_found_out() -> None:
    of = taught(*COLD, *(lie(n) for n in range(10, 18)))
    assert believed(of), "a few routes prove nothing"
    assert of.saving(A0, HOST) == pytest.approx(0.75)
    for number in range(18, 22):
        close(of, lie(number))
    assert of.snapshot()["clocks_not_believed"] == ["w-a/0"]
    assert of.saving(A0, HOST) == pytest.approx(0.0, abs=1e-9), "what it had taught is forgotten"
    # Of the others none is moved by what it said.
    assert of.saving(StableReplica("w-b", 0), HOST) == pytest.approx(0.75, abs=0.25)
    route = close(of, lie(30))
    assert route.saving is not None
    assert route.saving.share == pytest.approx(0.0, abs=1e-9)


def test_an_engine_that_was_mended_is_believed_again() -> None:
    of = taught(*COLD, *(lie(n) for n in range(10, 30)))
    assert not believed(of)
    for number in range(30, 60):
        close(of, loaded(number, load=0.1, ttft=0.2))
    assert believed(of)
    assert of.saving(A0, HOST) > 0.5


def test_a_replica_that_only_rests_is_not_believed_again() -> None:
    of = taught(*COLD, *(lie(n) for n in range(10, 30)))
    for number in range(100, 600):
        close(of, cold(number))
    assert not believed(of)
    assert of.saving(A0, HOST) == pytest.approx(0.0, abs=1e-9)


def test_ranks_and_workers_are_judged_apart() -> None:
    of = taught(*COLD, *(cold(n, rank=1) for n in range(4, 7)))
    for number in range(10, 40):
        close(of, lie(number, rank=1))
        close(of, loaded(100 + number, load=0.1, ttft=0.2))
        close(of, loaded_of("w-b", 200 + number, load=0.1, ttft=0.5))
    assert of.snapshot()["clocks_not_believed"] == ["w-a/1"], "of w-b no rate of its own is known"
    assert of.saving(A0, HOST) > 0.7
    assert of.saving(A1, HOST) < 0.1


@pytest.mark.parametrize(
    "route",
    [
        loaded(1, load=0.1, ttft=0.5, queued=None),
        loaded(1, load=0.1, ttft=5.0, queued=900),
        loaded(1, load=None, ttft=5.0),
        loaded(1, load=0.1, ttft=None),
        loaded(1, load=0.1, ttft=0.25),
    ],
)
def test_what_proves_nothing(route: ClosedRoute) -> None:
    """The queue was not known, or longer than the load; one of the clocks said nothing; they differ by less than is
    told apart."""
    of = taught(*COLD)
    for _ in range(4 * int(NEEDED)):
        close(of, route)
    assert believed(of)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("queue_is", ["exact", "noisy", "unseen"])
@pytest.mark.parametrize(
    ("queue", "spread", "overhead"), [(0.0, 0.5, 0.1), (300.0, 0.3, 0.3), (800.0, 0.5, 0.1), (800.0, 0.0, 0.0)]
)
def test_noise_condemns_no_honest_replica(
    seed: int, queue_is: str, queue: float, spread: float, overhead: float
) -> None:
    """Queues of up to twice what a load spares, known exactly, to a factor of two, or not at all; each time off by a
    log-normal factor; and a constant delay of as much as three quarters of what is spared. Whoever lies among the same
    noise is found out."""
    for honest in (True, False):
        rng = random.Random(seed)
        of = Calibration(CONFIG)
        condemned = 0
        for number in range(1, 400):
            waiting = rng.expovariate(1.0 / queue) if queue else 0.0
            known = int({"exact": waiting, "noisy": waiting * rng.uniform(0.0, 2.0), "unseen": 0.0}[queue_is])
            factor = rng.lognormvariate(0.0, spread)
            if number < 8 or rng.random() < 0.3:
                close(of, cold(number, seconds=(waiting + 1_000) / RATE * factor + overhead, queued=known))
            else:
                computed, took = (200, 0.1) if honest else (1_000, 0.0)
                first = (waiting + computed) / RATE * factor + took * rng.lognormvariate(0.0, spread) + overhead
                close(of, loaded(number, load=took, ttft=max(took, first), queued=known))
            condemned += not believed(of)
        assert (condemned == 0) is honest
