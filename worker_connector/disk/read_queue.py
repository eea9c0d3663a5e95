"""ReadQueue: chains of blocks that are to come up from disk, in which order, and who waits for them.

A chain that a request is held for (leader/disk_prefetch_wait.py) goes before all that nobody waits for. When its holder
gives up, it is one of the others: what it still brings serves the next request, and may not stand in the way of those
that are held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from worker_connector.disk.index import DiskBlock

MOST = 64
"""ReadQueue that nobody waits for; the oldest gives way."""
MOST_HELD = 64
"""Chains that somebody waits for; more are refused, and their requests go on at once."""
HANGING_SECONDS = 1.0
"""A disk that has answered nothing for so long, while it was asked for something, is not waited for."""
_ORDERS = 16
"""Orders that the time of a block is taken from."""


@dataclass(eq=False)
class QueuedRead:
    """`blocks`: consecutive ones of a chain. `horizon`: blocks that were used at this tick of the ledger or later keep
    their slots."""

    blocks: list[DiskBlock]
    horizon: int
    at: int = 0
    done: Future[int] | None = None
    """Where somebody waits: how many of the blocks are in the slab, once nothing of the wish is on its way any more.
    Never an exception."""
    orders: set[int] = field(default_factory=set)
    """Not answered, and bring blocks of it."""

    @property
    def taken(self) -> bool:
        """Nothing more of it will be ordered."""
        return self.at >= len(self.blocks)


class ReadQueue:
    """Not thread-safe: the leader's lock covers it."""

    def __init__(self, resident: Callable[[DiskBlock], bool]) -> None:
        self._resident = resident
        self._held: deque[QueuedRead] = deque()
        self._others: deque[QueuedRead] = deque()
        self._awaited: list[QueuedRead] = []
        """Those with somebody who waits, also when all of their blocks are ordered."""

    def __len__(self) -> int:
        return len(self._held) + len(self._others)

    @property
    def crowded(self) -> bool:
        """True while `MOST_HELD` chains or more are waited for: no further one may be added."""
        return len(self._awaited) >= MOST_HELD

    @property
    def blocks_held(self) -> int:
        """Of chains that somebody waits for, those that are not ordered yet."""
        return sum(len(wish.blocks) - wish.at for wish in self._held)

    def add(self, wish: QueuedRead) -> bool:
        """False: another one had to give way."""
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
        """Whose blocks are to be ordered next; those that are wholly ordered leave."""
        for queue in (self._held, self._others):
            while queue and queue[0].taken:
                queue.popleft()
            if queue:
                return queue[0]
        return None

    def give_up(self, done: Future[int]) -> None:
        """Whoever waited goes on without."""
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
        """Tells those who wait for what cannot come any further."""
        for wish in [wish for wish in self._awaited if wish.taken and not wish.orders]:
            self._awaited.remove(wish)
            self._tell(wish)

    def clear(self) -> None:
        """Nothing of them comes any more."""
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
    """How long a block takes from disk, by what the last orders took: the disk, the checks, and whatever else the
    rank's thread was at."""

    def __init__(self) -> None:
        self._last: deque[tuple[float, int]] = deque(maxlen=_ORDERS)
        self.last = 0.0
        """When an order was answered last, whatever came of it."""

    def add(self, sent: float, now: float, blocks: int) -> float:
        """An order that was sent then is answered, and brought so many blocks. It was begun when the one before was
        done. Returns the seconds that it took."""
        began, self.last = max(sent, self.last), now
        took = max(0.0, now - began)
        if blocks:
            self._last.append((took, blocks))
        return took

    def hanging(self, sent: Iterable[float], now: float) -> bool:
        """`sent`: when the orders were sent that are not answered."""
        oldest = min(sent, default=None)
        return oldest is not None and now - max(oldest, self.last) >= HANGING_SECONDS

    @property
    def seconds_per_block(self) -> float | None:
        """None: nothing has come from this disk yet."""
        if not self._last:
            return None
        return sum(seconds for seconds, _ in self._last) / sum(blocks for _, blocks in self._last)
