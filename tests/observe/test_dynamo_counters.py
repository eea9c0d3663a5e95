"""Dynamo's own counters, as its status server prints them."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest
from dynamo.prometheus_names import name_prefix, router

from dynamo_semkv.observe import dynamo_counters
from dynamo_semkv.observe.dynamo_counters import DynamoTokens, parse, read, status_url
from dynamo_semkv.observe.snapshot import build_snapshot
from tests.observe.fake_state import fake_state

LABELS = 'dynamo_component="backend",model="{}",phase="aggregated",router_id="1",worker_id="d7"'


def exposition(model: str, *values: float) -> str:
    labels = LABELS.format(model)
    lines = [
        f"# HELP {name} words\n{name}{{{labels}}} {value:g}"
        for name, value in zip(dynamo_counters.SERIES, values, strict=True)
    ]
    return "\n".join([*lines, f'dynamo_component_router_input_sequence_tokens_bucket{{{labels},le="+Inf"}} 30', ""])


def test_the_names_are_those_that_dynamo_exports() -> None:
    prefix = f"{name_prefix.COMPONENT}_"
    assert prefix + router.KV_BEST_ELIGIBLE_CACHED_PREFIX_TOKENS_TOTAL == dynamo_counters.BEST_ELIGIBLE
    assert prefix + router.KV_SELECTED_CACHED_PREFIX_TOKENS_TOTAL == dynamo_counters.SELECTED
    assert prefix + router.KV_WORKER_REUSED_TOKENS_TOTAL == dynamo_counters.WORKER_REUSED
    assert f"{prefix}{router.INPUT_SEQUENCE_TOKENS}_sum" == dynamo_counters.INPUT


def test_models_and_phases_add_up() -> None:
    text = exposition("a", 1000, 600, 500, 400) + exposition("b", 2000, 100, 90, 1.2e3)
    assert parse(text) == DynamoTokens(3000, 700, 590, 1600)


@pytest.mark.parametrize(
    "text", ["", "semkv_ready 1.0\n", 'dynamo_component_router_input_sequence_tokens_sum{a="b"} x\n', "\x00"]
)
def test_nothing_routed_yet_is_unknown_and_not_zero(text: str) -> None:
    assert parse(text) is None
    assert build_snapshot(fake_state(dynamo=None))["dynamo"] is None


@pytest.mark.parametrize(
    ("env", "url"),
    [
        ({}, None),
        ({"DYN_SYSTEM_PORT": "-1"}, None),
        ({"DYN_SYSTEM_PORT": "0"}, None),
        ({"DYN_SYSTEM_PORT": "9701"}, "http://127.0.0.1:9701"),
        ({"DYN_SYSTEM_PORT": "9701", "DYN_SYSTEM_HOST": "0.0.0.0"}, "http://127.0.0.1:9701"),
        ({"DYN_SYSTEM_PORT": "9701", "DYN_SYSTEM_HOST": "::1"}, "http://[::1]:9701"),
    ],
)
def test_where_dynamo_shows_them(env: dict[str, str], url: str | None) -> None:
    assert status_url(env) == url


@pytest.fixture
def server() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = exposition("a", 1000, 600, 500, 400).encode()
            self.send_response(200 if self.path == "/metrics" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()
        thread.join()


def test_they_are_read_over_http_and_away_is_unknown(server: str) -> None:
    assert read(server) == DynamoTokens(1000, 600, 500, 400)
    assert read(f"{server}/elsewhere") is None
    assert read("http://127.0.0.1:1") is None


def test_the_snapshot_gives_shares_of_dynamos_own_input() -> None:
    said = build_snapshot(fake_state(dynamo=DynamoTokens(1000, 600, 500, 400)))["dynamo"]
    assert said["input_tokens"] == 1000
    assert [(row["step"], row["tokens"], row["share"]) for row in said["steps"]] == [
        ("best_eligible", 600, 0.6),
        ("selected", 500, 0.5),
        ("worker_reused", 400, 0.4),
    ]
