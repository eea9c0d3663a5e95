"""One provider in one thread of its own: a provider that sleeps, loops or never returns occupies that thread and
nothing else."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import Counter
from typing import NamedTuple

from dynamo_semkv.evidence.claims import Claims, checked
from dynamo_semkv.evidence.provider import EvidenceProvider, LookupQuery

logger = logging.getLogger(__name__)

MAX_WAITING = 64
SWITCH_SECONDS = 0.0005
"""For `sys.setswitchinterval`: how long the event loop may work before a lookup's thread gets its turn, and the other
way round. Python's own 5 ms are the whole deadline: beside a replay of donor events every lookup would be late."""


class Answer(NamedTuple):
    """What a provider returned, checked in its own thread."""

    claims: Claims
    error: BaseException | None
    seconds: float


LATE = Answer(Claims(), None, 0.0)
"""What a future holds whose deadline passed: nobody waits for the real one any more."""


class _Job(NamedTuple):
    query: LookupQuery
    expires: float
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Answer]


class ProviderWorker:
    """Runs lookups one after another. `time.monotonic` throughout: deadlines are real time."""

    def __init__(self, provider: EvidenceProvider) -> None:
        self.provider = provider
        self.name = provider.name
        self.counts: Counter[str] = Counter()
        """`expired` (not begun in time), `late` (finished after the deadline; the result is dropped)."""
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._running_until: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"semkv-evidence-{self.name}", daemon=True)
        self._thread.start()

    def free(self) -> bool:
        """False while a lookup runs past its own deadline, or too many wait: more would only wait as well."""
        until = self._running_until
        return (until is None or time.monotonic() < until) and self._jobs.qsize() < MAX_WAITING

    def submit(self, query: LookupQuery, expires: float) -> asyncio.Future[Answer]:
        """`expires`: monotonic seconds. The future belongs to the running loop; whoever waits no longer settles or
        cancels it."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        self._jobs.put(_Job(query, expires, loop, answer))
        return answer

    def stop(self) -> None:
        """Returns at once; a thread inside a lookup ends when the lookup does, or with the process."""
        self._jobs.put(None)

    def join(self, timeout: float) -> bool:
        """Waits at most `timeout` seconds for the thread to end. Returns whether it has."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            began = time.monotonic()
            if job.answer.done():  # cancelled, or LATE
                continue
            if began >= job.expires:
                self.counts["expired"] += 1
                continue
            self._running_until = job.expires
            claims = Claims()
            error: BaseException | None = None
            try:
                claims = checked(self.provider.lookup(job.query), job.query)
            except BaseException as raised:  # even SystemExit: it would end the thread, and every later lookup with it
                error = raised
                logger.debug("provider %s failed", self.name, exc_info=True)
            finally:
                self._running_until = None
            ended = time.monotonic()
            if ended > job.expires:
                self.counts["late"] += 1
            self._deliver(job, Answer(claims, error, ended - began))

    @staticmethod
    def _deliver(job: _Job, answer: Answer) -> None:
        def settle() -> None:
            if not job.answer.done():
                job.answer.set_result(answer)

        try:
            job.loop.call_soon_threadsafe(settle)
        except RuntimeError:
            logger.debug("the loop that asked is closed; nobody waits for this answer")
