"""Spans of one request on fakes: one trace, right parents, what each says, and that they change nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
import pytest

from dynamo_semkv.contracts.report import MaterializationReport
from dynamo_semkv.observe.metrics import Metrics
from dynamo_semkv.outcome.history import History
from dynamo_semkv.outcome.route_tracker import RouteTracker
from dynamo_semkv.router.advisor import Advisor
from dynamo_semkv.router.attempts import Attempts
from dynamo_semkv.router.gateway_advice import GatewayAdvice
from dynamo_semkv.router.observed import ObservedHistory, ObservedJournal, ObservedLookup
from dynamo_semkv.router.route_records import RouteRecords
from dynamo_semkv.router.runtime_errors import FailureKind, RequestFailed
from dynamo_semkv.router.runtime_types import CallContext, Chunk, RankOverlap
from dynamo_semkv.router.service import RouterService
from dynamo_semkv.router.traced import (
    TracedAdvisor,
    TracedEdge,
    TracedHandler,
    TracedHints,
    traced,
)
from dynamo_semkv.telemetry.tracing import Tracing
from tests.outcome.build import report
from tests.router.fakes import A1, FakeEdge, FakeLookup, FakeRouter, Found, a_request, chunks, donor_on_a1
from tests.telemetry.memory import Kept, kept

PARENT = f"00-{'ab' * 16}-{'cd' * 8}-01"
CANARY = "canary-salt-5e1f"


@pytest.fixture
def spans() -> Iterator[Kept]:
    with kept() as memory:
        yield memory


class Traced:
    """A FakeRouter with every wrapper on, as the process puts them."""

    def __init__(self, tracing: Tracing, fake: FakeRouter) -> None:
        self.fake = fake
        edge = TracedEdge(fake.edge, tracing)
        self.advisor = Advisor(
            edge=edge,
            directory=fake.directory,
            lookup=ObservedLookup(fake.lookup, Metrics(), tracing),
            config=fake.config,
            fallbacks=fake.fallbacks,
        )
        journal = ObservedJournal(fake.journal, Metrics(), tracing)
        kv_router = fake.config.dynamo.kv_router
        self.records = RouteRecords(
            journal, fake.directory, Attempts(), fake.fallbacks, router="r1", kv_router=kv_router
        )
        service = RouterService(
            edge,
            TracedAdvisor(self.advisor, tracing),
            TracedHints(fake.hints, tracing),
            self.records,
            fake.directory,
            fake.fallbacks,
            fake.loaded,
            fake.identity,
        )
        self.handle = TracedHandler(service.handle, tracing)
        self.gateway = GatewayAdvice(
            service, TracedAdvisor(self.advisor, tracing), edge, fake.loaded, model="m", tracing=tracing
        )

    def call(self, traceparent: str | None = PARENT, **routing: Any) -> AsyncIterator[Chunk]:
        call = CallContext("req-1", {}, traceparent, lambda: False)
        return self.handle(a_request(routing=routing or None), call)

    async def run(self, traceparent: str | None = PARENT, **routing: Any) -> list[Chunk]:
        return [chunk async for chunk in self.call(traceparent, **routing)]


async def test_one_trace_holds_every_stage_under_the_frontends_context(spans: Kept) -> None:
    edge = FakeEdge(script=chunks(3, cached=960, prompt=1024), ranks={A1: RankOverlap(1, 0, 0)})
    made = Traced(spans.tracing, FakeRouter(edge=edge, lookup=donor_on_a1()))
    assert [chunk["token_ids"] for chunk in await made.run(cache_salt=CANARY)] == [[0], [1], [2]]
    found = spans.by_name()
    assert set(found) == {
        "semkv.route",
        "semkv.exact",
        "semkv.lookup",
        "semkv.score",
        "semkv.hint",
        "semkv.dispatch",
    }
    route = found["semkv.route"]
    assert (route.trace_id, route.parent_id) == ("ab" * 16, "cd" * 8)
    for name, span in found.items():
        assert span.trace_id == route.trace_id
        assert name == "semkv.route" or span.parent_id == route.span_id
        assert route.start <= span.start <= span.end <= route.end
        assert not span.failed
    order = ["semkv.exact", "semkv.lookup", "semkv.score", "semkv.hint", "semkv.dispatch"]
    assert [s.name for s in sorted((found[n] for n in order), key=lambda s: s.end)] == order
    opened, said = made.fake.opened, route.attributes
    assert said["semkv.route.id"] == opened.route_id
    assert said["semkv.request.id"] == "req-1"
    assert (said["semkv.placement.mode"], said["semkv.placement.reason"]) == ("enforce", "placed")
    assert (said["semkv.replica.name"], said["semkv.evidence.donor"]) == ("w-a/1", "d" * 32)
    assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.cache_read.input_tokens"]) == (1024, 960)
    assert (said["semkv.tokens.evidence"], said["semkv.tokens.hinted"]) == (opened.evidence_tokens, 928)
    assert found["semkv.lookup"].attributes == {"semkv.lookup.result": "hit", "semkv.lookup.matches": 1}
    assert found["semkv.score"].attributes["semkv.score.candidates"] == 4
    assert found["semkv.hint"].attributes == {"semkv.replica.name": "w-a/1", "semkv.hint.sent": True}
    dispatch = found["semkv.dispatch"]
    assert (dispatch.attributes["semkv.dispatch.end"], dispatch.attributes["semkv.dispatch.pinned"]) == (
        "complete",
        True,
    )
    assert "semkv.first_chunk" in dispatch.events
    # What the records and the hint carry is the route's own context, so that others become its children.
    assert opened.traceparent == f"00-{route.trace_id}-{route.span_id}-01"
    assert CANARY not in spans.text()


async def test_without_a_context_the_route_begins_a_trace(spans: Kept) -> None:
    made = Traced(spans.tracing, FakeRouter())
    await made.run(None)
    await made.run("not a context")
    routes = [span for span in spans.all() if span.name == "semkv.route"]
    assert [span.parent_id for span in routes] == ["", ""]
    assert len({span.trace_id for span in routes}) == 2


async def test_a_pin_given_up_is_an_event(spans: Kept) -> None:
    made = Traced(spans.tracing, FakeRouter(edge=FakeEdge(refuse="overloaded"), lookup=donor_on_a1()))
    await made.run()
    dispatch = spans.by_name()["semkv.dispatch"]
    assert dispatch.events["semkv.pin_given_up"] == {"semkv.dispatch.fallback": "overloaded"}
    assert dispatch.attributes["semkv.dispatch.pinned"] is False


async def test_a_failed_request_is_a_failed_span_and_fails_as_before(spans: Kept) -> None:
    failure = RequestFailed(FailureKind.WORKER_LOST, "gone")
    made = Traced(spans.tracing, FakeRouter(edge=FakeEdge(script=[*chunks(2)[:1], failure])))
    with pytest.raises(RequestFailed):
        await made.run()
    found = spans.by_name()
    for name in ("semkv.route", "semkv.dispatch"):
        assert found[name].failed
        assert found[name].attributes["error.type"] == "worker_lost"


@pytest.mark.parametrize(
    ("lookup", "error"), [(Found(status="timeout"), "timeout"), (RuntimeError(CANARY), "RuntimeError")]
)
async def test_a_failed_lookup_is_a_failed_span_without_its_text(spans: Kept, lookup: Any, error: str) -> None:
    made = Traced(spans.tracing, FakeRouter(lookup=FakeLookup(lookup)))
    assert len(await made.run()) == 3
    found = spans.by_name()["semkv.lookup"]
    assert found.failed
    assert found.attributes["error.type"] == error
    assert CANARY not in spans.text()


async def test_a_lookup_given_up_at_its_deadline_is_unfinished(spans: Kept) -> None:
    async def never(_: str) -> None:
        await asyncio.Event().wait()

    fake = FakeRouter({"evidence": {"deadline_ms": 1.0, "exact_deadline_ms": 1000}}, lookup=FakeLookup(gate=never))
    assert len(await Traced(spans.tracing, fake).run()) == 3
    await asyncio.sleep(0)  # the lookup that was given up hears of it
    assert spans.by_name()["semkv.lookup"].attributes["error.type"] == "unfinished"
    assert fake.opened.lookup == "timeout"


async def test_a_client_that_leaves_ends_every_span_of_its_own_route(spans: Kept) -> None:
    made = Traced(spans.tracing, FakeRouter())
    stream = made.call()
    await stream.__anext__()
    await stream.aclose()  # type: ignore[attr-defined]
    found = spans.by_name()
    assert found["semkv.dispatch"].attributes["semkv.dispatch.end"] == "cancelled"
    assert found["semkv.dispatch"].parent_id == found["semkv.route"].span_id
    made.fake.journal.check()


async def test_requests_side_by_side_keep_their_own_traces(spans: Kept) -> None:
    async def wait(stage: str) -> None:
        await asyncio.sleep(0)

    lookup = donor_on_a1()
    lookup.gate = wait
    made = Traced(spans.tracing, FakeRouter(edge=FakeEdge(gate=wait), lookup=lookup))
    parents = [f"00-{number + 1:032x}-{'cd' * 8}-01" for number in range(8)]
    await asyncio.gather(*(made.run(parent) for parent in parents))
    by_trace: dict[str, list[str]] = {}
    for span in spans.all():
        by_trace.setdefault(span.trace_id, []).append(span.name)
    assert sorted(by_trace) == sorted(parent[3:35] for parent in parents)
    assert {tuple(sorted(names)) for names in by_trace.values()} == {
        ("semkv.dispatch", "semkv.exact", "semkv.hint", "semkv.lookup", "semkv.route", "semkv.score")
    }


async def test_without_evidence_nothing_is_weighed(spans: Kept) -> None:
    await Traced(spans.tracing, FakeRouter()).run()
    assert set(spans.by_name()) == {"semkv.dispatch", "semkv.exact", "semkv.lookup", "semkv.route"}


async def test_off_mode_is_a_route_and_nothing_else(spans: Kept) -> None:
    made = Traced(spans.tracing, FakeRouter({"placement": {"mode": "off"}}))
    await made.run()
    assert set(spans.by_name()) == {"semkv.route"}


def test_off_is_the_part_itself() -> None:
    edge = FakeEdge()
    assert traced(edge, TracedEdge, None) is edge


async def test_advice_for_a_gateway_is_a_route_without_a_dispatch(spans: Kept) -> None:
    made = Traced(spans.tracing, FakeRouter(lookup=donor_on_a1()))
    answer = await made.gateway.answer_body(
        {"token_ids": list(range(1, 1025)), "cache_salt": CANARY, "request_id": "req-1", "traceparent": PARENT}
    )
    found = spans.by_name()
    assert set(found) == {"semkv.route", "semkv.exact", "semkv.lookup", "semkv.score", "semkv.hint"}
    route = found["semkv.route"]
    assert (route.trace_id, route.parent_id) == ("ab" * 16, "cd" * 8)
    assert route.attributes["semkv.route.id"] == answer["route_id"] == made.fake.opened.route_id
    assert CANARY not in spans.text()


async def test_a_gateways_trace_context_is_a_trace_context_or_nothing(spans: Kept) -> None:
    made = Traced(spans.tracing, FakeRouter(lookup=donor_on_a1()))
    fake = made.fake  # without spans the context would be handed on as it came
    gateway = GatewayAdvice(fake.service, fake.advisor, fake.edge, fake.loaded, model="m")
    await gateway.answer_body({"token_ids": list(range(1, 1025)), "traceparent": f"{CANARY}\n"})
    assert made.fake.opened.traceparent is None
    assert (await made.gateway.answer_body({"token_ids": "text"}))["error"].startswith("token_ids")


class Faulty:
    """Tracing that fails wherever it is touched."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def fail(*_: Any, **__: Any) -> Any:
            raise RuntimeError(name)

        return fail


