"""ReadQueue: chains of blocks that are to be read from disk, in which order, and who waits for them.

A chain that a request is held for (leader/disk_prefetch_wait.py) goes before all that nobody waits for. When that
request goes on without it, the chain joins the others: what it still brings serves the next request, and must not delay
chains that somebody waits for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from worker_connector.disk.index import DiskBlock

MOST = 64
"""Queued reads that nobody waits for; beyond that the oldest one is dropped."""
MOST_HELD = 64
"""Chains that somebody waits for; more are refused, and their requests go on at once."""
HANGING_SECONDS = 1.0
"""Nobody waits for a disk that was asked for something and has answered nothing for so long."""
_ORDERS = 16
"""How many of the last orders the time of a block is computed from."""


@dataclass(eq=False)
class QueuedRead:
    """One queued read. `blocks`: consecutive ones of a chain. `at`: index of the first one not ordered yet. `horizon`:
    blocks used after this tick of the ledger keep their slots."""

    blocks: list[DiskBlock]
    horizon: int
    at: int = 0
    done: Future[int] | None = None
    """Set where somebody waits. Its result: how many of the blocks are in the slab, once no more of them are on their
    way. Never an exception."""
    orders: set[int] = field(default_factory=set)
    """Unanswered orders that bring blocks of it."""

    @property
    def taken(self) -> bool:
        """True when nothing more of it will be ordered."""
        return self.at >= len(self.blocks)


class ReadQueue:
    """Not thread-safe: the leader's lock covers it."""

    def __init__(self, resident: Callable[[DiskBlock], bool]) -> None:
        self._resident = resident
        self._held: deque[QueuedRead] = deque()
        self._others: deque[QueuedRead] = deque()
        self._awaited: list[QueuedRead] = []
        """Reads that somebody waits for, also when all of their blocks are ordered."""

    def __len__(self) -> int:
        return len(self._held) + len(self._others)

    @property
    def crowded(self) -> bool:
        """True while `MOST_HELD` chains or more are waited for: no further one may be added."""
        return len(self._awaited) >= MOST_HELD

    @property
    def blocks_held(self) -> int:
        """Blocks of chains that somebody waits for, as far as they are not ordered yet."""
        return sum(len(wish.blocks) - wish.at for wish in self._held)

    def add(self, wish: QueuedRead) -> bool:
        """Queues a read; False if the oldest one that nobody waits for was dropped for it."""
        if wish.done is not None:
            self._held.append(wish)
            self._awaited.append(wish)
            return True
        self._others.append(wish)
        if len(self._others) <= MOST:
            return True
        self._others.popleft()
        return False

    def first(self) -> QueuedRead | None:
        """The read whose blocks are to be ordered next, or None. Reads that are wholly ordered leave the queue."""
        for queue in (self._held, self._others):
            while queue and queue[0].taken:
                queue.popleft()
            if queue:
                return queue[0]
        return None

    def give_up(self, done: Future[int]) -> None:
        """Whoever waited for `done` goes on without it."""
        for wish in [wish for wish in self._awaited if wish.done is done]:
            self._awaited.remove(wish)
            wish.done = None
            if wish in self._held:
                self._held.remove(wish)
                self.add(wish)

    def answered(self, order_id: int) -> None:
        """Notes that an order was answered, and resolves the reads that waited for nothing else."""
        for wish in self._awaited:
            wish.orders.discard(order_id)
        self.settle()

    def settle(self) -> None:
        """Resolves the futures of reads of which nothing more can come."""
        for wish in [wish for wish in self._awaited if wish.taken and not wish.orders]:
            self._awaited.remove(wish)
            self._tell(wish)

    def clear(self) -> None:
        """Drops all reads and resolves their futures."""
        self._held.clear()
        self._others.clear()
        awaited, self._awaited = self._awaited, []
        for wish in awaited:
            self._tell(wish)

    def _tell(self, wish: QueuedRead) -> None:
        here = 0
        while here < len(wish.blocks) and self._resident(wish.blocks[here]):
            here += 1
        if wish.done is not None:
            wish.done.set_result(here)


class StageTimes:
    """How long a block takes from disk, computed from the last orders: the disk, the checks, and whatever else the
    rank's thread did meanwhile."""

    def __init__(self) -> None:
        self._last: deque[tuple[float, int]] = deque(maxlen=_ORDERS)
        self.last = 0.0
        """Time (of the caller's clock) of the last answer to an order, whatever came of it."""

    def add(self, sent: float, now: float, blocks: int) -> float:
        """Notes that an order sent at `sent` was answered at `now` and brought `blocks` blocks. It began when the one
        before it was done. Returns the seconds that it took."""
        began, self.last = max(sent, self.last), now
        took = max(0.0, now - began)
        if blocks:
            self._last.append((took, blocks))
        return took

    def hanging(self, sent: Iterable[float], now: float) -> bool:
        """True if the disk has answered nothing for `HANGING_SECONDS`. `sent`: when the unanswered orders were sent."""
        oldest = min(sent, default=None)
        return oldest is not None and now - max(oldest, self.last) >= HANGING_SECONDS

    @property
    def seconds_per_block(self) -> float | None:
        """None: nothing has come from this disk yet."""
        if not self._last:
            return None
        return sum(seconds for seconds, _ in self._last) / sum(blocks for _, blocks in self._last)
