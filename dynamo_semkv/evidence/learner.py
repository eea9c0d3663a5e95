"""DonorLearner: base of providers that need a donor's text and take long to index it.

routed prompt, donor event (event loop) -> whose text is known (routed.py) -> a bounded queue -> `_index_donor` (a
thread of its own)
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter, OrderedDict
from typing import Any

from dynamo_semkv.contracts.keys import TokenArray
from dynamo_semkv.evidence.donor import CatalogDonor
from dynamo_semkv.evidence.provider import LookupQuery
from dynamo_semkv.evidence.routed import RoutedPrompts
from dynamo_semkv.telemetry.throttled import Throttled

logger = logging.getLogger(__name__)
_throttled = Throttled(logger)


class DonorLearner:
    """A DonorListener and a PromptListener (both in the event loop). `close` ends the thread. A provider calls
    `_start_thread` when it is whole, implements `_index_donor` and, where it has an index of its own, the two hooks."""

    name: str

    def __init__(self, max_prompt_bytes: int, max_donors: int, max_queued: int) -> None:
        self._max_donors = max_donors
        self._lock = threading.Lock()
        self._prompts = RoutedPrompts(max_prompt_bytes, max_donors)
        self._wanted: OrderedDict[str, CatalogDonor] = OrderedDict()
        """Donors that are indexed or will be; the thread drops a job whose donor is not here any more."""
        self.counts: Counter[str] = Counter()
        self._jobs: queue.Queue[tuple[CatalogDonor, TokenArray] | None] = queue.Queue(max_queued)
        self._thread = threading.Thread(target=self._run, name=f"semkv-{self.name}-donors", daemon=True)

    def _start_thread(self) -> None:
        self._thread.start()

    def close(self, timeout: float = 1.0) -> None:
        """Ends the thread. What is still queued is not indexed."""
        with self._lock:
            self._wanted.clear()
        try:
            self._jobs.put(None, timeout=timeout)
        except queue.Full:
            logger.warning("%s is stuck with a donor; its thread ends with the process", self.name)
            return
        self._thread.join(timeout)

    def prompt_routed(self, query: LookupQuery) -> None:
        """Keeps the prompt's tokens, and queues the donor that waited for them. A prompt of an unknown tenant is not
        kept."""
        if query.namespace.tenant is None:
            return
        donor = self._prompts.routed(query.digest.hex(), query.chain, query.tokens)
        if donor is not None:
            self._enqueue(donor, query.tokens)

    def donor_added(self, donor: CatalogDonor) -> None:
        """Queues the donor if the prompt that it was made of is known. The same sketch registered again is not queued
        twice."""
        with self._lock:
            known = self._wanted.get(donor.donor_id)
            if known is not None and known.sketch is donor.sketch and known.epoch is donor.epoch:
                self._wanted[donor.donor_id] = donor
                self._refresh(donor)
                return
        self.donor_removed(donor.donor_id)
        tokens = self._prompts.added(donor)
        if tokens is not None:
            self._enqueue(donor, tokens)

    def donor_removed(self, donor_id: str) -> None:
        """Drops the donor, queued or taken in."""
        self._prompts.removed(donor_id)
        with self._lock:
            self._wanted.pop(donor_id, None)
            self._forget(donor_id)

    def _learner_state(self) -> dict[str, Any]:
        """Under the lock: the part of a snapshot that all learners have."""
        return {
            "queued": self._jobs.qsize(),
            "prompts": len(self._prompts),
            "prompt_bytes": self._prompts.nbytes,
            "counts": dict(self.counts),
            "routed": dict(self._prompts.counts),
        }

    def _enqueue(self, donor: CatalogDonor, tokens: TokenArray) -> None:
        with self._lock:
            while len(self._wanted) >= self._max_donors:
                oldest, _ = self._wanted.popitem(last=False)
                self._forget(oldest)
                self.counts["crowded_out"] += 1
            self._wanted[donor.donor_id] = donor
        try:
            self._jobs.put_nowait((donor, tokens))
            self.counts["queued"] += 1
        except queue.Full:
            self.counts["queue_full"] += 1

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._index_donor(*job)
            except Exception:  # noqa: BLE001 - the thread must live on: one donor that cannot be taken in is one donor less
                self.counts["failed"] += 1
                _throttled.exception("%s could not index a donor", self.name)

    def _index_donor(self, donor: CatalogDonor, tokens: TokenArray) -> None:
        """Indexes one donor, whose text `tokens` is. Runs in the learner's thread."""
        raise NotImplementedError

    def _refresh(self, donor: CatalogDonor) -> None:
        """Called under the lock: the same registration came again, perhaps at another location."""

    def _forget(self, donor_id: str) -> None:
        """Called under the lock: the donor leaves the index."""
