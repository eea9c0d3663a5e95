"""Traces, log lines and connector metrics of real processes: one trace a request, no content anywhere, and no request
that depends on them.

The tests share one graph and run in order; the later ones break it. Every process logs at DEBUG, as JSON lines.
"""

from __future__ import annotations

import json
import re
import threading
import urllib.request
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dynamo_semkv.telemetry import catalogue as c
from graphs.local.graph import LocalGraph
from graphs.local.settings import LOW_GATE, GraphSettings
from tests.graphs.traffic import PATIENT, WAIT_SECONDS, forget_device, prompt, routes, wait_until
from tests.telemetry.collector import Collector, Seen

pytestmark = [pytest.mark.graph, pytest.mark.slow]

SALT = "canary-salt-7f3e"
WORDS = "canary-word-91ab"
CLIENT_SPAN = "cd" * 8
TOKENS = re.compile(r"\d+(?:, ?\d+){7}")
"""Eight numbers in a row, with or without spaces: token ids, wherever they are printed."""
STAGES = {"semkv.exact", "semkv.lookup", "semkv.score", "semkv.dispatch", "semkv.outcome"}


class LoudGraph(LocalGraph):
    """Everything at DEBUG, and spans sent at once."""

    def environment(self, **extra: str) -> dict[str, str]:
        loud = {"DYN_LOG": "debug", "OTEL_BSP_SCHEDULE_DELAY": "100"}
        return super().environment(**extra) | loud


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, collector: Collector) -> Iterator[LocalGraph]:
    settings = GraphSettings(
        model="tiny",
        threads=1,
        data_parallel_size=1,
        otlp_endpoint=collector.url,
        blocks_per_rank=160,
        overrides={
            **LOW_GATE,
            **PATIENT,
            "outcome": {"report_ttl_seconds": 30.0},
            "connector": {"announce_interval_seconds": 1.0, "metrics_port": 0},
        },
    )
    with LoudGraph(settings, run_dir=tmp_path_factory.mktemp("graph"), model_dir=model_dir) as started:
        yield started


