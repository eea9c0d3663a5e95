"""One snapshot per beat for all watchers: made once, and only while somebody watches.

A watcher that is slow misses beats; it is never sent an older one, and it never holds up the others or the router.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from dynamo_semkv.telemetry.throttled import Throttled

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)


class Full(Exception):
    """As many watchers as are allowed are connected."""


class Broadcast:
    """Calls `make` every `interval_seconds` while there are watchers, at most `max_watchers`. One event loop."""

    def __init__(self, make: Callable[[], str], interval_seconds: float, max_watchers: int) -> None:
        self.faults = 0
        self._make = make
        self._interval = interval_seconds
        self._max = max_watchers
        self._watchers: set[asyncio.Queue[str | None]] = set()
        self._beat: asyncio.Task[None] | None = None

    @property
    def watchers(self) -> int:
        """How many watch now."""
        return len(self._watchers)

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[AsyncIterator[str]]:
        """The texts, the first at once, until `close()`. Raises Full."""
        if len(self._watchers) >= self._max:
            raise Full
        mail: asyncio.Queue[str | None] = asyncio.Queue(maxsize=1)
        first = self._text()
        if first is not None:
            mail.put_nowait(first)
        self._watchers.add(mail)
        if self._beat is None:
            self._beat = asyncio.ensure_future(self._beat_while_watched())
        try:
            yield _texts(mail)
        finally:
            self._watchers.discard(mail)

    async def close(self) -> None:
        """Ends all streams and the beat."""
        for mail in self._watchers:
            _put(mail, None)
        if self._beat is not None:
            self._beat.cancel()
            await asyncio.gather(self._beat, return_exceptions=True)
            self._beat = None

    async def _beat_while_watched(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            if not self._watchers:
                self._beat = None
                return
            text = self._text()
            if text is not None:
                for mail in self._watchers:
                    _put(mail, text)

    def _text(self) -> str | None:
        try:
            return self._make()
        except Exception:  # noqa: BLE001 - the next beat may succeed; counted and logged
            self.faults += 1
            _throttled.exception("snapshot failed")
            return None


def _put(mail: asyncio.Queue[str | None], text: str | None) -> None:
    while mail.full():
        mail.get_nowait()
    mail.put_nowait(text)


async def _texts(mail: asyncio.Queue[str | None]) -> AsyncIterator[str]:
    while (text := await mail.get()) is not None:
        yield text
