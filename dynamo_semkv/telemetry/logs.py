"""Log lines: readable, or one JSON object a line, as Dynamo's own processes write them, with the route in each line
about a route.

    configure(env, level=None)      the root logger of this process, to stderr
    bind(request_id=..., ...)       for what this task logs from now on
    with about(route_id=...): ...   for what is logged inside

`DYN_LOGGING_CONSOLE_FORMAT=readable|jsonl` chooses the form, else `DYN_LOGGING_JSONL`; `DYN_LOG` gives levels, by
target too. Fields of a JSON line have Dynamo's names (time, level, target, message, trace_id, span_id) and ours
(request_id, route_id).
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TextIO

from dynamo_semkv.telemetry.traceparent import parse

LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 1,
}
_TRUE = frozenset({"1", "true", "yes", "on"})
_NAMES = {logging.WARNING: "WARN", logging.CRITICAL: "ERROR"}
_NOTHING: Mapping[str, str] = {}
_bound: ContextVar[Mapping[str, str | None]] = ContextVar("semkv_log_fields", default=_NOTHING)
"""As it was given: every request binds, and few of them write a line."""


def bind(
    *, request_id: str | None = None, traceparent: str | None = None, route_id: str | None = None, fresh: bool = False
) -> None:
    """Adds to what lines of this task carry; `fresh` begins anew."""
    given = {"request_id": request_id, "traceparent": traceparent, "route_id": route_id}
    _bound.set(given if fresh else {**_bound.get(), **_sound(given)})


@contextmanager
def about(
    *, request_id: str | None = None, traceparent: str | None = None, route_id: str | None = None
) -> Iterator[None]:
    """Log lines of this task carry these fields inside the block."""
    given = {"request_id": request_id, "traceparent": traceparent, "route_id": route_id}
    token = _bound.set({**_bound.get(), **_sound(given)})
    try:
        yield
    finally:
        _bound.reset(token)


def _sound(given: Mapping[str, str | None]) -> dict[str, str]:
    """What may stand in the place of what was bound before."""
    return {name: value for name, value in given.items() if value and (name != "traceparent" or parse(value))}


def _fields(bound: Mapping[str, str | None]) -> dict[str, str]:
    found = {name: value for name, value in bound.items() if value and name != "traceparent"}
    context = parse(bound.get("traceparent"))
    if context is not None:
        found |= {"trace_id": context.trace_hex, "span_id": context.span_hex}
    return found


class Bound(logging.Filter):
    """Puts what is bound where the line is written onto the record: a handler may format it in another thread."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Adds the fields that `about` has bound; keeps every record."""
        record.semkv = _fields(_bound.get())
        return True


class JsonLines(logging.Formatter):
    """One JSON object a line, with the names of Dynamo's own JSON logs."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line."""
        line: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{_micros(record):06d}Z",
            "level": _NAMES.get(record.levelno, record.levelname),
            "target": record.name,
            "message": record.getMessage(),
            **getattr(record, "semkv", _NOTHING),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class Readable(logging.Formatter):
    """A line for people, with the bound fields behind the message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The message and the fields."""
        fields: Mapping[str, str] = getattr(record, "semkv", _NOTHING)
        return super().formatMessage(record) + "".join(f" {name}={value}" for name, value in fields.items())


class _Lines(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:
        """A line that cannot be formatted is told as one, in the form of all others, and not as a traceback between
        them."""
        kind, error, _ = sys.exc_info()
        if isinstance(error, OSError) or self.stream.closed:
            return  # nobody reads any more; that may not become the fault of whoever logged
        said = (
            f"a line of {record.pathname}:{record.lineno} could not be written: {kind.__name__ if kind else ''}: "
            f"{error}"
        )
        self.stream.write(
            self.format(logging.makeLogRecord({"name": record.name, "msg": said, "levelname": "ERROR"})) + "\n"
        )


def json_lines(env: Mapping[str, str]) -> bool:
    """As Dynamo decides it; a value that it would refuse reads as readable."""
    form = env.get("DYN_LOGGING_CONSOLE_FORMAT", "").strip().lower()
    if form:
        return form == "jsonl"
    return env.get("DYN_LOGGING_JSONL", "").strip().lower() in _TRUE


def levels(directives: str) -> tuple[int, dict[str, int]]:
    """`DYN_LOG`: the level of all, and those of single targets. What is no level is left out."""
    root, targets = logging.INFO, {}
    for directive in directives.split(","):
        target, given, level = directive.strip().rpartition("=")
        number = LEVELS.get(level.strip().lower())
        if number is None:
            continue
        if given:
            targets[target.strip().replace("::", ".")] = number
        else:
            root = number
    return root, targets


def configure(env: Mapping[str, str], level: str | None = None, stream: TextIO | None = None) -> None:
    """`level`: from the command line; it stands before DYN_LOG's for all, not before those of single targets."""
    root, targets = levels(env.get("DYN_LOG", ""))
    handler = _Lines(stream or sys.stderr)
    handler.addFilter(Bound())
    handler.setFormatter(JsonLines() if json_lines(env) else Readable())
    logging.captureWarnings(True)
    logging.basicConfig(level=LEVELS[level] if level is not None else root, handlers=[handler], force=True)
    for target, number in targets.items():
        logging.getLogger(target).setLevel(number)


def _micros(record: logging.LogRecord) -> int:
    return int(record.created % 1 * 1_000_000)
