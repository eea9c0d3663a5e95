"""SimulatedReplica: one rank with a prefill queue, a device cache and a host slab. It is the cost model of the replay,
no more.

* Prefill is served in order of arrival at `rate` tokens a second; what is reused on the device costs nothing, what is
  loaded from the host costs `host_cost` of its prefill. Decode is not modelled: time to first token is queue plus
  prefill.
* Both caches are LRU over blocks. What was computed enters both (the connector writes through); a host block is loaded
  only where the engine *materializes*.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


class Blocks:
    """LRU over block ids. A chain counts as used from its end to its beginning, so its end is evicted first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._used: OrderedDict[int, None] = OrderedDict()

    def prefix(self, chain: Sequence[int], start: int = 0) -> int:
        """How many blocks of the chain, from `start` on, are present without a gap."""
        end = start
        while end < len(chain) and chain[end] in self._used:
            end += 1
        return end - start

    def touch(self, chain: Sequence[int]) -> None:
        """Adds the chain's blocks, or marks them as used; evicts beyond the capacity."""
        for block in reversed(chain):
            self._used[block] = None
            self._used.move_to_end(block)
        while len(self._used) > self.capacity:
            self._used.popitem(last=False)


@dataclass(frozen=True)
class Served:
    """The result of one request on one replica; times in seconds since the first request, `ttft` from its arrival."""

    ttft: float
    start: float
    end: float
    device_tokens: int
    host_tokens: int
    """Resident in the host slab beyond the device prefix: what may be offered."""
    confirmed: int
    """Of `host_tokens`, those reported as materialized."""
    computed: int
    load_seconds: float = 0.0
    """How long loading the confirmed tokens took."""


@dataclass
class SimulatedReplica:
    """One rank. `rate`: prefill tokens a second; `host_cost`: cost of a loaded token, as a share of its prefill."""

    block_tokens: int
    rate: float
    host_cost: float
    device: Blocks
    host: Blocks
    busy_until: float = 0.0
    computed_tokens: int = 0
    requests: int = 0
    _landing: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)

    def settle(self, now: float) -> None:
        """Puts into the caches what has been computed by now."""
        while self._landing and self._landing[0][0] <= now:
            _, chain = self._landing.pop(0)
            self.device.touch(chain)
            self.host.touch(chain)

    def queued_tokens(self, now: float) -> int:
        """Prefill tokens that still wait, by the rate."""
        return int(max(0.0, self.busy_until - now) * self.rate)

    def overlap(self, chain: Sequence[int]) -> tuple[int, int]:
        """(blocks on the device, blocks beyond them in the host slab)."""
        device = self.device.prefix(chain)
        return device, self.host.prefix(chain, device)

    def would_take(
        self, chain: Sequence[int], tokens: int, now: float, *, materializes: bool, lies: bool = False
    ) -> Served:
        """What serving the request now would give; changes nothing. `lies`: the replica reports that it loaded what it
        could have, and computes all of it."""
        device, host = (count * self.block_tokens for count in self.overlap(chain))
        device = min(device, tokens - 1)  # the last token is always computed
        host = max(0, min(host, tokens - 1 - device))
        confirmed = host if materializes or lies else 0
        loaded = 0 if lies else confirmed
        computed = tokens - device - loaded
        start = max(now, self.busy_until)
        end = start + (computed + self.host_cost * loaded) / self.rate
        load_seconds = self.host_cost * confirmed / self.rate
        return Served(end - now, start, end, device, host, confirmed, computed, load_seconds)

    def serve(
        self, chain: tuple[int, ...], tokens: int, now: float, *, materializes: bool, lies: bool = False
    ) -> Served:
        """Serves the request: the queue grows, and its blocks enter the caches at its end."""
        served = self.would_take(chain, tokens, now, materializes=materializes, lies=lies)
        self.busy_until = served.end
        self.computed_tokens += served.computed
        self.requests += 1
        self._landing.append((served.end, chain))
        return served
