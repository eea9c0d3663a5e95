"""Refusals: which streams the broker does not take or keep, in its own words; one warning an outage.

A connection alone says nothing about whether anything is stored: a broker without room, a stream of somebody else on
our subjects, or one that does not answer keeps a process "connected" and everything that it says lost.
"""

from __future__ import annotations

import logging

from nats.js import errors as js_errors

_log = logging.getLogger(__name__)

_NO_STREAM = js_errors.NoStreamResponseError.__name__


def words_of(error: BaseException) -> str:
    """What JetStream said, with its own error code; for anything else the kind of error and its text."""
    if isinstance(error, js_errors.APIError):
        return f"{error.description} (JetStream error {error.err_code})"
    return f"{type(error).__name__}: {error}".removesuffix(": ")


class Refusals:
    """The refusals that one publisher met. Written on one thread, read on any."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._open: dict[str, tuple[str, bool]] = {}
        """Stream -> (words, they came when it was to be made)."""

    def refused(self, stream: str, words: str, *, at_set_up: bool = False) -> None:
        """Logged once until the stream is accepted again. The newest words are kept, but for "no stream", which says
        less than why it could not be made."""
        known = self._open.get(stream)
        if known is None:
            _log.warning(
                "bus %s: the broker refuses %s: %s; it is tried again, and what does not fit the buffer meanwhile is "
                "dropped",
                self._name,
                stream,
                words,
            )
        if known is None or not (at_set_up or words.startswith(_NO_STREAM)):
            self._open[stream] = (words, at_set_up and known is None)

    def stored(self, stream: str) -> None:
        """A message was acknowledged by this stream."""
        if self._open.pop(stream, None) is not None:
            _log.info("bus %s: %s takes messages again", self._name, stream)

    def exists(self, stream: str) -> None:
        """The stream exists as it should. What was refused of its messages is open until one is stored."""
        known = self._open.get(stream)
        if known is not None and known[1]:
            self.stored(stream)

    def current(self) -> dict[str, str]:
        """Stream -> the broker's words, of what is refused now."""
        return {stream: words for stream, (words, _) in list(self._open.items())}

    def __bool__(self) -> bool:
        return bool(self._open)
