"""What can go wrong between us and a worker, as a closed set, and how Dynamo's exceptions are read.

Dynamo's KvRouter raises most failures as plain `Exception` or `ValueError` whose text starts with the class of its
semantic error ("Unavailable: ...", "InvalidRequest: ..."); only a buffered stream raises typed ones. So the text is
parsed here, in one place, and everything else in the router works with `FailureKind`.
"""

from __future__ import annotations

import enum
import re


class FailureKind(str, enum.Enum):
    """Why a request failed between us and a worker. Closed: the value is a metric label."""

    WORKER_LOST = "worker_lost"
    """The worker or the connection to it is gone. Another worker may serve: migratable."""
    NO_WORKER = "no_worker"
    """Nothing eligible is known to this router now. Another router may know better: migratable, 503 when exhausted."""
    OVERLOADED = "overloaded"
    """Admission refused for the whole pool (529)."""
    INVALID_PIN = "invalid_pin"
    """The request's worker or rank is not one this router can use."""
    INVALID_REQUEST = "invalid_request"
    """The client's fault (400); the same everywhere, so never retried."""
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


_CLASS_PREFIX = re.compile(r"(?:Backend)?([A-Z][A-Za-z]+): ")
_BY_CLASS = {
    "Unavailable": FailureKind.WORKER_LOST,
    "WorkerUnavailable": FailureKind.WORKER_LOST,
    "CannotConnect": FailureKind.WORKER_LOST,
    "Disconnected": FailureKind.WORKER_LOST,
    "ConnectionTimeout": FailureKind.WORKER_LOST,
    "ResponseTimeout": FailureKind.WORKER_LOST,
    "EngineShutdown": FailureKind.WORKER_LOST,
    "StreamIncomplete": FailureKind.WORKER_LOST,
    "WorkerOverloaded": FailureKind.OVERLOADED,
    "CapacityExhausted": FailureKind.OVERLOADED,
    "ResourceExhausted": FailureKind.OVERLOADED,
    "RouterQueueLimitExceeded": FailureKind.OVERLOADED,
    "RateLimited": FailureKind.OVERLOADED,
    "InvalidRequest": FailureKind.INVALID_REQUEST,
    "InvalidArgument": FailureKind.INVALID_REQUEST,
    "PayloadTooLarge": FailureKind.INVALID_REQUEST,
    "Cancelled": FailureKind.CANCELLED,
}
_PIN = re.compile(r"does not identify a known worker|[Pp]inned worker")
_NO_WORKER = re.compile(r"no endpoints available|instance_id=\d+ not found|[Nn]o workers? available")


def classify(error: BaseException) -> FailureKind:
    """The kind of a failure that KvRouter or its stream raised. The exception's own type wins over its text."""
    text = str(error)
    if _PIN.search(text):
        return FailureKind.INVALID_PIN
    if _NO_WORKER.search(text):
        return FailureKind.NO_WORKER
    for base in type(error).__mro__:
        if base.__name__ in _BY_CLASS:
            return _BY_CLASS[base.__name__]
    if isinstance(error, ConnectionError | TimeoutError):
        return FailureKind.WORKER_LOST
    prefix = _CLASS_PREFIX.match(text)
    if prefix is not None:
        return _BY_CLASS.get(prefix.group(1), FailureKind.UNKNOWN)
    return FailureKind.UNKNOWN


def message(error: BaseException) -> str:
    """The failure's text without the class prefix, for the client of an invalid request."""
    return _CLASS_PREFIX.sub("", str(error), count=1)


class RequestFailed(Exception):
    """A request that cannot go on here. `kind` decides what Dynamo's frontend is told; the cause is the original
    failure."""

    def __init__(self, kind: FailureKind, text: str) -> None:
        super().__init__(text)
        self.kind = kind
