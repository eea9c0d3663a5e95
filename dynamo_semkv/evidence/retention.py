"""Who has to go when the store is full: the oldest of the largest group that was not used since its last turn.

Groups are namespaces, so a tenant that floods the store evicts itself. Every operation is O(1) but for a victim's second chances, which are
bounded, so there is no stall at capacity.
"""

from __future__ import annotations

SECOND_CHANCES = 8


class Retention:
    """Members by group in order of age. Not thread-safe, but `touch` may be called from any thread."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, None]] = {}
        self._by_size: dict[int, dict[str, None]] = {}
        self._largest = 0
        self._used: set[str] = set()

    def __len__(self) -> int:
        return sum(size * len(groups) for size, groups in self._by_size.items())

    def size(self, group: str) -> int:
        return len(self._groups.get(group, ()))

    @property
    def groups(self) -> int:
        return len(self._groups)

    def add(self, group: str, member: str) -> None:
        """The youngest of its group; one that is there already keeps its age."""
        members = self._groups.setdefault(group, {})
        if member not in members:
            members[member] = None
            self._resize(group, len(members) - 1, len(members))

    def discard(self, group: str, member: str) -> None:
        members = self._groups.get(group)
        if members is None or member not in members:
            return
        del members[member]
        self._used.discard(member)
        self._resize(group, len(members) + 1, len(members))
        if not members:
            del self._groups[group]

    def touch(self, member: str) -> None:
        """It was good for something: it survives its next turn."""
        self._used.add(member)

    def victim(self, group: str | None = None) -> str | None:
        """The member to evict next, from `group` or from the largest one; None when there is none. The caller discards it."""
        if group is None:
            if not self._largest:
                return None
            group = next(iter(self._by_size[self._largest]))
        members = self._groups.get(group)
        if not members:
            return None
        for _ in range(min(SECOND_CHANCES, len(members))):
            oldest = next(iter(members))
            if oldest not in self._used:
                return oldest
            self._used.discard(oldest)
            del members[oldest]
            members[oldest] = None
        return next(iter(members))

    def _resize(self, group: str, before: int, after: int) -> None:
        if before:
            peers = self._by_size[before]
            del peers[group]
            if not peers:
                del self._by_size[before]
        if after:
            self._by_size.setdefault(after, {})[group] = None
        # Sizes move by one, so the largest does too.
        if after > self._largest or (before == self._largest and before not in self._by_size):
            self._largest = after
