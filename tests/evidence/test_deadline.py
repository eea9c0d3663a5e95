"""The hard deadline: whatever a provider does, the lookup comes back, and what it says is checked."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from dynamo_semkv.contracts.evidence import MatchType, SemanticTrtMatch
from dynamo_semkv.contracts.location import Tier, WorkerLocation
from dynamo_semkv.evidence.breaker import Breaker, BreakerState
from dynamo_semkv.evidence.claims import MAX_CLAIMS
from dynamo_semkv.evidence.deadline import DeadlineRunner, LookupStatus
from dynamo_semkv.evidence.provider import LookupQuery
from dynamo_semkv.testing import ManualClock, ScriptedProvider
from tests.evidence.documents import document, namespace, query_of

QUERY = query_of(document(1, 256), namespace())
AMPLE = 30.0
"""A deadline that no healthy lookup reaches, however busy the machine is."""
SHORT = 0.3
"""One that a hanging provider is sure to have been entered before."""


def match(donor_id: str = "d", **fields: Any) -> SemanticTrtMatch:
    base: dict[str, Any] = {
        "reusable_token_count": 128,
        "match_type": MatchType.SEMANTIC_CANDIDATE,
        "location": WorkerLocation(1, 0, Tier.HOST_PINNED),
        "provider": "scripted",
        "provider_generation": "g1",
        "overlap": 0.5,
        "confidence": 0.5,
    }
    return SemanticTrtMatch(donor_id=donor_id, **(base | fields))


class Runners:
    def __init__(self) -> None:
        self.made: list[tuple[DeadlineRunner, Sequence[ScriptedProvider]]] = []

    def __call__(
        self, *providers: ScriptedProvider, deadline: float = AMPLE, max_matches: int = 8, **more: Any
    ) -> DeadlineRunner:
        runner = DeadlineRunner(providers, deadline, max_matches, **more)
        self.made.append((runner, providers))
        return runner

    def close(self) -> None:
        for runner, providers in self.made:
            for provider in providers:
                provider.release()
            runner.close(timeout=10.0)


@pytest.fixture
def runner() -> Iterator[Runners]:
    runners = Runners()
    yield runners
    runners.close()


def hanging(name: str = "hanging") -> ScriptedProvider:
    provider = ScriptedProvider(name=name)
    provider._steps = [provider.hang]
    return provider


async def test_a_hit_names_who_said_it(runner: Runners) -> None:
    target = runner(ScriptedProvider([match()]), ScriptedProvider(name="other"))
    result = await target.lookup(QUERY)
    assert result.status is LookupStatus.HIT
    assert [m.donor_id for m in result.matches] == ["d"]
    assert {name: status for name, (status, _) in result.by_provider.items()} == {
        "scripted": LookupStatus.HIT,
        "other": LookupStatus.MISS,
    }
    assert result.by_provider["scripted"][1] >= 0.0


async def test_no_match_is_a_miss_and_no_provider_is_skipped(runner: Runners) -> None:
    assert (await runner(ScriptedProvider()).lookup(QUERY)).status is LookupStatus.MISS
    assert (await runner().lookup(QUERY)).status is LookupStatus.SKIPPED


async def test_lookups_run_off_the_event_loop(runner: Runners) -> None:
    provider = ScriptedProvider()
    await runner(provider).lookup(QUERY)
    assert provider.threads == ["semkv-evidence-scripted"]
    assert threading.current_thread().name not in provider.threads


async def test_production_stack_1016_a_provider_that_never_returns_costs_one_deadline_once(runner: Runners) -> None:
    stuck, healthy = hanging(), ScriptedProvider([match()])
    target = runner(stuck, healthy, deadline=SHORT)
    first = await target.lookup(QUERY)
    assert first.by_provider["hanging"][0] is LookupStatus.TIMEOUT
    assert target.snapshot()["hanging"]["stuck"] is True
    second = await target.lookup(QUERY)
    assert second.by_provider["hanging"] == (LookupStatus.SKIPPED, 0.0)
    assert len(stuck.queries) == 1
    assert target.snapshot()["hanging"]["lookups"] == {"timeout": 1, "skipped": 1}


async def test_a_lookup_that_only_times_out_says_so(runner: Runners) -> None:
    result = await runner(hanging(), deadline=SHORT).lookup(QUERY)
    assert (result.status, result.matches) == (LookupStatus.TIMEOUT, ())


async def test_a_result_after_the_deadline_is_dropped_and_counted(runner: Runners) -> None:
    go = threading.Event()

    def late(_: LookupQuery) -> Sequence[SemanticTrtMatch]:
        go.wait()
        return [match("late")]

    provider = ScriptedProvider(late, [match("fresh")])
    target = runner(provider, deadline=SHORT)
    assert (await target.lookup(QUERY)).status is LookupStatus.TIMEOUT
    go.set()
    for _ in range(2_000):
        if target.snapshot()["scripted"]["late"]:
            break
        await asyncio.sleep(0.005)
    assert target.snapshot()["scripted"]["late"] == 1
    result = await target.lookup(QUERY)
    assert [m.donor_id for m in result.matches] in (["fresh"], []), "never the late one"


async def test_what_waited_too_long_is_not_begun(runner: Runners) -> None:
    provider = hanging()
    target = runner(provider, deadline=SHORT)
    first, second = await asyncio.gather(target.lookup(QUERY), target.lookup(QUERY))
    assert {first.status, second.status} == {LookupStatus.TIMEOUT}
    provider.release()
    target.close(timeout=10.0)  # its thread ends once it has taken what waited
    assert len(provider.queries) == 1


@pytest.mark.parametrize("error", [ValueError("prompt text"), MemoryError()])
async def test_a_provider_that_raises_is_a_miss_with_a_reason(
    runner: Runners, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    target = runner(ScriptedProvider(error, [match()]))
    result = await target.lookup(QUERY)
    assert result.status is LookupStatus.ERROR
    assert target.snapshot()["scripted"]["last_error"] == type(error).__name__
    assert "prompt text" not in caplog.text
    assert (await target.lookup(QUERY)).status is LookupStatus.HIT


async def test_a_provider_that_exits_does_not_take_its_thread_along(runner: Runners) -> None:
    def leave(_: LookupQuery) -> Sequence[SemanticTrtMatch]:
        raise SystemExit(1)

    target = runner(ScriptedProvider(leave, [match()]))
    assert (await target.lookup(QUERY)).status is LookupStatus.ERROR
    assert (await target.lookup(QUERY)).status is LookupStatus.HIT


async def test_one_providers_fault_leaves_the_others_evidence(runner: Runners) -> None:
    result = await runner(ScriptedProvider(ValueError(), name="bad"), ScriptedProvider([match()])).lookup(QUERY)
    assert result.status is LookupStatus.HIT
    assert result.by_provider["bad"][0] is LookupStatus.ERROR


async def test_numpys_numbers_become_pythons_which_hints_and_route_events_are_written_with(runner: Runners) -> None:
    found = match(
        reusable_token_count=np.int64(128),
        exact_prefix_tokens=np.uint32(64),
        overlap=np.float32(0.5),
        confidence=np.float64(0.25),
        location=WorkerLocation(np.uint64(2**64 - 1), np.int32(1), Tier.DISK),
    )
    (plain,) = (await runner(ScriptedProvider([found])).lookup(QUERY)).matches
    assert msgspec.convert(msgspec.to_builtins(plain), SemanticTrtMatch) == plain
    assert plain.location == WorkerLocation(2**64 - 1, 1, Tier.DISK)
    assert plain == match(
        reusable_token_count=128,
        exact_prefix_tokens=64,
        confidence=0.25,
        location=WorkerLocation(2**64 - 1, 1, Tier.DISK),
    )


@pytest.mark.parametrize(
    "shown",
    [ValueError("at it"), [], {"a": {1, 2}}, {"a": math.nan}, {"a": "x" * 100_000}],
    ids=lambda it: str(it)[:20],
)
async def test_a_provider_that_cannot_show_itself_costs_the_page_its_own_part_only(runner: Runners, shown: Any) -> None:
    class Showing(ScriptedProvider):
        def snapshot(self) -> dict[str, Any]:
            if isinstance(shown, Exception):
                raise shown
            return shown  # type: ignore[no-any-return]

    page = runner(Showing([match()], name="showing"), ScriptedProvider([match()])).snapshot()
    assert json.loads(json.dumps(page, allow_nan=False)) == page
    assert page["showing"]["state"] == {}
    assert page.keys() == {"showing", "scripted"}


@pytest.mark.parametrize("error", [ValueError(), SystemExit(1), asyncio.CancelledError()], ids=repr)
async def test_a_provider_that_fails_to_take_note_fails_no_lookup_and_fills_no_log(
    runner: Runners, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    class Noting(ScriptedProvider):
        def prompt_routed(self, query: LookupQuery) -> None:
            raise error

    target = runner(Noting([match()]))
    for _ in range(9):
        assert (await target.lookup(QUERY)).status is LookupStatus.HIT
    assert target.snapshot()["scripted"]["lookups"]["prompt_errors"] == 9
    assert caplog.text.count("failed to take note") == 4, "1, 2, 4, 8"


async def test_a_provider_that_cannot_be_closed_keeps_no_other_open(runner: Runners) -> None:
    closed: list[str] = []

    class Closing(ScriptedProvider):
        def close(self, timeout: float) -> None:
            closed.append(self.name)
            raise ValueError("not now")

    runner(Closing(name="one"), Closing(name="two")).close()
    assert closed == ["one", "two"]


def endless() -> Iterator[SemanticTrtMatch]:
    while True:
        yield match()


@pytest.mark.parametrize(
    "nonsense", [7, None, "text", {"a": 1}, endless(), {match()}], ids=lambda it: type(it).__name__
)
async def test_a_result_that_is_no_sequence_is_an_error(runner: Runners, nonsense: Any) -> None:
    assert (await runner(ScriptedProvider(lambda _: nonsense)).lookup(QUERY)).status is LookupStatus.ERROR


async def test_of_too_many_matches_the_rest_is_not_looked_at(runner: Runners) -> None:
    target = runner(ScriptedProvider([match(f"d{n}") for n in range(MAX_CLAIMS)] + [None, None]))  # type: ignore[list-item]
    assert (await target.lookup(QUERY)).status is LookupStatus.HIT
    lookups = target.snapshot()["scripted"]["lookups"]
    assert (lookups["too_many_matches"], lookups.get("unsound_matches", 0)) == (1, 0)


class HangingList(list[SemanticTrtMatch]):
    """Hangs in whoever looks at it, the loop's thread excepted, which it tells on."""

    def __init__(self) -> None:
        super().__init__([match()])
        self.looked_at: set[str] = set()
        self.release = threading.Event()

    def __iter__(self) -> Iterator[SemanticTrtMatch]:
        self.looked_at.add(threading.current_thread().name)
        if threading.current_thread() is not threading.main_thread():
            self.release.wait(60.0)
        return super().__iter__()

    def __len__(self) -> int:
        self.looked_at.add(threading.current_thread().name)
        return super().__len__()


