"""BufferUse: how full a publisher's buffer is, by subject and in all. Numbers only; the owner's lock covers it."""

from __future__ import annotations

from collections import Counter

from dynamo_semkv.config.schema import BusConfig

WINDOW = 256
"""Messages of one subject that may be on their way before `has_room` says no."""


class BufferUse:
    """Counts records, whatever they are sent as. `transient` are those that no stream keeps; they leave at once."""

    def __init__(self, settings: BusConfig) -> None:
        self._limit, self._byte_limit = settings.max_buffered_messages, settings.max_buffered_bytes
        self.records = 0
        self.bytes = 0
        self._transient = 0
        self._transient_bytes = 0
        self._by_subject: Counter[str] = Counter()

    def fits(self, size: int) -> bool:
        """Is there a place for one more record of `size` bytes?"""
        return (
            self.records + self._transient < self._limit
            and self.bytes + self._transient_bytes + size <= self._byte_limit
        )

    @property
    def half_empty(self) -> bool:
        """Whether records and bytes are both at most half of their limit."""
        return 2 * self.records <= self._limit and 2 * self.bytes <= self._byte_limit

    def has_room(self, subject: str) -> bool:
        """Few of this subject are on their way, and the buffer that all subjects share is at most half full."""
        return self._by_subject[subject] < max(1, min(WINDOW, self._limit // 4)) and self.half_empty

    def add_kept(self, subject: str, size: int) -> None:
        """A record for a stream was added to the buffer."""
        self.records += 1
        self.bytes += size
        self._by_subject[subject] += 1

    def remove_kept(self, subject: str, records: int, size: int) -> None:
        """They have arrived, or never can."""
        self.records -= records
        self.bytes -= size
        self._by_subject[subject] -= records
        if not self._by_subject[subject]:
            del self._by_subject[subject]

    def add_transient(self, size: int) -> None:
        """A record that no stream keeps was added to the buffer."""
        self._transient += 1
        self._transient_bytes += size

    def remove_transient(self, size: int) -> None:
        """Such a record left the buffer."""
        self._transient -= 1
        self._transient_bytes -= size

    def drop_transient(self) -> int:
        """Returns how many there were."""
        count, self._transient, self._transient_bytes = self._transient, 0, 0
        return count

    def clear(self) -> int:
        """Returns how many records there were of any kind."""
        count = self.records + self.drop_transient()
        self.records = self.bytes = 0
        self._by_subject.clear()
        return count
