"""Spans of attempts: whose children they are, what they say, and that a report never depends on them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dynamo_semkv.contracts.codec import donor_action
from dynamo_semkv.contracts.evidence import Bucket
from dynamo_semkv.contracts.hints import DonorHint, HintDelivery, KvHintsEnvelope
from dynamo_semkv.contracts.identity import new_route_id
from dynamo_semkv.contracts.load_plan import ExpectedMode
from tests.telemetry.collector import Seen
from tests.telemetry.memory import Kept, kept
from tests.worker_connector.harness import STABLE_ID, Bench, engine, prompt, run, settings
from worker_connector.requests.attempt_trace import AttemptTracer

CONTEXT = f"00-{'ab' * 16}-{'cd' * 8}-01"


@pytest.fixture
def spans() -> Iterator[Kept]:
    with kept() as memory:
        yield memory


def hint(bench: Bench, route_id: str, prompt_key: bytes, context: str | None, *, inside: bool = False) -> HintDelivery:
    donor = DonorHint(
        route_id=route_id,
        donor_id="d" * 32,
        expected_mode=ExpectedMode.EXACT_EQUIVALENT,
        generation="g",
        namespace="00" * 32,
        token_count=192,
        exact_prefix_tokens=192,
        score_bucket=Bucket.FULL,
        traceparent=context if inside else None,
    )
    envelope = KvHintsEnvelope(protocol_version="0.1", message_id="m", actions=[donor_action("1", donor)])
    return HintDelivery(
        version="1.0",
        stable_routing_id=STABLE_ID,
        dp_rank=0,
        prompt_key=prompt_key,
        envelope=envelope,
        traceparent=None if inside else context,
    )


class Traced:
    """A small engine whose one prompt is resident in the slab and not on the device."""

    def __init__(self, spans: Kept, running: Any, bench: Bench) -> None:
        self.running, self.bench, self.spans = running, bench, spans
        self.tokens = prompt(200)
        run(running, self.tokens)
        self.key = bench.sink.reports[0].prompt_key
        running.reset_prefix_cache()
        bench.schedulers[0]._parts.event_publisher.tracer = AttemptTracer(spans.tracing)

    def put(self, context: str | None, *, inside: bool = False) -> str:
        route_id = new_route_id()
        self.bench.schedulers[0]._parts.event_publisher.table.put(
            hint(self.bench, route_id, self.key, context, inside=inside)
        )
        return route_id

    def serve(self) -> list[Seen]:
        before = len(self.spans.all())
        run(self.running, self.tokens)
        return self.spans.all()[before:]


@pytest.fixture
def traced(spans: Kept) -> Iterator[Traced]:
    bench = Bench(settings())
    with engine(bench) as running:
        yield Traced(spans, running, bench)


def the(spans: list[Seen], name: str) -> Seen:
    (found,) = [span for span in spans if span.name == name]
    return found


@pytest.mark.parametrize("inside", [False, True], ids=["beside the envelope", "in the hint"])
def test_a_hinted_attempt_is_a_child_of_its_route(traced: Traced, inside: bool) -> None:
    route_id = traced.put(CONTEXT, inside=inside)
    found = traced.serve()
    whole = the(found, "semkv.materialize")
    assert (whole.trace_id, whole.parent_id, whole.links) == ("ab" * 16, "cd" * 8, [])
    assert {span.name for span in found} == {"semkv.materialize", "semkv.offer", "semkv.load", "semkv.report"}
    for name in ("semkv.offer", "semkv.load", "semkv.report"):
        part = the(found, name)
        assert (part.trace_id, part.parent_id) == (whole.trace_id, whole.span_id)
        assert whole.start <= part.start <= part.end <= whole.end
    said = whole.attributes
    assert said["semkv.route.id"] == route_id
    assert said["semkv.materialize.context"] == "hint_delivery"
    assert (said["semkv.outcome.result"], said["semkv.tokens.confirmed"]) == ("materialized_exact", 192)
    assert the(found, "semkv.load").attributes["semkv.tokens.copied"] == 192
    assert the(found, "semkv.report").attributes == {"semkv.report.sent": True}
    report = traced.bench.sink.reports[-1]
    assert report.traceparent == f"00-{whole.trace_id}-{whole.span_id}-01"


def test_an_equal_prompt_after_it_is_linked_and_no_child(traced: Traced) -> None:
    traced.put(CONTEXT)
    traced.serve()
    again = the(traced.serve(), "semkv.materialize")
    assert again.parent_id == ""
    assert again.trace_id != "ab" * 16
    assert again.links == [("ab" * 16, "cd" * 8)]
    assert again.attributes["semkv.materialize.context"] == "equal_prompt"
    assert "semkv.route.id" not in again.attributes


@pytest.mark.parametrize("context", [None, "garbage"])
def test_without_a_context_no_parent_is_invented(traced: Traced, context: str | None) -> None:
    if context is not None:
        traced.put(context)
    whole = the(traced.serve(), "semkv.materialize")
    assert (whole.parent_id, whole.links) == ("", [])
    # The router that joins this report to its route finds the trace by what the report carries.
    assert traced.bench.sink.reports[-1].traceparent == f"00-{whole.trace_id}-{whole.span_id}-01"


def test_what_is_no_context_is_on_no_report(traced: Traced) -> None:
    """A forged hint could make the report too long for any router."""
    traced.bench.schedulers[0]._parts.event_publisher.tracer = None
    traced.put("x" * 20_000)
    traced.serve()
    assert traced.bench.sink.reports[-1].traceparent is None


def test_a_trace_that_is_not_sampled_stays_so(traced: Traced) -> None:
    traced.put(CONTEXT[:-1] + "0")
    assert traced.serve() == []
    assert str(traced.bench.sink.reports[-1].traceparent).endswith("-00")


def test_a_cold_attempt_has_no_load(traced: Traced) -> None:
    run(traced.running, prompt(200, 7))
    found = traced.spans.all()
    assert {span.name for span in found} == {"semkv.materialize", "semkv.offer", "semkv.report"}
    assert the(found, "semkv.offer").attributes["semkv.tokens.offered"] == 0


def test_without_spans_the_report_carries_what_it_was_sent(traced: Traced) -> None:
    traced.bench.schedulers[0]._parts.event_publisher.tracer = None
    traced.put(CONTEXT)
    assert traced.serve() == []
    assert traced.bench.sink.reports[-1].traceparent == CONTEXT


def test_a_fault_of_a_span_costs_no_report(traced: Traced, caplog: pytest.LogCaptureFixture) -> None:
    class Faulty:
        def start(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("no")

    class Later:
        def __init__(self, tracing: Any) -> None:
            self.start = tracing.start

    for tracing in (Faulty(), Later(traced.spans.tracing)):
        traced.bench.schedulers[0]._parts.event_publisher.tracer = AttemptTracer(tracing)  # type: ignore[arg-type]
        before = len(traced.bench.sink.reports)
        traced.serve()
        assert len(traced.bench.sink.reports) == before + 1
    assert "no span was begun" in caplog.text
    assert "spans of a report were not made" in caplog.text
    traced.bench.check_balance()