async def test_what_hangs_when_it_is_looked_at_hangs_the_providers_thread_and_its_deadline_only(
    runner: Runners,
) -> None:
    answer = HangingList()
    target = runner(ScriptedProvider(lambda _: answer), deadline=SHORT)
    try:
        assert (await target.lookup(QUERY)).status is LookupStatus.TIMEOUT
        assert target.snapshot()["scripted"]["stuck"]
    finally:
        answer.release.set()
    assert answer.looked_at == {"semkv-evidence-scripted"}


async def test_matches_come_best_first_one_a_donor_and_not_too_many(runner: Runners) -> None:
    exact = match("e", match_type=MatchType.EXACT_EQUIVALENT, exact_prefix_tokens=64, reusable_token_count=64)
    ones = [match("c", reusable_token_count=100), match("a", reusable_token_count=200), exact]
    again = [match("a", provider="other", reusable_token_count=210), match("b", reusable_token_count=90)]
    target = runner(ScriptedProvider(ones), ScriptedProvider(again, name="other"), max_matches=3)
    result = await target.lookup(QUERY)
    assert [(m.donor_id, m.provider) for m in result.matches] == [("e", "scripted"), ("a", "other"), ("c", "scripted")]


async def test_where_some_are_left_out_the_best_of_each_place_stays(runner: Runners) -> None:
    crowd = [match(f"a{n}", reusable_token_count=200 - n) for n in range(6)]
    elsewhere = match("b", reusable_token_count=100, location=WorkerLocation(2, 0, Tier.HOST_PINNED))
    result = await runner(ScriptedProvider([*crowd, elsewhere]), max_matches=3).lookup(QUERY)
    assert [m.donor_id for m in result.matches] == ["a0", "a1", "b"]


