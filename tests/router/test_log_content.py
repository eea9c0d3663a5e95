"""Whatever goes wrong with a request, no line and no span holds its prompt, its token ids or its salt. Everything at
DEBUG."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.router.runtime_errors import FailureKind, RequestFailed
from dynamo_semkv.router.runtime_types import CallContext
from dynamo_semkv.telemetry.logs import Bound, JsonLines
from tests.router.fakes import FakeEdge, FakeLookup, FakeRouter, a_request, chunks, donor_on_a1
from tests.router.test_traced import Traced
from tests.telemetry.memory import kept

SALT = "canary-salt-5e1f"
TEXT = "canary text of a prompt"
TOKEN = 987_654_321
TOKENS = [TOKEN, *range(1, 1024)]
CANARIES = (SALT, TEXT, str(TOKEN), "5, 6, 7, 8, 9")


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Every record of any logger, as it would be written."""
    written: list[str] = []

    class Writing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(JsonLines().format(record))

    handler, root = Writing(), logging.getLogger()
    handler.addFilter(Bound())
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield written
    root.removeHandler(handler)
    root.setLevel(level)


def salted(**changes: Any) -> dict[str, Any]:
    request = a_request(**changes)
    request["routing"] = {"cache_salt": SALT, **(changes.get("routing") or {})}
    request.setdefault("token_ids", TOKENS)
    return request


FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "healthy": ({}, {}),
    "two salts": ({"extra_args": {"nvext": {"cache_salt": SALT + "-other"}}}, {}),
    "salt is no text": ({"routing": {"cache_salt": [SALT]}}, {}),
    "tokens are text": ({"token_ids": TEXT}, {}),
    "tokens are too large": ({"token_ids": [2**40 + TOKEN, *TOKENS]}, {}),
    "tokens are negative": ({"token_ids": [-TOKEN, *TOKENS]}, {}),
    "media without hashes": ({"multi_modal_data": {"image_url": [{"Url": TEXT}]}}, {}),
    "a client's hint": ({"kv_hint": {"text": TEXT, "tokens": TOKENS}, "extra_args": {"semkv": TEXT}}, {}),
    "the provider fails": ({}, {"lookup": FakeLookup(RuntimeError("provider"))}),
    "dynamo fails": ({}, {"edge": FakeEdge(fail={"overlap": RuntimeError("overlap")})}),
    "a pin is refused": ({}, {"edge": FakeEdge(refuse="worker_lost")}),
    "the worker dies": (
        {},
        {"edge": FakeEdge(script=[*chunks(2)[:1], RequestFailed(FailureKind.WORKER_LOST, "gone")])},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_no_line_and_no_span_holds_content(lines: list[str], fault: str) -> None:
    changes, parts = FAULTS[fault]
    fake = FakeRouter(**{"lookup": donor_on_a1(), **parts})
    with kept() as spans:
        made = Traced(spans.tracing, fake)
        request = salted(**changes)
        call = CallContext("req-1", {}, f"00-{'ab' * 16}-{'cd' * 8}-01", lambda: False)
        try:
            async for _ in made.handle(request, call):
                pass
        except RequestFailed:
            assert fault == "the worker dies"
        text = spans.text()
    assert any("dynamo_semkv.router" in line for line in lines) or fault == "tokens are text"
    for canary in CANARIES:
        assert not [line for line in lines if canary in line]
        assert canary not in text


@pytest.mark.parametrize("fault", [name for name in FAULTS if name not in ("the worker dies",)])
async def test_lines_about_a_route_name_it(lines: list[str], fault: str) -> None:
    changes, parts = FAULTS[fault]
    with kept() as spans:
        made = Traced(spans.tracing, FakeRouter(**{"lookup": donor_on_a1(), **parts}))
        call = CallContext("req-1", {}, f"00-{'ab' * 16}-{'cd' * 8}-01", lambda: False)
        async for _ in made.handle(salted(**changes), call):
            pass
    about = [line for line in lines if '"target": "dynamo_semkv.router.' in line]
    for line in about:
        assert '"request_id": "req-1"' in line
        assert f'"trace_id": "{"ab" * 16}"' in line
        # What is logged before the decision is about a request that has no route yet.
        assert '"route_id"' in line or "dynamo_semkv.router.fallback" in line


def test_the_check_can_fail(lines: list[str]) -> None:
    logging.getLogger("dynamo_semkv.router.fallback").debug("%r", ContractError("x", SALT, "y"))
    assert [line for line in lines if SALT in line]
