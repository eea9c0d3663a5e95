"""Thousands of clients that hang up, through a real frontend, router, worker and broker: nothing stays, and the next
one is served."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_semkv.bus.server import EmbeddedNats
from tests.router.conftest import OpenGraph
from tests.router.graph.build import TestGraph, chat_body, http_json
from tests.router.graph.processes import LOOPBACK, WAIT_SECONDS, Process, wait_until
from tests.router.test_serve import DONOR_TOKENS, Bus, serve, write_config

pytestmark = pytest.mark.graph

STREAMS = 2_400
AT_ONCE = 64
ENDLESS = 10_000
"""Tokens; nobody waits for the last."""


async def leave(port: int, body: bytes, *, unread: bool) -> bool:
    """One client: asks for a stream and hangs up, at once (`unread`) or after the first chunk. Was it served until
    then?"""
    reader, writer = await asyncio.open_connection(LOOPBACK, port)
    try:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + body)
        await writer.drain()
        if unread:
            return True
        return b"data: {" in await asyncio.wait_for(reader.readuntil(b"data: {"), WAIT_SECONDS)
    except asyncio.IncompleteReadError:
        return False
    finally:
        writer.close()


async def leave_all(port: int, bodies: list[bytes]) -> list[bool]:
    room = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> bool:
        async with room:
            return await leave(port, bodies[number % len(bodies)], unread=number % 8 == 0)

    return await asyncio.gather(*(one(number) for number in range(STREAMS)))


class Seen:
    """What a router holds, as its page and the kernel say."""

    def __init__(self, router: Process) -> None:
        self._page = int(router.wait_log(r"dashboard: http://127\.0\.0\.1:(\d+)").group(1))
        self._process = Path(f"/proc/{router.pid}")

    def snapshot(self) -> dict[str, Any]:
        status, found = http_json(self._page, "/api/snapshot")
        assert status == 200
        return dict(found)

    def metric(self, series: str) -> float:
        (found,) = self.metrics(series + " ")
        return found

    def metrics(self, start: str) -> list[float]:
        """The values of all series that begin so."""
        status, text = http_json(self._page, "/metrics")
        assert status == 200
        return [float(line.split()[-1]) for line in text.splitlines() if line.startswith(start)]

    @property
    def files(self) -> int:
        return len(list((self._process / "fd").iterdir()))

    @property
    def threads(self) -> int:
        return len(list((self._process / "task").iterdir()))


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[EmbeddedNats]:
    with EmbeddedNats(tmp_path / "jetstream") as server:
        yield server


def test_thousands_of_cancelled_streams_leave_nothing_behind(open_graph: OpenGraph, nats: EmbeddedNats) -> None:
    bus = Bus(nats.url)
    try:
        with open_graph() as g:
            for worker in ("a", "b"):
                g.worker(worker, "--delay-s", "0.2")
            router = serve(g, "r1", write_config(g, nats.url, outcome={"report_ttl_seconds": 1.0}))
            router.wait_log("is served by")
            g.frontend(1)
            bus.announce()
            bus.register_donor("b", 1, start=300)
            hang_up(g, Seen(router))
            # Of each client that left, Dynamo itself logs that it cannot be told the rest.
            ours = [line for line in router.log_text().splitlines() if "dynamo_runtime::" not in line]
            assert [line for line in ours if " ERROR " in line or "Traceback" in line] == []
    finally:
        bus.publisher.close(2.0)


def hang_up(g: TestGraph, seen: Seen) -> None:
    wait_until("replicas to be announced", lambda: {r["standing"] for r in seen.snapshot()["replicas"]} == {"ok"})
    assert g.chat(words=DONOR_TOKENS + 40, start=300)[0] == 200
    files, threads = seen.files, seen.threads
    bodies = [
        json.dumps(chat_body(words=words, start=start, max_tokens=ENDLESS, stream=True)).encode()
        for words, start in ((DONOR_TOKENS + 40, 300), (100, 0), (200, 1500))
    ]
    served = asyncio.run(leave_all(g.frontend_port, bodies))
    assert all(served), f"{served.count(False)} of {STREAMS} were not served"

    def ended() -> bool:
        asked, ends = g.records("workers", "request"), g.records("workers", "end")
        return len(asked) >= STREAMS * 7 // 8 and len(asked) == len(ends)

    wait_until("the workers to run nothing", ended, interval_s=0.5)
    wait_until("the router to have no open route", lambda: seen.snapshot()["open_routes"] == 0, interval_s=0.2)
    wait_until("its files to be closed", lambda: seen.files <= files + AT_ONCE, interval_s=0.2)
    assert seen.threads <= threads + 8
    opened = seen.metric('semkv_outcome_events_total{event="opened"}')
    assert opened >= len(g.records("workers", "request")), "some left before a worker was asked"
    assert seen.metric('semkv_outcome_events_total{event="closed"}') == opened
    cancelled = sum(seen.metrics('semkv_outcome_total{outcome="cancelled"'))  # before their first token, or after it
    assert cancelled == opened - 1, "all but the first"
    assert seen.metric('semkv_placement_total{mode="enforce",result="placed"}') > 1, "advice was given, and left too"
    answer = g.stream(words=100, max_tokens=5)
    assert (answer.error, answer.tokens) == (None, list(range(100, 105)))
