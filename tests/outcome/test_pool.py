"""The pool holds each worker to its cap, sees a worker's own cells whole, and forgets to the last trial."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_semkv.contracts.evidence import Bucket, MatchType
from dynamo_semkv.contracts.location import Tier
from dynamo_semkv.outcome.lessons import Lesson
from dynamo_semkv.outcome.pool import Pool, Sums
from dynamo_semkv.scoring.credit import Kind

KIND = Kind(MatchType.EXACT_EQUIVALENT, Bucket.HIGH, Tier.HOST_PINNED)
CAP = 4.0


def lesson(share: float) -> Lesson:
    return Lesson(KIND, share, 1.0)


taught = st.lists(st.tuples(st.sampled_from("abc"), st.floats(-1.0, 1.0)), max_size=60)


def filled(steps: list[tuple[str, float]], now: float = 0.0) -> tuple[Pool, dict[str, Sums]]:
    """One cell a worker."""
    pool, cells = Pool(), dict[str, Sums]()
    for worker, share in steps:
        pool.add(worker, lesson(share), now, CAP, new_cell=worker not in cells)
        cells.setdefault(worker, Sums(at=now)).add(lesson(share), now)
    return pool, cells


@given(taught)
@settings(max_examples=80, deadline=None)
def test_each_worker_counts_at_its_mean_and_at_most_as_its_cap(steps: list[tuple[str, float]]) -> None:
    pool, cells = filled(steps)
    parts = {worker: min(1.0, CAP / sums.trials) for worker, sums in cells.items()}
    for who in "abcd":
        total, trials = pool.around(who, cells.get(who), 0.0)
        others = [worker for worker in cells if worker != who]
        assert trials == pytest.approx(sum(cells[w].trials * parts[w] for w in others), abs=1e-9)
        assert total == pytest.approx(sum(cells[w].total * parts[w] for w in others), abs=1e-9)


@given(taught)
@settings(max_examples=80, deadline=None)
def test_what_is_dropped_is_gone(steps: list[tuple[str, float]]) -> None:
    pool, cells = filled(steps)
    for number, (worker, sums) in enumerate(cells.items(), 1):
        pool.drop(worker, sums, 1.0, CAP)
        assert len(pool) == len(cells) - number
    assert pool.around("d", None, 1.0) == (0.0, 0.0)


def test_a_worker_sees_its_own_other_cells_whole() -> None:
    pool, cells = filled([("a", 1.0)] * 50)
    assert pool.around("a", None, 0.0) == pytest.approx((50.0, 50.0))
    assert pool.around("b", None, 0.0) == pytest.approx((CAP, CAP))
    pool.add("a", lesson(0.0), 0.0, CAP, new_cell=True)
    assert pool.around("a", cells["a"], 0.0) == pytest.approx((0.0, 1.0), abs=1e-9)
    pool.drop("a", cells["a"], 0.0, CAP)
    assert pool.around("b", None, 0.0) == pytest.approx((0.0, 1.0), abs=1e-9)


def test_it_fades_by_half_each_half_life() -> None:
    pool, _ = filled([("a", 1.0)] * 3 + [("b", 0.0)] * 40)
    total, trials = pool.around("c", None, 1.0)
    assert (total, trials) == pytest.approx((1.5, 3.5))
