"""The page in headless Chromium, part by part: Dynamo's counters, would-have, heat, calibration, donor streams,
search."""

from __future__ import annotations

from dataclasses import replace

import pytest
from playwright.async_api import Browser

from dynamo_semkv.observe.snapshot import build_snapshot
from dynamo_semkv.outcome.closed import JoinedBy, close_route
from dynamo_semkv.outcome.history import History
from tests.dashboard.serving import DESKTOP, PHONE, cells, opened_page, overflows, quiet, served, text_of, until
from tests.observe.fake_state import fake_calibration, fake_history, fake_replicas, fake_state
from tests.outcome.build import observed, opened, report

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]


async def test_dynamos_counters_stand_beside_the_funnel(chromium: Browser) -> None:
    async with served() as site, opened_page(chromium, site.server.url) as watched:
        page, said = watched.page, build_snapshot(site.state)["dynamo"]
        for row in said["steps"]:
            numbers = (await text_of(page, f'[data-dynamo="{row["step"]}"] .numbers')).split()
            assert numbers[0] == f"{row['tokens']:,}"
            assert float(numbers[1]) == pytest.approx(100 * row["share"], abs=0.06)
        assert f"{said['input_tokens']:,}" in await text_of(page, "#dynamo-note")
        quiet(watched, site.server.url)
    async with served(fake_state(dynamo=None)) as site, opened_page(chromium, site.server.url) as watched:
        assert "Not known" in await text_of(watched.page, "#dynamo-note")
        assert await watched.page.locator("[data-dynamo]").count() == 0


async def test_switching_to_shadow_and_back_shows_what_would_have_been(chromium: Browser) -> None:
    shadow = fake_history(200, mode="shadow")
    async with served(fake_state(fake_history(200))) as site, opened_page(chromium, site.server.url) as watched:
        page = watched.page
        assert "Placed, not materialized" in await text_of(page, "#tiles")
        enforce = site.state
        site.state = fake_state(shadow, mode="shadow")
        would = build_snapshot(site.state)["would_have"]

        async def says_would() -> bool:
            return "Would have been placed" in await text_of(page, "#tiles")

        await until("the tile of shadow mode", says_would)
        numbers = await text_of(page, '[data-step="would_have"] .numbers')
        assert numbers.split()[0] == f"{would['tokens']:,}"
        assert f"{would['routes']} requests" in await text_of(page, '[data-step="would_have"] .why')
        assert f"{would['agreed']} of them to the same replica" in await text_of(page, '[data-step="would_have"] .why')
        assert (await text_of(page, '[data-step="placed"] .numbers')).split()[0] == "0"
        assert await overflows(page) == []
        site.state = enforce

        async def says_placed() -> bool:
            return "Placed, not materialized" in await text_of(page, "#tiles")

        await until("the tile of enforce mode", says_placed)
        quiet(watched, site.server.url)


async def test_heat_is_placement_share_against_load(chromium: Browser) -> None:
    async with served() as site, opened_page(chromium, site.server.url) as watched:
        page, said = watched.page, build_snapshot(site.state)
        live = [row for row in said["replicas"] if row["live"]]
        placed, queued = (sum(row[key] for row in live) for key in ("placed_tokens", "queued_prefill_tokens"))
        shown = await page.locator("#heat li").all_inner_texts()
        assert len(shown) == len(live)
        by_name = {text.split("\n")[0]: text.split("\n") for text in shown}
        for row in live:
            percents = [float(part.removesuffix(" %")) for part in by_name[row["name"]] if part.endswith("%")]
            assert percents[0] == pytest.approx(100 * row["placed_tokens"] / placed, abs=0.06)
            assert percents[1] == pytest.approx(100 * row["queued_prefill_tokens"] / queued, abs=0.06)
        quiet(watched, site.server.url)


async def test_a_hot_and_busy_replica_is_said_in_words_among_thousands(chromium: Browser) -> None:
    history = History(10)
    history.add(close_route(opened(1), observed(1), report(1), JoinedBy.ROUTE_ID, 1.0))
    hot = opened(1).stable_routing_id
    crowd = [
        replace(r, worker_id=n, stable_routing_id=f"w{n}", queued_prefill_tokens=0)
        for n in range(60)
        for r in fake_replicas()[:1]
    ]
    busy = replace(crowd[0], stable_routing_id=hot, dp_rank=opened(1).dp_rank or 0, queued_prefill_tokens=900)
    for viewport in (DESKTOP, PHONE):
        state = fake_state(history, replicas=[*crowd, busy])
        async with served(state, history) as site, opened_page(chromium, site.server.url, viewport) as watched:
            first = await watched.page.locator("#heat li").first.inner_text()
            assert first.startswith(busy.name)
            assert "Hot and busy" in first
            assert await watched.page.locator("#heat li").count() == 48
            assert "13 more in the table" in await text_of(watched.page, "#heat-note")
            assert await overflows(watched.page) == []


