"""Saving: what an accepted materialization was worth in seconds, against the replica's own cold rate. Pure.

    PrefillRates()   .add(replica, seconds_per_token)   .seconds_per_token(replica)   .rows()
    cold_seconds_per_token(...) -> float | None      what one cold route says of the rate of its replica
    saving_of(...) -> Saving | None                  what one loaded route saved

The rate that turns tokens of prefill into seconds is a cold route's time to first token over the prefill tokens that
had to be computed before it (its own, and those that waited when it came). The same request is never run twice, so a
saving is an estimate: what the prompt would have taken at that rate, less what it took.
"""

from __future__ import annotations

import statistics
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from dynamo_semkv.contracts.identity import StableReplica

SAMPLES = 32
"""A replica's rate is the median of so many cold routes, the last ones: older ones are forgotten, and a single slow one
has no weight."""
NEEDED = 3
MIN_COLD_TOKENS = 128
"""A shorter prefill is mostly overhead and no measure of a rate."""
MIN_SECONDS_PER_TOKEN = 1e-9
"""A thousand million tokens per second: a smaller value was not measured, and its reciprocal may be infinite."""


@dataclass(frozen=True)
class Saving:
    """What loading saved on one route."""

    seconds_per_token: float
    """The replica's cold rate when the route closed."""
    cold_seconds: float
    """What the first token would have taken at that rate with nothing loaded, the tokens queued before it included."""
    saved_seconds: float | None
    """`cold_seconds` less the time to first token; negative where loading made it worse. None: nobody saw the
    stream."""
    share: float
    """In [-1, 1]: what part of its prefill a loaded token saved. By the connector's own clock where it reports the
    load's time, as that is free of what else the engine did; else by the time to first token."""


@dataclass
class _Rate:
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    median: float = 0.0

    @property
    def known(self) -> bool:
        return len(self.recent) >= NEEDED

    def add(self, seconds_per_token: float) -> None:
        self.recent.append(seconds_per_token)
        self.median = statistics.median(self.recent)


class PrefillRates:
    """The cold rate of each replica, at most `max_replicas` of them. A replica without a rate of its own yet has that
    of the fleet: the median over workers, so that none counts for more than one, however many routes or ranks it
    has."""

    def __init__(self, max_replicas: int) -> None:
        self._max_replicas = max_replicas
        self._rates: OrderedDict[StableReplica, _Rate] = OrderedDict()
        self._seen = 0
        self._fleet: float | None = None
        """None: computed by the next call that needs it."""

    def add(self, replica: StableReplica, seconds_per_token: float) -> None:
        """Takes the rate of one cold route."""
        self._rates.setdefault(replica, _Rate()).add(seconds_per_token)
        self._rates.move_to_end(replica)
        self._seen += 1
        self._fleet = None
        while len(self._rates) > self._max_replicas:
            self._rates.popitem(last=False)

    def seconds_per_token(self, replica: StableReplica) -> float | None:
        """None as long as too few cold routes were seen."""
        if self.is_own(replica):
            return self._rates[replica].median
        if self._seen < NEEDED:
            return None
        if self._fleet is None:
            self._fleet = self._median_of_workers()
        return self._fleet

    def _median_of_workers(self) -> float:
        workers: dict[str, list[float]] = {}
        for name, rate in self._rates.items():
            workers.setdefault(name.stable_routing_id, []).append(rate.median)
        return statistics.median(statistics.median(ranks) for ranks in workers.values())

    def is_own(self, replica: StableReplica) -> bool:
        """Whether the replica's own rate is known."""
        own = self._rates.get(replica)
        return own is not None and own.known

    def rows(self) -> Iterator[tuple[StableReplica, float, int]]:
        """(replica, seconds per token, cold routes behind it) of the replicas whose own rate is known; the latest
        first."""
        for replica, rate in reversed(self._rates.items()):
            if rate.known:
                yield replica, rate.median, len(rate.recent)


def cold_seconds_per_token(
    *, ttft_seconds: float, input_tokens: int, reused_tokens: int, queued_tokens: int | None
) -> float | None:
    """The rate that one cold route shows; None where too little was computed to tell."""
    own = input_tokens - reused_tokens
    if own < MIN_COLD_TOKENS:
        return None
    rate = ttft_seconds / (own + (queued_tokens or 0))
    return rate if rate >= MIN_SECONDS_PER_TOKEN else None


def saving_of(
    *,
    seconds_per_token: float,
    input_tokens: int,
    local_tokens: int,
    confirmed_tokens: int,
    queued_tokens: int | None,
    ttft_seconds: float | None,
    load_seconds: float | None,
) -> Saving | None:
    """What one load was worth; None where neither clock saw it, or nothing was confirmed. Times in seconds."""
    spared = confirmed_tokens * seconds_per_token
    if confirmed_tokens < 1 or not spared > 0.0:
        return None
    cold = seconds_per_token * (max(0, input_tokens - local_tokens) + (queued_tokens or 0))
    saved = cold - ttft_seconds if ttft_seconds is not None else None
    if load_seconds is not None:
        share = (spared - load_seconds) / spared
    elif saved is not None:
        share = saved / spared
    else:
        return None
    return Saving(seconds_per_token, cold, saved, max(-1.0, min(1.0, share)))
