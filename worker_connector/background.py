"""Background: one thread for everything that may not run on the engine's scheduler thread: hashing whole prompts,
sketches, encoding, and periodic work. Jobs run in the order in which they were submitted."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable

from dynamo_semkv.telemetry.throttled import Throttled

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)

Job = Callable[[], None]


class Background:
    """`submit` never blocks and never raises; beyond `capacity` waiting jobs it refuses the job and counts that. A job
    that raises is counted and logged, and the next one runs.

    `on_beat` runs every `beat_seconds`. `due` says when `on_due` has something to do (time.monotonic; infinite:
    nothing). It is called on the thread, between two jobs, so what only jobs change cannot become due unseen. `on_due`
    must move that time on, also where it raises."""

    def __init__(
        self,
        name: str,
        capacity: int,
        beat_seconds: float,
        on_beat: Job,
        due: Callable[[], float] = lambda: math.inf,
        on_due: Job = lambda: None,
    ) -> None:
        self._name = name
        self._capacity = capacity
        self._beat_seconds = beat_seconds
        self._on_beat = on_beat
        self._due = due
        self._on_due = on_due
        self._wake = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._running = False
        self._closing = False
        self._thread: threading.Thread | None = None
        self.refused = 0
        self.failed = 0

    def start(self) -> None:
        """Starts the thread. To be called once."""
        self._thread = threading.Thread(target=self._run, name=f"semkv-{self._name}", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> bool:
        """False where the job is refused: too many wait, or `close` was called. Any thread."""
        with self._wake:
            if self._closing or len(self._jobs) >= self._capacity:
                self.refused += 1
                return False
            self._jobs.append(job)
            self._wake.notify_all()
        return True

    def drain(self, timeout: float) -> bool:
        """Waits until all jobs have run; False if they have not within `timeout` seconds. Must not be called from a
        job."""
        deadline = time.monotonic() + timeout
        with self._wake:
            while self._jobs or self._running:
                left = deadline - time.monotonic()
                if left <= 0 or not self._wake.wait(left):
                    return not (self._jobs or self._running)
        return True

    def close(self, timeout: float = 5.0) -> None:
        """Runs what is waiting, as far as the time allows, and ends the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _run(self) -> None:
        next_beat = time.monotonic()
        while True:
            next_due = self._due()
            next_time = min(next_beat, next_due)
            with self._wake:
                while not self._jobs and not self._closing and (left := next_time - time.monotonic()) > 0:
                    self._wake.wait(left)
                if self._closing and not self._jobs:
                    return
                # A beat that is due goes first: otherwise a steady flow of jobs would hold up the announcements.
                now = time.monotonic()
                beat, due = (now >= at and not self._closing for at in (next_beat, next_due))
                job = self._on_beat if beat else self._on_due if due else self._jobs.popleft()
                self._running = True
            if beat:
                next_beat = time.monotonic() + self._beat_seconds
            try:
                job()
            except Exception:  # noqa: BLE001 - jobs are independent: one that fails costs its own report or donor
                self.failed += 1
                _throttled.exception("semkv %s: a background job failed", self._name)
            with self._wake:
                self._running = False
                self._wake.notify_all()
