"""SlabScrubber: the rank's thread that waits for copies, seals what has landed, and reads sealed blocks again (see
memory/slab.py).

It takes the waiting and the checksums off the engine's threads. Jobs go first; between them it does one small step of
the scrub at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TypeVar

from dynamo_semkv.telemetry.throttled import Throttled
from worker_connector.memory.slab import HostSlab

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)

SCRUB_BYTES_PER_SECOND = 64 * 1024 * 1024
"""About half a percent of one core. 1 GiB is read in 16 s."""
STEP_BYTES = 4 * 1024 * 1024
ROUND_SECONDS = 10.0
"""Between the starts of two rounds, at least."""
_IDLE_SECONDS = 1.0
_MAX_URGENT = 65_536

T = TypeVar("T")
Job = Callable[[], None]
OnDamaged = Callable[[Sequence[int], bool], None]
"""Called with (slots, whether they were loaded just before)."""


class Scrubber:
    """One step of the scrub at a time; no thread of its own."""

    def __init__(self, slab: HostSlab, on_damaged: OnDamaged, clock: Callable[[], float] = time.monotonic) -> None:
        self._slab = slab
        self._on_damaged = on_damaged
        self._clock = clock
        self._rests_until = clock()
        self._lock = threading.Lock()
        self._urgent: deque[tuple[int, bool]] = deque(maxlen=_MAX_URGENT)
        self._round: list[int] = []
        self._step = max(1, STEP_BYTES // slab.row_bytes)
        self.checked = 0
        self.damaged = 0

    def urgent(self, slots: Sequence[int], *, loaded: bool) -> None:
        """Puts slots before the rest of the round. `loaded`: they were loaded just before. Any thread."""
        with self._lock:
            self._urgent.extend((slot, loaded) for slot in slots)

    def step(self) -> int:
        """Checks a few slots; returns how many bytes that read."""
        with self._lock:
            batch = [self._urgent.popleft() for _ in range(min(self._step, len(self._urgent)))]
        if not batch:
            if not self._round and self._clock() >= self._rests_until:
                self._rests_until = self._clock() + ROUND_SECONDS
                self._round = self._slab.sealed_slots()
            batch = [(slot, False) for slot in self._round[: self._step]]
            self._round = self._round[self._step :]
        for loaded in (False, True):
            slots = sorted({slot for slot, was_loaded in batch if was_loaded is loaded})
            wrong = self._slab.damaged(slots)
            self.checked += len(slots)
            if wrong:
                self.damaged += len(wrong)
                self._on_damaged(wrong, loaded)
        return len(batch) * self._slab.row_bytes


class SlabScrubber:
    """Runs jobs in order on its thread. `inline=True`: on the caller's thread, and no scrub runs by itself (tests)."""

    def __init__(self, name: str, scrubber: Scrubber, *, inline: bool = False) -> None:
        self._scrubber = scrubber
        self._inline = inline
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        """None ends the thread. The queue is written in C: behind a forward pass, a Condition costs three times as
        much."""
        self.failed = 0
        self._thread = threading.Thread(target=self._run, name=f"semkv-slab-{name}", daemon=True)
        if not inline:
            self._thread.start()

    def submit(self, job: Job) -> None:
        """A job may wait for a copy. What it raises is counted and logged; it must report its own failure itself."""
        if self._inline:
            self._do(job)
        else:
            self._jobs.put(job)

    def drain(self, timeout: float) -> bool:
        """Waits until all jobs so far have run; False if they have not within `timeout` seconds, or the thread has
        ended before them."""
        if not self._thread.is_alive():
            return self._jobs.empty()
        reached = threading.Event()
        self._jobs.put(reached.set)
        return reached.wait(timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Runs what is waiting, as far as the time allows, and ends the thread."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join(timeout)

    def _run(self) -> None:
        due = time.monotonic() + _IDLE_SECONDS
        while True:
            try:
                job = self._jobs.get(timeout=max(0.0, due - time.monotonic()))
            except Empty:
                pass
            else:
                if job is None:
                    return
                self._do(job)
            if (
                time.monotonic() >= due
            ):  # also where jobs never stop coming: what was loaded under load is read again too
                read = self._do(self._scrubber.step)
                due = time.monotonic() + (read / SCRUB_BYTES_PER_SECOND if read else _IDLE_SECONDS)

    def _do(self, job: Callable[[], T]) -> T | None:
        try:
            return job()
        except Exception:  # noqa: BLE001 - one block's fault may not end the sealing of all later ones
            self.failed += 1
            _throttled.exception("semkv connector: a job of the slab's thread failed")
            return None
