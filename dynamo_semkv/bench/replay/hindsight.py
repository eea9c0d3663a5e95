"""The oracle's plan: a replica for each request of a trace, searched for with the whole trace in view.

The best plan is a scheduling problem that cannot be solved for thousands of requests, so this is a search: it starts
from the best plan of any policy, moves all later requests of a prompt family to another replica, and keeps what lowers
the mean time to first token. So it is never worse than what it started from. How far the best possible plan is below it
stays unknown.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from dynamo_semkv.bench.replay.trace import TraceRequest

Cost = Callable[[Sequence[int]], float]
"""Takes a plan; returns the mean seconds to first token of the trace under it."""


def improve(
    trace: Sequence[TraceRequest], plan: Sequence[int], cost: Cost, replicas: int, steps: int, seed: int = 0
) -> list[int]:
    """The best plan found. `plan[n]`: replica of request n. `steps`: how many changes are tried. Deterministic for one
    seed."""
    rng = random.Random(seed)
    families: dict[int, list[int]] = {}
    for number, request in enumerate(trace):
        families.setdefault(request.chain[0] if request.chain else -1 - number, []).append(number)
    movable = [members for members in families.values() if len(members) > 1]
    best, lowest = list(plan), cost(plan)
    for _ in range(steps if movable else 0):
        members = rng.choice(movable)
        tried, target = list(best), rng.randrange(replicas)
        for number in members[rng.randrange(len(members)) :]:
            tried[number] = target
        found = cost(tried)
        if found < lowest:
            best, lowest = tried, found
    return best
