"""The page in headless Chromium: right numbers, live, inert, usable by keyboard and on a phone, talking to nobody
else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from playwright.async_api import Browser

from dynamo_semkv.config.schema import DashboardConfig
from dynamo_semkv.dashboard.server import DashboardServer
from dynamo_semkv.observe.snapshot import build_snapshot
from dynamo_semkv.observe.state import ReplicaStatus
from dynamo_semkv.outcome.closed import JoinedBy, close_route
from dynamo_semkv.outcome.history import History
from tests.dashboard.serving import DESKTOP, PHONE, cells, opened_page, overflows, quiet, served, text_of, until
from tests.observe.fake_state import empty_state, fake_history, fake_state
from tests.outcome.build import observed, opened, report

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]


async def test_it_shows_what_the_snapshot_says(chromium: Browser) -> None:
    async with served() as site, opened_page(chromium, site.server.url) as watched:
        page, said = watched.page, build_snapshot(site.state)
        for row in said["funnel"]:
            shown = await text_of(page, f'[data-step="{row["step"]}"] .numbers')
            number, share = shown.split(" ", 1)
            assert number == f"{row['tokens']:,}"
            assert float(share.removesuffix("%")) == pytest.approx(100 * row["share"], abs=0.06)
        width = await page.evaluate(
            """() => { const bar = document.querySelector('[data-step="placed"] .bar');
            return parseFloat(bar.firstChild.style.getPropertyValue("--w")) }"""
        )
        assert width == pytest.approx(100 * said["funnel"][2]["share"], abs=0.01)
        outcomes = await cells(page, "outcomes")
        assert [(row[1].split("\n")[0], int(row[2].replace(",", ""))) for row in outcomes] == [
            (row["reason"], row["routes"]) for row in said["outcomes"]
        ]
        replicas = await cells(page, "replicas")
        assert [row[0].split("\n") for row in replicas] == [
            [r["name"], f"Dynamo instance {r['worker_id']}"] for r in said["replicas"]
        ]
        assert [int(row[3].replace(",", "")) for row in replicas] == [r["served_requests"] for r in said["replicas"]]
        assert [row[6].split("\n")[0].replace(",", "") for row in replicas] == [
            str(r["queued_prefill_tokens"]) for r in said["replicas"]
        ]
        routes = await page.locator("#routes button").evaluate_all("(all) => all.map((b) => b.dataset.route)")
        assert routes == [r["route_id"] for r in said["recent"]]
        for row in said["ttft"]:
            assert f"{row['count']} routes" in await text_of(page, f'[data-class="{row["class"]}"]')
            shown = await text_of(page, f'[data-class="{row["class"]}"] b')
            assert float(shown.removesuffix(" ms")) == pytest.approx(1_000 * row["median_seconds"], abs=0.51)
        assert "43,136 more without a hint" in (await text_of(page, "#tiles")).replace("\n", " ")
        assert "2 reports belonged to no route" in await text_of(page, "#outcomes-note")
        assert await page.locator("#chart canvas").count() == 1
        quiet(watched, site.server.url)


async def test_before_the_first_request(chromium: Browser) -> None:
    async with served(empty_state(), History(10)) as site, opened_page(chromium, site.server.url) as watched:
        page = watched.page
        assert "no worker has registered" in await text_of(page, "#notice")
        assert "still served" not in await text_of(page, "#notice")
        for empty in ("outcomes", "decisions", "lookups", "replicas", "calibration", "routes", "streams"):
            assert await page.locator(f"#{empty}-empty").is_visible()
        shown = await page.locator("body").inner_text()
        assert "NaN" not in shown
        assert "undefined" not in shown
        assert "null" not in shown
        assert (await text_of(page, '[data-step="materialized"] .numbers')).split() == ["0", "–"]
        assert await overflows(page) == []
        quiet(watched, site.server.url)


HOSTILE = [
    "<img src=x onerror=globalThis.owned=1>",
    '"><script>globalThis.owned=1</script>',
    "javascript:globalThis.owned=1",
    "__proto__",
    "constructor",
    "\u202egnirts\u0000\u0007 </td></tr></table>",
    "W" * 400,
]


async def test_hostile_names_are_text(chromium: Browser) -> None:
    """Names that come from peers, in every place that the page shows them."""
    history = History(50)
    for number, name in enumerate(HOSTILE, start=1):
        start = opened(
            number,
            model=name,
            mode=name,
            lookup=name,
            decision_reason=name,
            donor_id=name,
            provider=name,
            request_id=name,
            shadow_choice=name,
            stable_routing_id=name,
        )
        end = observed(number, end=name, served_stable_routing_id=name)
        history.add(close_route(start, end, report(number, stable_routing_id=name), JoinedBy.ROUTE_ID, number))
    state = fake_state(
        history,
        router=HOSTILE[0],
        mode=HOSTILE[4],
        config_hash=HOSTILE[1],
        replicas=[
            ReplicaStatus(
                worker_id=n, dp_rank=0, stable_routing_id=name, model=name, standing=name, materialization=name
            )
            for n, name in enumerate(HOSTILE)
        ],
        catalog={
            "donors": 1,
            "streams": [
                {
                    "worker_id": name,
                    "dp_rank": 0,
                    "generation": name,
                    "next_event_id": 1,
                    "donors": 1,
                    "quarantined": n % 2,
                    "absent": 0,
                }
                for n, name in enumerate(HOSTILE)
            ],
            "counts": {},
        },
        calibration={
            "match_types": {name: {"share": 0.5, "trials": 1.0} for name in HOSTILE},
            "cells": [
                {
                    "replica": name,
                    "match_type": name,
                    "overlap": name,
                    "tier": name,
                    "share": 0.5,
                    "prior": 0.5,
                    "trials": 1,
                    "routes": 1,
                }
                for name in HOSTILE
            ],
        },
        providers={name: {"breaker": name, "last_error": name} for name in HOSTILE},
        fallbacks=dict.fromkeys(HOSTILE, 1),
    )
    for viewport in (DESKTOP, PHONE):
        async with served(state, history) as site, opened_page(chromium, site.server.url, viewport) as watched:
            page = watched.page
            shown = await page.locator("body").inner_text()
            for name in HOSTILE[:3]:
                assert name in shown
            assert await overflows(page) == []
            for index in range(len(HOSTILE)):
                await page.locator("#routes button").nth(index).click()
                await page.locator("#route .story").wait_for()
                assert await overflows(page) == []
                await page.keyboard.press("Escape")
            found = await page.evaluate(
                """() => [globalThis.owned, ({}).polluted,
                document.querySelectorAll("img:not([src='/icon.svg'])").length,
                document.querySelectorAll("script:not([src])").length]"""
            )
            assert found == [None, None, 0, 0]
            quiet(watched, site.server.url)


async def test_it_follows_what_happens(chromium: Browser) -> None:
    async with served() as site, opened_page(chromium, site.server.url) as watched:
        page = watched.page
        assert await text_of(page, "#link") == "Live"
        before = int((await text_of(page, '[data-step="input"] .numbers b')).replace(",", ""))
        first = page.locator("#routes button").first
        kept = await first.get_attribute("data-route")
        await first.focus()
        site.history.add(
            close_route(opened(9, opened_at=site.state.now), observed(9), report(9), JoinedBy.ROUTE_ID, site.state.now)
        )
        site.state = fake_state(site.history, mode="shadow")

        async def arrived() -> bool:
            return int((await text_of(page, '[data-step="input"] .numbers b')).replace(",", "")) == before + 1_000

        await until("the new route", arrived)
        assert "shadow" in await text_of(page, "#facts")
        assert await page.locator("#routes button").first.get_attribute("data-route") == f"{9:032x}"
        # Whoever was reading stays where they were.
        assert await page.evaluate("document.activeElement.dataset.route") == kept
        quiet(watched, site.server.url)


async def test_a_replica_that_goes_is_shown_as_gone(chromium: Browser) -> None:
    async with served() as site, opened_page(chromium, site.server.url) as watched:
        page = watched.page
        site.state = replace(site.state, replicas=site.state.replicas[:-1])

        async def gone() -> bool:
            return "Gone" in (await cells(page, "replicas"))[-1][1]

        await until("the replica is gone", gone)
        assert (await cells(page, "replicas"))[-1][6].split("\n")[0] == "–"


async def test_router_away_and_back(chromium: Browser) -> None:
    async with served() as site:
        url = site.server.url
        window = await chromium.new_context(viewport=DESKTOP)
        try:
            page = await window.new_page()
            await page.clock.install()
            await page.goto(url)
            await page.locator("html[data-now]").wait_for(state="attached")
            await site.server.close()
            await page.clock.run_for(10_000)
            assert (await text_of(page, "#link")).startswith("No news since ")
            numbers = await text_of(page, '[data-step="input"] .numbers')
            assert numbers.startswith("1,")  # the last numbers stay, and are said to be old
            again = DashboardServer(
                DashboardConfig(port=int(url.rpartition(":")[2])),
                site.snapshot,
                site.history,
                metrics=str,
                readiness=site._readiness,
                interval_seconds=0.05,
            )
            await again.start()
            try:

                async def live() -> bool:
                    return await text_of(page, "#link") == "Live"

                await until("live again", live)
            finally:
                await again.close()
        finally:
            await window.close()


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_widths_and_themes(chromium: Browser, viewport: dict[str, int], scheme: str, tmp_path: Path) -> None:
    async with served() as site, opened_page(chromium, site.server.url, viewport, color_scheme=scheme) as watched:
        page = watched.page
        assert await overflows(page) == []
        background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == {"light": "rgb(244, 246, 248)", "dark": "rgb(14, 20, 26)"}[scheme]
        assert await page.evaluate(LOW_CONTRAST) == []
        # For whoever wants to look: pytest keeps the folders of the last runs.
        await page.screenshot(path=tmp_path / f"{viewport['width']}-{scheme}.png", full_page=True)
        for width in (320, 700, 1020, 1920):
            await page.set_viewport_size({"width": width, "height": 800})
            assert await overflows(page) == []
        quiet(watched, site.server.url)


LOW_CONTRAST = """() => {
  const parse = (c) => (c.match(/[\\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] === 1) return c;
    }
  };
  const low = [];
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || !e.checkVisibility() || e.closest(".hidden, .skip, noscript")) continue;
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(behind(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push(`${e.tagName}.${e.className} ${e.textContent.slice(0, 20)} ${ratio.toFixed(2)}`);
  }
  return low;
}"""


async def test_theme_is_chosen_and_kept(chromium: Browser) -> None:
    async with served() as site, opened_page(chromium, site.server.url) as watched:
        page = watched.page
        button = page.locator("#theme")
        colours = []
        for name in ("light", "dark", "system", "light", "dark"):
            await button.click()
            assert await button.inner_text() == f"Theme: {name}"
            colours.append(await page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert colours[0] != colours[1]
        assert await page.locator("#chart canvas").count() == 1
        await page.reload()
        await page.locator("html[data-now]").wait_for(state="attached")
        assert await button.inner_text() == "Theme: dark"
        quiet(watched, site.server.url)


async def test_by_keyboard_alone(chromium: Browser) -> None:
    async with served() as site, opened_page(chromium, site.server.url) as watched:
        page = watched.page
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.className") == "skip"
        for _ in range(10):
            await page.keyboard.press("Tab")
            if await page.evaluate("document.activeElement.dataset.route !== undefined"):
                break
        chosen = await page.evaluate("document.activeElement.dataset.route")
        assert chosen == build_snapshot(site.state)["recent"][0]["route_id"]
        assert await page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        await page.keyboard.press("Enter")
        await page.locator("#route .story").wait_for()
        assert chosen in await text_of(page, "#route-title")
        await page.keyboard.press("Escape")
        assert not await page.locator("#route").is_visible()
        assert await page.evaluate("document.activeElement.dataset.route") == chosen
        quiet(watched, site.server.url)


async def test_one_route_explained(chromium: Browser) -> None:
    async with served() as site, opened_page(chromium, site.server.url) as watched:
        page = watched.page
        route = next(r for r in site.state.recent if r.confirmed_tokens and r.opened.hinted_tokens)
        await page.locator(f'[data-route="{route.route_id}"]').click()
        await page.locator("#route .story").wait_for()
        told = await text_of(page, "#route-body")
        assert f"confirmed {route.confirmed_tokens:,} in 4.0 ms" in told
        assert f"Placed on a donor’s replica, on {route.opened.stable_routing_id}/{route.opened.dp_rank}" in told
        assert "equal to the report" in told
        assert str(route.opened.donor_id) in told
        await page.locator("#route-close").click()
        # A route that left the record meanwhile is no fault of the page.
        site.history._routes.clear()
        await page.locator(f'[data-route="{route.route_id}"]').click()
        await page.locator("#route-body", has_text="no closed route").wait_for()


async def test_says_what_it_shows_to_those_who_cannot_see(chromium: Browser) -> None:
    async with served() as site, opened_page(chromium, site.server.url) as watched:
        page = watched.page
        assert await page.locator("main").count() == 1
        assert await page.locator("h1").count() == 1
        unnamed = await page.evaluate(
            """() => [...document.querySelectorAll("button, a, table, [role=img], [role=region], section")]
            .filter((e) => !(e.textContent.trim() || e.ariaLabel || e.hasAttribute("aria-labelledby")) ||
              (e.matches("section, [role]") && !e.getAttribute("aria-label") &&
               !document.getElementById((e.getAttribute("aria-labelledby") ?? "").split(" ")[0])))
            .map((e) => e.outerHTML.slice(0, 80))"""
        )
        assert unnamed == []
        # Colour is a second sign: every badge says its word, and every bar has its number beside it.
        badges = await page.locator(".badge").evaluate_all(
            "(all) => all.map((b) => b.innerText.replace(/^[✓!✕·]/, '').trim())"
        )
        assert all(badges)
        assert await page.locator(".bar:not([aria-hidden])").count() == 0


async def test_ten_thousand_routes(chromium: Browser) -> None:
    history = fake_history(10_000)
    async with served(fake_state(history), history) as site, opened_page(chromium, site.server.url, PHONE) as watched:
        assert await watched.page.locator("#routes tr").count() == 50
        assert await overflows(watched.page) == []
        quiet(watched, site.server.url)


async def test_broker_down(chromium: Browser) -> None:
    state = fake_state()
    assert state.publisher is not None
    assert state.subscriber is not None
    state = replace(
        state,
        publisher=replace(state.publisher, connected=False, buffered=812),
        subscriber=replace(state.subscriber, connected=False),
        streams=[replace(stream, caught_up=False) for stream in state.streams],
    )
    async with served(state) as site, opened_page(chromium, site.server.url) as watched:
        page = watched.page
        assert "Degraded" in await text_of(page, "#facts")
        assert "not connected to the broker" in await text_of(page, "#checks")
        assert "812" in await text_of(page, "#bus")
        assert "catching up" in await text_of(page, "#bus")
        quiet(watched, site.server.url)


async def test_a_snapshot_that_the_page_cannot_read_is_said(chromium: Browser) -> None:
    async with served() as site, opened_page(chromium, site.server.url) as watched:
        site.server._broadcast._make = lambda: '{"schema": 99}'
        await watched.page.locator("#notice", has_text="cannot show").wait_for()


async def test_with_a_token(chromium: Browser, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("correct-horse-battery-staple")
    async with served(token_file=str(tmp_path / "token")) as site:
        window = await chromium.new_context()
        try:
            page = await window.new_page()
            await page.goto(f"{site.server.url}/?token=correct-horse-battery-staple")
            await page.locator("html[data-now]").wait_for(state="attached")
            assert page.url == f"{site.server.url}/"
        finally:
            await window.close()
