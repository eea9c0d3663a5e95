"""A lock that is handed over in order of arrival."""

from __future__ import annotations

import threading
from collections import deque


class FairLock:
    """Context manager. With `threading.Lock` a rank that releases and re-acquires at once starves the other ranks."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._queue: deque[threading.Lock] = deque()
        self._held = False

    def __enter__(self) -> None:
        with self._mutex:
            if not self._held:
                self._held = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._queue.append(turn)
        turn.acquire()

    def __exit__(self, *exc: object) -> None:
        with self._mutex:
            if self._queue:
                self._queue.popleft().release()  # the lock stays held: the next one owns it now
            else:
                self._held = False