async def test_less_than_the_minimum_overlap_is_no_evidence(runner: Runners) -> None:
    target = runner(ScriptedProvider([match(reusable_token_count=63)]), min_overlap_tokens=64)
    assert (await target.lookup(QUERY)).status is LookupStatus.MISS


async def test_many_lookups_at_once_are_all_answered(runner: Runners) -> None:
    target = runner(ScriptedProvider([match()]))
    results = await asyncio.gather(*[target.lookup(QUERY) for _ in range(50)])
    assert {result.status for result in results} == {LookupStatus.HIT}


async def test_a_failing_provider_is_put_aside_and_comes_back(runner: Runners) -> None:
    clock = ManualClock()
    provider = ScriptedProvider(*[ValueError()] * 6, [match()])
    target = runner(provider, breaker_clock=clock)
    statuses = [(await target.lookup(QUERY)).status for _ in range(7)]
    assert statuses == [LookupStatus.ERROR] * 5 + [LookupStatus.SKIPPED] * 2
    clock.advance(1.0)
    assert (await target.lookup(QUERY)).status is LookupStatus.ERROR, "the trial failed"
    clock.advance(1.0)
    assert (await target.lookup(QUERY)).status is LookupStatus.SKIPPED, "so the pause doubled"
    clock.advance(1.0)
    assert [(await target.lookup(QUERY)).status for _ in range(2)] == [LookupStatus.HIT] * 2
    assert target.snapshot()["scripted"]["breaker"] == "closed"


