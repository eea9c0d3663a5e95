"""The physical limits of this machine: memory copied per second, a cache miss, floating point. Best of several rounds,
one thread except for the matrix product, which uses all cores as the engine's does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """What this machine can do at most."""

    copy_bytes_per_second: float
    """Bytes copied per second: each is read once and written once."""
    read_bytes_per_second: float
    miss_seconds: float
    """One read from a random place of memory that is in no cache, within a series of such reads."""
    flops_per_second: float
    """Multiplications and additions of a float32 matrix product, per second."""


def measure(*, mib: int = 128, rounds: int = 5, order: int = 1_024) -> Limits:
    """Measures all limits. `mib`: size of the copied array; `order`: of the square matrices."""
    source = np.ones(mib * MIB // 8, np.float64)
    target = np.empty_like(source)
    copying = _best(lambda: np.copyto(target, source), rounds)
    reading = _best(lambda: source.sum(), rounds)
    a = np.ones((order, order), np.float32)
    b = np.ones((order, order), np.float32)
    product = _best(lambda: a @ b, rounds)
    return Limits(
        copy_bytes_per_second=source.nbytes / copying,
        read_bytes_per_second=source.nbytes / reading,
        miss_seconds=_miss(target.view(np.int64), rounds),
        flops_per_second=2.0 * order**3 / product,
    )


def _miss(table: np.ndarray[tuple[int], np.dtype[np.int64]], rounds: int, steps: int = 20_000) -> float:
    """Seconds per read from random places, whose neighbours are far away. The processor overlaps some of these reads,
    so this is less than the latency of one alone, and the best that code with many lookups can reach."""
    places = np.random.default_rng(0).integers(0, len(table), steps)
    return _best(lambda: table.take(places), rounds) / steps


def _best(what: Callable[[], object], rounds: int) -> float:
    """Seconds of the fastest round; the first one warms up."""
    what()
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        what()
        found.append(time.perf_counter() - began)
    return min(found)
