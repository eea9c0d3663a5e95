"""What goes wrong on our side of a request: each fault is counted by its reason, and the client gets Dynamo's own
answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.evidence.deadline import DeadlineRunner
from dynamo_semkv.router.fallback import FallbackReason
from dynamo_semkv.router.runtime_errors import FailureKind, RequestFailed
from dynamo_semkv.testing import ScriptedProvider
from tests.router.fakes import (
    A1,
    FakeEdge,
    FakeLookup,
    FakeRouter,
    Found,
    a_request,
    donor_on_a1,
    match,
    never,
)


@pytest.mark.parametrize("stage", ["overlap", "loads"])
async def test_production_stack_1016_dynamos_answer_that_never_comes_costs_the_deadline_only(stage: str) -> None:
    async def gate(at: str) -> None:
        if at == stage:
            await never(at)

    fake = FakeRouter({"evidence": {"exact_deadline_ms": 20}}, edge=FakeEdge(gate=gate), lookup=donor_on_a1())
    assert len(await asyncio.wait_for(fake.run(), 10)) == 3
    assert fake.opened.decision_reason == "exact_unknown"
    assert fake.dispatch.pin is None
    assert fake.fallbacks.counts == {FallbackReason.EXACT_TIMEOUT: 1}
    assert fake.lookup.queries == []


async def test_production_stack_1016_a_lookup_that_never_returns_is_a_miss() -> None:
    fake = FakeRouter({"evidence": {"deadline_ms": 20, "exact_deadline_ms": 1000}}, lookup=FakeLookup(gate=never))
    assert len(await asyncio.wait_for(fake.run(), 10)) == 3
    assert (fake.opened.lookup, fake.opened.decision_reason) == ("timeout", "lookup_timeout")
    assert fake.fallbacks.counts == {FallbackReason.LOOKUP_TIMEOUT: 1}


@pytest.mark.parametrize("stage", ["overlap", "loads"])
async def test_dynamos_failure_leaves_the_choice_to_dynamo(stage: str) -> None:
    fake = FakeRouter(edge=FakeEdge(fail={stage: Exception("InvalidRequest: no")}), lookup=donor_on_a1())
    assert len(await fake.run()) == 3
    assert fake.opened.decision_reason == "exact_unknown"
    assert fake.fallbacks.counts == {FallbackReason.EXACT_ERROR: 1}


async def test_a_lookup_that_raises_is_a_miss_with_its_reason() -> None:
    fake = FakeRouter(lookup=FakeLookup(RuntimeError("index broken")))
    assert len(await fake.run()) == 3
    assert (fake.opened.lookup, fake.opened.decision_reason) == ("error", "lookup_error")
    assert fake.fallbacks.counts == {FallbackReason.LOOKUP_ERROR: 1}


@pytest.mark.parametrize("status", ["timeout", "error"])
async def test_the_runners_own_misses_are_counted(status: str) -> None:
    fake = FakeRouter(lookup=FakeLookup(Found(status=status)))
    assert len(await fake.run()) == 3
    assert fake.opened.decision_reason == f"lookup_{status}"
    assert sum(fake.fallbacks.counts.values()) == 1


async def test_matches_of_one_provider_count_although_another_was_late() -> None:
    fake = FakeRouter(lookup=FakeLookup(Found([match(("w-a", 1), 960)], status="timeout")))
    await fake.run()
    assert fake.opened.decision_reason == "placed"


async def test_a_bug_in_the_advice_is_counted_and_the_request_served() -> None:
    fake = FakeRouter(edge=FakeEdge(fail={"live_replicas": RuntimeError("bug")}))
    assert len(await fake.run()) == 3
    assert fake.dispatch.pin is None
    assert fake.fallbacks.counts == {FallbackReason.ADVICE_ERROR: 1}
    assert fake.journal.opens == []


@pytest.mark.parametrize("token_ids", [None, "text", b"odd", [1, -2], [1, 2**40], ["a"]])
async def test_a_request_that_advice_cannot_read_is_passed_through(token_ids: Any) -> None:
    fake = FakeRouter()
    request = a_request(token_ids=token_ids)
    assert len(await fake.run(request)) == 3
    assert fake.dispatch.sent == request
    assert fake.fallbacks.counts == {FallbackReason.REQUEST_UNREADABLE: 1}


async def test_a_record_that_cannot_be_written_stops_nothing() -> None:
    fake = FakeRouter(lookup=donor_on_a1())
    fake.journal.fail = RuntimeError("full")
    assert len(await fake.run()) == 3
    assert fake.dispatch.pin == A1
    assert fake.fallbacks.counts == {FallbackReason.JOURNAL_ERROR: 2}
    assert fake.records.open_routes == 0


@pytest.mark.parametrize("takes", [False, RuntimeError("bus")])
async def test_a_bus_that_takes_no_hint_leaves_the_one_in_the_request(takes: Any) -> None:
    fake = FakeRouter(lookup=donor_on_a1())
    fake.hints.takes = takes
    await fake.run()
    assert fake.dispatch.sent is not None
    assert fake.dispatch.sent["extra_args"]["semkv"]
    assert fake.opened.hinted_tokens == 960
    assert fake.fallbacks.counts == {FallbackReason.HINT_NOT_SENT: 1}


async def test_a_hint_that_cannot_be_made_is_not_counted_as_hinted(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise ContractError("hint", "x", "y")

    monkeypatch.setattr("dynamo_semkv.router.service.build_envelope", broken)
    fake = FakeRouter(lookup=donor_on_a1())
    await fake.run()
    assert fake.dispatch.pin == A1
    assert fake.dispatch.sent is not None
    assert fake.dispatch.sent["extra_args"] is None
    assert (fake.opened.placed_tokens, fake.opened.hinted_tokens) == (960, 0)
    assert fake.fallbacks.counts == {FallbackReason.HINT_ERROR: 1}


@pytest.mark.parametrize("extra_args", ["text", [1], 5, "", [], 0])
async def test_extra_args_that_cannot_carry_a_hint_pass_unchanged_and_the_hint_goes_over_the_bus(
    extra_args: Any,
) -> None:
    fake = FakeRouter(lookup=donor_on_a1())
    assert len(await fake.run(a_request(extra_args=extra_args))) == 3
    assert fake.dispatch.pin == A1
    assert fake.dispatch.sent is not None
    assert fake.dispatch.sent["extra_args"] == extra_args
    assert len(fake.hints.sent) == 1
    assert fake.opened.hinted_tokens == 960
    assert fake.fallbacks.counts == {FallbackReason.HINT_ERROR: 1}


async def test_a_hint_that_went_nowhere_is_not_counted_as_hinted() -> None:
    fake = FakeRouter(lookup=donor_on_a1())
    fake.hints.takes = False
    await fake.run(a_request(extra_args="text"))
    assert (fake.opened.placed_tokens, fake.opened.hinted_tokens) == (960, 0)
    assert fake.fallbacks.counts == {FallbackReason.HINT_NOT_SENT: 1, FallbackReason.HINT_ERROR: 1}


@pytest.mark.parametrize("broken", ["new_route_id", "envelope_to_plain"])
async def test_a_fault_between_advice_and_dispatch_ends_in_dynamos_choice(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("bug")

    monkeypatch.setattr(f"dynamo_semkv.router.service.{broken}", fails)
    fake = FakeRouter(lookup=donor_on_a1())
    request = a_request()
    assert len(await fake.run(request)) == 3
    assert (fake.dispatch.pin, fake.dispatch.sent) == (None, request)
    assert fake.fallbacks.counts == {FallbackReason.ADVICE_ERROR: 1}
    assert (fake.records.open_routes, fake.journal.opens, fake.journal.ends) == (0, [], [])


@pytest.mark.parametrize("request_", [[1], "x", 5])
async def test_what_is_no_mapping_is_an_invalid_request(request_: Any) -> None:
    fake = FakeRouter()
    with pytest.raises(RequestFailed, match=r"^request: got .* a mapping with token_ids") as caught:
        await fake.run(request_)
    assert caught.value.kind is FailureKind.INVALID_REQUEST
    assert fake.edge.dispatched == []


async def test_a_pinned_dispatch_that_cannot_be_made_is_an_unpinned_one_of_the_same_route(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeRouter(lookup=donor_on_a1())
    whole = fake.edge.dispatch

    def only_plain(request: Any, pin: Any, **more: Any) -> Any:
        if pin is not None:
            raise RuntimeError("bug")
        return whole(request, pin, **more)

    monkeypatch.setattr(fake.edge, "dispatch", only_plain)
    assert len(await fake.run()) == 3
    assert fake.dispatch.pin is None
    assert fake.ended.end == "complete"
    assert fake.records.open_routes == 0
    fake.journal.check()
    assert fake.fallbacks.counts == {FallbackReason.ADVICE_ERROR: 1}


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (FailureKind.WORKER_LOST, FallbackReason.PIN_WORKER_LOST),
        (FailureKind.OVERLOADED, FallbackReason.PIN_OVERLOADED),
        (FailureKind.INVALID_PIN, FallbackReason.PIN_INVALID),
    ],
)
async def test_dynamo_7615_a_refused_pin_goes_unpinned_and_unhinted(kind: FailureKind, reason: FallbackReason) -> None:
    fake = FakeRouter(edge=FakeEdge(refuse=kind.value), lookup=donor_on_a1())
    request = a_request()
    assert len(await fake.run(request)) == 3
    assert fake.dispatch.pin == A1
    assert fake.dispatch.sent == request
    assert fake.opened.dp_rank == 1
    assert (fake.ended.end, fake.ended.served_stable_routing_id, fake.ended.served_dp_rank) == ("complete", "w-b", 1)
    assert fake.fallbacks.counts == {reason: 1}


async def test_production_stack_1016_a_provider_that_never_returns_takes_only_its_own_answer() -> None:
    provider = ScriptedProvider()
    provider.then(provider.hang)
    good = ScriptedProvider([match(("w-a", 1), 960)], name="good")
    runner = DeadlineRunner([provider, good], 0.8, 8)
    fake = FakeRouter(lookup=runner)
    try:
        for i in range(3):
            assert len(await asyncio.wait_for(fake.run(request_id=str(i)), 10)) == 3
    finally:
        provider.release()
        runner.close()
    assert provider.entered.is_set()
    # It answers once, then waits for ever: while it is stuck it is not asked again.
    assert len(provider.queries) == 2
    assert [o.decision_reason for o in fake.journal.opens] == ["placed", "placed", "placed"]
    assert {d.pin for d in fake.edge.dispatched} == {A1}


async def test_production_stack_1016_with_only_a_stuck_provider_requests_go_on_without_evidence() -> None:
    provider = ScriptedProvider()
    provider.then(provider.hang)
    runner = DeadlineRunner([provider], 0.8, 8)
    fake = FakeRouter(lookup=runner)
    try:
        for i in range(3):
            assert len(await asyncio.wait_for(fake.run(request_id=str(i)), 10)) == 3
    finally:
        provider.release()
        runner.close()
    assert [o.decision_reason for o in fake.journal.opens] == ["no_evidence", "lookup_timeout", "lookup_skipped"]
    assert fake.fallbacks.counts == {FallbackReason.LOOKUP_TIMEOUT: 1}


async def test_overload_sheds_advice_and_no_request() -> None:
    """More at once than `evidence.max_inflight`: the first are weighed, the rest go to Dynamo at once; then all is as
    before."""
    gate = asyncio.Event()

    async def held(stage: str) -> None:
        if stage == "lookup":
            await gate.wait()

    found = donor_on_a1()
    lookup = FakeLookup(found.found, gate=held)
    fake = FakeRouter({"evidence": {"max_inflight": 3, "deadline_ms": 1000, "exact_deadline_ms": 1000}}, lookup=lookup)
    tasks = [asyncio.ensure_future(fake.run(request_id=str(n))) for n in range(20)]
    await asyncio.gather(*tasks[3:])
    assert not any(task.done() for task in tasks[:3])
    gate.set()
    assert all(len(chunks) == 3 for chunks in await asyncio.gather(*tasks))
    assert sorted(event.decision_reason for event in fake.journal.opens) == ["overloaded"] * 17 + ["placed"] * 3
    await fake.run(request_id="later")
    assert fake.journal.opens[-1].decision_reason == "placed"
    fake.journal.check()


async def test_an_answer_whose_budget_is_spent_is_ended_and_dispatched_nowhere() -> None:
    """What the frontend sends when a worker died behind the last token: the rest of the request, with nothing left to
    generate."""
    fake = FakeRouter(lookup=donor_on_a1())
    assert await fake.run(a_request(stop_conditions={"max_tokens": 0})) == [
        {"token_ids": [], "finish_reason": "length"}
    ]
    assert fake.edge.dispatched == []
    assert fake.journal.opens == []
    assert len(await fake.run(a_request(stop_conditions={"max_tokens": 1}))) == 3
