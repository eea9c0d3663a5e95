"""`status` and `explain` against a real page: the page's numbers, the page's words, and errors that say what to do."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from dynamo_semkv.cli import main, words
from dynamo_semkv.cli.exit_status import FAILED, OK, REFUSED
from dynamo_semkv.contracts.route_events import RouteObserved
from dynamo_semkv.observe.snapshot import SCHEMA, build_snapshot, explain
from dynamo_semkv.outcome.history import History
from tests.dashboard.serving import Served, served
from tests.observe.fake_state import empty_state, fake_history, fake_state

TOKEN = "correct-horse-battery-staple"
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("SEMKV_DASHBOARD__TOKEN_FILE", raising=False)


@pytest.fixture
async def site():
    async with served(history=fake_history(120)) as it:
        yield it


async def command(*arguments: str) -> int:
    """In a thread: the page that it asks is served by this loop."""
    return await asyncio.to_thread(main, arguments)


def row(printed: str, *cells: str) -> Sequence[str] | None:
    """The cells of the one line that begins with these."""
    found = [parts for line in printed.splitlines() if (parts := line.split())[: len(cells)] == list(cells)]
    assert len(found) <= 1, found
    return found[0] if found else None


async def test_status_has_the_numbers_of_the_page(site: Served, capsys: Captured) -> None:
    assert await command("status", "--url", site.server.url) == OK
    printed, snapshot = capsys.readouterr().out, build_snapshot(site.state)
    for step in snapshot["funnel"]:
        cells = row(printed, step["step"], f"{step['tokens']:,}")
        assert cells is not None, step
        assert cells[-1] == f"{step['requests']:,}"
    for outcome in snapshot["outcomes"]:
        cells = row(printed, outcome["outcome"], outcome["reason"])
        assert cells is not None, outcome
        assert cells[-1] == f"{outcome['routes']:,}"
    for replica in snapshot["replicas"]:
        counts = (replica["placed_requests"], replica["served_requests"], replica["confirmed_tokens"])
        assert row(printed, replica["name"], "ok", *(f"{n:,}" for n in counts)) is not None, replica
    for ttft in snapshot["ttft"]:
        cells = row(printed, ttft["class"], f"{ttft['median_seconds'] * 1000:.0f}", "ms")
        assert cells is not None, ttft
        assert cells[-1] == str(ttft["count"])
    for check in snapshot["readiness"]["checks"]:
        assert row(printed, check["name"], "ok", *check["detail"].split()) is not None, check


async def test_status_tells_what_advice_is_made_from(site: Served, capsys: Captured) -> None:
    assert await command("status", "--url", site.server.url) == OK
    printed, snapshot = capsys.readouterr().out, build_snapshot(site.state)
    assert len(snapshot["calibration"]["cells"]) == 12
    for cell in snapshot["calibration"]["cells"]:
        match = {"exact_equivalent": ("Exact", "prefix"), "semantic_candidate": ("Similar",)}[cell["match_type"]]
        cells = row(printed, cell["replica"], *match, cell["overlap"], "Host", f"{100 * cell['share']:.1f}", "%")
        assert cells is not None, cell
        assert cells[-6:-4] == [f"{100 * cell['prior']:.1f}", "%"]
        assert cells[-3:-1] == [f"{100 * cell['saving']:.1f}", "%"]
    for stream in snapshot["catalog"]["streams"]:
        assert row(printed, stream["replica"], "in", "order", str(stream["donors"]), str(stream["next_event_id"])), (
            stream
        )
    for stream in snapshot["streams"]:
        assert row(printed, stream["name"], "yes", f"{stream['messages']:,}", "0"), stream
    for step in snapshot["dynamo"]["steps"]:
        assert row(printed, *step["step"].split("_"), f"{step['tokens']:,}", f"{100 * step['share']:.1f}", "%"), step
    for route in snapshot["recent"][:5]:
        assert row(printed, route["route_id"][:8], route["outcome"], route["reason"]), route
    for name, count in snapshot["lookups"].items():
        assert f"{name} {count:,}" in printed


async def test_status_as_json_is_the_snapshot(site: Served, capsys: Captured) -> None:
    assert await command("status", "--url", f"{site.server.url}/", "--json") == OK
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(build_snapshot(site.state)))


async def test_no_number_is_cut_on_80_columns(site: Served, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert await command("status", "--url", site.server.url) == OK
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "…" not in printed
    for replica in build_snapshot(site.state)["replicas"]:
        assert f"{replica['confirmed_tokens']:,}" in printed


async def test_status_before_the_first_worker(capsys: Captured) -> None:
    async with served(empty_state(), History(10)) as site:
        assert await command("status", "--url", site.server.url) == OK
    printed = capsys.readouterr().out
    assert "is not ready" in printed
    assert "no live replica" in printed
    assert "No route has closed yet." in printed
    assert "Dynamo's own counters: not known" in printed
    assert "nothing learned yet" in printed


async def test_status_in_shadow_says_what_would_have_been(capsys: Captured) -> None:
    history = fake_history(80, mode="shadow")
    async with served(fake_state(history, mode="shadow"), history) as site:
        assert await command("status", "--url", site.server.url) == OK
        would_have = build_snapshot(site.state)["would_have"]
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{would_have['routes']} routes would have been placed" in printed
    assert f"{would_have['tokens']:,} tokens, {100 * would_have['share']:.1f} % of input" in printed


async def test_names_of_others_cannot_write_to_the_terminal(capsys: Captured) -> None:
    evil = "\x1b[31mw\x1b]0;x\x07\u202e[bold red]"
    state = fake_state()
    hostile = [replace(replica, stable_routing_id=evil, model=evil, standing=evil) for replica in state.replicas]
    async with served(replace(state, replicas=hostile)) as site:
        assert await command("status", "--url", site.server.url) == OK
    printed = capsys.readouterr().out
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", printed)
    assert "\\x1b" in printed
    assert "[bold red]" in re.sub(r"\s", "", printed).replace("[boldred]", "[bold red]")


@pytest.mark.parametrize("prefix", ["", "chatcmpl-"])
async def test_explain_by_request(prefix: str, capsys: Captured) -> None:
    history = History(10)
    (route,) = fake_history(1).recent(1)
    history.add(replace(route, opened=replace_request(route.opened, "0d9c")))
    async with served(history=history) as site:
        assert await command("explain", f"{prefix}0d9c", "--url", site.server.url) == OK
    printed = capsys.readouterr().out
    assert f"Route {route.route_id}: {route.outcome.value}, {route.reason.value}" in printed
    assert "request 0d9c" in printed


def replace_request(opened, request_id: str):
    return msgspec.structs.replace(opened, request_id=request_id)


async def test_explain_tells_all_that_the_page_tells(site: Served, capsys: Captured) -> None:
    routes = site.history.recent(120)
    route = next(r for r in routes if r.funnel.materialized and r.funnel.hinted)
    assert await command("explain", route.route_id, "--url", site.server.url, "--json") == OK
    assert json.loads(capsys.readouterr().out) == [json.loads(json.dumps(explain(route)))]
    assert await command("explain", route.route_id, "--url", site.server.url) == OK
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{route.funnel.placed:,} tokens, {route.funnel.hinted:,} of them hinted" in printed
    assert f"confirmed {route.confirmed_tokens:,} in" in printed
    assert words.REASONS[route.reason.value] in printed
    assert f"Donor {route.opened.donor_id}" in printed


async def test_explain_without_report_and_without_end(capsys: Captured) -> None:
    history = History(10)
    (route,) = fake_history(1).recent(1)
    history.add(replace(route, observed=None, report=None))
    async with served(history=history) as site:
        assert await command("explain", "--last", "1", "--url", site.server.url) == OK
    printed = capsys.readouterr().out
    assert "No report: nothing is counted as reuse." in printed
    assert "its router went away" in printed


async def test_explain_the_last_ones(site: Served, capsys: Captured) -> None:
    assert await command("explain", "--last", "3", "--url", site.server.url, "--json") == OK
    listed = [item["route_id"] for item in json.loads(capsys.readouterr().out)]
    assert listed == [item["route_id"] for item in build_snapshot(site.state)["recent"][:3]]


async def test_explain_takes_the_eight_digits_that_status_lists(site: Served, capsys: Captured) -> None:
    listed = build_snapshot(site.state)["recent"][3]["route_id"]
    assert await command("explain", listed[:8], "--url", site.server.url, "--json") == OK
    assert [item["route_id"] for item in json.loads(capsys.readouterr().out)] == [listed]


async def test_explain_says_that_a_prefix_is_of_several(capsys: Captured) -> None:
    history, ids = History(10), ["abcd1" + "0" * 27, "abcd2" + "0" * 27]
    for route, route_id in zip(fake_history(2).recent(2), ids, strict=True):
        opened = msgspec.structs.replace(route.opened, route_id=route_id)
        history.add(replace(route, opened=opened, observed=None, report=None))
    async with served(history=history) as site:
        assert await command("explain", "abcd", "--url", site.server.url) == FAILED
        error = capsys.readouterr().err
        assert "2 recent routes begin with 'abcd'" in error
        assert all(route_id in error for route_id in ids)
        assert await command("explain", "abcd2", "--url", site.server.url) == OK
        assert f"Route {ids[1]}" in capsys.readouterr().out
        for short in ("abc", "ABCD2"):
            assert await command("explain", short, "--url", site.server.url) == FAILED
            assert "unique prefix" in capsys.readouterr().err


async def test_explain_numbers_attempts_as_the_api_does(capsys: Captured) -> None:
    (route,) = fake_history(1).recent(1)
    for attempt in (0, 2):
        history = History(10)
        history.add(replace(route, opened=msgspec.structs.replace(route.opened, attempt=attempt)))
        async with served(history=history) as site:
            assert await command("explain", route.route_id, "--url", site.server.url) == OK
        assert f"attempt {attempt}." in " ".join(capsys.readouterr().out.split())


async def test_explain_says_that_requests_of_several_tenants_have_the_id(capsys: Captured) -> None:
    (route,) = fake_history(1).recent(1)
    history = History(10)
    for number, tenant in enumerate(("a" * 32, "b" * 32)):
        start = msgspec.structs.replace(
            route.opened, route_id=f"{number:032x}", request_id="chosen", tenant=tenant, opened_at=float(number)
        )
        history.add(replace(route, opened=start, observed=None, report=None))
    async with served(history=history) as site:
        assert await command("explain", "chosen", "--url", site.server.url) == OK
    printed = " ".join(capsys.readouterr().out.split())
    assert "request 1 of 2 of several tenants" in printed
    assert "request 2 of 2 of several tenants" in printed


async def test_explain_of_what_a_gateway_dispatched(capsys: Captured) -> None:
    (route,) = fake_history(1).recent(1)
    history = History(10)
    history.add(replace(route, observed=RouteObserved(route_id=route.route_id, observed_at=1.0, end="advised")))
    async with served(history=history) as site:
        assert await command("explain", route.route_id, "--url", site.server.url) == OK
    printed = " ".join(capsys.readouterr().out.split())
    assert "A gateway dispatched it by our advice" in printed
    assert "tokens out" not in printed


async def test_explain_what_is_not_there(site: Served, capsys: Captured) -> None:
    for wanted in ("f" * 32, "chatcmpl-none", "a/../b c"):
        assert await command("explain", wanted, "--url", site.server.url) == FAILED
        error = capsys.readouterr().err
        assert f"no closed route of {wanted!r}" in error
        assert "unique prefix" in error


@pytest.mark.parametrize("count", ["0", "-1", "x", "²"])
def test_explain_wants_a_count(count: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["explain", "--last", count, "--url", "http://127.0.0.1:1"])
    assert stopped.value.code == REFUSED
    assert "--last" in capsys.readouterr().err


@pytest.mark.parametrize("verb", [["status"], ["explain", "--last", "1"]])
async def test_the_token(verb: list[str], tmp_path: Path, capsys: Captured) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_text(TOKEN + "\n")
    bad.write_text(TOKEN[::-1])
    async with served(history=fake_history(5), token_file=str(good)) as site:
        at = ["--url", site.server.url]
        assert await command(*verb, *at, "--token-file", str(good)) == OK
        capsys.readouterr()
        for wrong in ([], ["--token-file", str(bad)]):
            assert await command(*verb, *at, *wrong) == FAILED
            error = capsys.readouterr().err
            assert "--token-file" in error
            assert TOKEN not in error
        assert await command(*verb, *at, "--token-file", str(tmp_path / "none")) == REFUSED
        assert "dashboard.token_file" in capsys.readouterr().err


@pytest.mark.parametrize("verb", [["status"], ["explain", "--last", "1"], ["explain", "abc"]])
async def test_the_router_is_not_there(verb: list[str], capsys: Captured) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets the port meanwhile
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert await command(*verb, "--url", url) == FAILED
    error = capsys.readouterr().err
    assert error.startswith(f"{url}: no router's page answers")
    assert "refused" in error


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "file:///etc/passwd", "http://", "http://user:pw@127.0.0.1:1"])
def test_what_is_no_url_of_a_page(url: str, capsys: Captured) -> None:
    assert main(["status", "--url", url]) == REFUSED
    assert "--url: got" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda: web.Response(text="<html>hello"), "not the page"),
        (lambda: web.json_response([1]), "not the page"),
        (lambda: web.Response(status=502, text="bad gateway"), "not the page of a dynamo_semkv router (status 502)"),
        (lambda: web.Response(status=302, headers={"Location": "http://192.0.2.1/"}), "status 302"),
        (lambda: web.json_response({"error": "it broke"}, status=500), "status 500: it broke"),
        (lambda: web.json_response({"schema": SCHEMA + 1}), f"reads format {SCHEMA}"),
    ],
)
async def test_something_else_answers(answer, said: str, capsys: Captured) -> None:
    async def handle(request: web.Request) -> web.Response:
        return answer()

    app = web.Application()
    app.router.add_get("/api/snapshot", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert await command("status", "--url", f"http://127.0.0.1:{runner.addresses[0][1]}") == FAILED
    finally:
        await runner.cleanup()
    assert said in capsys.readouterr().err


async def test_proxies_of_the_environment_do_not_get_the_token(
    site: Served, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://192.0.2.1:9")
    assert await command("status", "--url", site.server.url, "--json") == OK


@pytest.mark.parametrize("name", ["REASONS", "DECISIONS", "MATCHES", "TIERS"])
def test_the_words_are_those_of_the_page(name: str) -> None:
    from dynamo_semkv.dashboard import files

    script = (Path(files.__file__).parent / "static" / "js" / "words.js").read_text()
    body = re.search(rf"export const {name} = \{{\n(.*?)\n\}};", script, re.DOTALL)
    assert body is not None
    page = dict(re.findall(r'^\s+(\w+): "(.*)",$', body[1].replace("’", "'"), re.MULTILINE))
    assert getattr(words, name) == page
