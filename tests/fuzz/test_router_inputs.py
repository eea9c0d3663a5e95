"""What reaches a router from clients, gateways, workers' cards, Dynamo's status server, the broker's API, and pages
that it asks."""

from __future__ import annotations

import asyncio
import io
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from dynamo_semkv.bus.inspection import BusInspection, _ask
from dynamo_semkv.bus.server_check import is_strict
from dynamo_semkv.cli import explain_view, status_view
from dynamo_semkv.cli.page import Page, PageError
from dynamo_semkv.config.load import build
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.identity import ReplicaKey
from dynamo_semkv.contracts.keys import as_tokens
from dynamo_semkv.dashboard.access import Access
from dynamo_semkv.observe import dynamo_counters
from dynamo_semkv.observe.diagnosis import diagnose
from dynamo_semkv.observe.snapshot import SCHEMA, build_snapshot
from dynamo_semkv.router.facts import RequestFacts, request_facts
from dynamo_semkv.router.ingress import prefill_half, strip_client_hints, without_own_pin
from dynamo_semkv.router.runtime_cards import MAX_RANKS, CardError, CardTable, parse_card
from dynamo_semkv.router.runtime_types import WorkerRole
from dynamo_semkv.router.service import is_spent
from dynamo_semkv.telemetry import traceparent
from dynamo_semkv.telemetry.target import otlp_target, shown
from tests.fuzz import odd
from tests.observe.fake_state import fake_history, fake_state
from tests.router.fakes import FakeRouter, a_request
from tests.router.test_gateway_advice import gateway_of

NAMES = (
    "model", "token_ids", "routing", "extra_args", "nvext", "annotations", "agent_context", "multi_modal_data",
    "prefill_result",
    "cache_salt", "lora_name", "kv_hints", "semkv", "backend_instance_id", "mm_hashes", "dp_rank",
    "decode_worker_id", "allowed_worker_ids", "routing_constraints", "required_taints", "preferred_taints",
)  # fmt: skip
CONSTRAINED = a_request(
    8,
    routing={
        "decode_worker_id": 5,
        "dp_rank": 1,
        "allowed_worker_ids": [1, 2],
        "routing_constraints": {"required_taints": ["a"], "preferred_taints": {}},
    },
)
IN_NVEXT = a_request(8, extra_args={"nvext": CONSTRAINED["routing"]})
requests = odd.changed(a_request(8)) | odd.changed(CONSTRAINED) | odd.changed(IN_NVEXT) | odd.mappings(*NAMES)


@settings(max_examples=120)
@given(requests)
def test_any_request_is_read_or_refused(request: Any) -> None:
    if not isinstance(request, dict):
        return
    stripped, count = strip_client_hints(request)
    assert count >= 0
    routing = prefill_half(without_own_pin(stripped, 7)).get("routing")
    assert not isinstance(routing, dict) or routing.get("decode_worker_id") is None
    try:
        facts = request_facts(stripped)
        tokens = as_tokens(facts.token_ids)
    except ContractError as error:
        odd.is_short(error, 2_000)
        return
    assert isinstance(facts, RequestFacts)
    assert tokens.dtype == np.uint32
    assert {type(it) for it in facts.constraints.required_taints} <= {str}
    assert {type(it) for it in facts.constraints.workers or ()} <= {int}


@settings(max_examples=30)
@given(requests.filter(lambda value: isinstance(value, dict)), st.sampled_from(WorkerRole))
def test_any_request_is_served(request: Any, role: WorkerRole) -> None:
    """Through the whole service: Dynamo gets it, whatever advice made of it, and the stream is whole."""

    async def serve() -> None:
        fake = FakeRouter(role=role, instance_id=5)
        assert await fake.run(request)
        assert len(fake.edge.dispatched) == (0 if is_spent(request) else 1)

    asyncio.run(serve())


CARD = {
    "display_name": "m", "source_path": "/m", "kv_cache_block_size": 32, "context_length": 4096,
    "runtime_config": {
        "data_parallel_size": 2, "data_parallel_start_rank": 0, "stable_routing_id": "w", "total_kv_blocks": 9,
        "runtime_data": {},
        "taints": ["a", "b"],
    },
    "worker_type": "prefill",
}  # fmt: skip


@settings(max_examples=100)
@given(st.text(max_size=60) | odd.changed(CARD).map(lambda value: json.dumps(value, default=repr)))
@example("[" * 100_000)
@example('{"kv_cache_block_size": 1' + "0" * 5_000 + "}")
def test_any_card_is_a_replica_or_named(text: str) -> None:
    try:
        card = parse_card(text)
    except CardError as error:
        odd.is_short(error, 500)
    else:
        assert 1 <= card.data_parallel_size <= MAX_RANKS
        assert card.block_size >= 1
        assert isinstance(card.role, WorkerRole)
        assert {type(taint) for taint in card.taints} <= {str}
    assert len(CardTable().update({"5": text})) <= MAX_RANKS


@given(odd.values)
def test_any_traceparent(text: Any) -> None:
    found = traceparent.parse(text)
    assert found is None or traceparent.form(found)[3:] == text[3:]


