"""DiskPrefetchWait: a request waits, before the engine sees it, for blocks of its prompt that are on this worker's own
disk.

An offer to the engine is a promise, so it is made of verified blocks in the slab only, and the engine asks once.
Whoever takes requests in can wait where the engine cannot: in its event loop, for a bounded time, while other requests
go by. The rules:

* `connector.disk_wait_ms` bounds the wait, whatever happens to disk, threads or books. What has not come by then serves
  the next request.
* Nobody waits for what the engine's own cache holds, for less than would be offered, or for blocks that take longer to
  read than to compute. Both are measured: a block by what the last orders to the disk took, with what goes before it, a
  token by the fastest of the last prefills (so that a queue in front of the engine is not taken for slow computing).
  What is not measured yet is tried.
* A disk that has answered nothing for a second, while it was asked for something, holds nobody until it does.
* Blocks are found as the engine's question finds them: in the request's namespace (salt, adapter, model), token by
  token.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from dynamo_semkv.config.schema import ConnectorConfig
from dynamo_semkv.contracts.keys import root_key
from dynamo_semkv.telemetry.catalogue import DISK_HOLD_SECONDS
from dynamo_semkv.telemetry.throttled import Throttled
from worker_connector.disk.index import DiskBlock
from worker_connector.disk.tier import DiskTier
from worker_connector.engine_api.request_view import RequestScope, pack_tokens
from worker_connector.leader.leader import Leader
from worker_connector.ledger.ledger import MatchEnd
from worker_connector.timings import Durations

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)

_PREFILLS = 32
_LEAST_COMPUTED = 64
"""Tokens: a shorter prefill says more about an iteration than about tokens."""


@dataclass(frozen=True)
class _Found:
    """What of a prompt is on disk, behind what is in the slab."""

    tier: DiskTier
    path: list[DiskBlock]
    horizon: int
    start: int
    """Tokens in the slab."""
    end: int
    """Tokens with the blocks on disk."""
    expected: float | None
    """Seconds until they would be in the slab."""
    hanging: bool
    """The disk has not answered for long."""


_doors: weakref.WeakSet[DiskPrefetchWait] = weakref.WeakSet()
_doors_lock = threading.Lock()


def disk_door(dp_rank: int = 0) -> DiskPrefetchWait | None:
    """Of the connector of that data-parallel rank in this process, for whoever takes requests in and has no scheduler
    object at hand. None: there is none (yet), or there are several."""
    with _doors_lock:
        found = [door for door in _doors if door.dp_rank == dp_rank]
    return found[0] if len(found) == 1 else None


def offer(door: DiskPrefetchWait) -> None:
    """To `disk_door`, as long as it lives and is not closed."""
    with _doors_lock:
        _doors.add(door)


class DiskPrefetchWait:
    """Used in one event loop. Never raises but for cancellation."""

    def __init__(self, leader: Leader, config: ConnectorConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._leader = leader
        self._wait = config.disk_wait_ms / 1e3
        self._least = config.min_offer_tokens
        self._clock = clock
        self._prefills: deque[float] = deque(maxlen=_PREFILLS)
        self.counts: Counter[str] = Counter()
        """Requests whose prompt goes on on disk. Held: `arrived` (all of it), `partly` (the rest cannot come), `late`,
        `left` (the client went). Not held: `slower` (than computing), `on_device`, `too_little`, `hanging` (the disk),
        `crowded`. `failed`: by a fault of ours."""
        self.seconds = Durations(DISK_HOLD_SECONDS.buckets)
        """That requests were held."""

    @property
    def dp_rank(self) -> int | None:
        """None until the engine has said it."""
        replica = self._leader.replica
        return None if replica is None else replica.dp_rank

    async def before(
        self,
        tokens: Sequence[int],
        *,
        salt: str | None = None,
        adapter: int | None = None,
        on_device: Callable[[], int] = lambda: 0,
        gone: Callable[[], Awaitable[Any]] | None = None,
    ) -> None:
        """Returns when what is worth waiting for has come, and after the deadline in any case. `on_device`: tokens of
        the prompt in the engine's own cache, where that is known; `gone`: ends when the client has left. Both are asked
        only where something is on disk."""
        try:
            found = self._find(tokens, RequestScope(salt, True, adapter, ()))
            done = self._hold(found, on_device) if found is not None else None
        except Exception:  # noqa: BLE001 - a fault of the disk's books may not fail the request: it is computed
            self.counts["failed"] += 1
            _throttled.exception("semkv connector: what is on disk of a prompt could not be asked for")
            return
        if found is not None and done is not None:
            await self._wait_for(found, done, gone)

    def prefilled(self, seconds: float, computed_tokens: int) -> None:
        """A request's first token came so long after the engine had it, which computed so many tokens of the prompt."""
        if computed_tokens >= _LEAST_COMPUTED and seconds > 0:
            self._prefills.append(seconds / computed_tokens)

    def snapshot(self) -> dict[str, Any]:
        """Numbers, JSON-able."""
        return {"results": dict(self.counts), "seconds": self.seconds.snapshot()}

    def close(self, timeout: float = 0.0) -> None:
        """Nobody is held any more."""
        self._wait = 0.0
        with _doors_lock:
            _doors.discard(self)
        with self._leader.lock:
            life, _, _ = self._leader.cache()
            if life is not None and life.disk is not None:
                life.disk.close()

    # one request

    def _find(self, tokens: Sequence[int], scope: RequestScope) -> _Found | None:
        """The usual answer, that nothing is on disk, costs a walk in memory. The leader's lock is not held while blocks
        are hashed."""
        if self._wait <= 0:
            return None
        packed = pack_tokens(tokens)
        with self._leader.lock:
            life, namespaces, _ = self._leader.cache()
            if life is None or namespaces is None or life.disk is None or life.ledger is None:
                return None
            _, digest, problem = namespaces.of(scope)
            if problem is not None:
                return None
            tier, size = life.disk, life.pool.tokens_per_block
            limit = (len(tokens) - 1) // size
            match = life.ledger.match(digest, packed, limit)
            if match.end is MatchEnd.LIMIT:
                return None
            at, step = match.blocks, 4 * size
            above = match.tip.key if match.tip is not None else root_key(digest)
            # Also blocks that are just coming up, because a hint was faster than its request.
            if not tier.index.path(above, packed[at * step : (at + 1) * step], step):
                return None
            horizon = life.ledger.tick
            life.ledger.touch(match.tip)
        path = tier.index.path(above, packed[at * step : limit * step], step)
        with self._leader.lock:
            expected, hanging = tier.expected_seconds(path), tier.hanging
        return None if not path else _Found(tier, path, horizon, at * size, (at + len(path)) * size, expected, hanging)

    def _hold(self, found: _Found, on_device: Callable[[], int]) -> Future[int] | None:
        """None, and counted: it is not held."""
        why = "hanging" if found.hanging else self._not_worth(found, on_device())
        if why is not None:
            self.counts[why] += 1
            return None
        done = found.tier.hold(found.path, found.horizon)
        if done is None:
            self.counts["crowded"] += 1
        return done

    def _not_worth(self, found: _Found, local: int) -> str | None:
        if local >= found.end:
            return "on_device"
        if found.end - local < self._least:
            return "too_little"
        saved = found.end - max(local, found.start)
        if found.expected is not None and self._prefills and found.expected >= saved * min(self._prefills):
            return "slower"
        return None

    async def _wait_for(self, found: _Found, done: Future[int], gone: Callable[[], Awaitable[Any]] | None) -> None:
        began = self._clock()
        result = "left"
        over = asyncio.wrap_future(done)
        both: set[asyncio.Future[Any]] = {over}
        if gone is not None:
            both.add(asyncio.ensure_future(_end_of(gone)))
        try:
            ended, _ = await asyncio.wait(both, timeout=self._wait, return_when=asyncio.FIRST_COMPLETED)
            if over in ended:
                result = "arrived" if over.result() >= len(found.path) else "partly"
            elif not ended:
                result = "late"
        finally:
            for future in both:
                future.cancel()  # the blocks come all the same
            found.tier.give_up(done)
            self.counts[result] += 1
            self.seconds.add(self._clock() - began)


async def _end_of(gone: Callable[[], Awaitable[Any]]) -> None:
    """A task of its own, so that a fault of whoever says it ends the wait and not the request."""
    try:
        await gone()
    except Exception:  # noqa: BLE001 - see above
        _throttled.exception("semkv connector: it is not known whether a client that waits has left")
