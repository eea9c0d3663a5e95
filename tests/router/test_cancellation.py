"""Cancelled at every await of the way of a request, one by one: the route closes once, Dynamo's stream is given back,
no task stays.

The points are read from the source, so a new `await` that no scenario reaches fails here until it is reached.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar

import pytest

pytest.importorskip("dynamo.llm", reason="the egress raises Dynamo's own exceptions")
from dynamo.llm.exceptions import Disconnected

from dynamo_semkv.router import (
    advisor,
    fallback,
    gateway_advice,
    observed,
    runtime_dispatch,
    runtime_egress,
    service,
    traced,
)
from dynamo_semkv.router.runtime_dispatch import RequestDispatch
from dynamo_semkv.router.runtime_egress import Inflight, adapter
from dynamo_semkv.router.runtime_errors import FailureKind, RequestFailed
from dynamo_semkv.telemetry.tracing import Tracing
from tests.router.await_points import Point, Suspended, points
from tests.router.fakes import FakeEdge, FakeRouter, a_request, chunks, donor_on_a1
from tests.router.test_traced import Traced
from tests.telemetry.memory import kept

MOST_STEPS = 400


async def step(*_: Any) -> None:
    await asyncio.sleep(0)


class Stream:
    """What KvRouter hands out: as long as somebody holds it, Dynamo has the request booked."""

    def __init__(self, script: list[Any]) -> None:
        self._script = script

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Any:
        await step()
        if not self._script:
            raise StopAsyncIteration
        item = self._script.pop(0)
        if isinstance(item, Exception):
            raise item
        return item


class Sender:
    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.closed = 0

    def send(self, chunk: Any) -> None:
        self.sent.append(chunk)

    def close(self) -> None:
        self.closed += 1


class Context:
    """Of one call, as Dynamo gives it."""

    metadata: ClassVar[dict[str, str]] = {}

    def __init__(self) -> None:
        self.left = asyncio.Event()

    def id(self) -> str:
        return "req-1"

    def trace_headers(self) -> dict[str, str]:
        return {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}

    def is_stopped(self) -> bool:
        return self.left.is_set()

    def is_killed(self) -> bool:
        return False


class World:
    """One request through everything of ours: egress, spans, service, advice, dispatch. Dynamo follows `script`: an
    entry a call."""

    def __init__(self, tracing: Tracing, script: list[Any]) -> None:
        self.script = script
        self.streams: list[weakref.ref[Stream]] = []
        lookup = donor_on_a1()
        lookup.gate = step
        self.fake = FakeRouter(edge=FakeEdge(gate=step), lookup=lookup)
        self.fake.edge.dispatch = self.dispatch  # type: ignore[method-assign,assignment]
        self.fake.edge.best_choice = self.best_choice  # type: ignore[method-assign]
        self.traced = Traced(tracing, self.fake)
        self.inflight = Inflight()
        self.sender, self.context = Sender(), Context()

    async def best_choice(self, *_: Any) -> Any:
        await step()
        return await FakeEdge.best_choice(self.fake.edge, [])

    async def generate(self, request: Any) -> Stream:
        await step()
        item = self.script.pop(0)
        if isinstance(item, Exception):
            raise item
        stream = Stream(list(item))
        self.streams.append(weakref.ref(stream))
        return stream

    def dispatch(self, request: Any, pin: Any, **options: Any) -> RequestDispatch:
        options.setdefault("unpinned", None)
        options.setdefault("annotate", None)
        return RequestDispatch(self.generate, request, pin, losses=self, **options)

    def lost(self, worker_id: int) -> None:
        return None

    async def push(self) -> None:
        serve = adapter(self.inflight, self.traced.handle)
        async for _ in serve(a_request(), self.context, self.sender):
            raise AssertionError("a push handler yields nothing")

    async def pull(self) -> None:
        async for chunk in adapter(self.inflight, self.traced.handle)(a_request(), self.context):
            self.sender.send(chunk)
            await step()

    async def advise(self) -> None:
        body = {"token_ids": list(range(1, 1025)), "model": "m", "request_id": "req-1"}
        assert "error" not in await self.traced.gateway.answer_body(body)

    async def advise_large(self) -> None:
        body = {"token_ids": list(range(gateway_advice.LARGE + 1)), "model": "m", "request_id": "req-1"}
        assert "error" not in await self.traced.gateway.answer_body(body)

    async def advise_over_the_endpoint(self) -> None:
        async for chunk in adapter(self.inflight, self.traced.gateway.endpoint)(a_request(), self.context):
            self.sender.send(chunk)


def lost() -> Exception:
    """A new one each time: a raised exception holds the frames it went through, and with them the stream."""
    return Disconnected("gone")


def answer() -> list[Any]:
    return [dict(chunk) for chunk in chunks(2)]


def scripts() -> dict[str, Callable[[], list[Any]]]:
    return {
        "the pin holds": lambda: [answer()],
        "the pin is refused": lambda: [Exception("no endpoints available to route work"), answer()],
        "the pinned worker is lost": lambda: [[lost()], answer()],
        "it fails in the middle": lambda: [[answer()[0], lost()]],
        "an empty answer": lambda: [[]],
    }


WAYS: list[tuple[str, str]] = [
    *((way, script) for way in ("push", "pull") for script in scripts()),
    ("advise", "the pin holds"),
    ("advise_over_the_endpoint", "the pin holds"),
]


async def cancelled_after(steps: int, tracing: Tracing, way: str, script: str, seen: set[tuple[str, int]]) -> bool:
    """True when it was over before. AssertionError for whatever is left behind."""
    world, suspended = World(tracing, scripts()[script]()), Suspended()
    with suspended.on():
        task = asyncio.ensure_future(getattr(world, way)())
        for _ in range(steps):
            await asyncio.sleep(0)
        over = task.done()
        if not over:
            seen |= suspended.lines()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    if over and task.exception() is not None and "it fails" not in script and "empty" not in script:
        raise AssertionError(f"{way}, {script}") from task.exception()
    for _ in range(10):  # what was cancelled on the way may need a turn to end
        await asyncio.sleep(0)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, left
    fake = world.fake
    fake.journal.check()
    assert len(fake.journal.opens) <= 1
    assert world.traced.fake.records.open_routes == 0
    assert world.inflight.count == 0
    del task
    assert not held(world), f"Dynamo has it booked still: {way}, {script}, step {steps}"
    return over


def held(world: World) -> bool:
    """Whether anybody holds a stream of Dynamo's. What only the garbage collector can free counts as freed: it would
    be, a little later."""
    if any(stream() is not None for stream in world.streams):
        gc.collect()
    return any(stream() is not None for stream in world.streams)


def wanted() -> list[Point]:
    here = [
        *points(service, "handle"),
        *points(runtime_dispatch),
        *points(runtime_egress),
        *points(traced, "TracedHandler"),
        *points(traced, "TracedEdge"),
        *points(observed, "ObservedLookup"),
        *points(traced, "TracedAdvisor"),
        *points(advisor),
        *points(fallback, "within"),
        *points(gateway_advice),
    ]
    return here


NOT_A_CANCELLATION = {
    # Reached only once a cancellation is under way, or only in another thread's turn.
    "close()": "gives Dynamo's stream back while the request ends",
    "asyncio.to_thread": "a large prompt is read in a thread: see below",
    "self._read(body)": "waits for that thread only",
}


async def test_cancelled_at_every_await_nothing_stays() -> None:
    """Every way and script, cancelled after each number of steps until it is over; then: was every await among the
    places."""
    seen: set[tuple[str, int]] = set()
    with kept() as spans:
        for way, script in WAYS:
            for steps in range(MOST_STEPS):
                if await cancelled_after(steps, spans.tracing, way, script, seen):
                    break
            else:
                pytest.fail(f"{way}, {script}: not over after {MOST_STEPS} steps")
            assert steps > 3, (way, script)
    missed = [
        point
        for point in wanted()
        if not any((point.module, line) in seen for line in range(point.first, point.last + 1))
        and not any(text in point.text for text in NOT_A_CANCELLATION)
    ]
    assert not missed, "\n".join(map(str, missed))


@pytest.mark.parametrize("steps", range(0, 60, 3))
async def test_a_client_that_leaves_ends_the_pump_and_the_route(steps: int) -> None:
    with kept() as spans:
        world = World(spans.tracing, scripts()["the pin holds"]())
        task = asyncio.ensure_future(world.push())
        for _ in range(steps):
            await asyncio.sleep(0)
        world.context.left.set()
        await asyncio.wait_for(task, 10)
    for _ in range(10):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    world.fake.journal.check()
    assert world.inflight.count == 0
    assert world.sender.closed <= 1
    assert not held(world)


async def test_a_large_prompts_advice_that_is_cancelled_gives_its_place_back() -> None:
    with kept() as spans:
        world = World(spans.tracing, [])
        for _ in range(2 * gateway_advice.LARGE_AT_ONCE + 1):
            task = asyncio.ensure_future(world.advise_large())
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert world.fake.journal.opens == world.fake.journal.ends == []
        await world.advise_large()  # there is room, or it would be told `busy`
    world.fake.journal.check()


async def test_hundreds_of_cancelled_streams_leave_nothing_behind() -> None:
    """All at once, each at another step."""
    with kept() as spans:
        worlds = [World(spans.tracing, scripts()["the pin holds"]()) for _ in range(20)]

        async def one(number: int) -> None:
            world = worlds[number % len(worlds)]
            world.script[:] = [answer() for _ in range(50)]
            task = asyncio.ensure_future(world.push())
            for _ in range(number % 37):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        await asyncio.gather(*(one(number) for number in range(400)))
    for _ in range(10):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    opened = 0
    for world in worlds:
        world.fake.journal.check()
        opened += len(world.fake.journal.opens)
        assert world.inflight.count == 0
        assert not held(world)
    assert opened > 50
    assert "cancelled" in {end.end for world in worlds for end in world.fake.journal.ends}


def test_the_source_has_the_points_that_are_looked_for() -> None:
    assert len(wanted()) > 25


@pytest.mark.parametrize("what", ["a chunk cannot be sent", "the worker says so"])
async def test_what_a_client_that_left_leaves_behind_is_no_failure(what: str) -> None:
    """It may come before the next look at who left."""
    context, sent = Context(), Sender()

    def send(_: Any) -> None:
        if what == "a chunk cannot be sent":
            raise RuntimeError("nobody listens")
        context.left.set()

    sent.send = send  # type: ignore[method-assign,assignment]

    async def handler(request: Any, call: Any) -> AsyncIterator[dict[str, Any]]:
        yield {"token_ids": [1]}
        raise RequestFailed(FailureKind.CANCELLED, "stopped")

    inflight = Inflight()
    async for _ in adapter(inflight, handler)(a_request(), context, sent):
        raise AssertionError("a push handler yields nothing")
    assert (sent.closed, inflight.count) == (0, 0)