async def test_a_cancelled_request_leaves_nothing_behind(runner: Runners) -> None:
    clock = ManualClock()
    provider = ScriptedProvider(*[ValueError()] * 5)
    target = runner(provider, breaker_clock=clock)
    for _ in range(5):
        await target.lookup(QUERY)
    clock.advance(1.0)
    provider.then(provider.hang, [match()])
    provider.entered.clear()
    trial = asyncio.create_task(target.lookup(QUERY))
    assert await asyncio.to_thread(provider.entered.wait, 10.0)
    trial.cancel()
    with pytest.raises(asyncio.CancelledError):
        await trial
    provider.release()
    assert (await target.lookup(QUERY)).status is LookupStatus.HIT, "the next request carries the trial"


async def test_what_a_cancelled_request_asked_is_not_begun(runner: Runners) -> None:
    provider = hanging()
    target = runner(provider)
    asking = [asyncio.create_task(target.lookup(QUERY)) for _ in range(2)]
    assert await asyncio.to_thread(provider.entered.wait, 10.0)
    for task in asking:
        task.cancel()
    assert all(isinstance(it, asyncio.CancelledError) for it in await asyncio.gather(*asking, return_exceptions=True))
    provider.release()
    target.close(timeout=10.0)  # its thread ends once it has taken what waited
    assert len(provider.queries) == 1


async def test_close_does_not_wait_for_a_provider_that_never_returns(
    runner: Runners, caplog: pytest.LogCaptureFixture
) -> None:
    target = runner(hanging(), deadline=SHORT)
    await target.lookup(QUERY)
    target.close(timeout=0.05)
    assert "still inside a lookup" in caplog.text


def test_breaker_counts_failures_in_a_row_only() -> None:
    breaker = Breaker(ManualClock(), threshold=3)
    for _ in range(10):
        breaker.failure()
        breaker.failure()
        breaker.success()
    assert breaker.state is BreakerState.CLOSED
    assert breaker.opened == 0


def test_breaker_lets_one_trial_through_and_doubles_up_to_a_limit() -> None:
    clock = ManualClock()
    breaker = Breaker(clock, threshold=1, pause=1.0, longest=4.0)
    breaker.failure()
    for pause in (1.0, 2.0, 4.0, 4.0):
        clock.advance(pause - 0.01)
        assert not breaker.allow()
        clock.advance(0.01)
        assert breaker.allow()
        assert not breaker.allow(), "one at a time"
        breaker.failure()
    clock.advance(4.0)
    assert breaker.allow()
    breaker.success()
    assert breaker.allow()
    assert breaker.opened == 5


def test_equal_claims_are_ordered_the_same_way_whoever_is_asked_first() -> None:
    from dynamo_semkv.evidence.deadline import _rank

    ones = [match("b"), match("a"), match("a", provider="z"), replace(match("c"), confidence=0.9)]
    shuffled = [ones[n] for n in (2, 0, 3, 1)]
    assert sorted(ones, key=_rank) == sorted(shuffled, key=_rank)
