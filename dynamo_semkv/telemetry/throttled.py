"""A logger for what may happen again with every request, event or beat: written the 1st, 2nd, 4th, 8th, ... time, with
how often it was.

    _throttled = Throttled(_log)
    _throttled.warning("worker %s refused a hint: %s", worker, why)
        key="...": counted apart from others of the same message
    except Exception:
        _throttled.exception("a listener failed")

A message is counted by its text before the arguments go in, over the whole process: two connectors in one process share
its log.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from typing import Any

MAX_KEYS = 1_000
"""Of one logger that are counted apart; all others are counted as one, whatever a peer makes of its names."""
_OTHERS = ("", "")
_all: weakref.WeakSet[Throttled] = weakref.WeakSet()


class Throttled:
    """For any thread. Each call returns how often it was, this time included."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        _all.add(self)

    def log(self, level: int, message: str, *args: object, key: str = "", exc_info: Any = None, depth: int = 1) -> int:
        """`exc_info` as `logging` takes it. `depth`: calls between here and the line that is told about."""
        with self._lock:
            name = (message, key)
            if name not in self._counts and len(self._counts) >= MAX_KEYS:
                name = _OTHERS
            self._counts[name] += 1
            count = self._counts[name]
        if count & (count - 1) == 0:
            self._logger.log(level, f"{message} (%d so far)", *args, count, exc_info=exc_info, stacklevel=depth + 1)
        return count

    def info(self, message: str, *args: object, key: str = "", exc_info: Any = None) -> int:
        """As `log`, at level INFO."""
        return self.log(logging.INFO, message, *args, key=key, exc_info=exc_info, depth=2)

    def warning(self, message: str, *args: object, key: str = "", exc_info: Any = None) -> int:
        """As `log`, at level WARNING."""
        return self.log(logging.WARNING, message, *args, key=key, exc_info=exc_info, depth=2)

    def error(self, message: str, *args: object, key: str = "", exc_info: Any = None) -> int:
        """As `log`, at level ERROR."""
        return self.log(logging.ERROR, message, *args, key=key, exc_info=exc_info, depth=2)

    def exception(self, message: str, *args: object, key: str = "") -> int:
        """An error with the traceback of the exception that is being handled."""
        return self.log(logging.ERROR, message, *args, key=key, exc_info=True, depth=2)

    def forget(self) -> None:
        """Every message of this logger is new again."""
        with self._lock:
            self._counts.clear()


def forget() -> None:
    """Everything is new again, in every module. For tests, of which each has its own log."""
    for one in list(_all):
        one.forget()


__all__ = ["MAX_KEYS", "Throttled", "forget"]