async def test_two_workers_with_one_stable_id_are_two_rows_and_a_check_that_names_both(chromium: Browser) -> None:
    first = replace(fake_replicas()[0], standing="stable_id_shared")
    second = replace(first, worker_id=first.worker_id + 1)
    state = fake_state(replicas=[first, second, *fake_replicas()[1:]])
    async with served(state) as site, opened_page(chromium, site.server.url) as watched:
        rows = {
            row[0].split("\n")[1]: row for row in await cells(watched.page, "replicas") if row[0].startswith(first.name)
        }
        assert set(rows) == {f"Dynamo instance {one.worker_id}" for one in (first, second)}
        assert all("stable id shared" in row[1].lower() for row in rows.values()), rows
        shown = await text_of(watched.page, "#checks")
        assert all(str(one.worker_id) in shown for one in (first, second))
        assert f"one DYN_STABLE_ROUTING_ID for several workers: {first.stable_routing_id}" in shown
        quiet(watched, site.server.url)


async def test_calibration_of_each_bucket(chromium: Browser) -> None:
    async with served() as site, opened_page(chromium, site.server.url) as watched:
        page = watched.page
        rows = await cells(page, "calibration")
        known = fake_calibration()["cells"]
        assert [(row[0], row[2]) for row in rows] == [(cell["replica"], cell["overlap"]) for cell in known]
        for row, cell in zip(rows, known, strict=True):
            assert row[1] == {"exact_equivalent": "Exact prefix", "semantic_candidate": "Similar"}[cell["match_type"]]
            assert float(row[4].split()[0]) == pytest.approx(100 * cell["share"], abs=0.06)
            assert float(row[5].split()[0]) == pytest.approx(100 * cell["prior"], abs=0.06)
        assert "Exact prefix: 82.0 %" in await text_of(page, "#calibration-note")
        site.state = replace(site.state, calibration={**fake_calibration(), "enabled": False})
        await page.locator("#calibration-note", has_text="Learning is off").wait_for()
        site.state = replace(site.state, calibration={**fake_calibration(), "clocks_not_believed": ["w-odd/3"]})
        await page.locator("#calibration-note", has_text="Load times not believed").wait_for()
        assert "came later than they say: w-odd/3." in await text_of(page, "#calibration-note")
        quiet(watched, site.server.url)


async def test_donor_streams_that_need_a_look_come_first(chromium: Browser) -> None:
    state = fake_state()
    streams = [dict(row) for row in state.catalog["streams"]]
    streams[2]["quarantined"] = True
    streams[1]["absent"] = True
    async with (
        served(replace(state, catalog={**state.catalog, "streams": streams})) as site,
        opened_page(chromium, site.server.url) as watched,
    ):
        rows = await cells(watched.page, "streams")
        assert ["Quarantined" in rows[0][1], "Worker gone" in rows[1][1], "In order" in rows[2][1]] == [True] * 3
        assert rows[0][0].split("\n") == ["worker-b/0", f"stable id {streams[2]['worker_id']}"]
        assert "Quarantined\n1" in await text_of(watched.page, "#catalog")


async def test_a_route_is_found_by_its_id_or_by_that_of_its_request(chromium: Browser) -> None:
    async with served() as site, opened_page(chromium, site.server.url) as watched:
        page = watched.page
        route = site.state.recent[0]
        other = opened(77, request_id=route.opened.request_id, attempt=1)
        site.history.add(close_route(other, observed(77), report(77), JoinedBy.ROUTE_ID, site.state.now))
        for asked, count in (
            (route.route_id, 1),
            (f"chatcmpl-{route.opened.request_id}", 2),
            (f"  {route.opened.request_id} ", 2),
        ):
            await page.locator("#find-id").fill(asked)
            await page.keyboard.press("Enter")
            await page.locator("#route .story").first.wait_for()
            assert await page.locator("#route .story").count() == count
            assert route.route_id in await text_of(page, "#route")
            await page.keyboard.press("Escape")
        for unknown in ("nobody", "<b>x</b>", "../../etc", "x" * 400, "ä%00", "."):
            await page.locator("#find-id").fill(unknown)
            await page.locator("#find button").click()
            await page.locator("#route-body", has_text="No closed route").wait_for()
            assert await overflows(page) == []
            await page.locator("#route-close").click()
        quiet(watched, site.server.url)


async def test_a_hit_that_saves_nothing_is_not_called_no_donor(chromium: Browser) -> None:
    history = History(10)
    start = opened(
        5,
        lookup="hit",
        decision_reason="no_evidence",
        donor_id=None,
        evidence_tokens=0,
        placed_tokens=0,
        hinted_tokens=0,
    )
    history.add(close_route(start, observed(5), report(5, confirmed=0), JoinedBy.ROUTE_ID, 1.0))
    async with served(fake_state(history), history) as site, opened_page(chromium, site.server.url) as watched:
        page = watched.page
        assert "No donor found" not in await text_of(page, "#decisions")
        await page.locator("#routes button").click()
        await page.locator("#route .story").wait_for()
        told = await text_of(page, "#route-body")
        assert "No donor" not in told
        assert "saves nothing beyond what its replica holds" in told
