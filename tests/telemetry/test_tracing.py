"""The exporter: spans arrive, a collector that is away or refuses costs spans only, off is off."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SpanExportResult

from dynamo_semkv.telemetry import tracing as module
from dynamo_semkv.telemetry.target import Target, otlp_target
from dynamo_semkv.telemetry.tracing import Tracing, start_tracing, traceparent_of
from tests.telemetry.collector import Collector

PARENT = f"00-{'ab' * 16}-{'cd' * 8}-01"
UNSAMPLED = PARENT[:-1] + "0"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")


def started(url: str, **env: str) -> Tracing:
    tracing = start_tracing(otlp_target(url, env), "semkv-router", "semkv-1")
    assert tracing is not None
    return tracing


def test_spans_arrive_with_parents_links_and_times() -> None:
    with Collector() as collector:
        tracing = started(collector.url)
        route = tracing.start("semkv.route", parent=PARENT, attributes={"semkv.route.id": "r", "absent": None})
        tracing.record("semkv.lookup", route, 1_000, 2_000, {"n": 3}, error="timeout")
        linked = tracing.start("semkv.outcome", links=[traceparent_of(route), None, "garbage"])
        tracing.end(linked)
        tracing.end(route)
        spans = {span.name: span for span in collector.wait_for(lambda spans: len(spans) == 3)}
        tracing.close()
    root, lookup, outcome = spans["semkv.route"], spans["semkv.lookup"], spans["semkv.outcome"]
    assert (root.trace_id, root.parent_id, root.attributes) == ("ab" * 16, "cd" * 8, {"semkv.route.id": "r"})
    assert (lookup.trace_id, lookup.parent_id, lookup.start, lookup.end) == (root.trace_id, root.span_id, 1_000, 2_000)
    assert lookup.failed
    assert lookup.attributes == {"n": 3, "error.type": "timeout"}
    assert not root.failed
    assert outcome.parent_id == ""
    assert outcome.trace_id != root.trace_id
    assert outcome.links == [(root.trace_id, root.span_id)]
    assert {span.service for span in spans.values()} == {"semkv-router"}
    assert root.resource["service.instance.id"] == "semkv-1"
    assert tracing.counts == {"ended": 3, "exported": 3}


def test_the_operators_service_name_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "their-name")
    with Collector() as collector:
        tracing = started(collector.url)
        tracing.end(tracing.start("semkv.route"))
        assert collector.wait_for(bool)[0].service == "their-name"
        tracing.close()


def test_a_trace_that_is_not_sampled_makes_no_span_and_hands_its_context_on() -> None:
    with Collector() as collector:
        tracing = started(collector.url)
        route = tracing.start("semkv.route", parent=UNSAMPLED)
        context = traceparent_of(route)
        tracing.record("semkv.lookup", route, 1, 2)
        tracing.end(route)
        tracing.close()
        assert collector.requests == 0
    assert context[:35] == UNSAMPLED[:35]
    assert context.endswith("-00")
    assert tracing.counts == {}


def test_the_sample_ratio_is_of_traces_that_begin_here() -> None:
    with Collector() as collector:
        tracing = started(collector.url, OTEL_TRACES_SAMPLE_RATIO="0")
        tracing.end(tracing.start("semkv.route"))
        tracing.end(tracing.start("semkv.score", parent=PARENT))
        tracing.close()
        assert [span.name for span in collector.spans] == ["semkv.score"]


def test_a_collector_that_is_away_delays_nobody_and_is_said_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    with Collector() as gone:
        url = gone.url
    tracing = started(url)
    for _ in range(3):
        tracing.end(tracing.start("semkv.route"))
    until = time.monotonic() + 30.0
    while not tracing.counts["failed"] and time.monotonic() < until:
        time.sleep(0.02)
    tracing.close()
    assert tracing.counts["failed"] == 3
    assert tracing.counts["exported"] == 0
    ours = [record for record in caplog.records if record.name == module.__name__ and record.levelno >= logging.WARNING]
    assert len(ours) == 1
    assert "3 spans are lost" in ours[0].getMessage()
    assert [record for record in caplog.records if record.name.startswith("opentelemetry.exporter")] == []


class Stuck:
    """An exporter that does not come back."""

    def __init__(self) -> None:
        self.entered, self.release = threading.Event(), threading.Event()

    def export(self, spans: Any) -> SpanExportResult:
        self.entered.set()
        self.release.wait(60)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        return None


def test_spans_wait_in_a_bounded_queue_and_ending_one_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
    stuck = Stuck()
    tracing = Tracing(stuck, "s", "i")  # type: ignore[arg-type]
    tracing.end(tracing.start("semkv.route"))
    assert stuck.entered.wait(20)
    # The exporter's thread is held; if ending a span waited for it, this loop would not come to its end.
    for _ in range(200):
        tracing.end(tracing.start("semkv.route"))
    assert tracing.counts["ended"] == 201
    tracing.close(0.05)
    stuck.release.set()


def test_a_fault_of_the_exporter_is_counted_and_the_next_batch_goes_on() -> None:
    class Broken(Stuck):
        def export(self, spans: Any) -> SpanExportResult:
            raise RuntimeError("no")

    broken = Broken()
    tracing = Tracing(broken, "s", "i")  # type: ignore[arg-type]
    tracing.end(tracing.start("semkv.route"))
    tracing.close(20.0)
    assert tracing.counts == {"ended": 1, "failed": 1}


def test_off_imports_nothing_and_starts_no_thread() -> None:
    """In a process of its own: here OpenTelemetry is long imported."""
    program = """if True:
        import sys, threading
        import dynamo_semkv.router.traced, worker_connector.requests.attempt_trace
        from dynamo_semkv.telemetry.target import otlp_target
        from dynamo_semkv.telemetry.tracing import start_tracing
        before = threading.active_count()
        assert start_tracing(otlp_target(None, {}), "s", "i") is None
        assert threading.active_count() == before
        print([name for name in sys.modules if name.startswith(("opentelemetry", "requests"))])
    """
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.strip() == "[]"


def test_off_says_nothing_and_a_warning_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert start_tracing(Target(None), "s", "i") is None
    assert caplog.records == []
    assert start_tracing(Target(None, "no spans are exported: because"), "s", "i") is None
    assert "because" in caplog.text


def test_a_missing_library_is_said_once_and_keeps_nobody_from_starting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    assert start_tracing(Target("http://127.0.0.1:1/v1/traces"), "s", "i") is None
    assert "pip install '.[telemetry]' in a checkout" in caplog.text


def test_credentials_of_the_endpoint_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        started("http://user:secret@127.0.0.1:1").close()
    assert "spans go to http://127.0.0.1:1/v1/traces" in caplog.text
    assert "secret" not in caplog.text
