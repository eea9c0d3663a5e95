"""The page of a real router process in headless Chromium: what it shows is what happened in the graph behind it,
without a reload."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page

from dynamo_semkv.bus.server import EmbeddedNats
from dynamo_semkv.contracts import subjects
from dynamo_semkv.contracts.codec import MSGPACK, encode_report
from dynamo_semkv.contracts.identity import StableReplica
from dynamo_semkv.contracts.route_events import RouteOpened
from tests.dashboard.serving import browser, cells, opened_page, quiet, text_of, until
from tests.outcome.build import report
from tests.router.conftest import OpenGraph
from tests.router.graph.build import TestGraph
from tests.router.graph.processes import Process
from tests.router.test_serve import DONOR_TOKENS, WORKERS, Bus, ended, serve, write_config

pytestmark = [pytest.mark.graph, pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]


@dataclass
class Live:
    g: TestGraph
    bus: Bus
    router: Process
    url: str

    def placed(self) -> tuple[RouteOpened, str]:
        """One request that was placed on the donor, and its id as a client has it."""
        answers: list[tuple[int, Any]] = []
        for _ in range(100):
            events, _ = self.bus.collect(
                lambda e, h: ended(e), lambda: answers.append(self.g.chat(words=DONOR_TOKENS + 40, start=300))
            )
            opened: RouteOpened = next(e for e in events if isinstance(e, RouteOpened))
            assert answers[-1][0] == 200
            if opened.decision_reason == "placed":
                return opened, answers[-1][1]["id"]
        raise AssertionError("nothing was placed on the donor")

    def confirm(self, route: RouteOpened) -> None:
        """As the connector of the worker that served reports it."""
        said = report(
            stable_routing_id=str(route.stable_routing_id),
            dp_rank=route.dp_rank,
            prompt_key=route.prompt_key,
            route_id=route.route_id,
            prompt_tokens=route.input_tokens,
            confirmed=route.hinted_tokens,
        )
        subject = subjects.reports(StableReplica(said.stable_routing_id, said.dp_rank))
        assert self.bus.publisher.publish(subject, encode_report(said), content_type=MSGPACK)


@pytest.fixture(scope="module")
def live(open_graph: OpenGraph, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with EmbeddedNats(tmp_path_factory.mktemp("jetstream")) as nats, open_graph() as g:
        for worker in WORKERS:
            g.worker(worker)
        router = serve(g, "r1", write_config(g, nats.url))
        port = router.wait_log(r"dashboard: http://127\.0\.0\.1:(\d+)").group(1)
        router.wait_log("is served by")
        g.frontend(1)
        bus = Bus(nats.url)
        try:
            yield Live(g, bus, router, f"http://127.0.0.1:{port}")
        finally:
            bus.publisher.close(2.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium() -> AsyncIterator[Browser]:
    async with browser() as launched:
        yield launched


async def states(page: Page) -> dict[str, str]:
    """State of each replica in words, as its row says it, without the badge's sign in front."""
    rows = [[cell.split("\n")[0] for cell in row] for row in await cells(page, "replicas")]
    return {name: re.sub(r"^\W+", "", state).lower() for name, state, *_ in rows}


async def shows(page: Page, what: str, condition: Callable[[dict[str, str]], bool]) -> None:
    async def there() -> bool:
        return condition(await states(page))

    await until(what, there)


async def test_the_page_follows_a_graph_from_its_first_announcement_to_its_routers_end(
    chromium: Browser, live: Live
) -> None:
    names = {f"stable-{worker}/{rank}" for worker in WORKERS for rank in (0, 1)}
    async with opened_page(chromium, live.url) as watched:
        page = watched.page
        await shows(page, "four silent replicas", lambda seen: seen == dict.fromkeys(names, "not announced"))
        assert "unannounced" in await text_of(page, "#checks")

        live.bus.announce()
        await shows(page, "four advised replicas", lambda seen: seen == dict.fromkeys(names, "advised"))
        await asyncio.to_thread(live.bus.register_donor, "b", 1, 300)
        await page.locator("#streams tr", has_text="stable-b/1").wait_for()

        route, request_id = await asyncio.to_thread(live.placed)
        await asyncio.to_thread(live.confirm, route)
        await page.locator(f'#routes [data-route="{route.route_id}"]').wait_for()
        row = next(row for row in await cells(page, "routes") if route.route_id[:8] in row[0])
        assert row[2].startswith("stable-b/1")
        assert f"{route.hinted_tokens:,}" in row[3]

        await page.locator("#find-id").fill(request_id)
        await page.keyboard.press("Enter")
        await page.locator("#route .story").wait_for()
        story = await text_of(page, "#route")
        assert route.route_id in story
        assert str(route.donor_id) in story
        await page.keyboard.press("Escape")
        quiet(watched, live.url)

        assert await asyncio.to_thread(live.router.terminate, 60.0) == 0
        await page.locator("#link", has_text="No news since").wait_for()
