"""One NATS connection that is made again whenever it ends.

Each connection is a fresh client. nats-py's own reconnect keeps subscriptions and buffers across servers that may have
lost both, so it is switched off, and the user of the bus sets itself up again for each session, from what it knows to
be delivered.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from typing import Any

import nats
import nats.errors
from nats.aio.client import Client

from dynamo_semkv.bus.access_files import credentials, tls_context
from dynamo_semkv.bus.server_check import objection, version_of
from dynamo_semkv.config.schema import BusConfig
from dynamo_semkv.telemetry.throttled import Throttled

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)

BACKOFF_MIN_SECONDS = 0.05
BACKOFF_MAX_SECONDS = 2.0
_CONNECT_SECONDS = 2
_CLOSE_SECONDS = 3.0
_CHECK_SECONDS = 0.25
_CANCEL_AGAIN_SECONDS = 2.0
_PING_SECONDS = 10
_MISSED_PINGS = 2


class Backoff:
    """Doubles from 50 ms to 2 s, with jitter so that a fleet does not return in step."""

    def __init__(self) -> None:
        self._next = BACKOFF_MIN_SECONDS

    def reset(self) -> None:
        """The next pause is the shortest one again."""
        self._next = BACKOFF_MIN_SECONDS

    async def pause(self) -> None:
        """Sleeps, and doubles the next pause."""
        await asyncio.sleep(self._next * random.uniform(0.5, 1.0))
        self._next = min(2 * self._next, BACKOFF_MAX_SECONDS)


Session = Callable[[Client], Coroutine[Any, Any, None]]


async def end_tasks(*tasks: asyncio.Task[None]) -> None:
    """Cancel, and wait until every task is done; their results are dropped.

    Cancelled again if need be: before Python 3.12 `asyncio.wait_for`, which the client is full of, loses a cancellation
    that meets the result it waits for, and a loop that lost its only one would run for ever.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        done, pending = await asyncio.wait(pending, timeout=_CANCEL_AGAIN_SECONDS)
        for task in done:
            if not task.cancelled():
                task.exception()  # taken, so that asyncio does not report it as never retrieved


