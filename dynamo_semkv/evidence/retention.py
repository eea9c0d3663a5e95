"""Retention: which donor is evicted when the store is full: the oldest one that was not used since its last turn, of
the largest namespace of the worker with most donors.

Shares are by worker first, since a worker may invent namespaces and ranks, but not its name; then by namespace, so a
tenant that floods the store evicts itself. Every operation is O(1) but for a victim's second chances, which are
bounded, and for the choice of a worker within one namespace; so there is no stall at capacity.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

from dynamo_semkv.evidence.chains import NOBODY, Chains, Slots
from dynamo_semkv.evidence.shares import Sizes

K = TypeVar("K", bound=Hashable)
SECOND_CHANCES = 8


class Retention:
    """Members, which are slots of `slots`, by namespace and worker in order of age. Not thread-safe, but `touch` may be
    called from any thread."""

    def __init__(self, slots: Slots) -> None:
        self._chains = Chains(slots)
        self._heads: dict[tuple[str, int], int] = {}
        """Head of the chain of each namespace on each worker."""
        self._workers: Sizes[int] = Sizes()
        self._namespaces_of: dict[int, Sizes[str]] = {}
        self._workers_in: dict[str, dict[int, int]] = {}
        """Members of each namespace by worker."""
        self._sizes: dict[str, int] = {}
        self._used = bytearray()

    def __len__(self) -> int:
        return self._workers.total

    def size(self, namespace: str) -> int:
        """Members of the namespace."""
        return self._sizes.get(namespace, 0)

    @property
    def namespaces(self) -> int:
        """Number of namespaces with members."""
        return len(self._sizes)

    def add(self, namespace: str, worker: int, member: int) -> None:
        """Adds a member as the youngest of its worker in the namespace; one that is there already keeps its age."""
        if self._chains.linked(member):
            return
        head = self._heads.get((namespace, worker))
        if head is None:
            head = self._heads[namespace, worker] = self._chains.new()
        self._chains.append(head, member)
        if member >= len(self._used):
            self._used.extend(bytes(member + 1 - len(self._used)))
        self._used[member] = 0
        self._step(namespace, worker, 1)

    def discard(self, namespace: str, worker: int, member: int) -> None:
        """Removes the member, which is in this namespace of this worker or nowhere."""
        if not self._chains.linked(member):
            return
        self._chains.remove(member)
        self._step(namespace, worker, -1)
        if worker not in self._workers_in.get(namespace, ()):
            self._chains.end(self._heads.pop((namespace, worker)))

    def touch(self, member: int) -> None:
        """The member was used, so it is passed over at its next turn."""
        if member < len(self._used):
            self._used[member] = 1

    def victim(self, namespace: str | None = None) -> int | None:
        """The member to evict next, of the worker with most, in `namespace` alone or over all; None when there is none.
        The caller discards it."""
        if namespace is None:
            worker = self._workers.largest()
            if worker is None:
                return None
            namespace = self._namespaces_of[worker].largest()
            assert namespace is not None
        else:
            workers = self._workers_in.get(namespace)
            if workers is None:
                return None
            worker = max(workers, key=workers.__getitem__)
        head = self._heads[namespace, worker]
        for _ in range(min(SECOND_CHANCES, self._workers_in[namespace][worker])):
            oldest = self._chains.first(head)
            if not self._used[oldest]:
                return oldest
            self._used[oldest] = 0
            self._chains.remove(oldest)
            self._chains.append(head, oldest)
        oldest = self._chains.first(head)
        return None if oldest == NOBODY else oldest

    def _step(self, namespace: str, worker: int, by: int) -> None:
        self._workers.step(worker, by)
        namespaces = self._namespaces_of.setdefault(worker, Sizes())
        namespaces.step(namespace, by)
        if not namespaces.total:
            del self._namespaces_of[worker]
        _step(self._workers_in.setdefault(namespace, {}), worker, by)
        if not self._workers_in[namespace]:
            del self._workers_in[namespace]
        _step(self._sizes, namespace, by)


def _step(counts: dict[K, int], key: K, by: int) -> None:
    after = counts.get(key, 0) + by
    if after:
        counts[key] = after
    else:
        del counts[key]
