"""Closes connections on which no whole request ever came, whether they send nothing or one byte after another.

aiohttp closes a connection that idles *between* requests (`keepalive_timeout`); before the first request it waits for
ever, until its release 3.14.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any


class IdleConnections:
    """The open connections without a request. `connections()` lists the open ones, as `aiohttp.web.Server.connections`
    does. One event loop."""

    def __init__(self, connections: Callable[[], Iterable[Any]], seconds: float) -> None:
        self._connections = connections
        self._seconds = seconds
        self._used: set[Any] = set()
        self._waiting: set[Any] = set()
        self.closed = 0

    def used(self, connection: Any) -> None:
        """Notes that a whole request came on the connection."""
        self._used.add(connection)

    def close_idle(self) -> None:
        """Closes connections that had no request at the previous call either."""
        there = set(self._connections())
        self._used &= there
        silent = there - self._used
        for connection in silent & self._waiting:
            if connection.transport is not None:
                connection.transport.abort()
                self.closed += 1
        self._waiting = silent

    async def watch(self) -> None:
        """Closes idle connections every `seconds`, for ever."""
        while True:
            await asyncio.sleep(self._seconds)
            self.close_idle()
