"""Only what is exactly a W3C trace context is one: the text comes from clients."""

from __future__ import annotations

import pytest

from dynamo_semkv.telemetry.traceparent import form, of_call, parse

GOOD = f"00-{'ab' * 16}-{'cd' * 8}-01"


def test_a_context_is_read_and_written() -> None:
    context = parse(GOOD)
    assert context is not None
    assert (context.trace_hex, context.span_hex, context.flags) == ("ab" * 16, "cd" * 8, 1)
    assert form(context) == GOOD


@pytest.mark.parametrize(
    "text",
    [
        None,
        7,
        "",
        GOOD.upper(),
        GOOD + "-more",
        GOOD + "\n",
        f"ff-{'ab' * 16}-{'cd' * 8}-01",
        f"00-{'00' * 16}-{'cd' * 8}-01",
        f"00-{'ab' * 16}-{'00' * 8}-01",
        "00-t-s-01",
        "x" * 10_000,
    ],
)
def test_anything_else_is_none(text: object) -> None:
    assert parse(text) is None


def test_dynamos_own_context_stands_before_the_clients_metadata() -> None:
    other = f"00-{'12' * 16}-{'34' * 8}-00"
    assert of_call(GOOD, {"traceparent": other}) == GOOD
    assert of_call(None, {"traceparent": other}) == other
    assert of_call("garbage", {"traceparent": other}) == other
    assert of_call(None, {"traceparent": "garbage"}) is None
    assert of_call(None, {}) is None
