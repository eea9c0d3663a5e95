"""Room that several owners share, so that none can take it from the others: the owner of most gives up first. Every
operation is O(1)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=Hashable)


class Sizes(Generic[K]):
    """How much each owner has, and which owner has the most."""

    __slots__ = ("_by_size", "_largest", "_of", "total")

    def __init__(self) -> None:
        self._of: dict[K, int] = {}
        self._by_size: dict[int, dict[K, None]] = {}
        self._largest = 0
        self.total = 0

    def __len__(self) -> int:
        return len(self._of)

    def of(self, key: K) -> int:
        """How much `key` has; 0 if it is unknown."""
        return self._of.get(key, 0)

    @property
    def most(self) -> int:
        """How much the largest has; 0 where nobody has anything."""
        return self._largest

    def largest(self) -> K | None:
        """Of several with as much the one that came to it first; None where nobody has anything."""
        return next(iter(self._by_size[self._largest])) if self._largest else None

    def step(self, key: K, by: int) -> None:
        """`by`: 1 or -1."""
        before = self.of(key)
        after = before + by
        self.total += by
        if before:
            peers = self._by_size[before]
            del peers[key]
            if not peers:
                del self._by_size[before]
        if after:
            self._by_size.setdefault(after, {})[key] = None
            self._of[key] = after
        else:
            del self._of[key]
        # Sizes move by one, so the largest does too.
        if after > self._largest or (before == self._largest and before not in self._by_size):
            self._largest = after


class Shares(Generic[K, V]):
    """Items by owner, the least recently used first."""

    def __init__(self) -> None:
        self._items: dict[K, OrderedDict[V, None]] = {}
        self.sizes: Sizes[K] = Sizes()

    def use(self, owner: K, item: V) -> None:
        """The owner has the item, and it is the one used last."""
        items = self._items.get(owner)
        if items is None:
            items = self._items[owner] = OrderedDict()
        if item in items:
            items.move_to_end(item)
        else:
            items[item] = None
            self.sizes.step(owner, 1)

    def drop(self, owner: K, item: V) -> None:
        """Nothing happens where the owner does not have it."""
        items = self._items.get(owner)
        if items is None or item not in items:
            return
        del items[item]
        self.sizes.step(owner, -1)
        if not items:
            del self._items[owner]

    def of(self, owner: K) -> list[V]:
        """The owner's items, the least recently used first."""
        return list(self._items.get(owner, ()))

    def victim(self) -> tuple[K, V] | None:
        """The least recently used item of whoever has the most; None where nobody has anything. The caller drops it."""
        owner = self.sizes.largest()
        return None if owner is None else (owner, next(iter(self._items[owner])))
