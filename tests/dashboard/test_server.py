"""The HTTP side: what is answered, to whom, with which headers, and when something behind it fails."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from dynamo_semkv.config.schema import DashboardConfig
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.dashboard import server as server_module
from dynamo_semkv.dashboard.files import page_files
from dynamo_semkv.dashboard.rate_limit import RateLimit
from dynamo_semkv.dashboard.server import DashboardServer
from dynamo_semkv.observe.snapshot import build_snapshot
from dynamo_semkv.outcome.closed import JoinedBy, close_route
from dynamo_semkv.outcome.history import History
from dynamo_semkv.testing import ManualClock
from tests.dashboard.serving import Served, served
from tests.observe.fake_state import empty_state, fake_history
from tests.outcome.build import observed, opened, report, route_id

DEADLINE = 20.0
TOKEN = "correct-horse-battery-staple"


@pytest.fixture
async def client():
    timeout = aiohttp.ClientTimeout(total=DEADLINE)
    async with aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
        yield session


@pytest.fixture
async def site():
    async with served(history=fake_history(20)) as it:
        yield it


async def events(response: aiohttp.ClientResponse, count: int) -> list[dict]:
    """The first `count` snapshots of a stream."""
    found = []
    while len(found) < count:
        line = (await asyncio.wait_for(response.content.readline(), DEADLINE)).decode()
        assert line, "the stream ended"
        if line.startswith("data: "):
            found.append(json.loads(line.removeprefix("data: ")))
    return found


async def test_the_page_and_its_files(client: aiohttp.ClientSession, site: Served) -> None:
    async with client.get(site.server.url) as answer:
        assert answer.status == 200
        assert answer.content_type == "text/html"
        page = await answer.text()
    for name in page_files():
        async with client.get(f"{site.server.url}/{name}") as answer:
            assert answer.status == 200, name
    assert "/js/main.js" in page


async def test_every_answer_has_the_headers(client: aiohttp.ClientSession, site: Served) -> None:
    for path in (
        "/",
        "/api/snapshot",
        "/api/stream",
        "/api/routes/x",
        "/metrics",
        "/healthz",
        "/readyz",
        "/no",
        "/js/main.js",
    ):
        async with client.get(site.server.url + path) as answer:
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers["X-Frame-Options"] == "DENY"


async def test_unchanged_files_are_not_sent_again(client: aiohttp.ClientSession, site: Served) -> None:
    async with client.get(f"{site.server.url}/js/main.js") as answer:
        tag = answer.headers["ETag"]
    async with client.get(f"{site.server.url}/js/main.js", headers={"If-None-Match": tag}) as answer:
        assert answer.status == 304
        assert await answer.read() == b""


@pytest.mark.parametrize(
    "path",
    [
        "/../server.py",
        "/%2e%2e/server.py",
        "/js/..%2f..%2fserver.py",
        "/vendor/uplot/LICENSE",
        "/index.html",
        "/js/",
        "//etc/passwd",
    ],
)
async def test_nothing_but_the_page_is_served(client: aiohttp.ClientSession, site: Served, path: str) -> None:
    import yarl

    async with client.get(yarl.URL(site.server.url + path, encoded=True)) as answer:
        assert answer.status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize("path", ["/", "/api/snapshot", "/api/stream"])
async def test_it_only_reads(client: aiohttp.ClientSession, site: Served, method: str, path: str) -> None:
    async with client.request(method, site.server.url + path, data=b"x") as answer:
        assert answer.status == 405


async def test_snapshot(client: aiohttp.ClientSession, site: Served) -> None:
    async with client.get(f"{site.server.url}/api/snapshot") as answer:
        assert answer.headers["Cache-Control"] == "no-store"
        assert await answer.json() == json.loads(json.dumps(build_snapshot(site.state)))


async def test_stream_shows_what_changes(client: aiohttp.ClientSession, site: Served) -> None:
    async with client.get(f"{site.server.url}/api/stream") as answer:
        assert answer.content_type == "text/event-stream"
        (first,) = await events(answer, 1)
        assert first["open_routes"] == 3
        site.state = replace(site.state, open_routes=17)
        while (await events(answer, 1))[0]["open_routes"] != 17:
            pass


async def test_watchers_are_bounded_and_leave_no_trace(
    client: aiohttp.ClientSession, site: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.server._broadcast._max = 2
    async with client.get(f"{site.server.url}/api/stream") as one, client.get(f"{site.server.url}/api/stream") as two:
        await events(one, 1)
        await events(two, 1)
        async with client.get(f"{site.server.url}/api/stream") as third:
            assert third.status == 503
            assert third.headers["Retry-After"] == "5"
    for _ in range(1_000):
        if site.server._broadcast.watchers == 0:
            break
        await asyncio.sleep(0.01)
    assert site.server._broadcast.watchers == 0


async def test_closing_ends_open_streams(client: aiohttp.ClientSession) -> None:
    async with served(history=History(1)) as it:
        answer = await client.get(f"{it.server.url}/api/stream")
        await events(answer, 1)
        await asyncio.wait_for(it.server.close(), DEADLINE)
        assert await asyncio.wait_for(answer.content.read(), DEADLINE) is not None
        answer.close()


async def test_one_route_in_full(client: aiohttp.ClientSession, site: Served) -> None:
    (route,) = site.history.recent(1)
    async with client.get(f"{site.server.url}/api/routes/{route.route_id}") as answer:
        explained = await answer.json()
    assert explained["route_id"] == route.route_id
    assert explained["opened"]["request_id"] == route.opened.request_id


async def test_requests_of_two_tenants_with_one_id_are_shown_apart(client: aiohttp.ClientSession) -> None:
    """Clients choose request ids, so one tenant's route is no attempt of the other's request."""
    history = History(10)
    for number, tenant in ((1, "a" * 32), (2, "b" * 32)):
        start = opened(number, request_id="r", tenant=tenant)
        history.add(close_route(start, observed(number), report(number), JoinedBy.ROUTE_ID, float(number)))
    async with served(history=history) as it, client.get(f"{it.server.url}/api/requests/r") as answer:
        text = await answer.text()
    rows = [(row["route_id"], row["request"], row["requests"]) for row in json.loads(text)["routes"]]
    assert rows == [(route_id(1), 1, 2), (route_id(2), 2, 2)]
    assert "a" * 32 not in text, "what tells them apart stays here"


async def test_the_routes_of_a_request(client: aiohttp.ClientSession, site: Served) -> None:
    (route,) = site.history.recent(1)
    for asked in (route.opened.request_id, f"chatcmpl-{route.opened.request_id}", route.route_id):
        async with client.get(f"{site.server.url}/api/requests/{asked}") as answer:
            assert [it["route_id"] for it in (await answer.json())["routes"]] == [route.route_id]
    async with client.get(f"{site.server.url}/api/requests/nobody") as answer:
        assert await answer.json() == {"routes": []}


@pytest.mark.parametrize(
    ("route_id", "status"), [("f" * 32, 404), ("x", 400), ("A" * 32, 400), ("f" * 500, 400), ("%00", 400)]
)
async def test_routes_that_are_none(client: aiohttp.ClientSession, site: Served, route_id: str, status: int) -> None:
    async with client.get(f"{site.server.url}/api/routes/{route_id}") as answer:
        assert answer.status == status
        assert (await answer.json())["error"]


async def test_metrics(client: aiohttp.ClientSession, site: Served) -> None:
    async with client.get(f"{site.server.url}/metrics") as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert await answer.text() == "semkv_ready 1.0\n"


async def test_readiness_in_words(client: aiohttp.ClientSession, site: Served) -> None:
    async with client.get(f"{site.server.url}/readyz") as answer:
        assert answer.status == 200
        assert (await answer.json())["state"] == "ready"
    site.state = empty_state()
    async with client.get(f"{site.server.url}/readyz") as answer:
        assert answer.status == 503
        checks = {check["name"]: check["level"] for check in (await answer.json())["checks"]}
        assert checks["workers"] == "fail"


async def test_readiness_is_read_a_bounded_number_of_times_and_no_probe_is_refused(
    client: aiohttp.ClientSession, site: Served
) -> None:
    clock = ManualClock()
    site.server._probe_rate = RateLimit(server_module.PROBES_PER_SECOND, server_module.PROBE_BURST, clock)

    async def ask() -> int:
        async with client.get(f"{site.server.url}/readyz") as answer:
            return answer.status

    assert {await ask() for _ in range(100)} == {200}
    assert site.readings == server_module.PROBE_BURST
    site.state = empty_state()
    assert await ask() == 200, "the last answer"
    clock.advance(1.0)
    assert await ask() == 503
    site.fail = True
    assert {await ask() for _ in range(100)} == {500}
    assert site.readings <= 2 * server_module.PROBE_BURST


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "], ids=["nothing", "half a header"])
async def test_a_connection_without_a_whole_request_is_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "IDLE_SECONDS", 0.05)
    async with served() as site:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(site.server.url.rpartition(":")[2]))
        writer.write(sent)
        assert await asyncio.wait_for(reader.read(), DEADLINE) == b""
        writer.close()


async def test_a_second_request_that_never_ends_is_closed_too_and_a_stream_is_not(
    client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "IDLE_SECONDS", 0.05)
    async with served() as site, client.get(f"{site.server.url}/api/stream") as watched:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(site.server.url.rpartition(":")[2]))
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET /healthz HTTP/1.1\r\n")
        assert (await asyncio.wait_for(reader.read(), DEADLINE)).count(b"200 OK") == 1
        writer.close()
        assert len(await events(watched, 3)) == 3


async def test_alive_whatever_else_is_broken(client: aiohttp.ClientSession, site: Served) -> None:
    site.fail = True
    async with client.get(f"{site.server.url}/healthz") as answer:
        assert answer.status == 200
    for path in ("/readyz", "/api/snapshot"):
        async with client.get(site.server.url + path) as answer:
            assert answer.status == 500
            assert "broker" not in await answer.text()
    async with client.get(f"{site.server.url}/api/stream") as answer:
        site.fail = False
        assert len(await events(answer, 1)) == 1


async def test_a_foreign_name_gets_nothing(client: aiohttp.ClientSession, site: Served) -> None:
    for path in ("/", "/api/snapshot", "/healthz"):
        async with client.get(site.server.url + path, headers={"Host": "evil.example"}) as answer:
            assert answer.status == 421


class TestToken:
    @pytest.fixture
    async def guarded(self, tmp_path: Path):
        (tmp_path / "token").write_text(TOKEN)
        async with served(history=fake_history(3), token_file=str(tmp_path / "token")) as it:
            yield it

    @pytest.mark.parametrize("path", ["/", "/api/snapshot", "/api/stream", "/metrics", "/js/main.js", "/api/routes/x"])
    async def test_nothing_without_it(self, client: aiohttp.ClientSession, guarded: Served, path: str) -> None:
        async with client.get(guarded.server.url + path, headers={"Authorization": "Bearer wrong"}) as answer:
            assert answer.status == 401
            assert answer.headers["WWW-Authenticate"] == "Bearer"

    @pytest.mark.parametrize("header", [b"Authorization: Bearer \xff", b"Cookie: semkv_dashboard=\xff"])
    async def test_header_that_is_no_text(
        self, guarded: Served, header: bytes, caplog: pytest.LogCaptureFixture
    ) -> None:
        port = int(guarded.server.url.rsplit(":", 1)[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(b"GET /api/snapshot HTTP/1.1\r\nHost: localhost\r\n" + header + b"\r\n\r\n")
            assert b" 401 " in await asyncio.wait_for(reader.readline(), 10)
        finally:
            writer.close()
        assert not any(record.exc_info for record in caplog.records)

    async def test_bearer(self, client: aiohttp.ClientSession, guarded: Served) -> None:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with client.get(f"{guarded.server.url}/api/snapshot", headers=headers) as answer:
            assert answer.status == 200

    async def test_link_sets_a_cookie_and_leaves_the_url(self, client: aiohttp.ClientSession, guarded: Served) -> None:
        async with client.get(f"{guarded.server.url}/?token={TOKEN}", allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (303, "/")
            cookie = answer.headers["Set-Cookie"]
            assert "HttpOnly" in cookie
            assert "SameSite=Strict" in cookie
            assert TOKEN not in cookie
        async with client.get(f"{guarded.server.url}/api/snapshot") as answer:
            assert answer.status == 200

    async def test_the_query_opens_the_page_only(self, client: aiohttp.ClientSession, guarded: Served) -> None:
        async with client.get(f"{guarded.server.url}/api/snapshot?token={TOKEN}") as answer:
            assert answer.status == 401

    async def test_probes_need_none_and_learn_little(self, client: aiohttp.ClientSession, guarded: Served) -> None:
        async with client.get(f"{guarded.server.url}/healthz") as answer:
            assert answer.status == 200
        async with client.get(f"{guarded.server.url}/readyz") as answer:
            assert await answer.json() == {"ready": True}


@pytest.mark.parametrize(
    "request_text",
    [
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET /api/requests/" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"b" * 20_000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
    ],
    ids=["url", "id", "header", "tls"],
)
async def test_what_is_no_http_is_refused_without_a_traceback(
    site: Served, request_text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    reader, writer = await asyncio.open_connection("127.0.0.1", int(site.server.url.rpartition(":")[2]))
    writer.write(request_text)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    assert answer.startswith((b"HTTP/1.0 400 ", b"HTTP/1.1 400 "))
    assert len(answer) < 1_000
    assert [record.levelname for record in caplog.records if record.exc_info or record.levelname == "ERROR"] == []
    assert sum("no HTTP was refused" in record.getMessage() for record in caplog.records) == 1


async def test_refuses_to_start_open_to_others() -> None:
    with pytest.raises(ContractError, match=r"dashboard\.host"):
        Served(history=History(1), host="0.0.0.0")


async def test_a_taken_port_is_an_error_that_says_so(site: Served) -> None:
    port = int(site.server.url.rpartition(":")[2])
    other = DashboardServer(
        DashboardConfig(port=port), site.snapshot, site.history, metrics=str, readiness=site._readiness
    )
    with pytest.raises(OSError, match="address already in use"):
        await other.start()
    await other.close()


async def test_address_of_ipv6() -> None:
    async with served(history=History(1), host="::1") as it:
        assert it.server.url.startswith("http://[::1]:")


async def test_a_watcher_that_takes_nothing_is_let_go(
    client: aiohttp.ClientSession, site: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "WRITE_SECONDS", 0.05)
    site.state = replace(site.state, router="r" * 200, providers={str(n): {"state": "x" * 200} for n in range(20_000)})
    reader, writer = await asyncio.open_connection("127.0.0.1", int(site.server.url.rpartition(":")[2]), limit=1024)
    writer.write(b"GET /api/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    await writer.drain()
    for _ in range(1_500):
        if site.snapshots and site.server._broadcast.watchers == 0:
            break
        await asyncio.sleep(0.01)
    assert site.snapshots > 0
    assert site.server._broadcast.watchers == 0
    writer.close()
    assert reader is not None
