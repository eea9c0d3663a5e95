"""What others write to `sys.stderr` becomes lines of the log, so that JSON logging is JSON throughout.

    with stderr_lines(json=json_lines(os.environ)):
        ...

Dynamo prints the traceback of every exception that leaves a handler, also of the one that makes a request a client's
400, and takes it nowhere else. Such a traceback is throttled, and of Dynamo's own typed exceptions, which are raised on
purpose, only the last line is kept. Other text is passed on where lines are readable, and is a line of its own where
they are JSON. What native code writes to the file descriptor goes past it.
"""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from dynamo_semkv.telemetry.throttled import Throttled

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)

_TRACEBACK = "Traceback (most recent call last)"
_GOES_ON = (" ", _TRACEBACK, "Exception in thread", "Exception ignored", "During handling of", "The above exception")
_ON_PURPOSE = "dynamo."
_MAX_KEY = 120


@contextmanager
def stderr_lines(*, json: bool) -> Iterator[None]:
    """Handlers of `logging` keep the stream that they were made with: make them before."""
    before = sys.stderr
    if before is None:
        yield
        return
    taken = _Lines(before, json)
    sys.stderr = taken
    try:
        yield
    finally:
        taken.flush()
        sys.stderr = before


class _Lines(io.TextIOBase):
    def __init__(self, real: TextIO, json: bool) -> None:
        self._real = real
        self._json = json
        self._of = threading.local()

    def write(self, text: str) -> int:
        if getattr(self._of, "inside", False):  # logging itself complains
            return self._real.write(text)
        self._of.text = getattr(self._of, "text", "") + text
        if text.endswith("\n") and not self._goes_on(self._of.text):
            self._emit()
        return len(text)

    def flush(self) -> None:
        if getattr(self._of, "text", ""):
            self._emit()
        self._real.flush()

    def fileno(self) -> int:
        return self._real.fileno()

    def writable(self) -> bool:
        return True

    @staticmethod
    def _goes_on(text: str) -> bool:
        """A traceback ends with the line of its exception."""
        last = text.rstrip("\n").rpartition("\n")[2]
        return not last or last.startswith(_GOES_ON)

    def _emit(self) -> None:
        text, self._of.text = self._of.text, ""
        self._of.inside = True
        try:
            if _TRACEBACK in text:
                _tell(text.strip("\n"))
            elif self._json and text.strip():
                _log.warning("%s", text.rstrip("\n"))
            elif not self._json:
                self._real.write(text)
        finally:
            self._of.inside = False


def _tell(text: str) -> None:
    last = text.rpartition("\n")[2]
    kind = last.partition(":")[0][:_MAX_KEY]
    if last.startswith(_ON_PURPOSE):
        _throttled.info("a request failed with %s", last, key=kind)
    else:
        _throttled.error("%s", text, key=kind)


__all__ = ["stderr_lines"]
