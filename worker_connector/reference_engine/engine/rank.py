"""A data-parallel rank: the thread that runs its executor, and the mailbox that other threads use."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from worker_connector.reference_engine.engine.assembly import assemble_rank
from worker_connector.reference_engine.engine.config import ConnectorSpec, EngineConfig
from worker_connector.reference_engine.engine.connector_manager import ConnectorManager
from worker_connector.reference_engine.engine.fair_lock import FairLock
from worker_connector.reference_engine.engine.outcome import CANCELLED, OnOutput, RankStats
from worker_connector.reference_engine.engine.request import LlmRequest
from worker_connector.reference_engine.engine.reuse import ReuseScope
from worker_connector.reference_engine.models.kv_pool import KvPool
from worker_connector.reference_engine.models.presets import LoadedModel

_log = logging.getLogger(__name__)

#: Pause between polls while every request waits for a transfer.
_TRANSFER_POLL_S = 0.002


class EngineDeadError(RuntimeError):
    """The engine stopped: it was shut down, or a connector callback ended it."""


class Rank:
    """Owns one pool, one executor and one connector instance. All methods are thread-safe."""

    def __init__(
        self,
        rank: int,
        config: EngineConfig,
        model: LoadedModel,
        connector: ConnectorSpec | None,
        forward_lock: FairLock,
        on_fatal: Callable[[int, BaseException], None],
    ) -> None:
        self.rank = rank
        self._config = config
        self._on_fatal = on_fatal
        parts = assemble_rank(rank, config, model, connector, forward_lock)
        self._pool, self._events, self._manager, self._executor = parts
        self._stats = self._executor.stats()
        self._wake = threading.Condition()
        self._submitted: list[tuple[LlmRequest, OnOutput, Callable[[], None]]] = []
        self._cancelled: set[int] = set()
        self._drop_cached = False
        self._stopping = False
        self._fatal: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"reference-engine-rank-{rank}", daemon=True)

    @property
    def pool(self) -> KvPool:
        """The pages, for inspection."""
        return self._pool

    @property
    def connector(self) -> ConnectorManager | None:
        """None without a connector."""
        return self._manager

    def start(self) -> None:
        """Start the thread; once."""
        self._thread.start()

    def submit(self, request: LlmRequest, on_output: OnOutput, on_end: Callable[[], None]) -> None:
        """Queue a request. EngineDeadError if the rank no longer runs.

        `on_end` is called on the rank's thread once the iteration in which the request ended is over: its blocks are in
        the reuse tree then, and its events and statistics can be read.
        """
        with self._wake:
            if self._stopping:
                raise EngineDeadError(f"rank {self.rank} has stopped") from self._fatal
            self._submitted.append((request, on_output, on_end))
            self._wake.notify()

    def cancel(self, request_id: int) -> None:
        """End a request in the next iteration; no effect on one that has ended."""
        with self._wake:
            self._cancelled.add(request_id)
            self._wake.notify()

    def drop_cached(self) -> None:
        """Forget all KV that no request holds, before the next iteration."""
        with self._wake:
            self._drop_cached = True
            self._wake.notify()

    def stop(self) -> None:
        """Ask the thread to end after its iteration; open requests are cancelled."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def join(self, timeout: float | None) -> bool:
        """Wait up to `timeout` seconds, None: for ever; True if the thread has ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def fatal_error(self) -> BaseException | None:
        """What ended this rank, or None. It is set before the rank's requests are failed, so that whoever is told of
        those can find out why."""
        return self._fatal

    def stats(self) -> RankStats:
        """Numbers as they were at the end of the last iteration."""
        return self._stats

    def processor_seconds(self) -> float:
        """Processor time of the rank's thread, which must run; that of the whole process on systems that do not tell
        (macOS)."""
        clock_of = getattr(time, "pthread_getcpuclockid", None)
        if clock_of is None:
            return time.process_time()
        return time.clock_gettime(clock_of(self._thread.ident))

    def cached_tokens(self, tokens: Sequence[int], scope: ReuseScope) -> int:
        """An estimate of how many of these tokens a request would find cached."""
        return self._executor.blocks.cached_tokens(tokens, scope)

    def drain_events(self) -> list[dict[str, Any]]:
        """KV events since the last call, oldest first, as `engine/events.py` has them."""
        return self._events.drain()

    def _run(self) -> None:
        torch.set_num_threads(self._config.num_threads)  # per thread in the math libraries
        try:
            while self._step():
                pass
        except Exception as error:  # noqa: BLE001 - a connector callback or a bug: the rank ends and says so
            _log.exception("rank %d: the executor ended", self.rank)
            self._fatal = error
        with self._wake:
            self._stopping = True
            for submission in self._submitted:
                self._executor.add(*submission)
            self._submitted.clear()
        if self._fatal is None:
            self._executor.fail_all("", reason=CANCELLED)
        else:
            self._executor.fail_all(f"{type(self._fatal).__name__}: {self._fatal}")
        self._publish()
        if self._fatal is not None:
            self._on_fatal(self.rank, self._fatal)

    def _step(self) -> bool:
        """Wait for work, run one iteration. False: stop."""
        with self._wake:
            while not (self._submitted or self._cancelled or self._drop_cached or self._stopping):
                if self._executor.has_runnable:
                    break
                pause = _TRANSFER_POLL_S if self._executor.has_transfers else self._config.idle_poll_s
                if not self._wake.wait(pause):
                    break
            if self._stopping:
                return False
            submitted, self._submitted = self._submitted, []
            cancelled, self._cancelled = self._cancelled, set()
            drop_cached, self._drop_cached = self._drop_cached, False
        for submission in submitted:
            self._executor.add(*submission)
        if drop_cached:
            self._executor.drop_cached()
        ran = self._executor.iterate(cancelled)
        self._publish()
        if not ran and self._executor.has_runnable and self._executor.has_transfers:
            self._pause()  # nothing fits until a transfer frees pages
        return True

    def _publish(self) -> None:
        self._stats = self._executor.stats()
        for on_end in self._executor.take_ended():
            on_end()

    def _pause(self) -> None:
        with self._wake:
            if not (self._submitted or self._cancelled or self._stopping):
                self._wake.wait(_TRANSFER_POLL_S)
