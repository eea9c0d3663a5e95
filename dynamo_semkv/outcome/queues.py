"""The three containers of the outcome book: what is due when, what belongs together, and a memory with an end."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class DueQueue(Generic[K]):
    """Keys that are due a fixed span after they were added, in order of adding.

    Only heads are looked at, so a tick costs what is due and not what is open. A time that lies ahead of `now` means that the clock was
    set back; it counts from `now` on, so no key is ever kept longer than twice its span.
    """

    def __init__(self, span: float) -> None:
        self._span = span
        self._at: OrderedDict[K, float] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._at

    def __len__(self) -> int:
        return len(self._at)

    def add(self, key: K, at: float) -> None:
        self._at[key] = at
        self._at.move_to_end(key)

    def discard(self, key: K) -> None:
        self._at.pop(key, None)

    def pop_due(self, now: float) -> list[K]:
        due: list[K] = []
        while self._at:
            key, at = next(iter(self._at.items()))
            if at > now:
                self.add(key, now)
                if self._span > 0.0:
                    continue
            elif at + self._span > now:
                break
            del self._at[key]
            due.append(key)
        return due

    def shift(self, seconds: float) -> None:
        for key in self._at:
            self._at[key] += seconds


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


class Bounded(Generic[K, V]):
    """A dict that forgets the entry written longest ago when it holds more than `size`."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: OrderedDict[K, V] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __setitem__(self, key: K, value: V) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        while len(self._entries) > self._size:
            self._entries.popitem(last=False)

    def get(self, key: K) -> V | None:
        return self._entries.get(key)
