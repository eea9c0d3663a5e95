"""Connections on which no whole request ever came are closed, whether nothing comes or one byte after another.

aiohttp closes one that idles *between* requests (`keepalive_timeout`); before the first request it waits for ever,
until its release 3.14.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any


class Unheard:
    """`connections()`: those that are open, as `aiohttp.web.Server.connections` has them."""

    def __init__(self, connections: Callable[[], Iterable[Any]], seconds: float) -> None:
        self._connections = connections
        self._seconds = seconds
        self._heard: set[Any] = set()
        self._waiting: set[Any] = set()
        self.closed = 0

    def heard(self, connection: Any) -> None:
        """A whole request came on it."""
        self._heard.add(connection)

    def look(self) -> None:
        """Closes those that were unheard at the last look already."""
        there = set(self._connections())
        self._heard &= there
        silent = there - self._heard
        for connection in silent & self._waiting:
            if connection.transport is not None:
                connection.transport.abort()
                self.closed += 1
        self._waiting = silent

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            self.look()
