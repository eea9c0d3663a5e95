"""Disconnects: clients that left, noticed by one look at all calls now and then.

Dynamo does not interrupt a push handler: a client that leaves during a long prefill would be noticed with the first
chunk only. It offers a future that says so, but waiting for one beside the answer takes two tasks and several wakes
from another thread for every request.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

LOOK_SECONDS = 0.05
"""How long a disconnect may go unnoticed, unless there are very many calls."""
LOOK_SECONDS_A_CALL = 5e-5
"""A look costs under a microsecond for each call: it may take 2% of a processor."""


class Listened(Protocol):
    """The part of Dynamo's Context that is used here."""

    def is_stopped(self) -> bool:
        """True once the answer was asked to stop (Dynamo's `stop_generating`)."""
        ...

    def is_killed(self) -> bool:
        """True once the call was killed."""
        ...


def gone(context: Listened) -> bool:
    """Whether nobody waits for the answer any more."""
    return context.is_stopped() or context.is_killed()


class Disconnects:
    """Cancels the tasks whose client left. One event loop. `watch` a task while it answers a call and `forget` it
    afterwards; it is cancelled, once, when nobody waits for its answer."""

    def __init__(self) -> None:
        self._calls: dict[asyncio.Task[object], Listened] = {}
        self._cancelled: set[asyncio.Task[object]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, task: asyncio.Task[object], context: Listened) -> None:
        """Looks at the call of `task` from now on; starts the timer where none runs."""
        self._calls[task] = context
        if self._timer is None:
            self._start_timer()

    def was_cancelled(self, task: asyncio.Task[object]) -> bool:
        """Whether the task was cancelled by this object."""
        return task in self._cancelled

    def forget(self, task: asyncio.Task[object]) -> None:
        """Ends the watch; also of a task that is not watched."""
        self._calls.pop(task, None)
        self._cancelled.discard(task)

    def _start_timer(self) -> None:
        seconds = max(LOOK_SECONDS, LOOK_SECONDS_A_CALL * len(self._calls))
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        for task, context in list(self._calls.items()):
            if gone(context):
                del self._calls[task]
                self._cancelled.add(task)
                task.cancel()
        if self._calls:
            self._start_timer()