class Connection:
    """Connects, calls `session(client)` for each connection made, and connects again, from `start` to `stop`.

    `session` is cancelled when its connection ends; when it raises, the connection is closed and made again. Failures
    to connect are kept in `last_error` and logged once per outage, not once per try.
    """

    def __init__(self, settings: BusConfig, name: str) -> None:
        self._settings = settings
        self._name = name
        self._urls = [url.strip() for url in settings.url.split(",")]
        self._task: asyncio.Task[None] | None = None
        self._outage_logged = False
        self._version_logged = False
        self.connected = False
        self.sessions = 0
        self.failed_once = False
        """A try to connect has failed since the start: who shuts down need not wait for a broker that was never
        there."""
        self.last_error: str | None = None

    @property
    def reconnects(self) -> int:
        """Connections made after the first one."""
        return max(0, self.sessions - 1)

    def start(self, session: Session) -> None:
        """Begins in the running loop. Once."""
        if self._task is not None:
            raise RuntimeError("start() is called once")
        self._task = asyncio.ensure_future(self._run(session))

    async def stop(self) -> None:
        """Returns when the session has ended and the connection is closed; at once if it was never started."""
        if self._task is not None:
            await end_tasks(self._task)

    async def _run(self, session: Session) -> None:
        backoff = Backoff()
        while True:
            client = Client()
            ended = asyncio.Event()
            try:
                if await self._try_connect(client, ended):
                    started = asyncio.get_running_loop().time()
                    await self._run_session(client, session, ended)
                    if asyncio.get_running_loop().time() - started > BACKOFF_MAX_SECONDS:
                        backoff.reset()
            finally:
                self.connected = False
                await self._close(client)
            await backoff.pause()

    async def _try_connect(self, client: Client, ended: asyncio.Event) -> bool:
        try:
            await asyncio.wait_for(self._connect(client, ended), (2 * len(self._urls) + 1) * _CONNECT_SECONDS)
        except Exception as error:  # noqa: BLE001 - any of them is an outage: recorded, retried
            if not isinstance(error, nats.errors.NoServersError):  # its cause came through error_cb
                self._record(error)
            self.failed_once = True
            self._log_outage("no broker")
            return False
        if self._outage_logged:
            _log.info("bus %s: connected to %s", self._name, self._shown_urls())
        self._outage_logged = False
        self._warn_about_version(client)
        self.sessions += 1
        self.connected = True
        return True

    def _warn_about_version(self, client: Client) -> None:
        """Warns once of a server on which our permissions may not hold."""
        words = objection(version_of(client))
        if words is not None and not self._version_logged:
            _log.warning("bus %s: %s at %s; see docs/security.md", self._name, words, self._shown_urls())
        self._version_logged = words is not None

    def _log_outage(self, what: str) -> None:
        if not self._outage_logged:
            _log.warning("bus %s: %s at %s (%s); trying again", self._name, what, self._shown_urls(), self.last_error)
        self._outage_logged = True

    async def _connect(self, client: Client, ended: asyncio.Event) -> None:
        async def on_end() -> None:
            ended.set()

        async def on_error(error: Exception) -> None:
            self._record(error)
            _log.debug("bus %s: %s", self._name, self.last_error)

        await _connect_client(
            client, self._settings, self._name, error_cb=on_error, disconnected_cb=on_end, closed_cb=on_end
        )

    async def _run_session(self, client: Client, session: Session, ended: asyncio.Event) -> None:
        work = asyncio.ensure_future(session(client))
        end = asyncio.ensure_future(_until_set(ended))
        try:
            # Polled as well: when bytes are left to send on a broken socket, the client closes without a callback.
            while client.is_connected:
                done, _ = await asyncio.wait({work, end}, return_when=asyncio.FIRST_COMPLETED, timeout=_CHECK_SECONDS)
                if done:
                    break
        finally:
            await end_tasks(work, end)
        error = None if work.cancelled() else work.exception()
        if error is not None:
            self._record(error)
            if not isinstance(error, (nats.errors.Error, OSError, asyncio.TimeoutError)):
                _throttled.error("bus %s: a session failed", self._name, exc_info=error)
        self._log_outage("connection lost")

    async def _close(self, client: Client) -> None:
        try:
            await asyncio.wait_for(client.close(), _CLOSE_SECONDS)
        except Exception as error:  # noqa: BLE001 - given up either way; the next session has its own
            self._record(error)
        # A client whose socket broke while bytes were left to send calls itself closed, and leaves the socket open,
        # tasks running and the error in one that nobody looks at (nats-py 2.16, `Client._close`). It offers no
        # public way to finish the job.
        left = [getattr(client, name, None) for name in ("_reading_task", "_flusher_task", "_ping_interval_task")]
        left += [getattr(sub, "_wait_for_msgs_task", None) for sub in getattr(client, "_subs", {}).values()]
        await end_tasks(*(task for task in left if task is not None))
        transport = getattr(client, "_transport", None)
        if transport is not None:
            transport.close()
        await asyncio.sleep(0)  # the client cancels the tasks of its subscriptions: now they end

    def record(self, what: str, error: BaseException) -> None:
        """Keeps the error for `last_error`: it was met while doing `what`, such as a subject or a stream."""
        self.last_error = f"{what}: {type(error).__name__}: {error}"
        _log.debug("bus %s: %s", self._name, self.last_error)

    def _record(self, error: BaseException) -> None:
        self.last_error = f"{type(error).__name__}: {error}"

    def _shown_urls(self) -> str:
        """Without user and password."""
        return ",".join(url.rpartition("@")[2] for url in self._urls)


async def connect_once(client: Client, settings: BusConfig, name: str) -> None:
    """Connects the client, for a short task. Raises the first error of any server: nats.errors.Error, OSError or
    asyncio.TimeoutError."""
    errors: list[Exception] = []

    async def on_error(error: Exception) -> None:
        errors.append(error)

    try:
        await _connect_client(client, settings, name, error_cb=on_error)
    except nats.errors.NoServersError as error:
        raise (errors[0] if errors else error) from error


async def _connect_client(client: Client, settings: BusConfig, name: str, **callbacks: Any) -> None:
    await client.connect(
        servers=[url.strip() for url in settings.url.split(",")],
        name=name,
        allow_reconnect=False,
        max_reconnect_attempts=1,  # of one connect(): each server is tried twice, at once
        reconnect_time_wait=0,
        connect_timeout=_CONNECT_SECONDS,
        ping_interval=_PING_SECONDS,
        max_outstanding_pings=_MISSED_PINGS,
        user_credentials=credentials(settings),
        inbox_prefix=settings.inbox_prefix,
        tls=tls_context(settings),
        **callbacks,
    )


async def _until_set(event: asyncio.Event) -> None:
    await event.wait()
