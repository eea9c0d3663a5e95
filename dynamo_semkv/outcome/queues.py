"""The three containers of the route tracker: keys by due time, ids by a shared key, and a bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class DueQueue(OrderedDict[K, float]):
    """Keys, and when they were added; they are due a fixed span later, in order of adding. Times in seconds.

    Only the oldest keys are looked at, so a tick costs what is due and not what is open. A time later than `now` means
    that the clock was set back; it counts from `now` on, so no key is ever kept longer than twice its span.
    """

    def __init__(self, span: float) -> None:
        super().__init__()
        self._span = span

    def add(self, key: K, at: float) -> None:
        """Adds the key, or starts its span again."""
        self[key] = at
        self.move_to_end(key)

    def discard(self, key: K) -> None:
        """Removes the key if it is there."""
        self.pop(key, None)

    def pop_due(self, now: float) -> list[K]:
        """Removes and returns the keys whose span is over, the oldest first."""
        due: list[K] = []
        while self:
            key, at = next(iter(self.items()))
            if at > now:
                self.add(key, now)
                if self._span > 0.0:
                    continue
            elif at + self._span > now:
                break
            del self[key]
            due.append(key)
        return due

    def shift(self, seconds: float) -> None:
        """Moves all times by `seconds`."""
        for key in self:
            self[key] += seconds


class Groups(Generic[K]):
    """Ids by a key they share, in order of adding; a group that is empty is gone."""

    def __init__(self) -> None:
        self._members: dict[K, dict[str, None]] = {}

    def add(self, key: K, member: str) -> None:
        """Adds the member to the key's group; again changes nothing."""
        self._members.setdefault(key, {})[member] = None

    def discard(self, key: K, member: str) -> None:
        """Removes the member if it is there."""
        members = self._members.get(key)
        if members is not None:
            members.pop(member, None)
            if not members:
                del self._members[key]

    def of(self, key: K) -> Iterator[str]:
        """The members by order of adding, over a copy: the group may change meanwhile."""
        return iter(tuple(self._members.get(key, ())))


class Bounded(OrderedDict[K, V]):
    """Forgets the entry written longest ago when it holds more than `size`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self._size:
            self.popitem(last=False)
