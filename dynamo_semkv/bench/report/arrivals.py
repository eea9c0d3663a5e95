"""When requests are sent: the same times for every contender, in seconds from the start of a pass.

offsets("uniform", 24, gap=0.4)                    -> 0, 0.4, 0.8, ...
offsets("bursty", 24, gap=0.4)                     -> four at once, every 1.6 s
offsets("mooncake", 24, gap=0.4, intervals=...)    -> as in the trace, on average 0.4 s apart
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, cycle, islice, pairwise
from pathlib import Path

from dynamo_semkv.bench.replay.trace import read_mooncake

PATTERNS = ("uniform", "bursty", "mooncake", "at_once")
BURST = 4

CONVERSATION_GROUPS = (10, 16, 3, 9, 8, 15, 4, 6, 5, 11)
"""How many requests come together, every three seconds, at the start of the conversation trace of Mooncake
(kvcache-ai/Mooncake, FAST25-release/traces/conversation_trace.jsonl, whose times are in steps of three seconds). Used
where no trace file is given."""
CONVERSATION_INTERVALS = tuple(
    3.0 if first else 0.0 for n in CONVERSATION_GROUPS for first in (True, *(False,) * (n - 1))
)[1:]
"""The same arrivals as seconds between one request and the next."""


def trace_intervals(path: Path, count: int) -> list[float]:
    """Seconds between the first `count + 1` requests of a trace in Mooncake's form. ContractError names a bad line."""
    times = [request.at for request in read_mooncake(path, limit=count + 1)]
    return [after - before for before, after in pairwise(times)]


def offsets(
    pattern: str, count: int, *, gap: float, intervals: Sequence[float] = CONVERSATION_INTERVALS
) -> tuple[float, ...]:
    """`count` times, not falling. `gap`: seconds on average; where the trace has so many requests at once, all are 0.
    ValueError for another pattern."""
    if pattern == "uniform":
        return tuple(n * gap for n in range(count))
    if pattern == "at_once":
        return (0.0,) * count
    if pattern == "bursty":
        return tuple(n // BURST * BURST * gap for n in range(count))
    if pattern != "mooncake":
        raise ValueError(f"pattern is {pattern!r}; it must be one of {', '.join(PATTERNS)}")
    taken = list(islice(cycle(intervals), count - 1)) if intervals else []
    total = sum(taken)
    scale = gap * (count - 1) / total if total else 0.0
    return (0.0, *accumulate(step * scale for step in taken))[:count]
