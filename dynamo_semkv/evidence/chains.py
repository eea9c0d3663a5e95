"""Bookkeeping for a hundred thousand donors without stalls: numbers instead of objects, and no table that is ever
rebuilt in one go.

A dict of 100,000 entries takes milliseconds when it grows, several that grow at the same add take tens, and the first
entry of one from which many were deleted is found by walking over the holes.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

NOBODY = -1
_SHARDS = 64
_PART_BITS = 10
_PART_MASK = (1 << _PART_BITS) - 1


class Sharded(Generic[K, V]):
    """A dict in 64 parts, which grow at different times."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: tuple[dict[K, V], ...] = tuple({} for _ in range(_SHARDS))

    def _part(self, key: K) -> dict[K, V]:
        # Not the lowest bits: those are what a dict itself places its entries by.
        return self._parts[hash(key) >> 24 & _SHARDS - 1]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __contains__(self, key: K) -> bool:
        return key in self._part(key)

    def __getitem__(self, key: K) -> V:
        return self._part(key)[key]

    def __setitem__(self, key: K, value: V) -> None:
        self._part(key)[key] = value

    def __delitem__(self, key: K) -> None:
        del self._part(key)[key]

    def get(self, key: K) -> V | None:
        """The value of `key`; None if it has none."""
        return self._part(key).get(key)


class Row(Generic[V]):
    """Values by small number. A list would be walked by every full garbage collection, value by value; an array of
    objects is not. In parts, because to copy a long one is to touch every object in it."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[npt.NDArray[np.object_]] = []

    def __getitem__(self, at: int) -> V | None:
        if at >> _PART_BITS >= len(self._parts):
            return None
        value: V | None = self._parts[at >> _PART_BITS][at & _PART_MASK]
        return value

    def __setitem__(self, at: int, value: V | None) -> None:
        while at >> _PART_BITS >= len(self._parts):
            self._parts.append(np.full(_PART_MASK + 1, None, object))
        self._parts[at >> _PART_BITS][at & _PART_MASK] = value


class Slots:
    """Hands out small numbers, those that were given back first."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._made = 0

    def take(self) -> int:
        """A number that nobody else has, a returned one first."""
        if self._free:
            return self._free.pop()
        self._made += 1
        return self._made - 1

    def give_back(self, slot: int) -> None:
        """The number may be taken again; it must not be in use."""
        self._free.append(slot)


class Chains:
    """Linked lists of slots, each slot in one list at most. A list is named by a slot of its own, its head. Every
    operation is O(1)."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._next = array("i")
        self._prev = array("i")

    def new(self) -> int:
        """The head of an empty list."""
        head = self._slots.take()
        self._room_for(head)
        self._next[head] = self._prev[head] = head
        return head

    def end(self, head: int) -> None:
        """Ends an empty list; its head may be taken for something else."""
        self._next[head] = self._prev[head] = NOBODY
        self._slots.give_back(head)

    def linked(self, slot: int) -> bool:
        """Whether the slot is in a list, or is the head of one."""
        return slot < len(self._next) and self._next[slot] != NOBODY

    def append(self, head: int, slot: int) -> None:
        """Puts `slot`, which is in no list, at the end of the list."""
        self._room_for(slot)
        last = self._prev[head]
        self._next[last] = self._prev[head] = slot
        self._prev[slot], self._next[slot] = last, head

    def remove(self, slot: int) -> None:
        """Takes the slot out of the list that it is in; does nothing if it is in none."""
        if self.linked(slot):
            before, after = self._prev[slot], self._next[slot]
            self._next[before], self._prev[after] = after, before
            self._next[slot] = self._prev[slot] = NOBODY

    def first(self, head: int) -> int:
        """The first slot of the list; NOBODY if it is empty."""
        slot = self._next[head]
        return NOBODY if slot == head else slot

    def members(self, head: int) -> Iterator[int]:
        """In order. The list must not change meanwhile."""
        slot = self._next[head]
        while slot != head:
            yield slot
            slot = self._next[slot]

    def _room_for(self, slot: int) -> None:
        while len(self._next) <= slot:
            self._next.append(NOBODY)
            self._prev.append(NOBODY)
