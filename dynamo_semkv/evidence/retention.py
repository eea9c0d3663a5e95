"""Who has to go when the store is full: the oldest of the largest group that was not used since its last turn.

Groups are namespaces, so a tenant that floods the store evicts itself. Every operation is O(1) but for a victim's second chances, which are
bounded, so there is no stall at capacity.
"""

from __future__ import annotations

from dynamo_semkv.evidence.chains import NOBODY, Chains, Slots

SECOND_CHANCES = 8


class Retention:
    """Members, slots of `slots`, by group in order of age. Not thread-safe, but `touch` may be called from any thread."""

    def __init__(self, slots: Slots) -> None:
        self._chains = Chains(slots)
        self._groups: dict[str, int] = {}
        """Head of each group's chain."""
        self._sizes: dict[str, int] = {}
        self._by_size: dict[int, dict[str, None]] = {}
        self._largest = 0
        self._used = bytearray()

    def __len__(self) -> int:
        return sum(size * len(groups) for size, groups in self._by_size.items())

    def size(self, group: str) -> int:
        return self._sizes.get(group, 0)

    @property
    def groups(self) -> int:
        return len(self._groups)

    def add(self, group: str, member: int) -> None:
        """The youngest of its group; one that is there already keeps its age."""
        if self._chains.linked(member):
            return
        head = self._groups.get(group)
        if head is None:
            head = self._groups[group] = self._chains.new()
        self._chains.append(head, member)
        if member >= len(self._used):
            self._used.extend(bytes(member + 1 - len(self._used)))
        self._used[member] = 0
        self._resize(group, 1)

    def discard(self, group: str, member: int) -> None:
        """A member of `group`, or of none."""
        if not self._chains.linked(member):
            return
        self._chains.remove(member)
        self._resize(group, -1)
        if not self.size(group):
            self._chains.end(self._groups.pop(group))

    def touch(self, member: int) -> None:
        """It was good for something: it survives its next turn."""
        if member < len(self._used):
            self._used[member] = 1

    def victim(self, group: str | None = None) -> int | None:
        """The member to evict next, from `group` or from the largest one; None when there is none. The caller discards it."""
        if group is None:
            if not self._largest:
                return None
            group = next(iter(self._by_size[self._largest]))
        head = self._groups.get(group)
        if head is None:
            return None
        for _ in range(min(SECOND_CHANCES, self.size(group))):
            oldest = self._chains.first(head)
            if not self._used[oldest]:
                return oldest
            self._used[oldest] = 0
            self._chains.remove(oldest)
            self._chains.append(head, oldest)
        oldest = self._chains.first(head)
        return None if oldest == NOBODY else oldest

    def _resize(self, group: str, by: int) -> None:
        before = self.size(group)
        after = before + by
        if before:
            peers = self._by_size[before]
            del peers[group]
            if not peers:
                del self._by_size[before]
        if after:
            self._by_size.setdefault(after, {})[group] = None
            self._sizes[group] = after
        else:
            del self._sizes[group]
        # Sizes move by one, so the largest does too.
        if after > self._largest or (before == self._largest and before not in self._by_size):
            self._largest = after