def send(graph: LocalGraph, seed: int, trace: int | None = None, max_tokens: int = 4) -> dict[str, Any]:
    """A chat of the canary tenant; `trace`: the client's own trace id."""
    content = f"{WORDS} {prompt(seed)}"
    body = {
        "model": graph.settings.served_model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "nvext": {"cache_salt": SALT},
    }
    headers = {"content-type": "application/json"}
    if trace is not None:
        headers["traceparent"] = f"00-{trace:032x}-{CLIENT_SPAN}-01"
    request = urllib.request.Request(f"{graph.frontend_url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def route_of(graph: LocalGraph, answer: dict[str, Any]) -> dict[str, Any]:
    request_id = answer["id"].removeprefix("chatcmpl-")
    found: dict[str, Any] = wait_until(f"route of {request_id}", lambda: routes(graph, "router-0", request_id))[-1]
    return found


def trace_of(collector: Collector, trace: int, names: set[str]) -> dict[str, Seen]:
    """The spans of one trace, once all of these are there; each name once."""
    wanted = f"{trace:032x}"

    def there(spans: list[Seen]) -> bool:
        return names <= {span.name for span in spans if span.trace_id == wanted}

    spans = [span for span in collector.wait_for(there) if span.trace_id == wanted]
    found = {span.name: span for span in spans}
    assert len(found) == len(spans), [span.name for span in spans]
    return found


def test_a_request_without_a_hint_is_one_trace_and_a_link_to_the_connectors(
    graph: LocalGraph, collector: Collector
) -> None:
    route = route_of(graph, send(graph, 1, trace=1))
    stages = STAGES - {"semkv.score"}  # without evidence nothing is weighed
    found = trace_of(collector, 1, {"semkv.route", *stages})
    assert set(found) == {"semkv.route", *stages}
    whole = found["semkv.route"]
    assert whole.service == "semkv-router"
    # Child of a span that Dynamo's runtime made for this router, not of the client's.
    assert whole.parent_id not in ("", CLIENT_SPAN)
    for name in stages:
        assert found[name].parent_id == whole.span_id
    assert whole.attributes["semkv.route.id"] == route["opened"]["route_id"]
    assert whole.attributes["gen_ai.request.model"] == "tiny"
    assert whole.attributes["gen_ai.usage.cache_read.input_tokens"] == 0
    (linked,) = found["semkv.outcome"].links
    connectors = collector.wait_for(lambda spans: linked in {(s.trace_id, s.span_id) for s in spans})
    (attempt,) = [span for span in connectors if (span.trace_id, span.span_id) == linked]
    assert (attempt.name, attempt.service, attempt.parent_id) == ("semkv.materialize", "semkv-connector", "")
    assert attempt.attributes["semkv.materialize.context"] == "none"


def test_a_hinted_request_is_one_trace_through_router_and_engine(graph: LocalGraph, collector: Collector) -> None:
    cold = send(graph, 2)
    route_of(graph, cold)
    traces = count(0x200)
    trace = 0

    def loaded() -> dict[str, Any] | None:
        """Again until Dynamo has heard that the device caches are empty (before that there is nothing to place), and
        the hint came before its request ended (on a busy machine it may not; the route is then joined by its
        prompt)."""
        nonlocal trace
        forget_device(graph)
        trace = next(traces)
        answer = send(graph, 2, trace=trace)
        assert answer["choices"] == cold["choices"]
        route = route_of(graph, answer)
        named = (route["report"] or {}).get("route_id") == route["opened"]["route_id"]
        return route if named and route["outcome"] == "materialized_exact" else None

    route: dict[str, Any] = wait_until("a hinted load", loaded)
    engine = {"semkv.materialize", "semkv.offer", "semkv.load", "semkv.report"}
    found = trace_of(collector, trace, {"semkv.route", "semkv.hint", *STAGES, *engine})
    assert set(found) == {"semkv.route", "semkv.hint", *STAGES, *engine}
    whole, attempt = found["semkv.route"], found["semkv.materialize"]
    for name in {"semkv.hint", "semkv.materialize", *STAGES}:
        assert found[name].parent_id == whole.span_id, name
    for name in engine - {"semkv.materialize"}:
        assert found[name].parent_id == attempt.span_id, name
    assert {found[name].service for name in engine} == {"semkv-connector"}
    assert attempt.attributes["semkv.materialize.context"] == "hint_delivery"
    assert attempt.attributes["semkv.route.id"] == whole.attributes["semkv.route.id"] == route["opened"]["route_id"]
    assert attempt.attributes["semkv.tokens.confirmed"] == route["report"]["confirmed"] > 0
    assert attempt.attributes["semkv.replica.name"] == route["served_by"]
    assert found["semkv.outcome"].attributes["semkv.outcome.result"] == "materialized_exact"
    assert found["semkv.outcome"].links == [(attempt.trace_id, attempt.span_id)]
    assert whole.start <= found["semkv.hint"].end <= attempt.start
    assert not [name for name, span in found.items() if span.failed]


def metrics(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=30) as response:
        text = response.read().decode()
    return {
        family.name: family
        for family in text_string_to_metric_families(text)
        if family.name.startswith("semkv_connector")
    }


def test_connector_metrics_are_on_the_workers_status_server_and_in_the_engine_process(graph: LocalGraph) -> None:
    loaded = 0.0
    for worker in graph.worker_names:
        families = metrics(f"{graph.status_url(worker)}/metrics")
        absent = {"semkv_connector_disk_blocks"}  # no tier of files here; the counters of it have no samples either
        assert {spec.name.removesuffix("_total") for spec in c.CONNECTOR} == set(families) | absent
        sample = families["semkv_connector_donors"].samples[0]
        assert sample.labels["dp_rank"] == "0"
        assert (sample.labels["dynamo_component"], sample.labels["model"]) == ("backend", "tiny")
        assert sample.labels["worker_id"]
        loaded += sum(
            s.value for s in families["semkv_connector_tokens"].samples if s.labels.get("step") == "confirmed"
        )
        own = re.search(r"metrics of rank 0: (http://127\.0\.0\.1:\d+/metrics)", graph.log_text(worker))
        assert own is not None
        assert set(metrics(own.group(1))) == set(families)
    assert loaded > 0


def lines_of(graph: LocalGraph, part: str) -> list[tuple[str, dict[str, Any]]]:
    """Every line but those of Dynamo's Rust side, which have a `file`; `{}` for what is no JSON, such as the tracebacks
    that Dynamo's bindings print of an exception that a handler raised."""
    lines = []
    whole, _, _ = graph.log_text(part).rpartition("\n")  # the last one may just be being written
    for text in whole.splitlines():
        line = json.loads(text) if text.startswith("{") else {}
        if "file" not in line:
            lines.append((text, line))
    return lines


def ours(graph: LocalGraph, part: str) -> list[dict[str, Any]]:
    """The lines of this project's own loggers."""
    names = ("dynamo_semkv", "worker_connector")
    return [line for _, line in lines_of(graph, part) if line.get("target", "").partition(".")[0] in names]


def test_lines_about_a_route_name_it_and_its_trace(graph: LocalGraph) -> None:
    route = route_of(graph, send(graph, 3, trace=3))
    route_id = route["opened"]["route_id"]
    wait_until(
        "the route's lines", lambda: len([x for x in ours(graph, "router-0") if x.get("route_id") == route_id]) >= 2
    )
    lines = [line for line in ours(graph, "router-0") if line.get("route_id") == route_id]
    assert {line["trace_id"] for line in lines} == {f"{3:032x}"}
    assert {line["request_id"] for line in lines} == {route["opened"]["request_id"]}
    assert [line["level"] for line in lines if line["message"].startswith("route opened: ")] == ["DEBUG"]
    hinted = [line for line in ours(graph, "worker-0") + ours(graph, "worker-1") if "route_id" in line]
    assert hinted
    for line in hinted:
        assert len(line["trace_id"]) == 32
    # A line of a request's task that names a route at all names the request too.
    for line in ours(graph, "router-0"):
        assert ("route_id" not in line) or line["request_id"]


def test_requests_are_served_while_the_collector_is_broken_and_the_broker_and_a_worker_die(
    graph: LocalGraph, collector: Collector
) -> None:
    """Fails everything that a request could stumble over; what is written down meanwhile is looked at by the next
    test."""
    collector.answer = 503
    assert send(graph, 4)["choices"]
    answers: list[dict[str, Any]] = []
    streams = [
        threading.Thread(target=lambda n=n: answers.append(send(graph, 50 + n, max_tokens=200)))  # type: ignore[misc]
        for n in range(4)
    ]
    for stream in streams:
        stream.start()
    wait_until("both workers are busy", lambda: _running(graph) >= 2)
    graph.kill("worker-1")
    graph.kill("nats")
    for stream in streams:
        stream.join(WAIT_SECONDS)
    assert len(answers) == 4
    assert {answer["choices"][0]["finish_reason"] for answer in answers} == {"length"}
    assert send(graph, 5)["choices"]
    graph.restart("nats")
    graph.start("worker-1")
    graph.wait_ready()
    wait_until(
        "the loss of spans is said", lambda: any("spans are lost" in x["message"] for x in ours(graph, "router-0"))
    )
    collector.answer = 200
    send(graph, 6, trace=6)
    # A route may be two attempts here: a worker that just came back may still be suspect.
    collector.wait_for(lambda spans: any(s.name == "semkv.route" and s.trace_id == f"{6:032x}" for s in spans))


def _running(graph: LocalGraph) -> int:
    running = 0
    for worker in graph.worker_names:
        with urllib.request.urlopen(f"{graph.status_url(worker)}/engine/semkv", timeout=30) as response:
            running += json.load(response)["in_flight"] > 0
    return running


def test_nothing_of_a_prompt_or_a_salt_was_written_anywhere(graph: LocalGraph, collector: Collector) -> None:
    for part in ("router-0", *graph.worker_names):
        assert {line["level"] for line in ours(graph, part)} >= {"DEBUG", "INFO"}, part
        for text, _ in lines_of(graph, part):
            for canary in (SALT, WORDS, prompt(2)[:20]):
                assert canary not in text, text
            assert TOKENS.search(text) is None, text
    wire = b"".join(collector.raw)
    for canary in (SALT, WORDS, prompt(2)[:20]):
        assert canary.encode() not in wire
    for span in collector.spans:
        for value in (span.attributes, *span.events.values(), span.resource):
            assert TOKENS.search(json.dumps(value, default=str)) is None, span