class HalfFaulty(Faulty):
    """... but begins the route's span."""

    def __init__(self, tracing: Tracing) -> None:
        self.start_route = tracing.start

    def start(self, name: str, **options: Any) -> Any:
        return self.start_route(name, **options)


@pytest.mark.parametrize("half", [False, True])
async def test_a_fault_of_tracing_reaches_no_request(spans: Kept, half: bool) -> None:
    faulty = HalfFaulty(spans.tracing) if half else Faulty()
    made = Traced(faulty, FakeRouter(lookup=donor_on_a1()))  # type: ignore[arg-type]
    assert len(await made.run()) == 3
    made.fake.journal.check()
    assert made.fake.opened.decision_reason == "placed"
    assert made.fake.fallbacks.counts == {}


def closed_by(fake: FakeRouter, history: Any, told: MaterializationReport) -> None:
    tracker = RouteTracker(30.0, history.add, history.add_orphan)
    opened = fake.opened
    tracker.opened(opened, opened.opened_at)
    tracker.observed(fake.ended, fake.ended.observed_at)
    tracker.report(told, fake.ended.observed_at)
    tracker.expire(fake.ended.observed_at + 100.0)


@pytest.mark.parametrize(
    ("router", "live", "told"), [("r1", True, True), ("another", True, False), ("r1", False, False)]
)
async def test_the_outcome_is_told_in_the_routes_trace_by_its_own_router(
    spans: Kept, router: str, live: bool, told: bool
) -> None:
    made = Traced(spans.tracing, FakeRouter(lookup=donor_on_a1()))
    await made.run()
    opened = made.fake.opened
    connector = f"00-{'12' * 16}-{'34' * 8}-01"
    inner = History(10)
    history = ObservedHistory(inner, Metrics(), spans.tracing, router=router, is_live=lambda: live)
    answer = replace_report(report(), opened, traceparent=connector)
    closed_by(made.fake, history, answer)
    assert len(inner) == 1
    found = spans.by_name()
    assert ("semkv.outcome" in found) is told
    if told:
        outcome = found["semkv.outcome"]
        assert outcome.parent_id == found["semkv.route"].span_id
        assert outcome.trace_id == "ab" * 16
        assert outcome.links == [("12" * 16, "34" * 8)]
        assert outcome.attributes["semkv.outcome.result"] == inner.recent(1)[0].outcome.value
        assert outcome.start <= outcome.end <= time.time_ns()


async def test_a_report_that_gives_back_what_it_was_sent_is_no_link(spans: Kept) -> None:
    made = Traced(spans.tracing, FakeRouter(lookup=donor_on_a1()))
    await made.run()
    opened = made.fake.opened
    history = ObservedHistory(History(10), Metrics(), spans.tracing, router="r1", is_live=lambda: True)
    closed_by(made.fake, history, replace_report(report(), opened, traceparent=opened.traceparent))
    assert spans.by_name()["semkv.outcome"].links == []


def replace_report(made: MaterializationReport, opened: Any, **changes: Any) -> MaterializationReport:
    return msgspec.structs.replace(
        made,
        route_id=opened.route_id,
        prompt_key=opened.prompt_key,
        stable_routing_id=opened.stable_routing_id,
        dp_rank=opened.dp_rank,
        prompt_tokens=opened.input_tokens,
        **changes,
    )