LINE = f'{dynamo_counters.INPUT}{{model="m"}} 12\n{dynamo_counters.SELECTED} 3\n'.encode()


@given(odd.texts | odd.damaged(LINE).map(lambda raw: raw.decode("utf-8", "replace")))
@example(f"{dynamo_counters.INPUT} inf")
@example(f"{dynamo_counters.INPUT} nan")
@example(f"{dynamo_counters.INPUT} 1e308\n{dynamo_counters.INPUT} 1e308")
@example(f"{dynamo_counters.INPUT} 5\n{dynamo_counters.SELECTED} -inf")
def test_any_exposition(text: str) -> None:
    found = dynamo_counters.parse(text)
    assert found is None or isinstance(found.input_tokens, int)


@given(st.binary(max_size=60) | odd.values.map(lambda value: json.dumps(value, default=repr).encode()))
@example(b"[" * 100_000)
def test_any_answer_of_the_broker(raw: bytes) -> None:
    class Broker:
        async def request(self, subject: str, payload: bytes, timeout: float) -> Any:
            return SimpleNamespace(data=raw)

    found = BusInspection("h:1")
    asyncio.run(_ask(Broker(), "S", found, "_INBOX"))  # type: ignore[arg-type]
    assert found.jetstream_error is not None or "S" in found.streams
    assert asyncio.run(is_strict(Broker())) in (True, False, None)  # type: ignore[arg-type]


SNAPSHOT = json.loads(json.dumps(build_snapshot(fake_state(fake_history(5)))))


@settings(max_examples=40)
@given(odd.changed(SNAPSHOT).map(lambda value: {**value, "schema": SCHEMA} if isinstance(value, dict) else value))
def test_any_page_is_shown_or_refused_in_one_sentence(shown: Any) -> None:
    page = Page("http://127.0.0.1:1")
    try:
        parsed = page._parsed(io.BytesIO(json.dumps(shown, default=repr).encode()))
        with page.reading():
            Console(file=io.StringIO(), width=80).print(status_view.render(parsed))
            diagnose(build({}), None, parsed, 1e9)
    except PageError as error:
        odd.is_short(error, 1_000, lines=1)


@given(st.binary(max_size=100))
@example(b"[" * 100_000)
def test_any_bytes_of_a_page(raw: bytes) -> None:
    try:
        assert isinstance(Page("http://127.0.0.1:1")._parsed(io.BytesIO(raw)), dict)
    except PageError:
        pass


ROUTE = {"route_id": "a" * 32, "tokens": {}, "decision": {}, "outcome": "declined"}


@given(odd.changed(ROUTE))
def test_any_route_of_a_page(route: Any) -> None:
    page = Page("http://127.0.0.1:1")
    try:
        with page.reading():
            Console(file=io.StringIO(), width=80).print(explain_view.render(route))
    except PageError as error:
        odd.is_short(error, 1_000, lines=1)


@given(odd.texts)
def test_any_address_of_a_page(url: str) -> None:
    try:
        Page(url)
    except ContractError as error:
        odd.is_short(error, 500)


@given(*[st.none() | odd.texts] * 4)
def test_no_header_opens_the_page_but_the_token(
    host: str | None, authorization: str | None, cookie: str | None, query: str | None
) -> None:
    locked = Access("0.0.0.0", "a-token-of-sixteen-or-more")
    assert not locked.token_allowed(authorization, cookie, query)
    assert Access("127.0.0.1").host_allowed(host) == (
        host is not None and host.startswith(("127.", "localhost", "LOCALHOST", "[::1", "::1"))
    )


BODY = {
    "token_ids": [1, 2, 3],
    "model": "m",
    "cache_salt": "s",
    "lora_name": None,
    "request_id": "r",
    "traceparent": None,
}


@settings(max_examples=70)
@given(odd.changed(BODY) | odd.values)
def test_any_body_of_advise_has_an_answer(body: Any) -> None:
    answer = asyncio.run(gateway_of(FakeRouter()).answer_body(body))
    assert "route_id" in answer or len(answer["error"]) < 2_000


def test_keys_of_replicas_are_integers() -> None:
    (replica,) = CardTable().update({"18446744073709551615": json.dumps({"kv_cache_block_size": 1})})
    assert replica == ReplicaKey(2**64 - 1, 0)


OTEL = (
    "OTEL_SDK_DISABLED", "OTEL_EXPORT_ENABLED", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_TRACES_SAMPLE_RATIO",
)  # fmt: skip
URLS = odd.texts | st.sampled_from(
    ["http://[::1", "http://u:secret@h:99999", "https://h:4317", "true", "h:4318", "http://h/ü"]
)


@given(st.dictionaries(st.sampled_from(OTEL), URLS, max_size=6), st.none() | URLS)
def test_any_environment_of_spans(env: dict[str, str], endpoint: str | None) -> None:
    env = {name: value for name, value in env.items() if "ENDPOINT" in name or "secret" not in value}
    found = otlp_target(endpoint, env)
    assert found.sample_ratio is None or 0.0 <= found.sample_ratio <= 1.0
    assert "secret" not in shown(found.url or "") + (found.warning or "")
