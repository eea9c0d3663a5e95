"""Fetcher: pulls what Dynamo's `kv.fetch@1.0` hints say that another worker has, on threads of its own; whoever begins
one never waits.

One budget of time and bytes a pull, one of memory for all of them. What has not come by then is not offered; the
request is computed. A peer that failed is left alone for a while (fetch/peers.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from dynamo_semkv.config.fetch import FetchConfig
from dynamo_semkv.contracts.namespace import CacheNamespace
from dynamo_semkv.telemetry.catalogue import FETCH_SECONDS
from dynamo_semkv.telemetry.throttled import Throttled
from worker_connector.fetch.peers import Address, NotAllowed, Peers
from worker_connector.fetch.tier import FetchTier, Pull, Stop
from worker_connector.fetch.transport import BlockSource, BlockTransport, FetchFailed, Rows, Why
from worker_connector.fetch.wire import MAX_KEYS
from worker_connector.timings import Durations

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)

THREADS = 2
MAX_WAITING = 64
"""Pulls that wait for a thread; more are refused."""
_PEERS_FAULT = (Why.UNREACHABLE, Why.TIMEOUT, Why.UNAUTHORIZED, Why.MALFORMED, Why.LOST, Why.FOREIGN, Why.BUSY)
_CALLED_BACK = (Why.RESET, Why.FOREIGN)
"""Also a source that was not foreign when it gave something, and is now."""
_LIES = (Stop.WRONG_TOKENS, Stop.WRONG_BYTES)


@dataclass(eq=False)
class Order:
    """One hinted prompt."""

    namespace: CacheNamespace
    digest: bytes
    tokens: bytes
    limit: int
    """Blocks of the prompt that the source is said to have and that may be served."""
    endpoint: str
    begun: float = 0.0
    done: Future[int] = field(default_factory=Future)
    """How many blocks entered. Never an exception."""

    @property
    def name(self) -> tuple[bytes, int, bytes]:
        """Equal for orders that would fetch the same."""
        return self.digest, self.limit, self.tokens[-256:]


class Fetcher:
    """Thread-safe. `manual`: no threads, pulls run in `run_pending` (tests)."""

    def __init__(
        self,
        tier: FetchTier,
        transport: BlockTransport,
        peers: Peers,
        config: FetchConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        manual: bool = False,
    ) -> None:
        self._tier = tier
        self._transport = transport
        self._peers = peers
        self._config = config
        self._clock = clock
        self._manual = manual
        self._wake = threading.Condition()
        self._waiting: deque[Order] = deque()
        self._open: dict[tuple[bytes, int, bytes], Order] = {}
        self._threads: list[threading.Thread] = []
        self._closing = False
        self.seconds = Durations(FETCH_SECONDS.buckets)
        self.counts: Counter[str] = Counter()
        """Pulls by what became of them: `complete`, `short` (the source had less), `nothing_missing`, `joined` (one for
        the same prompt was under way), `crowded` (too many wait, or no thread is there), `resting`, `bad_address`,
        `address_not_allowed`, `error`, and the values of `Why` and `Stop`."""
        self.blocks = 0
        self.bytes = 0

    def begin(self, order: Order) -> Future[int]:
        """Never waits. Of a pull for the same prompt that is under way, its future. An address that is not followed is
        known at once: the request is not held until a thread has time to say so."""
        try:
            self._peers.address(order.endpoint)
        except NotAllowed as error:
            self._not_followed(error)
            order.done.set_result(0)
            return order.done
        with self._wake:
            found = self._open.get(order.name)
            if found is not None and found.tokens == order.tokens:
                self.counts["joined"] += 1
                return found.done
            if self._closing or len(self._waiting) >= MAX_WAITING or not (self._threads or self._manual):
                self.counts["crowded"] += 1
                order.done.set_result(0)
                return order.done
            order.begun = self._clock()
            order.done.set_running_or_notify_cancel()  # whoever waits for it may give up, and cannot take it back
            self._open[order.name] = order
            self._waiting.append(order)
            self._wake.notify()
        return order.done

    def _not_followed(self, error: NotAllowed) -> None:
        with self._wake:
            self.counts[error.kind] += 1
        if error.kind != "resting":
            _throttled.warning("semkv connector: a hint's source is not followed: %s", error.kind, key=error.kind)

    def start(self) -> None:
        """Once; until then nothing is pulled. Not where somebody waits: starting a thread takes a while."""
        for _ in range(0 if self._manual else THREADS):
            thread = threading.Thread(target=self._run, name="semkv-fetch-pull", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                _log.exception("semkv connector: no thread for pulls")
                return
            self._threads.append(thread)

    def run_pending(self) -> int:
        """Manual mode: runs what waits; returns how many."""
        done = 0
        while (order := self._next()) is not None:
            self._work(order)
            done += 1
        return done

    def close(self, timeout: float = 5.0) -> None:
        """Ends after the exchanges in hand, or `timeout`. What waits ends with nothing."""
        deadline = time.monotonic() + timeout
        with self._wake:
            self._closing = True
            waiting = list(self._waiting)
            self._waiting.clear()
            self._wake.notify_all()
        for order in waiting:
            order.done.set_result(0)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    # on the threads

    def _next(self) -> Order | None:
        with self._wake:
            return self._waiting.popleft() if self._waiting else None

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closing or bool(self._waiting))
                if self._closing:
                    return
            order = self._next()
            if order is not None:
                self._work(order)

    def _work(self, order: Order) -> None:
        entered = 0
        try:
            entered, result = self._pull(order)
        except Exception:  # noqa: BLE001 - a thread that ended would leave every later request waiting for its budget
            result = "error"
            _throttled.exception("semkv connector: a pull failed")
        with self._wake:
            self.counts[result] += 1
            if self._open.get(order.name) is order:
                del self._open[order.name]
            self.seconds.add(self._clock() - order.begun)
        order.done.set_result(entered)

    def _pull(self, order: Order) -> tuple[int, str]:
        try:
            address = self._peers.address(order.endpoint, trying=True)
        except NotAllowed as error:  # another pull has just failed on it, or tries whether it will again
            return 0, error.kind
        deadline = order.begun + self._config.deadline_ms / 1e3
        if self._clock() >= deadline:
            return 0, Why.TIMEOUT.value
        pull = self._tier.plan(order.namespace, order.digest, order.tokens, order.limit)
        if not isinstance(pull, Pull):
            return 0, "nothing_missing" if pull is None else pull.value
        pool = pull.held.pool
        most = self._config.max_pull_bytes // pool.bytes_per_block
        del pull.keys[max(most, 1) :]
        try:
            result = self._exchange(pull, address, deadline)
            if result in _LIES:
                self._peers.failed(address)
            else:
                self._peers.worked(address)
        except FetchFailed as failed:
            result = failed.why.value
            if failed.why in _PEERS_FAULT:
                self._peers.failed(address)
            if failed.why in _CALLED_BACK:
                self._tier.withdraw(pull)
            _throttled.info("semkv connector: a pull from %s:%d ended: %s", *address, failed)
        finally:
            self._tier.keep(pull)
        with self._wake:
            self.blocks += len(pull.entered)
            self.bytes += len(pull.entered) * pool.bytes_per_block
        return len(pull.entered), result

    def _exchange(self, pull: Pull, address: Address, deadline: float) -> str:
        source = self._transport.connect(address.host, address.port, deadline)
        try:
            return self._read(pull, source, deadline)
        finally:
            source.close()

    def _read(self, pull: Pull, source: BlockSource, deadline: float) -> str:
        row = pull.held.slab.row_bytes
        batch = min(max(1, self._config.max_in_flight_bytes // (THREADS * row)), MAX_KEYS, len(pull.keys))
        rows: Rows = np.zeros((batch, row), dtype=np.uint8)
        while pull.at < len(pull.keys) and not self._closing:
            wanted = pull.wanted(batch)
            answer = source.read(wanted, rows, deadline)
            stop = self._tier.land(pull, answer, rows)
            if stop is not None:
                if stop in _LIES:
                    _throttled.warning(
                        "semkv connector: a peer sent a block that is not what was asked for: %s", stop.value
                    )
                return stop.value
            if len(answer.blocks) < len(wanted.keys):
                return "short"
        return "complete"
