"""Outbox: the messages that callers handed over and the broker has not stored yet, within bounds.

Callers add on their threads, the bus thread takes. Every method holds the lock for a few instructions only.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dynamo_semkv.bus.acks import Message
from dynamo_semkv.bus.connection import Connection
from dynamo_semkv.config.schema import BusConfig

WINDOW = 256
"""Messages of one subject that may be on their way before `has_room` says no."""


@dataclass(frozen=True)
class PublisherStats:
    """What a publisher has done and holds, at one moment. Counts are of records, what `publish` was called with:
    however many of them went in one stream message."""

    connected: bool
    buffered: int
    """Persistent ones that are not acknowledged yet."""
    buffered_bytes: int
    published: int
    """Acknowledged by JetStream, or handed to the connection where they are not kept."""
    dropped: int
    refused: int
    """Calls that were wrong in themselves (subject, payload, closed publisher); not counted as dropped."""
    callback_errors: int
    reconnects: int
    last_error: str | None
    refused_streams: Mapping[str, str] = field(default_factory=dict)
    """Stream -> the broker's words: what is sent for it is not kept now."""
    seconds_since_drop: float | None = None
    """None: nothing was dropped yet."""


class Outbox:
    """`wake()` is called under the lock when the bus thread has to look at the outbox: `shut` takes the same lock
    before the loop is closed, which would refuse that call."""

    def __init__(self, settings: BusConfig, wake: Callable[[], object]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._limit, self._byte_limit = settings.max_buffered_messages, settings.max_buffered_bytes
        self._records = self._bytes = 0
        """Persistent records, whatever they are sent as, until they are settled."""
        self._by_subject: Counter[str] = Counter()
        self._transient_bytes = 0
        self._kept: dict[str, deque[Message]] = {}
        """To be sent. What is on its way is not here; what could not be delivered is put back."""
        self._transient: deque[tuple[str, Message]] = deque()
        """What no stream keeps: sent once, or dropped."""
        self._lost: set[str] = set()
        self._watched: set[str] = set()
        """Subjects whose queue a task looks at again by itself."""
        self._published = self._dropped = self._refused = self._callback_errors = 0
        self._dropped_at: float | None = None
        self._accepting = False
        self._wake_pending = False

    def open(self) -> None:
        """Messages are accepted from now on."""
        self._accepting = True

    def shut(self) -> None:
        """Messages are refused from now on."""
        with self._lock:
            self._accepting = False

    def refuse(self) -> None:
        """Counts a message that may not be published at all."""
        with self._lock:
            self._refused += 1

    def add(self, subject: str, message: Message, *, persistent: bool, connected: bool) -> bool:
        """False: refused or dropped, and counted. A message that is not `persistent` needs a connection."""
        size = len(message.payload)
        with self._lock:
            if not self._accepting:
                self._refused += 1
                return False
            accepted = (persistent or connected) and self._fits(size)
            if not accepted:
                self._drop(1)
                if persistent:
                    self._lost.add(subject)
            elif persistent:
                self._records += 1
                self._bytes += size
                self._by_subject[subject] += 1
                queue = self._kept.get(subject)
                if queue is None:
                    queue = self._kept[subject] = deque()
                queue.append(message)
            else:
                self._transient_bytes += size
                self._transient.append((subject, message))
            if not self._wake_pending and not (persistent and subject in self._watched):
                self._wake_pending = True
                self._wake()
        return accepted

    def watch(self) -> list[str]:
        """The subjects with messages that no task looks at. The caller starts a task for each."""
        with self._lock:
            self._wake_pending = False
            new = [subject for subject in self._kept if subject not in self._watched]
            self._watched.update(new)
        return new

    def take(self, subject: str, most: int, *, leave_if_empty: bool) -> list[Message] | None:
        """Removes the oldest messages, at most `most`. None: there were none, and as `leave_if_empty` asks, the task of
        the subject ends. That is one step under the lock, so no message is forgotten."""
        with self._lock:
            queue = self._kept.get(subject)
            if queue:
                return [queue.popleft() for _ in range(min(len(queue), most))]
            if not leave_if_empty:
                return []
            self._kept.pop(subject, None)
            self._watched.discard(subject)
            return None

    def unwatch(self, subject: str) -> None:
        """The task of the subject has ended, for whatever reason."""
        with self._lock:
            self._watched.discard(subject)

    def put_back(self, subject: str, left: list[Message]) -> None:
        """To the front of the queue. The broker may have stored them, so they go again under their own ids."""
        if left:
            with self._lock:
                self._kept.setdefault(subject, deque()).extendleft(m._replace(fixed=True) for m in reversed(left))

    def next_transient(self) -> tuple[str, Message] | None:
        """Removes the oldest message that no stream keeps."""
        with self._lock:
            if not self._transient:
                return None
            subject, message = self._transient.popleft()
            self._transient_bytes -= len(message.payload)
        return subject, message

    def settled(self, subject: str, records: int, size: int, impossible: int) -> None:
        """So many records, of `size` bytes, are stored, but for `impossible` ones, which can never be."""
        with self._lock:
            self._records -= records
            self._bytes -= size
            self._by_subject[subject] -= records
            if not self._by_subject[subject]:
                del self._by_subject[subject]
            self._published += records - impossible
            if impossible:
                self._drop(impossible)
                self._lost.add(subject)

    def count(self, *, published: int = 0, dropped: int = 0, callback_errors: int = 0) -> None:
        """Adds to the counters."""
        with self._lock:
            self._published += published
            self._drop(dropped)
            self._callback_errors += callback_errors

    def end_session(self) -> None:
        """Nothing is connected any more: what no stream keeps is dropped, and no task looks at a queue."""
        with self._lock:
            self._watched.clear()
            self._drop_transient()

    def take_lost(self) -> list[str]:
        """The subjects of which persistent messages were dropped, once the buffer is at most half full."""
        with self._lock:
            if not self._lost or not self._half_empty():
                return []
            lost = sorted(self._lost)
            self._lost.clear()
        return lost

    def discard(self) -> int:
        """Drops everything. Returns how many persistent records there were."""
        with self._lock:
            left, self._records, self._bytes = self._records, 0, 0
            self._drop(left)
            self._drop_transient()
            self._kept.clear()
            self._by_subject.clear()
        return left

    def waiting(self, subject: str) -> int:
        """How many messages of the subject are to be sent."""
        with self._lock:
            return len(self._kept.get(subject, ()))

    def has_room(self, subject: str) -> bool:
        """Few records of this subject are on their way, and the buffer that all subjects share is at most half full."""
        with self._lock:
            return self._by_subject[subject] < max(1, min(WINDOW, self._limit // 4)) and self._half_empty()

    @property
    def empty(self) -> bool:
        """Nothing waits, and nothing is on its way."""
        with self._lock:
            return not self._records and not self._transient

    def stats(self, connection: Connection, refused_streams: Mapping[str, str]) -> PublisherStats:
        """Counters of this moment, with the connection's beside them."""
        with self._lock:
            return PublisherStats(
                connected=connection.connected,
                buffered=self._records,
                buffered_bytes=self._bytes,
                published=self._published,
                dropped=self._dropped,
                refused=self._refused,
                callback_errors=self._callback_errors,
                reconnects=connection.reconnects,
                last_error=connection.last_error,
                refused_streams=refused_streams,
                seconds_since_drop=None if self._dropped_at is None else time.monotonic() - self._dropped_at,
            )

    def _fits(self, size: int) -> bool:
        records, taken = self._records + len(self._transient), self._bytes + self._transient_bytes
        return records < self._limit and taken + size <= self._byte_limit

    def _half_empty(self) -> bool:
        return 2 * self._records <= self._limit and 2 * self._bytes <= self._byte_limit

    def _drop_transient(self) -> None:
        self._drop(len(self._transient))
        self._transient.clear()
        self._transient_bytes = 0

    def _drop(self, count: int) -> None:
        if count:
            self._dropped += count
            self._dropped_at = time.monotonic()
