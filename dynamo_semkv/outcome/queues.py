"""The three containers of the outcome book: what is due when, what belongs together, and a memory with an end."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class DueQueue(OrderedDict[K, float]):
    """Keys, and when they were added; they are due a fixed span later, in order of adding.

    Only heads are looked at, so a tick costs what is due and not what is open. A time that lies ahead of `now` means
    that the clock was set back; it counts from `now` on, so no key is ever kept longer than twice its span.
    """

    def __init__(self, span: float) -> None:
        super().__init__()
        self._span = span

    def add(self, key: K, at: float) -> None:
        self[key] = at
        self.move_to_end(key)

    def discard(self, key: K) -> None:
        self.pop(key, None)

    def pop_due(self, now: float) -> list[K]:
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
        for key in self:
            self[key] += seconds


class Groups(Generic[K]):
    """Ids by a key they share, in order of adding; a group that is empty is gone."""

    def __init__(self) -> None:
        self._members: dict[K, dict[str, None]] = {}

    def add(self, key: K, member: str) -> None:
        self._members.setdefault(key, {})[member] = None

    def discard(self, key: K, member: str) -> None:
        members = self._members.get(key)
        if members is not None:
            members.pop(member, None)
            if not members:
                del self._members[key]

    def of(self, key: K) -> Iterator[str]:
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
