"""A dashboard over states that a test changes, and a browser that may talk to it alone."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from playwright.async_api import Browser, Page, async_playwright

from dynamo_semkv.config.schema import DashboardConfig
from dynamo_semkv.dashboard.server import DashboardServer
from dynamo_semkv.observe.health import readiness
from dynamo_semkv.observe.snapshot import build_snapshot
from dynamo_semkv.observe.state import RouterState
from dynamo_semkv.outcome.history import History
from tests.observe.fake_state import fake_history, fake_state

CHROMIUM = "/usr/bin/chromium"
DEADLINE = 20.0
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}


class Served:
    """What the server shows is `state`, or what `state` is replaced by."""

    def __init__(self, state: RouterState | None = None, history: History | None = None, **config: Any) -> None:
        self.history = history if history is not None else fake_history()
        self.state = state if state is not None else fake_state(self.history)
        self.fail = False
        self.snapshots = self.readings = 0
        self.server = DashboardServer(
            DashboardConfig(**config),
            self.snapshot,
            self.history,
            metrics=lambda: "semkv_ready 1.0\n",
            readiness=self._readiness,
            interval_seconds=0.25,
        )

    def snapshot(self) -> dict[str, Any]:
        if self.fail:
            raise RuntimeError("the broker is away")
        self.snapshots += 1
        return build_snapshot(self.state)

    def _readiness(self) -> Any:
        self.readings += 1
        if self.fail:
            raise RuntimeError("the broker is away")
        return readiness(self.state)


@asynccontextmanager
async def served(
    state: RouterState | None = None, history: History | None = None, **config: Any
) -> AsyncIterator[Served]:
    it = Served(state, history, **config)
    await it.server.start()
    try:
        yield it
    finally:
        await it.server.close()


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """Skips the test where there is none."""
    if not os.access(CHROMIUM, os.X_OK):
        pytest.skip(f"{CHROMIUM} is not installed (Debian package chromium)")
    async with async_playwright() as playwright:
        chromium = await playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            yield chromium
        finally:
            await chromium.close()


class Watched:
    """A page, everything that it asked for, and everything that it complained of."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self._complain(message.type, message.text))
        page.on("pageerror", lambda error: self._complain("error", str(error)))

    def _complain(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(f"{kind}: {text}")


@asynccontextmanager
async def opened_page(
    chromium: Browser, url: str, viewport: dict[str, int] | None = None, **context: Any
) -> AsyncIterator[Watched]:
    """The page after its first snapshot. A request to any other host is refused, and noted."""
    window = await chromium.new_context(viewport=viewport or DESKTOP, **context)
    try:
        page = await window.new_page()
        watched = Watched(page)
        await window.route(lambda target: not target.startswith(url), lambda route: route.abort())
        await page.goto(url)
        await page.locator("html[data-now]").wait_for(state="attached")
        yield watched
    finally:
        await window.close()


async def text_of(page: Page, selector: str) -> str:
    return (await page.locator(selector).inner_text()).strip()


Change = Callable[[RouterState], RouterState]


async def until(what: str, condition: Callable[[], Awaitable[object]]) -> None:
    end = time.monotonic() + DEADLINE
    while not await condition():
        assert time.monotonic() < end, f"not reached in {DEADLINE:.0f} s: {what}"
        await asyncio.sleep(0.02)


def quiet(watched: Watched, url: str) -> None:
    """No complaint in the console, no request to anybody else."""
    assert watched.complaints == []
    assert watched.requests
    assert [target for target in watched.requests if not target.startswith(url)] == []


async def overflows(page: Page) -> list[str]:
    """Empty when the page does not scroll sideways; else what sticks out."""
    return await page.evaluate(
        """() => document.documentElement.scrollWidth <= innerWidth ? [] :
        [...document.querySelectorAll("body *")].filter((e) => e.getBoundingClientRect().right > innerWidth + 1)
          .map((e) => `${e.tagName}.${e.className}`).concat("the page")"""
    )


async def cells(page: Page, body: str) -> list[list[str]]:
    """Text of each cell of a table's rows."""
    return await page.evaluate(
        "(id) => [...document.querySelectorAll(`#${id} tr`)].map((r) => [...r.cells].map((c) => c.innerText))", body
    )
