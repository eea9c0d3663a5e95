"""Failures as Dynamo 1.6.1 words them -> kinds. The texts were taken from a running KvRouter."""

from __future__ import annotations

import pytest

from dynamo_semkv.router.runtime_errors import FailureKind, classify, message


class InvalidArgument(Exception):
    """Named as Dynamo's typed exception."""


class RouterQueueLimitExceeded(Exception):
    """Named as Dynamo's typed exception."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("Unavailable: Stream ended before generation completed"), FailureKind.WORKER_LOST),
        (Exception("Unavailable: TCP connection to 127.0.0.1:44841 failed"), FailureKind.WORKER_LOST),
        (ValueError("BackendEngineShutdown: engine shutting down"), FailureKind.WORKER_LOST),
        (Exception("ResponseTimeout: inactivity"), FailureKind.WORKER_LOST),
        (ConnectionResetError("reset"), FailureKind.WORKER_LOST),
        (TimeoutError("late"), FailureKind.WORKER_LOST),
        (Exception("Unavailable: instance_id=12345 not found"), FailureKind.NO_WORKER),
        (Exception("no endpoints available to route work"), FailureKind.NO_WORKER),
        (Exception("CapacityExhausted: all eligible workers are overloaded"), FailureKind.OVERLOADED),
        (RouterQueueLimitExceeded("queue"), FailureKind.OVERLOADED),
        (Exception("CapacityExhausted: pinned worker 9 is overloaded"), FailureKind.INVALID_PIN),
        (
            Exception("InvalidRequest: nvext.backend_instance_id=777 does not identify a known worker"),
            FailureKind.INVALID_PIN,
        ),
        (Exception("Pinned worker 3 dp_rank 7 is not eligible: outside [0, 2)"), FailureKind.INVALID_PIN),
        (Exception("Pinned worker 3 requires an explicit dp_rank"), FailureKind.INVALID_PIN),
        (ValueError("InvalidRequest: prompt too long"), FailureKind.INVALID_REQUEST),
        (InvalidArgument("prompt too long"), FailureKind.INVALID_REQUEST),
        (ValueError("Cancelled: gone"), FailureKind.CANCELLED),
        (ValueError("Internal: ConnectionError: text"), FailureKind.UNKNOWN),
        (Exception("missing field `protocol_version`"), FailureKind.UNKNOWN),
        (KeyError("x"), FailureKind.UNKNOWN),
    ],
)
def test_classification(error: Exception, kind: FailureKind) -> None:
    assert classify(error) is kind


def test_the_client_gets_the_text_without_the_class() -> None:
    assert message(ValueError("InvalidRequest: prompt: too long")) == "prompt: too long"
    assert message(InvalidArgument("prompt too long")) == "prompt too long"
