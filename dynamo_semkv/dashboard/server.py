"""DashboardServer: the page and what it reads, over HTTP.

    DashboardServer(config.dashboard, view.snapshot, history, metrics=view.metrics_text, readiness=view.readiness)
    url = await server.start();  await server.close()

    /                  the page             /metrics   Prometheus text
    /api/snapshot      JSON                 /healthz   alive: answers whatever else is broken
    /api/stream        the same, as server-sent events
    /api/routes/{id}   one route in full    /readyz    200 or 503, with the checks
    /api/requests/{id} the routes of one request, by the id in `chatcmpl-<id>`

It only reads, answers GET and HEAD only, and belongs to the event loop that calls `start`. It refuses to start on an
address that others can reach without a token.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web

from dynamo_semkv.config.schema import DashboardConfig
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.identity import check_route_id
from dynamo_semkv.dashboard import http_log
from dynamo_semkv.dashboard.access import Access
from dynamo_semkv.dashboard.broadcast import Broadcast, Full
from dynamo_semkv.dashboard.files import page_files
from dynamo_semkv.dashboard.idle_connections import IdleConnections
from dynamo_semkv.dashboard.rate_limit import RateLimit
from dynamo_semkv.observe.health import Readiness
from dynamo_semkv.observe.snapshot import explain, explain_request
from dynamo_semkv.outcome.history import History
from dynamo_semkv.telemetry.throttled import Throttled

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)

MAX_WATCHERS = 32
WRITE_SECONDS = 10.0
"""A watcher that takes nothing for so long is disconnected."""
PER_SECOND, BURST = 50.0, 200
"""How many answers are made anew for requests, over all clients: each takes milliseconds of the event loop that streams
need too."""
PROBES_PER_SECOND, PROBE_BURST = 10.0, 10
"""How many answers to `/readyz` are made anew, over all clients; beyond that a client gets the last one, so no probe is
refused."""
IDLE_SECONDS = 15.0
"""A connection without a whole request for so long (before the first one: at most twice as long) is closed, whether it
sends nothing or one byte after another."""
COOKIE = "semkv_dashboard"
OPEN_PATHS = frozenset({"/healthz", "/readyz"})
"""Probes have no token; without one `/readyz` says whether the router is ready and nothing else."""

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class DashboardServer:
    """Serves the page in the event loop that calls `start`, until `close`."""

    def __init__(
        self,
        config: DashboardConfig,
        snapshot: Callable[[], dict[str, Any]],
        history: History,
        *,
        metrics: Callable[[], str],
        readiness: Callable[[], Readiness],
        interval_seconds: float = 1.0,
    ) -> None:
        """Raises ContractError when `config` would show the page to others without a token, or the token cannot be
        read."""
        self._config = config
        self._access = Access.of(config)
        self._snapshot = snapshot
        self._history = history
        self._metrics = metrics
        self._readiness = readiness
        self._broadcast = Broadcast(self._snapshot_text, interval_seconds, MAX_WATCHERS)
        self._files = page_files()
        self._rate = RateLimit(PER_SECOND, BURST)
        self._probe_rate = RateLimit(PROBES_PER_SECOND, PROBE_BURST)
        self._last_ready: Readiness | None = None
        self._runner: web.AppRunner | None = None
        self._idle = IdleConnections(self._connections, IDLE_SECONDS)
        self._watching: asyncio.Task[None] | None = None
        self._port: int | None = None

    @property
    def url(self) -> str:
        """The address that it listens on. RuntimeError before `start` has returned."""
        if self._port is None:
            raise RuntimeError("the address is known once start() has returned")
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        return f"http://{host}:{self._port}"

    async def start(self) -> str:
        """Listens; returns the address. Raises OSError when the port is taken."""
        if self._runner is not None:
            raise RuntimeError("start() is called once")
        app = web.Application(middlewares=[self._guard], client_max_size=1024)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics_text)
        app.router.add_get("/api/snapshot", self._api_snapshot)
        app.router.add_get("/api/stream", self._api_stream, allow_head=False)
        app.router.add_get("/api/routes/{route_id}", self._api_route)
        app.router.add_get("/api/requests/{request_id}", self._api_request)
        app.router.add_get("/{path:.*}", self._page)
        app.on_shutdown.append(self._end_streams)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=2.0, keepalive_timeout=IDLE_SECONDS, logger=http_log.logger
        )
        await self._runner.setup()
        try:
            site = web.TCPSite(self._runner, self._config.host, self._config.port)
            await site.start()
        except BaseException:
            await self._runner.cleanup()
            raise
        self._watching = asyncio.ensure_future(self._idle.watch())
        self._port = self._runner.addresses[0][1]
        return self.url

    def _connections(self) -> list[Any]:
        server = self._runner.server if self._runner is not None else None
        return server.connections if server is not None else []

    async def close(self) -> None:
        """Ends the streams, then the server. May be called without `start`."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            self._watching = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _end_streams(self, app: web.Application) -> None:
        await self._broadcast.close()

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Refuses requests that are not allowed, turns faults of ours into a plain 500, and puts the headers on every
        answer."""
        self._idle.used(request.protocol)
        try:
            response = self._refusal(request) or await handler(request)
        except web.HTTPException as error:
            response = _json({"error": error.reason}, status=error.status)
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
        except Exception:  # noqa: BLE001 - a page that fails may not fail the router; logged
            _throttled.exception("dashboard: %r failed", request.path)
            response = _json({"error": "internal error; the router's log has it"}, status=500)
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    def _refusal(self, request: web.Request) -> web.StreamResponse | None:
        if not self._access.host_allowed(request.headers.get("Host")):
            return _json({"error": "this page answers to 127.0.0.1, ::1 and localhost"}, status=421)
        if request.path in OPEN_PATHS:
            return None
        if self._authorized(request):
            return self._too_often(request)
        if request.path == "/" and self._access.token_allowed(None, None, request.query.get("token")):
            # The token leaves the URL at once: URLs end up in histories and logs.
            answer: web.Response = web.Response(status=303, headers={"Location": "/"})
            answer.set_cookie(COOKIE, self._access.cookie, httponly=True, samesite="Strict", path="/")
            return answer
        refusal = _json({"error": "a token is needed: Authorization: Bearer ..., or open /?token=... once"}, status=401)
        refusal.headers["WWW-Authenticate"] = "Bearer"
        return refusal

    def _too_often(self, request: web.Request) -> web.StreamResponse | None:
        if (request.path != "/metrics" and not request.path.startswith("/api/")) or self._rate.take():
            return None
        busy = _json({"error": f"more than {PER_SECOND:.0f} questions a second"}, status=429)
        busy.headers["Retry-After"] = "1"
        return busy

    def _authorized(self, request: web.Request) -> bool:
        return self._access.token_allowed(request.headers.get("Authorization"), request.cookies.get(COOKIE))

    async def _page(self, request: web.Request) -> web.StreamResponse:
        file = self._files.get(request.match_info["path"])
        if file is None:
            raise web.HTTPNotFound(reason="no such page")
        tag = f'"{file.etag}"'
        headers = {"ETag": tag, "Cache-Control": "no-cache"}
        if tag in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers=headers)
        return web.Response(body=file.body, content_type=file.content_type, charset="utf-8", headers=headers)

    async def _healthz(self, request: web.Request) -> web.StreamResponse:
        return _json({"status": "alive"})

    async def _readyz(self, request: web.Request) -> web.StreamResponse:
        if self._probe_rate.take():
            self._last_ready = None  # a failure to make one must not be hidden by an old answer
            self._last_ready = self._readiness()
        found = self._last_ready
        if found is None:
            return _json({"error": "internal error; the router's log has it"}, status=500)
        detail = found.plain() if self._authorized(request) else {"ready": found.ready}
        return _json(detail, status=200 if found.ready else 503)

    async def _metrics_text(self, request: web.Request) -> web.StreamResponse:
        text = self._metrics()
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8", "Cache-Control": "no-store"}
        return web.Response(body=text.encode(), headers=headers)

    async def _api_snapshot(self, request: web.Request) -> web.StreamResponse:
        return _json_text(self._snapshot_text())

    async def _api_route(self, request: web.Request) -> web.StreamResponse:
        try:
            route_id = check_route_id(request.match_info["route_id"])
        except ContractError as error:
            return _json({"error": str(error)}, status=400)
        route = self._history.get(route_id)
        if route is None:
            return _json({"error": f"no closed route {route_id} among the last {len(self._history)}"}, status=404)
        return _json(explain(route))

    async def _api_request(self, request: web.Request) -> web.StreamResponse:
        return _json({"routes": explain_request(self._history, request.match_info["request_id"])})

    async def _api_stream(self, request: web.Request) -> web.StreamResponse:
        try:
            async with self._broadcast.watch() as texts:
                return await _send_events(request, texts)
        except Full:
            busy = _json({"error": f"{MAX_WATCHERS} watch already"}, status=503)
            busy.headers["Retry-After"] = "5"
            return busy

    def _snapshot_text(self) -> str:
        return json.dumps(self._snapshot(), allow_nan=False, separators=(",", ":"))


async def _send_events(request: web.Request, texts: AsyncIterator[str]) -> web.StreamResponse:
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", **HEADERS}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    try:
        await response.write(b"retry: 2000\n\n")
        async for text in texts:
            # One data line suffices: JSON as we write it has no line break in it.
            await asyncio.wait_for(response.write(f"event: snapshot\ndata: {text}\n\n".encode()), WRITE_SECONDS)
    except (ConnectionError, asyncio.TimeoutError) as gone:
        _log.debug("a watcher is gone: %r", gone)
        if request.transport is not None:
            request.transport.abort()  # otherwise the end of the answer would wait for the watcher too
    return response


def _json(value: object, status: int = 200) -> web.Response:
    return _json_text(json.dumps(value, allow_nan=False), status)


def _json_text(text: str, status: int = 200) -> web.Response:
    return web.Response(
        text=text, status=status, content_type="application/json", headers={"Cache-Control": "no-store"}
    )
